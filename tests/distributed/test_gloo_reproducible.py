"""`rs.reproducible` on gloo processes, and with any number of threads: the bits of one process with one thread."""

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ringspan as rs
from ringspan.program.reproducible.tree import TILE
from ringspan.runtime.reproducible_arithmetic import single_threads
from support.ranks import run_ranks, values
from support.reproducible_layers import SEQ_LEN, run_layers
from support.reproducible_training import SEQ_LEN as TRAINED
from support.reproducible_training import train

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_on_processes_have_the_bits_of_one(subtests: pytest.Subtests, world_size: int) -> None:
    layouts = [rs.zigzag(SEQ_LEN, world_size, align=TILE), rs.striped(SEQ_LEN, world_size, block=TILE)]
    parts_by_rank = values(run_ranks(run_on_layouts, world_size, layouts))
    alone = run_layers(rs.contiguous(SEQ_LEN, 1), 0, None, torch.float32)
    for layout, parts in zip(layouts, zip(*parts_by_rank, strict=True), strict=True):
        with subtests.test(layout=layout):
            for field, expected in alone.items():
                if field.startswith("token "):
                    assert torch.equal(layout.unshard([part[field] for part in parts], 1), expected), field
                else:
                    assert all(torch.equal(part[field], expected) for part in parts), field


def run_on_layouts(rank: int, layouts: list[rs.Layout]) -> list[dict[str, torch.Tensor]]:
    return [run_layers(layout, rank, None, torch.float32) for layout in layouts]


@pytest.mark.slow
def test_twenty_steps_on_processes_end_in_the_weights_of_one(subtests: pytest.Subtests) -> None:
    alone = train(rs.contiguous(TRAINED, 1), None)
    assert len(alone["losses"]) == 20
    assert alone["losses"][-1] < alone["losses"][0] - 0.1
    for world_size in (2, 4):
        with subtests.test(world_size=world_size):
            for weights in values(run_ranks(run_training, world_size, world_size)):
                assert [name for name, x in alone.items() if not torch.equal(weights[name], x)] == []


def run_training(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    return train(rs.zigzag(TRAINED, world_size, align=TILE), None)


@pytest.mark.parametrize("setting", [None, pytest.param("AUTO,STRICT", marks=pytest.mark.slow)])
def test_the_number_of_threads_does_not_change_a_bit(setting: str | None) -> None:
    """For every value of MKL_CBWR."""
    digests = run_apart("print_digests", {"MKL_CBWR": setting} if setting else {})
    assert len(digests) == 4
    assert len(set(digests)) == 1


def test_the_libraries_use_one_thread_for_each_thread_that_shares_a_product() -> None:
    """If a split sum happens to have the same bits, the digests above cannot notice the split."""
    assert run_apart("print_openmp_threads", {}) == ["1"] * 6


def run_apart(function: str, variables: dict[str, str]) -> list[str]:
    """The words that a function of this file prints in a new interpreter: the libraries read variables when loaded.

    OpenMP takes two threads by default there, so that a thread that was not told to use one is noticed.
    """
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", f"import test_gloo_reproducible as test; test.{function}()"],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"} | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def print_openmp_threads() -> None:
    """Ask OpenMP itself: asking torch would initialise the thread."""
    library = re.search(r"/\S*/lib[gi]?omp\S*", Path("/proc/self/maps").read_text())
    assert library is not None
    ask = ctypes.CDLL(library[0]).omp_get_max_threads
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        meet = threading.Barrier(num_threads)

        def ask_on_each(_: int, meet: threading.Barrier = meet) -> int:
            meet.wait(timeout=50)
            return int(ask())

        with single_threads(torch.device("cpu")) as threads:
            for count in threads.map(ask_on_each, range(num_threads)):
                sys.stdout.write(f"{count}\n")


def print_digests() -> None:
    for num_threads in (1, 2, 3, 4):
        torch.set_num_threads(num_threads)
        digest = hashlib.sha256()
        layers = run_layers(rs.contiguous(SEQ_LEN, 1), 0, None, torch.float32)
        weights = train(rs.contiguous(TRAINED, 1), None, steps=2)
        for x in (*layers.values(), *weights.values(), *narrow_products()):
            digest.update(x.numpy().tobytes())
        sys.stdout.write(digest.hexdigest() + "\n")


def narrow_products() -> list[torch.Tensor]:
    """Sums over many features for few results: threads would split them, which changes the bits."""
    generator = torch.Generator().manual_seed(0)
    layout = rs.contiguous(TILE + 17, 1)
    x, dout = (torch.randn(1, TILE + 17, features, generator=generator) for features in (1024, 64))
    weight = torch.randn(64, 1024, generator=generator)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = rs.reproducible.linear(x, weight, layout=layout)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), dout)]
