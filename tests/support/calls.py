"""A call for tests that fail on purpose: its arguments, how it ended, and how to die in the middle of it."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import ringspan as rs

SEQ_LEN = 48
DEADLINE_S = 0.6
AMPLE_S = 30.0  # for waits that must end long before
MARGIN_S = 10.0  # for busy machines; far less than AMPLE_S

Arguments = dict[str, Any]


def arguments(rank: int, world_size: int) -> Arguments:
    """A valid call."""
    layout = rs.zigzag(SEQ_LEN, world_size)
    generator = torch.Generator().manual_seed(0)
    tensors = [layout.shard(torch.randn(1, 12, SEQ_LEN, 8, generator=generator), rank, 2) for _ in range(3)]
    return {**dict(zip("qkv", tensors, strict=True)), "mask": rs.causal(), "layout": layout, "timeout_s": AMPLE_S}


def attend(given: Arguments) -> torch.Tensor:
    given = dict(given)
    out = rs.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert isinstance(out, torch.Tensor)
    return out


class Outcome(NamedTuple):
    """How one call ended on one rank."""

    error: str | None  # the name of its type
    message: str
    seconds: float


def outcome(given: Arguments) -> Outcome:
    return outcome_of(lambda: attend(given))


def outcome_of(call: Callable[[], object]) -> Outcome:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return Outcome(type(error).__name__, str(error), time.monotonic() - began)
    return Outcome(None, "", time.monotonic() - began)


def dies_at(action: str, step: int) -> Callable[[Any], None]:
    def record(event: Any) -> None:
        if event.action == action and event.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return record
