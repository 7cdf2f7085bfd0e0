"""How does a call take part in autograd and torch.compile: what is differentiated, recompiled or refused?"""

import gc
import os
import shutil
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._guards import TracingContext, tracing
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.runtime import compiled as compiled_calls
from ringspan.runtime.plan import CallOptions
from ringspan.transports.in_process import InProcessRank

SEQ_LEN = 24
CAUSAL = rs.causal()
ALONE = rs.zigzag(SEQ_LEN, 1)
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    with warnings.catch_warnings():  # the compiler's own warnings
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


def inputs(*, requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, heads, SEQ_LEN, 8, generator=generator).to(dtype).requires_grad_(requires_grad)
        for heads in (4, 2, 2)
    )


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient differs from row to row."""
    return (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).square().sum()


def forward_and_backward(attend: Callable[..., Any], leaves: Tensors, *args: Any) -> Tensors:
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    out = attend(*leaves, *args)
    loss_of(out).backward()
    return out.detach(), *(x.grad for x in leaves)


def on_ranks(world_size: int, attend: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float32) -> Tensors:
    """Run attend(q, k, v, layout, group) on shards of `inputs()`; return the whole out, dq, dk and dv."""
    layout = rs.zigzag(SEQ_LEN, world_size)
    weights = torch.linspace(-1, 1, 2 * 4 * SEQ_LEN * 8).view(2, 4, SEQ_LEN, 8)

    def on_rank(group: InProcessRank) -> Tensors:
        leaves = [layout.shard(x.detach(), group.rank, 2).clone().requires_grad_() for x in inputs(dtype=dtype)]
        out = attend(*leaves, layout, group)
        (out.float() * layout.shard(weights, group.rank, 2)).square().sum().backward()
        return out.detach(), *(x.grad for x in leaves)

    parts = rs.run_in_process(on_rank, world_size)
    return tuple(layout.unshard([part[i] for part in parts], 2) for i in range(4))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: rs.Layout, group: Any) -> torch.Tensor:
    out = rs.attention(q, k, v, mask=CAUSAL, layout=layout, group=group)
    assert isinstance(out, torch.Tensor)
    return out


def check_all(got: Tensors, expected: Tensors, **tolerance: float) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


# Checkpointing and autocast


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_under_checkpoint(world_size: int, use_reentrant: bool) -> None:
    checkpointed = partial(checkpoint, attend, use_reentrant=use_reentrant)
    check_all(on_ranks(world_size, checkpointed), forward_and_backward(plain, inputs()))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_under_autocast(world_size: int) -> None:
    """Inputs are rounded, and gradients come back in the inputs' own type.

    PyTorch's own bf16 attention ends in an illegal instruction on some CPUs, so it is given rounded float32 here.
    """

    def narrow(*args: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(*args)

    def rounded(*tensors: torch.Tensor) -> torch.Tensor:
        return plain(*(x.bfloat16().float() for x in tensors)).bfloat16()

    got, expected = on_ranks(world_size, narrow), forward_and_backward(rounded, inputs())
    assert [x.dtype for x in got] == [torch.bfloat16, *[torch.float32] * 3]
    check_all(got[:1], expected[:1])
    check_all(got[1:], expected[1:], rtol=2**-7, atol=2**-7)  # twice the rounding of bf16, which gradients go through
    assert max((x - y).abs().max() for x, y in zip(got, forward_and_backward(plain, inputs()), strict=True)) > 2**-7


# What is refused


def test_double_backward_is_refused_when_it_is_asked_for() -> None:
    q, k, v = inputs()
    (dq,) = torch.autograd.grad(attend(q, k, v, ALONE, None).square().sum(), q, create_graph=True)
    (expected,) = torch.autograd.grad(plain(q, k, v).square().sum(), q)
    torch.testing.assert_close(dq.detach(), expected)
    for wanted in (q, k, v):
        with pytest.raises(rs.UnsupportedError, match="first derivatives only; leave out create_graph, or detach"):
            torch.autograd.grad(dq.sum(), wanted, retain_graph=True)


@pytest.mark.parametrize("is_alone", [True, False], ids=["only sinks", "with the rest"])
def test_second_derivatives_by_way_of_sinks_are_refused(is_alone: bool) -> None:
    """Their gradients would silently be missing."""
    q, k, v = inputs(requires_grad=not is_alone)
    sinks = torch.zeros(4, requires_grad=True)
    out = rs.attention(q, k, v, sinks=sinks, mask=CAUSAL, layout=ALONE)
    assert isinstance(out, torch.Tensor)
    (dsinks,) = torch.autograd.grad(out.sum(), sinks, create_graph=True)
    with pytest.raises(rs.UnsupportedError, match="first derivatives only"):
        torch.autograd.grad(dsinks.square().sum(), sinks)


def with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, detach: bool) -> torch.Tensor:
    out, lse = rs.attention(q, k, v, mask=CAUSAL, layout=ALONE, return_lse=True)
    return out + (lse.detach() if detach else lse)[..., None]


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_transforms_are_refused_before_the_first_message(transform: Callable[..., Any]) -> None:
    """The rank inside such a region raises, and the other ranks learn it."""

    def run(group: InProcessRank) -> str:
        q = torch.randn(1, 1, 1, 4, 8)

        def attend(q: torch.Tensor) -> torch.Tensor:
            return rs.attention(q, q, q, mask=CAUSAL, layout=rs.zigzag(8, 2), group=group).sum()

        with pytest.raises(rs.RingspanError) as caught:
            transform(attend)(q if transform is torch.func.vmap else q[0]) if group.rank else attend(q[0])
        return str(caught.value)

    assert all("inside torch.func" in text for text in rs.run_in_process(run, 2, timeout_s=30))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_dual_tensors_are_refused_before_the_first_message(kernel: str) -> None:
    """The tangents of other ranks' keys would be missing; the group stays usable."""
    layout = rs.zigzag(8, 2)

    def run(group: InProcessRank) -> str:
        q = torch.randn(1, 1, 4, 8)

        def attend(q: torch.Tensor) -> object:
            return rs.attention(q, q, q, mask=CAUSAL, layout=layout, group=group, kernel=kernel)

        with pytest.raises(rs.RingspanError) as caught:
            attend(forward_ad.make_dual(q, torch.ones_like(q)) if group.rank else q)
        attend(q)
        return str(caught.value)

    with forward_ad.dual_level():
        assert all("attention of dual tensors" in text for text in rs.run_in_process(run, 2, timeout_s=30))


