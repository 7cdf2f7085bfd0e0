"""Guidance on two halves of the ranks: pipelines that call twice, and pipelines that double the batch."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

import torch

from support.ranks import run_ranks, values

pytestmark = pytest.mark.xdist_group("processes")


def denoise_by_branches(rank, name, num_inner):
    import torch.distributed as dist

    from ringspan.adapters.diffusers import parallelize
    from ringspan.transports.base import ALONE
    from support.diffused import error_of, quiet
    from support.diffusers_models import PIPELINES, denoise

    if num_inner == 1:
        group, cfg = ALONE, dist.group.WORLD
    else:
        mesh = dist.init_device_mesh("cpu", (2, num_inner), mesh_dim_names=("cfg", "cp"))
        group, cfg = mesh["cp"], mesh["cfg"]
    with quiet():
        pipe, arguments = PIPELINES[name]()
        expected = denoise(pipe, arguments)
        with parallelize(pipe, group, cfg=cfg):
            error = error_of(denoise(pipe, arguments), expected)
            num_split = pipe.transformer.forward.num_split
        return error, num_split, torch.equal(denoise(pipe, arguments), expected)


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_four_steps_of_which_the_first_is_not_split(name):
    for error, num_split, is_restored in values(run_ranks(denoise_by_branches, 2, name, 1, timeout_s=120)):
        assert error <= 5e-6
        assert num_split == 3
        assert is_restored


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_guidance_and_tokens_are_split(name):
    for error, num_split, is_restored in values(run_ranks(denoise_by_branches, 4, name, 2, timeout_s=240)):
        assert error <= 5e-6
        assert num_split == 3
        assert is_restored
