"""`ringspan bench video`: what it measures of a denoising step, that it is true, and what it refuses."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

import copy
import json
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from ringspan.adapters.diffusers import run as adapter_run
from ringspan.bench import video as bench
from ringspan.bench import video_models
from ringspan.bench.settings import VIDEO_MODELS, Job, VideoSettings
from ringspan.bench.video import error_of, measure_video, sharing_weights
from ringspan.bench.video_models import build_video_model, draw_call, draw_example, new_transformer
from ringspan.cli import main
from ringspan.transports.in_process import run_in_process
from support.diffused import quiet, whole
from support.diffusers_models import build, wan

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(200)]
SMALL = VideoSettings("wan2.1-1.3b", 9, 80, 112, 2, 1, "float32", "pass_kv", 2, 0, 60.0)
PARTS = ("attention_s", "merge_s", "communication_s", "waiting_s", "other_s")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Wan of 2 narrow layers and its arguments in place of the model's own widths."""
    model = build("wan")[0].requires_grad_(False)

    def narrow(*_: Any) -> torch.nn.Module:
        return copy.deepcopy(model)

    def arguments(settings: VideoSettings, *_: Any) -> dict[str, Any]:
        shape = (settings.batch, 4, *settings.latents)
        call = {name: x[: settings.batch] for name, x in wan()[1].items()}
        return call | {"hidden_states": torch.randn(shape, generator=torch.Generator().manual_seed(4))}

    monkeypatch.setattr(bench, "build_video_model", narrow)
    monkeypatch.setattr(bench, "draw_call", arguments)
    monkeypatch.setattr(bench, "draw_example", arguments)


def measured(world_size: int, settings: VideoSettings = SMALL) -> Any:
    job = Job("video", "threads", world_size, 60.0, video=settings)
    cpu = torch.device("cpu")
    return run_in_process(lambda group: measure_video(job, group, cpu, lambda _: None), world_size, timeout_s=100)[0]


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q", "all_gather", "ulysses"])
def test_what_is_measured(tiny: None, algorithm: str) -> None:
    settings = VideoSettings("wan2.1-1.3b", 9, 80, 112, 2, 1, "float32", algorithm, 2, 0, 60.0)
    result = measured(2, settings)
    assert result.is_verified
    assert 0 < result.check.max_error <= 2e-6
    assert result.num_tokens == 3 * 5 * 7
    assert result.plan == "2 blocks; 2 × self, 2 × cross"
    for timing in (result.one_process, result.ranks, result.ideal):
        assert len(timing.runs_s) == 2
        assert timing.fastest_s > 0
    totals = [sum(getattr(part, key) for key in PARTS) for part in result.by_rank]
    assert totals == pytest.approx([totals[0]] * 2)
    assert all(part.attention_s > 0 < part.communication_s for part in result.by_rank)
    assert result.one_process_memory.weights == result.memory_by_rank[1].weights
    assert result.memory_by_rank[0].peak > 0
    assert result.memory_by_rank[0].process_peak is None


