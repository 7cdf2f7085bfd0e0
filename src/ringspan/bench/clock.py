"""How is one call timed or recorded, after a barrier of all ranks?"""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ringspan.bench.breakdown import Interval
from ringspan.bench.conclude import Dissected
from ringspan.bench.group import meet
from ringspan.bench.timed import Watch, watched
from ringspan.runtime.session import session_of
from ringspan.transports.base import Transport

T = TypeVar("T")


class Timed(NamedTuple, Generic[T]):
    """What a call returned, and its seconds of wall and processor time."""

    value: T
    taken_s: float
    cpu_s: float


def time_call(transport: Transport, device: torch.device, timeout_s: float, call: Callable[[], T]) -> Timed[T]:
    """Time a call that begins after a barrier."""
    meet(transport, timeout_s)
    _finish(device)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    value = call()
    _finish(device)
    return Timed(value, time.perf_counter() - start_s, time.process_time() - start_cpu_s)


def record_calls(
    group: Any, device: torch.device, timeout_s: float, calls: Sequence[Callable[[Watch], object]]
) -> list[Dissected]:
    """Record calls one after the other, each after a barrier."""
    watch = Watch(session_of(group).transport.rank, device)
    found = []
    with watched(group, watch) as transport:
        for call in calls:
            meet(transport, timeout_s)
            watch.activities.clear()
            start_s = watch.now()
            call(watch)
            taken = Interval(start_s, watch.now())
            found.append(Dissected(socket.gethostname(), taken, tuple(watch.activities), 0))
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
