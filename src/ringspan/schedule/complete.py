"""How do partial sums reach their owners?

A builder states only which inputs are copied where and who attends what. Every attend leaves a part of a sum (out, dq,
dkv) on the rank that computed it. This module derives the transfers that bring those parts to their owners, for forward
and backward alike, so no builder writes them.

There are two routes. `straight`: each part goes to its owner in the step after its last contribution. `follow`: the
parts of one sum travel from the first rank that read the block to the next reader, are added there, and go from the
last reader to the owner. Both send the same number of messages; `follow` sends them between neighbours, and between
nodes no more often than the block itself.
"""

from collections import defaultdict
from typing import Literal, get_args

from ringspan.arguments import TEXT, check_arguments
from ringspan.errors import UnsupportedError
from ringspan.schedule.actions import A_SCHEDULE, ALL, Block, Schedule, Step, Transfer
from ringspan.schedule.visible import A_VISIBLE, Visible

Route = Literal["straight", "follow"]


def complete(draft: Schedule, visible: Visible, route: Route = "straight") -> Schedule:
    """Add the transfers of sums to a draft that has only attends and transfers of inputs."""
    check_arguments(draft=(A_SCHEDULE, draft), visible=(A_VISIBLE, visible), route=(TEXT, route))
    if route not in get_args(Route):
        remedy = f"use one of {', '.join(get_args(Route))}"
        raise UnsupportedError("gradients get home another way", argument="route", value=route, remedy=remedy)
    sums: defaultdict[int, list[Transfer]] = defaultdict(list)
    for block, made in _parts_abroad(draft, visible).items():
        sent = 0
        onward = [block.owner] * len(made) if route == "straight" else [*list(made)[1:], block.owner]
        for (rank, t), dst in zip(made.items(), onward, strict=True):
            # A part leaves one step after the last part that is merged into it has arrived.
            sent = t + 1 if route == "straight" else max(t, sent) + 1
            sums[sent].append(Transfer(block, rank, dst))
    return Schedule.of_steps(draft.world_size, draft.heads, _with_sums(draft, sums))


def _parts_abroad(draft: Schedule, visible: Visible) -> dict[Block, dict[int, int]]:
    """Return for each sum the other ranks that add to it, in order, with the step of their last contribution."""
    parts: defaultdict[Block, dict[int, int]] = defaultdict(dict)
    for t, step in enumerate(draft.steps):
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for block, _ in visible.contributions(attend):
                    if block.owner not in (rank, ALL):
                        parts[block][rank] = t
    return parts


def _with_sums(draft: Schedule, sums: dict[int, list[Transfer]]) -> list[Step]:
    steps = []
    for t in range(max([draft.num_steps, *(sent + 1 for sent in sums)])):
        drafted = draft.step(t) if t < draft.num_steps else Step([()] * draft.world_size)
        steps.append(Step(drafted.attends, (*drafted.transfers, *sums.get(t, ())), drafted.merges))
    return steps