def test_other_ranks_hear_of_a_gradient_by_way_of_lse() -> None:
    """The others raise at once instead of waiting for a rank that refused."""

    def run(group: InProcessRank) -> str:
        q = torch.randn(1, 1, 4, 8, requires_grad=True)
        out, lse = rs.attention(q, q, q, mask=CAUSAL, layout=rs.zigzag(8, 2), group=group, return_lse=True)
        loss = out.sum() + (lse.sum() if group.rank == 0 else 0)
        with pytest.raises(rs.RingspanError) as caught:
            loss.backward()
        return str(caught.value)

    assert all("the lse of attention has no gradient" in text for text in rs.run_in_process(run, 2, timeout_s=30))


def test_a_gradient_by_way_of_lse_is_refused() -> None:
    leaves = inputs()
    with pytest.raises(rs.UnsupportedError, match=r"the lse of attention has no gradient; use lse.detach\(\)"):
        forward_and_backward(partial(with_lse, detach=False), leaves)
    detached = forward_and_backward(partial(with_lse, detach=True), leaves)
    compiled = torch.compile(partial(with_lse, detach=True), backend="aot_eager", fullgraph=True)
    check_all(forward_and_backward(compiled, leaves), detached)
    compiled = torch.compile(partial(with_lse, detach=False), backend="aot_eager", fullgraph=True)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(Exception, match="the lse of attention has no gradient"),
    ):
        compiled(*leaves)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), with_lse(*leaves, detach=False))


