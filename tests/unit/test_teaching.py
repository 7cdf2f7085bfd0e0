"""The two teaching functions."""

import pytest

import ringspan as rs


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_a_gpu_attends_a_block_in_each_step_and_sends_in_all_but_the_last(num_gpus: int) -> None:
    costs = rs.ring_attention_context_parallel(64 * num_gpus, num_gpus, 32, 4)
    _, comm_schedule = rs.ring_attention_simulate(*[[[1.0]] * num_gpus] * 3, num_gpus)
    assert costs["ring_steps"] == num_gpus == len(comm_schedule)
    assert costs["total_comm_bytes"] == (num_gpus - 1) * costs["per_step_comm_bytes"]