def test_a_wrong_output_of_one_rank_is_seen(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = adapter_run.TokenShardRun.gather_rows

    def gather_wrongly(self: Any, rows: torch.Tensor, *where: Any) -> torch.Tensor:
        whole_rows = gather(self, rows, *where)
        return whole_rows.roll(1, -1) if self.options.rank == 1 and self.notes is None else whole_rows

    monkeypatch.setattr(adapter_run.TokenShardRun, "gather_rows", gather_wrongly)
    result = measured(2)
    assert not result.is_verified
    assert result.check.max_error > 1e-4


def test_the_ideal_sends_nothing_and_computes_what_a_rank_computes(tiny: None) -> None:
    """Its pieces cover all pairs of this rank's queries and the keys of all ranks."""
    tokens, found = SMALL.num_tokens, []

    class Pieces(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            found.append(sum(piece.q.shape[2] * piece.k.shape[2] for piece in value[1]))
            super().__setitem__(key, value)

    def on_rank(group: Any) -> None:
        made = bench._VideoBench(Job("video", "threads", 2, 60.0, video=SMALL), group, torch.device("cpu"), lambda _: 0)
        made.pieces = Pieces()
        with torch.no_grad():
            made.without_messages()
        made.handle.restore()

    run_in_process(on_rank, 2, timeout_s=60)
    assert sum(found) == tokens**2


def test_half_types_are_held_to_float32(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(2)
    assert result.check.reference == "one process"
    monkeypatch.setattr(bench, "_RELATIVE", {})
    result = measured(2)
    assert result.check.reference == "one process in float32"


@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_every_model_is_built_with_its_own_widths(name: str) -> None:
    settings = VideoSettings(name, 17 if name != "ltx-video" else 9, 64, 96, 3, 2, "float32", "pass_kv", 1, 0, 60.0)
    with torch.device("meta"):
        model = new_transformer(settings).to(torch.bfloat16)
    per_layer = sum(x.numel() for x in model.parameters()) / 3
    assert per_layer > 0.9 * settings.shapes.counted_parameters / settings.shapes.layers
    meta = torch.device("meta")
    for draw in (draw_call, draw_example):
        arguments = draw(settings, meta)
        tokens = arguments["hidden_states"]
        with quiet(), torch.no_grad():
            cast = {key: x.bfloat16() if is_float(x) else x for key, x in arguments.items()}
            assert whole(model(**cast)).shape == tokens.shape


def is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def test_weights_are_drawn_alike_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(_: object) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        torch.nn.init.zeros_(model[0].weight)
        return model

    monkeypatch.setattr(video_models, "new_transformer", narrow)
    first, second = run_in_process(lambda _: build_video_model(SMALL, torch.device("cpu")), 2, timeout_s=60)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one.any()
        assert torch.equal(one, other)
    shared = sharing_weights(first)
    assert shared is not first
    assert shared[0].weight is first[0].weight


def test_errors_are_in_units_of_the_largest_number() -> None:
    assert error_of(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0])) == pytest.approx(0.2)


def test_everything_as_json_and_as_a_page(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringspan.cli.bench.video.run_on_ranks", lambda job, *_: measured(2, job.video))
    words = ["bench", "video", "wan2.1-1.3b", "--frames", "9", "--size", "80x112", "--repeats", "1", "--ranks", "2"]
    page = tmp_path / "video.html"
    done = CliRunner().invoke(main, [*words, "--transport", "threads", "--html", str(page), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["is_verified"]
    assert report["settings"]["frames"] == 9
    assert [it["devices"] for it in report["predicted"]] == ["1xh100", "2xh100", "8xh100"]
    assert "A denoising step of wan2.1-1.3b on 2 ranks, measured" in page.read_text()
    printed = CliRunner().invoke(main, [*words, "--transport", "threads"])
    text = " ".join(printed.output.split())
    for expected in (
        "105 tokens, 512 of text",
        "of the ideal",
        "MLP, projections",
        "step, peak",
        "8×h100",
        "✓ The output",
    ):
        assert expected in text


@pytest.mark.slow
def test_real_widths_on_gloo() -> None:
    words = ["bench", "video", "wan2.1-1.3b", "--frames", "5", "--size", "80x112", "--layers", "1", "--repeats", "1"]
    done = CliRunner().invoke(main, [*words, "--ranks", "2", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["is_verified"]
    assert report["share_of_ideal_cpu"]["median"] > 0
    assert all(memory["process_peak"] > memory["weights"] for memory in report["memory_by_rank"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mochi-1"], "'mochi-1' is not one of"),
        (["wan2.1-1.3b", "--size", "7"], "--size 7: expected a size; use HEIGHTxWIDTH"),
        (["wan2.1-1.3b", "--size", "70x112"], "a token is 16 pixels wide and high"),
        (["wan2.1-1.3b", "--frames", "8"], "the VAE takes 1 + a multiple of 4 frames"),
        (["wan2.1-1.3b", "--frames", "1", "--size", "16x32", "--ranks", "3"], "at least one of the 2 tokens"),
        (["wan2.1-1.3b", "--dtype", "int8"], "is not one of"),
    ],
)
def test_refused_before_any_rank_is_started(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["bench", "video", *words])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
