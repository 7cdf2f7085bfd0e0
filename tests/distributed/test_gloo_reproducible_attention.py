"""The reproducible mode on gloo processes: the bits of one process."""

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks, values
from support.reproducible_cases import LAYOUTS, Call, alone, different, on_rank, options_of, together

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

CALLS = (Call("causal", has_sinks=True), Call("rows", torch.bfloat16))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_one_device(subtests: pytest.Subtests, world_size: int) -> None:
    of_ranks = values(run_ranks(attend, world_size, world_size))
    for i, (call, way) in enumerate((call, way) for call in CALLS for way in ("pass_kv", "pass_q", "double_ring")):
        with subtests.test(call=call, way=way):
            got = together(LAYOUTS["zigzag"](world_size), [each[i] for each in of_ranks])
            assert different(got, alone(call)) == [], (call, way)


def attend(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    layout = LAYOUTS["zigzag"](world_size)
    return [
        on_rank(call, layout, dist.group.WORLD, rank, **options_of(way, world_size))
        for call in CALLS
        for way in ("pass_kv", "pass_q", "double_ring")
    ]
