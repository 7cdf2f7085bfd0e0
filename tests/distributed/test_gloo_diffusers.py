"""An unmodified pipeline of diffusers on gloo processes."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

import time

import torch

from ringspan.errors import TransportError
from support.ranks import run_ranks, values

pytestmark = pytest.mark.xdist_group("processes")


def denoise_on_rank(rank):
    from ringspan.adapters.diffusers import parallelize
    from support.diffused import error_of, quiet
    from support.diffusers_models import PIPELINES, denoise

    with quiet():
        pipe, arguments = PIPELINES["wan"]()
        expected = denoise(pipe, arguments, num_steps=3)
        with parallelize(pipe):
            error = error_of(denoise(pipe, arguments, num_steps=3), expected)
            began = time.monotonic()
            with pytest.raises(TransportError) as raised:
                denoise(pipe, arguments, seed=rank, num_steps=3)
            seconds = time.monotonic() - began
        return error, torch.equal(denoise(pipe, arguments, num_steps=3), expected), str(raised.value), seconds


def test_a_pipeline_on_processes():
    for error, is_restored, message, seconds in values(run_ranks(denoise_on_rank, 2, timeout_s=120)):
        assert error <= 5e-6
        assert is_restored
        assert "hidden_states: rank 0 has" in message
        assert seconds < 3 * 5