# The operator


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_pass_opcheck(dtype: torch.dtype, has_sinks: bool, requires_grad: bool) -> None:
    options = CallOptions(CAUSAL, ALONE, ALONE, "auto", None, None, "auto", None, None, None, False)
    with tracing(TracingContext(None)):
        number = compiled_calls._enter(*options, None, None, True, None)
    tensors = [*inputs(requires_grad=requires_grad, dtype=dtype), None]
    if has_sinks:
        tensors[3] = torch.linspace(-1, 1, 4).requires_grad_(requires_grad)
    checked = torch.library.opcheck(torch.ops.ringspan.attend.default, (*tensors, number, requires_grad))
    out, lse, call = torch.ops.ringspan.attend(*tensors, number, requires_grad)
    arguments = [x if x is None else x.detach() for x in (*tensors, torch.ones_like(out), out, lse, call)]
    checked_backward = torch.library.opcheck(torch.ops.ringspan.attend_backward.default, (*arguments, number))
    for results in (checked, checked_backward):
        assert list(results.values()) == ["SUCCESS"] * 4


# torch.compile


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_compiled_on_ranks_as_threads(world_size: int) -> None:
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    check_all(on_ranks(world_size, compiled), forward_and_backward(plain, inputs()))


def test_compiled_by_inductor() -> None:
    """With views before and after, sinks and their gradient; without anything that must be compiled as C++."""

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = rs.attention(q, k, v, sinks=sinks, mask=CAUSAL, layout=ALONE)
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2)

    leaves = (*(x.transpose(1, 2).contiguous() for x in inputs()), torch.linspace(-1, 1, 4))
    compiled = torch.compile(block, fullgraph=True)
    check_all(forward_and_backward(compiled, leaves), forward_and_backward(block, leaves))


COMPILE_WITH_EACH_OF = """
import os, sys
import torch, torch._inductor.compile_fx
from torch._dynamo.utils import counters

def attend_and_differentiate():
    import ringspan as rs

    layout, mask = rs.zigzag(8, 1), rs.causal()
    attend = torch.compile(lambda q: rs.attention(q, q, q, mask=mask, layout=layout), fullgraph=True)
    q = torch.ones(1, 1, 8, 4, requires_grad=True)
    attend(q).sum().backward()

for source in sys.argv[1:]:
    if not (child := os.fork()):
        sys.path.insert(0, source)
        attend_and_differentiate()
        print(counters["aot_autograd"]["autograd_cache_hit"], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_programs_on_disk_are_taken_from_the_same_release_only(tmp_path: Path) -> None:
    """torch finds them by the name of the forward operator, and would run the backward operator of another release."""
    ours, other = Path(rs.__file__).parents[1], tmp_path / "other"
    shutil.copytree(ours / "ringspan", other / "ringspan")
    file = other / "ringspan/runtime/compiled.py"
    text = file.read_text()
    assert "ringspan::attend_backward" in text
    file.write_text(text.replace("attend_backward", "attend_backward_of_then"))
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "programs"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-c", COMPILE_WITH_EACH_OF, str(other), str(ours), str(ours)]
    ended = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == ["0", "0", "1"], ended.stderr


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_would_know_neither_mask_nor_group(strict: bool) -> None:
    class Block(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q, k, v, ALONE, None)

    with pytest.raises(Exception, match=r"attention inside torch\.export: .* use torch\.compile"):
        torch.export.export(Block(), inputs(requires_grad=False), strict=strict)


def test_a_program_of_another_process_never_runs_another_call() -> None:
    options = CallOptions(CAUSAL, ALONE, ALONE, "auto", None, None, "auto", None, None, None, False)
    others = (
        options._replace(mask=rs.full()),
        options._replace(kv_layout=rs.contiguous(SEQ_LEN, 1, start=2)),
        options._replace(scale=0.5),
        options._replace(softcap=0.5),
        options._replace(reproducible=True),
    )
    digests = [compiled_calls._digest(it) for it in (options, options._replace(mask=rs.causal()), *others)]
    assert len(set(digests)) == 1 + len(others)
    assert digests[0] == digests[1]
    with pytest.raises(rs.UnsupportedError, match="compiled in another process"):
        torch.ops.ringspan.attend(*inputs(), None, f"1000, {digests[0]}", False)


def test_a_compiled_call_does_not_keep_its_group_alive() -> None:
    """Otherwise a server that makes and destroys groups would keep all of them, with threads and sockets."""

    def run_on_new_group() -> weakref.ref[dist.ProcessGroup]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            group = dist.new_group([0])
            compiled = torch.compile(lambda *qkv: attend(*qkv, ALONE, group), backend="eager")
            compiled(*inputs(requires_grad=False))
            found = weakref.ref(group)
            assert any(entry.find_group() is group for entry in compiled_calls._entries.values())
            return found
        finally:
            dist.destroy_process_group()
            torch._dynamo.reset()

    groups = [run_on_new_group() for _ in range(3)]
    gc.collect()
    assert [group() for group in groups] == [None] * 3
    assert not any(entry.call.group is not None for entry in compiled_calls._entries.values())


def test_compiled_under_autocast_and_checkpoint() -> None:
    def narrow(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(attend, *tensors, ALONE, None, use_reentrant=False)

    compiled = torch.compile(narrow, backend="aot_eager", fullgraph=True)
    check_all(forward_and_backward(compiled, inputs()), forward_and_backward(narrow, inputs()))


def test_compiled_the_bits_are_those_of_the_reproducible_mode() -> None:
    layout = rs.contiguous(700, 1)
    leaves = (*(torch.randn(1, 2, 700, 8) for _ in range(3)), torch.randn(2))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        out = rs.attention(q, k, v, sinks=sinks, mask=CAUSAL, layout=layout, reproducible=True)
        assert isinstance(out, torch.Tensor)
        return out

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for mine, wanted in zip(forward_and_backward(compiled, leaves), forward_and_backward(attend, leaves), strict=True):
        assert torch.equal(mine, wanted)


MASKS = (rs.full(), rs.sliding_window(3, 0), rs.sliding_window(4, 0), rs.documents([10, 14]), rs.documents([12, 12]))
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mask": [{"mask": mask} for mask in (*MASKS, CAUSAL & MASKS[3], CAUSAL | MASKS[1])],
    "layout": [{"layout": layout} for layout in (ALONE, rs.contiguous(SEQ_LEN, 1, start=5))],
    "kv_layout": [{"kv_layout": layout} for layout in (None, rs.contiguous(SEQ_LEN, 1, start=2))],
    "scale": [{"scale": scale} for scale in (None, 0.1, 0.2, 0.3, 1)],
    "algorithm": [{"algorithm": name} for name in ("pass_kv", "pass_q", "all_gather", "ulysses")],
    "timeout_s": [{"timeout_s": seconds} for seconds in (None, 5, 6, 7.0)],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_another_object_is_another_program(name: str) -> None:
    """A program compiled for one mask, layout or number never runs for another, and is reused for an equal one."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        out = rs.attention(q, k, v, **{"mask": CAUSAL, "layout": ALONE, **options})
        assert isinstance(out, torch.Tensor)
        return out

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    variants = VARIANTS[name]
    for options in variants:
        check_all(
            forward_and_backward(compiled, inputs(), options),
            forward_and_backward(call, inputs(), options),
            atol=0,
            rtol=0,
        )
    num_programs = counter.frame_count
    assert num_programs >= len(variants)
    for options in variants:
        assert torch.equal(compiled(*inputs(), options), call(*inputs(), options))
    assert counter.frame_count == num_programs


