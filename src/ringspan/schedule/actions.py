"""What can a rank do in a step? These actions are the vocabulary of every algorithm.

A `Schedule` is data: steps of actions that name blocks, never positions, shapes or devices. The simulator, the runtime,
the timeline and the pictures all read this one value.

Timing: a Transfer or AllMerge carries the state at the start of its step, and a block that arrives in step t is usable
from step t + 1. The attends of step t overlap with its transfers.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from ringspan.arguments import ITERABLE, RANKS, WHOLE, check_arguments, instance_of, optional
from ringspan.errors import ScheduleError
from ringspan.schedule._picture import draw_schedule

ALL = -1  # the owner of a block that every rank holds

Kind = Literal["q", "kv", "q_grad", "out", "dq", "dkv"]
INPUTS: frozenset[str] = frozenset({"q", "kv", "q_grad"})
SUMS: frozenset[str] = frozenset({"out", "dq", "dkv"})


class Heads(NamedTuple):
    """The numbers of query heads and KV heads over all ranks."""

    num_heads: int
    num_kv_heads: int

    @property
    def group(self) -> int:
        """The number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class Block(NamedTuple):
    """A named value: one owner's tokens, for all heads or for a range of heads.

    Inputs are "q" (q), "kv" (k, v) and "q_grad" (q, dout, out, lse); a Transfer copies an input. Sums are "out"
    (out, lse), "dq" and "dkv" (dk, dv). Every rank may hold its own part of a sum; a Transfer moves the part, and the
    receiver merges it. `heads` uses the block's own numbering: KV heads for "kv" and "dkv", query heads for the others.
    """

    kind: Kind
    owner: int
    heads: range | None = None

    @property
    def is_sum(self) -> bool:
        """Whether ranks add parts to this block."""
        return self.kind in SUMS

    @property
    def whole(self) -> "Block":
        """The same block with all its heads."""
        return self if self.heads is None else Block(self.kind, self.owner)

    def overlaps(self, other: "Block") -> bool:
        """Whether the two blocks have the same kind and owner and share a head."""
        if (self.kind, self.owner) != (other.kind, other.owner):
            return False
        if self.heads is None or other.heads is None:
            return True
        return self.heads.start < other.heads.stop and other.heads.start < self.heads.stop

    def __str__(self) -> str:
        owner = "*" if self.owner == ALL else str(self.owner)
        heads = "" if self.heads is None else f"[{self.heads.start}:{self.heads.stop}]"
        return f"{self.kind}{owner}{heads}"


class Attend(NamedTuple):
    """Attend every q block to every kv block; pairs of blocks without a visible pair of tokens are skipped.

    A forward attend adds to this rank's `out` of each q. A backward attend, whose q blocks are "q_grad", adds to `dq`
    of each q and `dkv` of each kv.
    """

    qs: tuple[Block, ...]
    kvs: tuple[Block, ...]

    def __str__(self) -> str:
        return "×".join(",".join(map(str, side)) for side in self)


class Transfer(NamedTuple):
    """Send one block from rank `src` to rank `dst`."""

    block: Block
    src: int
    dst: int

    def __str__(self) -> str:
        return f"{self.block}→{self.dst}"


class AllMerge(NamedTuple):
    """Merge every rank's part of a sum in rank order and leave the result on all ranks."""

    block: Block

    def __str__(self) -> str:
        return f"{self.block}↔all"


