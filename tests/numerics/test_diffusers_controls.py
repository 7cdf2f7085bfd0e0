"""Faults that the comparison with one process must see, and that verification must refuse."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

from collections.abc import Callable
from typing import Any

import torch

from ringspan.adapters.diffusers import adapter, parallelize, run
from ringspan.errors import UnsupportedError
from ringspan.layout import Layout, contiguous
from ringspan.runtime.api import attention
from ringspan.span import Span
from support.diffused import error_of, on_ranks, outputs_on_ranks, run_alone, whole
from support.diffusers_models import build

VISIBLE = 1e-3


def count_text_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank sends its copy of the text, as if it were other tokens."""

    def of_every_rank(layout: Layout) -> Layout:
        lengths = [layout.shard_len(rank) for rank in range(layout.world_size)]
        starts = [sum(lengths[:rank]) for rank in range(layout.world_size)]
        return Layout(tuple((Span(start, start + n),) for start, n in zip(starts, lengths, strict=True)))

    def attend(*tensors: torch.Tensor, layout: Layout, kv_layout: Layout, **options: Any) -> Any:
        layouts = {"layout": of_every_rank(layout), "kv_layout": of_every_rank(kv_layout)}
        return attention(*tensors, **layouts, **options)

    monkeypatch.setattr(run, "attention", attend)


def give_every_rank_the_first_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = run.TokenShardRun._cut

    def cut_wrongly(self: Any, call: Any, leaf: Any) -> Any:
        if not leaf.path.startswith("rotary_emb"):
            return cut(self, call, leaf)
        length = contiguous(self.num_tokens, self.options.world_size).shard_len(self.options.rank)
        return leaf.value.narrow(call.tokens[leaf.path].dim, 0, length)

    monkeypatch.setattr(run.TokenShardRun, "_cut", cut_wrongly)


def leave_counts_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.TokenShardRun, "_cut_count", lambda self, count: count)


def show_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "read_part", lambda *_: run.NO_MASK)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("flux", count_text_on_every_rank),
        ("wan", give_every_rank_the_first_positions),
        ("hunyuan_token_replace", leave_counts_uncut),
        ("hunyuan", show_padding),
    ],
)
def test_a_fault_is_seen_and_refused(
    name: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_alone(name)
    fault(monkeypatch)
    outputs = outputs_on_ranks(alone, 2, verify=False)
    assert max(error_of(output, alone.output) for output in outputs) > VISIBLE
    with pytest.raises(UnsupportedError, match="differs by"):
        outputs_on_ranks(alone, 2)


def test_noise_of_its_own_on_one_rank_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.TransformerOnRanks, "agree", lambda *_: None)
    alone = run_alone("wan")

    def forward(model: Any, group: Any) -> torch.Tensor:
        noise = torch.randn(build("wan")[1]["hidden_states"].shape, generator=torch.Generator().manual_seed(group.rank))
        with torch.no_grad(), parallelize(model, group):
            return whole(model(**alone.arguments | {"hidden_states": noise}))

    outputs = on_ranks(alone, 2, forward)
    noise = torch.randn(alone.arguments["hidden_states"].shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = whole(alone.model(**alone.arguments | {"hidden_states": noise}))
    assert error_of(outputs[0], expected) > VISIBLE