def test_the_same_module_with_other_settings_compiled_one_by_one() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, window: int, scale: float) -> None:
            super().__init__()
            self.mask = rs.sliding_window(window, 0)
            self.scale = scale

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = rs.attention(q, k, v, mask=self.mask, layout=ALONE, scale=self.scale)
            assert isinstance(out, torch.Tensor)
            return out

    layers = [Layer(window, window / 10) for window in (1, 2, 3)]
    for layer in layers:
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*inputs()), layer(*inputs()))


def test_another_group_is_another_program() -> None:
    """A program compiled for one group must not run for another: messages of the first would never arrive."""
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    expected = forward_and_backward(plain, inputs())
    for world_size in (2, 3, 2):
        check_all(on_ranks(world_size, compiled), expected)


def reversing(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
    """A compiler pass that reverses two independent attentions, as a scheduler may."""
    calls = [node for node in graph.graph.nodes if "ringspan.attend" in str(node.target)]
    for node in calls[1:]:
        calls[0].prepend(node)
    graph.recompile()
    return graph


@pytest.mark.parametrize("reorders", [(), (1,), (0, 1)])
def test_calls_in_another_order_on_one_rank_are_detected(reorders: tuple[int, ...]) -> None:
    """Both calls have equal signatures: without their places, each rank would attend to the other call's keys."""
    layout = rs.zigzag(SEQ_LEN, 2)
    expected = plain(*inputs(requires_grad=False))

    def two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: rs.Layout, group: Any) -> Tensors:
        other = 2 * k
        return attend(q, k, v, layout, group), attend(q, other, v, layout, group)

    def on_rank(group: InProcessRank) -> torch.Tensor:
        backend = reversing if group.rank in reorders else "eager"
        shards = [layout.shard(x, group.rank, 2) for x in inputs(requires_grad=False)]
        with torch.no_grad():
            return torch.compile(two, backend=backend, fullgraph=True)(*shards, layout, group)[0]

    if len(reorders) == 1:
        with pytest.raises(rs.TransportError, match=r"place in the compiled program: rank 0 has 0, rank 1 has 1"):
            rs.run_in_process(on_rank, 2)
    else:
        torch.testing.assert_close(layout.unshard(rs.run_in_process(on_rank, 2), 2), expected)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("turned", [(), (1,), (0, 1)])