class Actions(NamedTuple):
    """The actions of one rank in one step."""

    attends: tuple[Attend, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    merges: tuple[AllMerge, ...]


class Step:
    """The actions of all ranks in one step: attends by rank, transfers in order of their source, all-merges."""

    __slots__ = ("_by_dst", "_by_src", "attends", "merges", "transfers")

    def __init__(
        self,
        attends: Iterable[Iterable[Attend]],
        transfers: Iterable[Transfer] = (),
        merges: Iterable[AllMerge] = (),
    ) -> None:
        self.attends = tuple(tuple(of_rank) for of_rank in attends)
        self.transfers = tuple(sorted(transfers, key=lambda transfer: transfer.src))
        self.merges = tuple(merges)
        self._by_src: dict[int, list[Transfer]] = {}
        self._by_dst: dict[int, list[Transfer]] = {}
        for transfer in self.transfers:
            self._by_src.setdefault(transfer.src, []).append(transfer)
            self._by_dst.setdefault(transfer.dst, []).append(transfer)

    def actions(self, rank: int) -> Actions:
        """Return the actions of one rank."""
        attends = self.attends[rank] if rank < len(self.attends) else ()
        return Actions(attends, tuple(self._by_src.get(rank, ())), tuple(self._by_dst.get(rank, ())), self.merges)

    def blocks(self) -> Iterator[Block]:
        """Yield every block that the step names."""
        for attends in self.attends:
            for attend in attends:
                yield from attend.qs
                yield from attend.kvs
        yield from (transfer.block for transfer in self.transfers)
        yield from (merge.block for merge in self.merges)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        return (self.attends, self.transfers, self.merges) == (other.attends, other.transfers, other.merges)

    def __hash__(self) -> int:
        return hash((len(self.attends), len(self.transfers)))

    def __repr__(self) -> str:
        return f"Step(attends={self.attends}, transfers={self.transfers}, merges={self.merges})"


_STEP = instance_of(Step, "rs.schedule.Step(attends)")


class Schedule:
    """The actions of all ranks of an algorithm, step by step.

    Steps are built on demand, so a ring of thousands of ranks costs nothing until a step is read. Equality compares
    steps. `heads` is None unless a block names a range of heads.
    """

    __slots__ = ("_made", "heads", "num_steps", "world_size")

    def __init__(self, world_size: int, heads: Heads | None, num_steps: int, step: Callable[[int], Step]) -> None:
        self.world_size = world_size
        self.heads = heads
        self.num_steps = num_steps
        self._made = lru_cache(maxsize=None)(step)

    @classmethod
    def of_steps(cls, world_size: int, heads: Heads | None, steps: Iterable[Step]) -> "Schedule":
        """Make a schedule of given steps."""
        check_arguments(
            world_size=(RANKS, world_size),
            heads=(optional(instance_of(Heads, "rs.Heads(32, 8)")), heads),
            steps=(ITERABLE, steps),
        )
        all_steps = tuple(steps)
        check_arguments(**{f"steps[{t}]": (_STEP, step) for t, step in enumerate(all_steps)})
        return cls(world_size, heads, len(all_steps), all_steps.__getitem__)

    def step(self, t: int) -> Step:
        """Return the actions of all ranks in step t."""
        check_arguments(t=(WHOLE, t))
        if not 0 <= t < self.num_steps:
            raise ScheduleError(f"the schedule has {self.num_steps} steps, numbered from 0", argument="t", value=t)
        return self._made(t)

    @property
    def is_backward(self) -> bool:
        """Whether the schedule computes gradients; False for a schedule without attends."""
        kinds = (attend.qs[0].kind for step in self.steps for attends in step.attends for attend in attends)
        return next(kinds, "q") == "q_grad"

    @property
    def steps(self) -> Iterator[Step]:
        """Yield all steps in order."""
        return map(self.step, range(self.num_steps))

    def actions(self, rank: int, t: int) -> Actions:
        """Return the actions of one rank in step t."""
        check_arguments(rank=(WHOLE, rank))
        if not 0 <= rank < self.world_size:
            raise ScheduleError(
                f"the schedule has {self.world_size} ranks, numbered from 0", argument="rank", value=rank
            )
        return self.step(t).actions(rank)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Schedule):
            return NotImplemented
        return (self.world_size, self.heads, self.num_steps) == (
            other.world_size,
            other.heads,
            other.num_steps,
        ) and all(mine == theirs for mine, theirs in zip(self.steps, other.steps, strict=True))

    def __hash__(self) -> int:
        return hash((self.world_size, self.heads, self.num_steps))

    def __reduce__(self) -> tuple[Callable[..., "Schedule"], tuple[object, ...]]:
        return Schedule.of_steps, (self.world_size, self.heads, tuple(self.steps))

    def _repr_html_(self) -> str:
        return draw_schedule(self)

    def __repr__(self) -> str:
        return f"<Schedule: {self.world_size} ranks, {self.num_steps} steps, heads {self.heads}>"


A_SCHEDULE = instance_of(Schedule, "that of rs.schedule.build_schedule")
