"""One rank leaves a turn of a cache, or a save or load, by an error of its own: all others hear of it at once."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.transports._neighbours import SWITCH
from support.calls import MARGIN_S
from support.ranks import run_ranks

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

OPTIONS: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}


class Boom(BaseException):
    """Not an Exception, like Ctrl-C."""


def feed(cache: rs.KVCache, error: BaseException | None = None, before_layer: int = 0) -> None:
    with cache.begin([20], algorithm="pass_kv") as turn:
        for layer in range(2):
            if error is not None and layer == before_layer:
                raise error
            q = torch.zeros(1, 2, turn.num_rows, 8)
            turn.prefill(q, q[:, :1], q[:, :1], layer=layer)


def told(rank: int, ends: Any, kind: str) -> None:
    """What every rank says, in the time of a message."""
    for peer, end in enumerate(ends):
        assert end.exit_code == 0
        assert end.seconds < MARGIN_S
        if peer == rank:
            assert type(end.error).__name__ == kind
        else:
            assert isinstance(end.error, rs.TransportError), end
            assert "out of luck" in str(end.error)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, Boom])
@pytest.mark.parametrize("before_layer", [0, 1])
def test_a_callers_exception_between_layers(before_layer: int, kind: type[BaseException]) -> None:
    told(1, run_ranks(run_caller, 3, before_layer, kind, group_timeout_s=1800.0), kind.__name__)


def run_caller(rank: int, before_layer: int, kind: type[BaseException]) -> None:
    cache = rs.KVCache(**OPTIONS)
    feed(cache, kind("out of luck") if rank == 1 else None, before_layer)


def test_the_group_stays_usable_if_nothing_was_sent() -> None:
    for end in run_ranks(run_caller_and_go_on, 3, group_timeout_s=1800.0):
        assert end.error is None, end.message


def run_caller_and_go_on(rank: int) -> None:
    cache = rs.KVCache(**OPTIONS)
    with pytest.raises((ValueError, rs.TransportError), match="out of luck"):
        feed(cache, ValueError("out of luck") if rank == 1 else None)
    feed(cache)
    assert cache.lengths == {0: 20}


def test_an_error_of_another_call_within_a_turn_is_told_once() -> None:
    for end in run_ranks(run_refused_within, 3, group_timeout_s=1800.0):
        assert end.error is None, end.message


def run_refused_within(rank: int) -> None:
    cache = rs.KVCache(**OPTIONS)
    layout = rs.contiguous(6, 3)
    with pytest.raises(rs.RingspanError), cache.begin([20], algorithm="pass_kv"):
        rs.gather(torch.zeros(2 + (rank == 1)), layout, dim=0)
    feed(cache)


@pytest.mark.parametrize("kind", [OSError, Boom])
def test_a_load_that_fails_on_one_rank(kind: type[BaseException], tmp_path: Path) -> None:
    told(1, run_ranks(run_load, 3, kind, tmp_path, group_timeout_s=1800.0), kind.__name__)


def run_load(rank: int, kind: type[BaseException], folder: Path) -> None:
    cache = rs.KVCache(**OPTIONS)
    feed(cache)
    cache.save(folder)
    if rank == 1:
        from ringspan.cache import _saving as saving

        def fail(*_: object) -> None:
            raise kind("out of luck")

        saving._fill = fail  # type: ignore[assignment]
    rs.KVCache(**OPTIONS).load(folder)


def test_a_save_with_a_turn_open_on_one_rank(tmp_path: Path) -> None:
    for rank, end in enumerate(run_ranks(run_save, 3, tmp_path, group_timeout_s=1800.0)):
        assert end.seconds < MARGIN_S
        assert isinstance(end.error, rs.CacheError if rank == 1 else rs.TransportError), end
        assert "save during a turn" in str(end.error)


def run_save(rank: int, folder: Path) -> None:
    os.environ[SWITCH] = "0"
    cache = rs.KVCache(**OPTIONS)
    feed(cache)
    if rank == 1:
        cache.begin([1])
    cache.save(folder)
