"""Conversations over real processes."""

from typing import Any

import pytest
import torch

import ringspan as rs
from support.conversations import Story, live_through
from support.ranks import run_ranks, values

pytestmark = pytest.mark.xdist_group("processes")


class Rank:
    """The parts of a group that `live_through` uses, for the default group."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


STORAGES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3")


def tell(storage: str) -> Story:
    specs: list[Any] = [("causal",), ("and", ("causal",), ("sliding_window", 5, 0))]
    story = Story(3, rs.Heads(4, 2), specs, torch.float32, storage=storage)
    story.turn({0: 30, 1: 7}, algorithm="pass_kv").turn({1: 4, 0: 2}, algorithm="pass_q")
    for query in ("sharded", "replicated", "sharded"):
        story.turn({0: 1, 1: 1}, query=query)
    return story.truncate(0, 20).turn({0: 2, 1: 9})


def converse(rank: int) -> list[Any]:
    told: list[Any] = []
    for storage in STORAGES:
        story = tell(storage)
        cache = live_through(story, Rank(rank), story.cache(None))
        turn = cache.begin({0: 3})
        told.append((cache.balance(), turn.reason))
        turn.abort()
    return told


def test_conversations_on_gloo() -> None:
    """Every storage dtype, every wire format, and a choice by measured rates that all ranks share."""
    told = values(run_ranks(converse, 2))
    assert told[0] == told[1]
