"""The one chain from a problem to what a rank runs: visible → build → validate → compile → bind.

Simulator, runtime, cache, benchmarks and lesson all get their programs here, so a schedule that was not proved to
compute exactly the visible pairs never runs. `prepare` has the only cache of the chain.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Generic, NamedTuple, TypeVar

from ringspan.algorithms import Direction, Mesh, Query, Side, build_decode, build_schedule
from ringspan.program.bind import BoundProgram, bind
from ringspan.program.execute import Arithmetic, BlockSizes, RankState, Value
from ringspan.program.problem import Problem, Sizes
from ringspan.program.reproducible.bind import bind_grid
from ringspan.program.reproducible.state import TreeState
from ringspan.schedule import Block, Route, Schedule, Visible, compile_rank, validate

NewState = Callable[[int, BlockSizes, dict[Block, Value], Arithmetic], RankState]


class Bound(NamedTuple):
    """A rank's program, and the factory of its state from (rank, sizes, inputs, arithmetic)."""

    program: BoundProgram
    new_state: NewState


class Mode(NamedTuple):
    """How partial results are summed: the route of gradients, and the binding of a program to its rank state.

    What the two modes do with numbers differs by library: see `runtime/modes.py` for torch. NumPy needs no difference.
    """

    name: str
    route: Route
    bind: Callable[[Schedule, int, Sizes, int], Bound]


def _bind_default(schedule: Schedule, rank: int, problem: Sizes, tiles_at_once: int) -> Bound:  # noqa: ARG001
    return Bound(bind(compile_rank(schedule, rank), problem), RankState)


def _bind_reproducible(schedule: Schedule, rank: int, problem: Sizes, tiles_at_once: int) -> Bound:
    assert isinstance(problem, Problem)
    program, growth = bind_grid(schedule, rank, problem, tiles_at_once)
    return Bound(program, partial(TreeState, growth=growth))


DEFAULT = Mode("default", "follow", _bind_default)
"""Running sums: each rank adds parts in the order they arrive in the schedule."""

REPRODUCIBLE = Mode("reproducible", "straight", _bind_reproducible)
"""Sums are trees over fixed tiles: the same bits for any number of ranks and any algorithm."""


class ProgramOptions(NamedTuple):
    """The options of a program besides its algorithm."""

    mesh: Mesh | None = None
    direction: Direction | None = None
    backward: Side | None = None
    """The side that travels in the backward pass; None for the forward pass."""
    mode: Mode = DEFAULT
    tiles_at_once: int = 1
    """In the reproducible mode, the tiles of queries that one kernel call may take."""


AnySizes = TypeVar("AnySizes", bound=Sizes)


class Prepared(NamedTuple, Generic[AnySizes]):
    """Everything one rank needs to run one kind of call."""

    problem: AnySizes
    sizes: BlockSizes
    schedule: Schedule
    program: BoundProgram
    new_state: NewState

    def state(self, rank: int, inputs: dict[Block, Value], arithmetic: Arithmetic) -> RankState:
        """The rank's state before the first step."""
        return self.new_state(rank, self.sizes, inputs, arithmetic)


_FORWARD = ProgramOptions()


def build(problem: Problem, algorithm: str, options: ProgramOptions = _FORWARD) -> Schedule:
    """The schedule of a named algorithm, not yet proved."""
    return build_schedule(
        algorithm,
        problem.visible(),
        heads=problem.shapes.heads,
        mesh=options.mesh,
        direction=options.direction,
        backward=options.backward,
        route=options.mode.route,
    )


@lru_cache(maxsize=256)
def prepare(problem: Problem, rank: int, algorithm: str, options: ProgramOptions = _FORWARD) -> Prepared[Problem]:
    """Build, prove, compile and bind one rank's program."""
    schedule = build(problem, algorithm, options)
    validate(schedule, problem.visible())
    return _prepared(problem, schedule, rank, options)


def prepare_ranks(problem: Problem, schedule: Schedule, options: ProgramOptions = _FORWARD) -> list[Prepared[Problem]]:
    """The programs of all ranks for a given schedule, which is proved first."""
    validate(schedule, problem.visible())
    return [_prepared(problem, schedule, rank, options) for rank in range(problem.world_size)]


def prepare_turn(problem: AnySizes, rank: int, algorithm: str, query: Query) -> Prepared[AnySizes]:
    """One rank's program for a turn of a cache. Its sizes never recur, so only the schedule is cached."""
    return _prepared(problem, _proved_for_turn(problem.visible(), algorithm, query), rank, _FORWARD)


@lru_cache(maxsize=1024)
def _proved_for_turn(visible: Visible, algorithm: str, query: Query) -> Schedule:
    is_replicated = query == "replicated"
    schedule = build_decode(visible, query=query) if is_replicated else build_schedule(algorithm, visible)
    validate(schedule, visible)
    return schedule


def _prepared(problem: AnySizes, schedule: Schedule, rank: int, options: ProgramOptions) -> Prepared[AnySizes]:
    sizes = BlockSizes(problem.world_size, cache(problem.block_shapes))
    return Prepared(problem, sizes, schedule, *options.mode.bind(schedule, rank, problem, options.tiles_at_once))
