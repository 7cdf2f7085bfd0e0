"""examples/train_long_context.py has the same losses on any number of ranks, after a checkpoint, and with FSDP2."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
from support.ranks import run_ranks, values

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_long_context.py"
SMALL = ["--tokens", "131", "--batch", "2"]


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("train_long_context", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(rank: int, argv: list[str], breakage: str = "") -> bool:
    module = load_example()
    if breakage == "ring":
        rs.attention = attend_own
    if breakage == "optimizer":
        module.dcp = SimpleNamespace(load=load_without_moments)
    if breakage == "limit":
        module.CLOSE = 0.0
    is_well: bool = module.main(argv)
    return is_well


def attend_own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """A broken ring: every rank attends to its own keys only."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def load_without_moments(state: dict[str, Any], checkpoint_id: str) -> None:
    found = {name: value for name, value in state.items() if name != "optimizer"}
    dcp.load(found, checkpoint_id=checkpoint_id)
    state.update(found)


def train(world_size: int, *argv: str, breakage: str = "") -> bool:
    (is_well, *others) = values(run_ranks(run_example, world_size, [*SMALL, *argv], breakage))
    assert all(other == is_well for other in others)
    return bool(is_well)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The losses of one rank, in a file."""
    file = tmp_path_factory.mktemp("training") / "one.json"
    assert train(1, "--steps", "6", "--losses", str(file))
    losses = json.loads(file.read_text())
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
    return str(file)


@pytest.mark.parametrize(("world_size", "more"), [(2, []), (4, ["--cp", "2"])], ids=["2", "2 replicas of 2"])
def test_the_losses_are_those_of_one_rank(world_size: int, more: list[str], alone: str) -> None:
    assert train(world_size, "--steps", "6", "--compare", alone, *more)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(
    before: int, after: int, alone: str, tmp_path: Path
) -> None:
    assert train(before, "--steps", "3", "--save", str(tmp_path / "half"))
    assert train(after, "--steps", "6", "--resume", str(tmp_path / "half"), "--compare", alone)
    if after == 1:
        forgetful = train(
            1, "--steps", "6", "--resume", str(tmp_path / "half"), "--compare", alone, breakage="optimizer"
        )
        assert not forgetful


def test_reproducible_losses_are_the_same_to_the_bit_and_so_is_a_resume(tmp_path: Path) -> None:
    tiles = ["--reproducible", "--tokens", "1100", "--batch", "1", "--steps"]
    losses, half = str(tmp_path / "bits.json"), str(tmp_path / "half")
    assert train(1, *tiles, "4", "--losses", losses)
    assert train(2, *tiles, "2", "--save", half, "--compare", losses)
    assert train(1, *tiles, "4", "--resume", half, "--compare", losses)
    assert not train(2, "--tokens", "1100", "--batch", "1", "--steps", "4", "--compare", losses, breakage="limit")


def test_a_broken_ring_has_other_losses(alone: str) -> None:
    assert not train(2, "--steps", "3", "--compare", alone, breakage="ring")


def test_as_a_user_starts_it(alone: str, tmp_path: Path) -> None:
    """Run it under torchrun, with a diagram."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plot = tmp_path / "losses.svg"
    command = [*torchrun, str(EXAMPLE), *SMALL, "--steps", "2", "--compare", alone, "--plot", str(plot)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 replicas of 2 ranks" in ended.stdout
    assert ended.stdout.count("step 2: loss") == 1
    assert "largest difference of 2 losses" in ended.stdout
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_what_cannot_be_split_is_refused() -> None:
    (ended,) = run_ranks(run_example, 1, ["--cp", "2"])
    assert isinstance(ended.error, SystemExit)
    assert ended.error.code == 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tokens", "0"], "--tokens 0: give 2 or more"),
        (["--steps", "0"], "--steps 0: give 1 or more"),
        (["--cp", "0"], "--cp 0: give 1 or more"),
        (["--tokens", "1000000000"], "--batch 2, --tokens 1000000000: a step takes 2000000000 bytes, and the text has"),
        (["--losses", "/"], "--losses /: this is a folder; give a file"),
        (["--compare", "x.json", "--plot", "/"], "--plot /: this is a folder; give a file"),
        (["--losses", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--compare", "/no/such/file"], "--compare /no/such/file: no losses to be read there"),
        (["--resume", "/no/such/folder"], "no checkpoint is there"),
        (["--plot", "x.svg"], "--plot draws two runs"),
    ],
)
def test_wrong_input_is_told_before_anything_is_trained(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_example(0, argv)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_text_that_one_step_would_use_up_is_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    """The position in the data wraps around at the end of the data."""
    length = len(load_example().read_text())
    with pytest.raises(SystemExit) as ended:
        run_example(0, ["--batch", "1", "--tokens", str(length)])
    assert ended.value.code == 2
    assert f"a step takes {length} bytes, and the text has {length}; give fewer" in capsys.readouterr().err


def test_a_file_without_losses_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.json"
    file.write_text("[]")
    with pytest.raises(SystemExit) as ended:
        run_example(0, ["--compare", str(file)])
    assert ended.value.code == 2
    assert f"--compare {file}: no losses are there; write them with --losses" in capsys.readouterr().err


def test_a_nan_loss_does_not_count_as_equal(alone: str, tmp_path: Path) -> None:
    first, *_ = json.loads(Path(alone).read_text())
    file = tmp_path / "nan.json"
    file.write_text(json.dumps([first, float("nan")]))
    assert not train(1, "--steps", "2", "--compare", str(file))
