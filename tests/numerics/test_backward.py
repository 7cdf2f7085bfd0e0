"""The backward pass of `rs.attention` on ranks as threads, against the dense oracle's gradients in float64."""

import pytest
import torch

from attention_cases import check_gradients, covering_third, job_of_case, run_backward
from cases import CASES, ROWS, WORLD_SIZES, select

torch.set_num_threads(1)

each_algorithm = pytest.mark.parametrize("algorithm", [row.algorithm for row in ROWS])


@each_algorithm
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_table_in_float64(algorithm: str, world_size: int) -> None:
    """All of it up to 3 ranks; of more ranks a third, because they share one or two cores here."""
    cases = select(CASES if world_size <= 3 else covering_third(2), algorithm=algorithm, world_size=world_size)
    assert len(cases) >= 21
    for case in cases:
        job = job_of_case(case)
        check_gradients(job, run_backward(job), case)


@each_algorithm
def test_a_sixth_of_the_table_in_float32(algorithm: str) -> None:
    cases = select(covering_third(0), algorithm=algorithm)[::2]
    assert len(cases) >= 63
    for case in cases:
        job = job_of_case(case, torch.float32)
        check_gradients(job, run_backward(job), case)
