"""Copies of half dtypes in kept memory: right numbers, no shared memory, and freed when not needed."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
import ringspan.runtime.scratch
from ringspan.kernels.reference import ReferenceKernel
from ringspan.kernels.softmax import Partial
from ringspan.runtime.reproducible_arithmetic import tiles_at_once
from ringspan.runtime.scratch import Scratch, ScratchPool
from ringspan.runtime.session import session_of
from ringspan.transports.in_process import InProcessRank
from support.oracle import dense_attention, dense_mask

SHAPE = (2, 4, 33, 5)  # not a multiple of any vector width

ARRANGEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in order": lambda x: x,
    "heads behind tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "some heads": lambda x: torch.cat([x, x], 1)[:, 2:6],
    "some rows": lambda x: torch.cat([x, x], 2)[:, :, 7:40],
    "every other number": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "all the same": lambda x: x[:, :, :1].expand(SHAPE),
}


def random(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_what_they_are_copies_of(arrangement: str, dtype: torch.dtype) -> None:
    tensors = [ARRANGEMENTS[arrangement](random(dtype, seed)) for seed in range(3)]
    copies = Scratch().operands(tensors)
    for copy, x in zip(copies, tensors, strict=True):
        assert copy.dtype == torch.float32
        assert copy.stride() == x.to(torch.float32).stride()
        torch.testing.assert_close(copy, x.float(), rtol=0, atol=0)
    assert all(copy.data_ptr() % 64 == 0 for copy in copies)


def test_float32_passes_untouched() -> None:
    scratch, narrow, wide = Scratch(), random(), random(torch.float32)
    first, second, third = scratch.operands([wide, narrow, wide])
    assert first is wide
    assert third is wide
    torch.testing.assert_close(second, narrow.float(), rtol=0, atol=0)


def test_queries_stay_while_operands_come_and_go() -> None:
    scratch, q = Scratch(), random()
    (kept,) = scratch.queries([q])
    for seed in range(1, 4):
        scratch.operands([random(seed=seed)] * seed)
    torch.testing.assert_close(kept, q.float(), rtol=0, atol=0)


def test_the_next_call_has_the_same_memory() -> None:
    pool, addresses = ScratchPool(), set()
    for _ in range(3):
        with pool.lend() as scratch:
            addresses.add(scratch.operands([random()])[0].data_ptr())
    assert len(addresses) == 1


def test_two_calls_at_once_have_memory_of_their_own() -> None:
    pool, one, other = ScratchPool(), random(seed=1), random(seed=2)
    with pool.lend() as scratch, pool.lend() as another:
        (first,), (second,) = scratch.operands([one]), another.operands([other])
        torch.testing.assert_close(first, one.float(), rtol=0, atol=0)
        torch.testing.assert_close(second, other.float(), rtol=0, atol=0)


def test_what_failed_is_not_used_again() -> None:
    pool = ScratchPool()
    with pytest.raises(KeyError), pool.lend() as failed:
        raise KeyError
    with pool.lend() as scratch:
        assert scratch is not failed


def kept_numbers(scratch: Scratch) -> int:
    return scratch._operands._memory.numel() + scratch._queries._memory.numel()


@pytest.mark.parametrize("later", [[], [random()]], ids=["nothing", "less"])
def test_what_two_calls_did_not_need_is_freed(later: list[torch.Tensor]) -> None:
    scratch = Scratch()
    scratch.operands([random()] * 3)
    scratch.queries([random()])
    scratch.end_call()
    most = kept_numbers(scratch)
    for expected in (True, False):
        scratch.operands(later)
        scratch.end_call()
        assert (kept_numbers(scratch) == most) is expected
    assert kept_numbers(scratch) == 0


def test_a_lot_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random()
    monkeypatch.setattr(ringspan.runtime.scratch, "_MOST_KEPT", x.numel())
    scratch = Scratch()
    for copy in scratch.operands([x, x]):
        torch.testing.assert_close(copy, x.float(), rtol=0, atol=0)
    assert kept_numbers(scratch) == 0


def check_call(seed: int, kernel: str = "auto") -> None:
    """Run one call on one rank against dense float64 attention."""
    q, k, v = (random(seed=seed + i) for i in range(3))
    allowed = dense_mask(("causal",), range(SHAPE[2]), range(SHAPE[2]))
    expected, _ = dense_attention(q.double(), k.double(), v.double(), allowed)
    with torch.no_grad():
        out = rs.attention(q, k, v, mask=rs.causal(), layout=rs.contiguous(SHAPE[2], 1), kernel=kernel)
    torch.testing.assert_close(out.double(), torch.from_numpy(expected), rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("is_first", [True, False])
def test_calls_in_inference_mode_and_outside_share_it(is_first: bool) -> None:
    for is_inference in (is_first, not is_first):
        with torch.inference_mode(is_inference):
            check_call(seed=0)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("default_dtype")
def test_the_default_type_does_not_matter(dtype: torch.dtype) -> None:
    """A copy in that dtype would round, overflow, or leave an lse of another dtype than is sent."""
    x = (random(torch.float32) * 1e5).bfloat16() if dtype == torch.bfloat16 else random(dtype)
    (copy,) = Scratch().operands([x])
    assert copy.dtype == torch.float32
    torch.testing.assert_close(copy, x.to(torch.float32), rtol=0, atol=0)
    out, lse = rs.attention(x, x, x, mask=rs.causal(), layout=rs.contiguous(SHAPE[2], 1), return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("mask", [rs.causal(), rs.sliding_window(3, 0)], ids=str)
def test_the_default_device_does_not_matter(mask: rs.Mask, reproducible: bool) -> None:
    """Also in the first call of its kind."""
    x, layout = random(), rs.contiguous(SHAPE[2], 1)
    tiles_at_once.cache_clear()
    session_of(None).plans.clear()
    with torch.device("meta"):
        out = rs.attention(x, x, x, mask=mask, layout=layout, reproducible=reproducible)
    allowed = torch.from_numpy(mask.allowed(layout.all_positions(), layout.all_positions()))
    wide = x.float()
    torch.testing.assert_close(out, scaled_dot_product_attention(wide, wide, wide, attn_mask=allowed).to(x.dtype))


def test_nor_does_it_where_the_machine_is_measured() -> None:
    """Many keys for few queries: which algorithm is faster depends on the machine."""
    layout, kv_layout = rs.contiguous(4, 2), rs.contiguous(400, 2)

    def attend(group: InProcessRank) -> torch.Size:
        q, k = (torch.randn(1, 2, rows, 8, device="cpu") for rows in (2, 200))
        with torch.device("meta"):
            return rs.attention(q, k, k, mask=rs.full(), layout=layout, kv_layout=kv_layout, group=group).shape

    assert rs.run_in_process(attend, 2, timeout_s=20) == [(1, 2, 2, 8)] * 2


class Meeting(ReferenceKernel):
    """A kernel that waits until both threads are about to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=30)
        self.num_met = 0

    def forward(self, *operands: Any) -> Partial:
        self.barrier.wait()
        self.num_met += 1
        return super().forward(*operands)


def test_threads_attend_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Meeting()
    monkeypatch.setattr("ringspan.runtime.plan.choose_kernel", lambda *_: kernel)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(partial(check_call, kernel="meeting"), [1, 2]))
    assert kernel.num_met == 2