def test_like_calls_that_one_rank_differentiates_in_another_order(turned: tuple[int, ...], is_compiled: bool) -> None:
    """Both calls have equal signatures: without their numbers, each rank would add gradients of two losses."""
    layout = rs.zigzag(SEQ_LEN, 2)
    whole = inputs()

    def attend_scaled(factor: torch.Tensor, q: torch.Tensor, *args: Any) -> torch.Tensor:
        return attend(factor * q, *args)

    run = torch.compile(attend_scaled, backend="aot_eager", fullgraph=True) if is_compiled else attend_scaled
    expected = [torch.autograd.grad(loss_of(plain(factor * whole[0], *whole[1:])), whole) for factor in (1, 2)]

    def on_rank(group: InProcessRank) -> list[Tensors]:
        leaves = [layout.shard(x.detach(), group.rank, 2).clone().requires_grad_() for x in whole]
        weights = layout.shard(torch.linspace(-1, 1, whole[0].numel()).view(whole[0].shape), group.rank, 2)
        factors = torch.tensor([1.0, 2.0])
        losses = [(run(factor, *leaves, layout, group) * weights).square().sum() for factor in factors]
        order = (1, 0) if group.rank in turned else (0, 1)
        grads = {i: torch.autograd.grad(losses[i], leaves) for i in order}
        return [grads[0], grads[1]]

    if len(turned) == 1:
        with pytest.raises(rs.TransportError, match=r"gradients of call: rank 0 has 1, rank 1 has 2"):
            rs.run_in_process(on_rank, 2)
        return
    parts = rs.run_in_process(on_rank, 2)
    for i in (0, 1):
        for j in range(3):
            torch.testing.assert_close(layout.unshard([part[i][j] for part in parts], 2), expected[i][j])


def test_masks_and_layouts_are_built_outside() -> None:
    """causal() and full() can be made inside; for others the compiler gives the reason or breaks the graph."""

    def simple(*tensors: torch.Tensor) -> Any:
        return rs.attention(*tensors, mask=rs.causal(), layout=ALONE)

    def window(*tensors: torch.Tensor) -> Any:
        return rs.attention(*tensors, mask=rs.causal() & rs.sliding_window(3, 0), layout=ALONE)

    def layout(*tensors: torch.Tensor) -> Any:
        return rs.attention(*tensors, mask=CAUSAL, layout=rs.zigzag(tensors[0].shape[2], 1))

    def own_layout(*tensors: torch.Tensor) -> Any:
        return rs.attention(*tensors, mask=CAUSAL, layout=rs.Layout(((rs.Span(0, SEQ_LEN),),)))

    compiled = torch.compile(simple, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs()), simple(*inputs()))
    for function in (window, layout, own_layout):
        with pytest.raises(Exception, match="build masks and layouts outside of the compiled function"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs())
        assert torch.equal(torch.compile(function, backend="aot_eager")(*inputs()), function(*inputs()))


def test_the_marks_are_those_of_torch() -> None:
    """They are set by hand, so that the compiler is not imported."""

    def constant() -> int:
        return 0

    assert vars(torch.compiler.assume_constant_result(constant)) == vars(compiled_calls._enter)
    assert (
        vars(rs.zigzag).items()
        <= vars(torch.compiler.disable(constant, reason=rs.zigzag._torchdynamo_disable_msg)).items()
    )
