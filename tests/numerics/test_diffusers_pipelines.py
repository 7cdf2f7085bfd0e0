"""Unmodified pipelines on ranks: the latents of one process."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

import torch

from ringspan.adapters.diffusers import parallelize
from ringspan.errors import TransportError
from ringspan.transports.in_process import run_in_process
from support.diffused import error_of, quiet
from support.diffusers_models import PIPELINES, denoise


@pytest.mark.parametrize("name", PIPELINES)
def test_the_latents_are_those_of_one_process(name):
    with quiet():
        pipes = [PIPELINES[name]() for _ in range(3)]
        expected = denoise(*pipes[2])

        def run(group):
            pipe, arguments = pipes[group.rank]
            with parallelize(pipe, group):
                latents = denoise(pipe, arguments)
            return latents, denoise(pipe, arguments)

        results = run_in_process(run, 2, timeout_s=250)
    for latents, restored in results:
        assert error_of(latents, expected) <= 5e-6
        assert torch.equal(restored, expected)


def test_a_seed_of_its_own_on_every_rank_is_an_error():
    with quiet():
        pipes = [PIPELINES["wan"]() for _ in range(2)]

        def run(group):
            pipe, arguments = pipes[group.rank]
            with parallelize(pipe, group), pytest.raises(TransportError) as raised:
                denoise(pipe, arguments, seed=group.rank)
            return str(raised.value)

        messages = run_in_process(run, 2, timeout_s=250)
    for message in messages:
        assert "hidden_states: rank 0 has" in message
        assert "manual_seed" in message
