"""When does everything happen? A discrete-event run of a schedule's loads.

A load is one step of all ranks: seconds of compute by rank, and rounds of messages. Ranks are array elements, so a step
costs a few array operations however many ranks there are. Where all ranks do the same at the same time up to their
place in a node, one node stands for all (see `algorithms/loads.py`), so the largest rings stay cheap.

The rules are those of `schedule/actions.py`. A rank begins a step when it has computed the one before and holds what
the step reads; then it starts its messages and computes while they travel. A message needs both ends to be there, the
sender's outgoing and the receiver's incoming side of the link free; in and out do not hinder each other, nor does the
link inside a node the one between nodes. A link serves one message after the other.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ringspan.algorithms.loads import END, Load, Round, Seconds
from ringspan.planner.catalog import Link


class Moment(NamedTuple):
    """One step as it happened: when ranks began, how long they computed, when each round's messages went and came."""

    begin_s: Seconds
    busy_s: Seconds  # with what carrying messages stole
    load: Load
    messages: tuple[tuple[Seconds, Seconds], ...]


class Timeline(NamedTuple):
    """How long all took, and where the time of the busiest went. By rank, of the ranks that were run."""

    makespan_s: float
    compute_s: Seconds
    exposed_s: Seconds  # blocked by messages under way
    bubble_s: Seconds  # waiting for ranks that are not as far, or for the end
    link_s: float  # the busiest side of a link
    link_name: str
    num_operations: int  # steps with messages; an exchange counts twice
    moments: tuple[Moment, ...] = ()


def run_timeline(loads: Iterable[Load], world_size: int, near: Link, far: Link, *, record: bool = False) -> Timeline:
    """Follow the loads of `world_size` ranks, in order."""
    clock = _Clock(world_size, near, far)
    moments = []
    for t, load in enumerate(loads):
        begin_s = clock.begin(t)
        is_spread = len({_distance(one) for one in load.rounds if one.src.size}) > 1
        messages = tuple(clock.send(t, begin_s, one, is_spread=is_spread) for one in load.rounds)
        clock.num_operations += bool(messages) + is_spread
        busy_s = clock.compute(begin_s, load.attend_s)
        if record:
            moments.append(Moment(begin_s, busy_s, load, messages))
    return clock.finish(tuple(moments))


def _distance(one: Round) -> int:
    """From a sender to its receiver."""
    return int(one.dst[0] - one.src[0])


class _Clock:
    def __init__(self, world_size: int, near: Link, far: Link) -> None:
        self.links = (near, far)
        self.free_s = np.zeros(world_size)
        self.compute_s = np.zeros(world_size)
        self.exposed_s = np.zeros(world_size)
        self.stolen_s = np.zeros(world_size)  # of the step's compute, by carrying messages
        self.out_s = np.zeros((2, world_size))  # when the outgoing side of near and far is free again
        self.in_s = np.zeros((2, world_size))
        self.out_busy_s = np.zeros((2, world_size))
        self.in_busy_s = np.zeros((2, world_size))
        self.num_operations = 0
        self.due: dict[int, tuple[Seconds, Seconds]] = {}  # by reading step: arrival, and when both ends were ready

    def begin(self, t: int) -> Seconds:
        due = self.due.pop(t, None)
        if due is None:
            return self.free_s.copy()
        arrival_s, ready_s = due
        begin_s = np.maximum(self.free_s, arrival_s)
        self.exposed_s += np.maximum(0.0, begin_s - np.maximum(self.free_s, ready_s))
        return begin_s

    def send(self, t: int, begin_s: Seconds, one: Round, *, is_spread: bool) -> tuple[Seconds, Seconds]:
        """`is_spread`: ranks send to several others in this step, which share a bridge."""
        near, far = self.links
        side = one.is_far.astype(np.intp)
        src, dst = one.src, one.dst
        near_rate, near_latency_s = near.bytes_per_s, near.latency_s
        if one.is_exchange or (is_spread and near.wiring == "bridge"):
            near_rate, near_latency_s = near.exchange_bytes_per_s, near.exchange_latency_s
        far_rate, far_latency_s = far.bytes_per_s, far.latency_s
        if one.is_exchange:
            far_rate, far_latency_s = far.exchange_bytes_per_s, far.exchange_latency_s
        travel_s = one.nbytes / np.array((near_rate, far_rate))[side]
        ready_s = np.maximum(begin_s[src], begin_s[dst])
        start_s = np.maximum(ready_s, np.maximum(self.out_s[side, src], self.in_s[side, dst]))
        end_s = start_s + travel_s
        self.out_s[side, src] = self.in_s[side, dst] = end_s
        self.out_busy_s[side, src] += travel_s
        self.in_busy_s[side, dst] += travel_s
        for ranks in (src, dst) if near.steals or far.steals else ():
            self.stolen_s[ranks] += travel_s * np.array((near.steals, far.steals))[side] / 2
        arrival_s = end_s + np.array((near_latency_s, far_latency_s))[side]
        reads_at = t + 1 if one.reads_at == 0 else one.reads_at
        due = self.due.get(reads_at)
        if due is None:
            due = self.due[reads_at] = np.zeros_like(self.free_s), np.zeros_like(self.free_s)
        later = arrival_s >= due[0][dst]
        due[1][dst] = np.where(later, ready_s, due[1][dst])
        due[0][dst] = np.maximum(due[0][dst], arrival_s)
        return start_s, arrival_s

    def compute(self, begin_s: Seconds, attend_s: Seconds) -> Seconds:
        busy_s: Seconds = attend_s + np.minimum(self.stolen_s, attend_s)
        self.stolen_s[:] = 0.0
        self.compute_s += busy_s
        self.free_s = begin_s + busy_s
        return busy_s

    def finish(self, moments: tuple[Moment, ...]) -> Timeline:
        for t in sorted(self.due, key=lambda t: (t == END, t)):
            self.free_s = self.begin(t)
        makespan_s = float(self.free_s.max())
        busy_s = np.maximum(self.out_busy_s, self.in_busy_s).max(axis=1)
        busiest = int(busy_s.argmax())
        bubble_s = np.maximum(0.0, makespan_s - self.compute_s - self.exposed_s)
        return Timeline(
            makespan_s,
            self.compute_s,
            self.exposed_s,
            bubble_s,
            float(busy_s[busiest]),
            self.links[busiest].id,
            self.num_operations,
            moments,
        )
