"""The memory of a whole model per rank falls with the number of ranks: activations, keys and values, and peaks."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

import ringspan as rs
from ringspan.bench.decoder import Decoder
from ringspan.bench.memory import LiveStorages
from ringspan.bench.model_runs import OnRanks
from ringspan.bench.settings import TransformerSettings

SETTINGS = TransformerSettings(2, 2, 1, 16, 96, 1, 8192, "float32", "auto", 1, 0, 60.0)


class Taken(NamedTuple):
    kv_cache: int
    prefill_peak: int
    activations: int
    train_peak: int  # without the gradients of weights, which every rank has whole


@cache
def measure(world_size: int) -> Taken:
    """The largest over the ranks."""
    tokens = torch.randint(256, (1, SETTINGS.seq_len), generator=torch.Generator().manual_seed(0))
    layout = rs.zigzag(SETTINGS.seq_len, world_size)

    def on_rank(group: Any) -> Taken:
        runs = OnRanks(SETTINGS, Decoder(SETTINGS, torch.device("cpu")), tokens, layout, group)
        kept: list[int] = []
        with LiveStorages() as prefill:
            runs.prefill()
        with LiveStorages() as train:
            runs.train(at_turn=lambda: kept.append(train.now))
        return Taken(runs.cache_bytes, prefill.peak, kept[0], train.peak - runs.model.nbytes)

    return Taken(*map(max, zip(*rs.run_in_process(on_rank, world_size), strict=True)))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("what", Taken._fields)
def test_it_falls_as_one_over_the_ranks(what: str, world_size: int) -> None:
    alone, shared = getattr(measure(1), what), getattr(measure(world_size), what)
    assert shared * world_size == pytest.approx(alone, rel=0.15)
