"""Other libraries' attention as targets. Each is imported only when it is asked for."""

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringspan.errors import UnsupportedError
from ringspan.verify.cases import VerifyCase
from ringspan.verify.targets.base import Target, TargetCall


class TorchContextParallel(Target):
    """`torch.distributed.tensor.experimental.context_parallel` with its default, load-balanced sharding."""

    name = "torch"
    features = ("full", "causal", "float32", "float64", "bfloat16", "backward", "scale")
    layouts = ("zigzag",)
    ranks = "processes"

    def can_ask(self, case: VerifyCase) -> bool:
        """F.scaled_dot_product_attention in this context takes is_causal and no other mask."""
        return not case.features - {*self.features, "odd_length", "gqa"}

    def surroundings(self, call: TargetCall) -> AbstractContextManager[Any]:
        """Its context cuts whole buffers; here an unused buffer tells it the length."""
        from torch.distributed.tensor.experimental import context_parallel

        if call.case.length % (2 * call.world_size):
            raise UnsupportedError("its load balancing takes multiples of 2 * ranks only")
        mesh = _mesh(call.world_size)
        context: AbstractContextManager[Any] = context_parallel(
            mesh, buffers=[torch.zeros(call.case.length)], buffer_seq_dims=[0]
        )
        return context

    def attend(self, call: TargetCall) -> torch.Tensor:
        """PyTorch's own attention, inside the context."""
        return torch.nn.functional.scaled_dot_product_attention(
            *(call.q, call.k, call.v),
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1],
        )


@functools.cache
def _mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


class RingAttentionPytorch(Target):
    """`ring_attention_pytorch.ring_flash_attn`, which takes (batch, seq, heads, dim)."""

    name = "ring_attention_pytorch"
    features = ("full", "causal", "float32", "backward", "gqa")
    layouts = ("contiguous",)
    ranks = "processes"

    def can_ask(self, case: VerifyCase) -> bool:
        """It takes causal and no other mask, and shards of one length."""
        return not case.features - set(self.features)

    def attend(self, call: TargetCall) -> torch.Tensor:
        """Query head i reads KV head i mod n there, so query heads are reordered."""
        module = import_module("ring_attention_pytorch.ring_flash_attention")
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        order = torch.arange(heads).view(kv_heads, -1).T.reshape(-1)
        q, k, v = (x.transpose(1, 2) for x in (call.q[:, order], call.k, call.v))
        size = call.q.shape[2]
        out = module.ring_flash_attn(
            *(q, k, v), causal=call.is_causal, bucket_size=size, ring_reduce_col=True, ring_size=call.world_size
        )
        back: torch.Tensor = out.transpose(1, 2)[:, order.argsort()]
        return back


class RingFlashAttn(Target):
    """`ring_flash_attn.zigzag_ring_flash_attn_func`; it needs flash-attn and a CUDA device."""

    name = "ring_flash_attn"
    features = ("full", "causal", "bfloat16", "backward", "gqa", "scale")
    layouts = ("zigzag",)
    ranks = "processes"

    def attend(self, call: TargetCall) -> torch.Tensor:
        """(batch, seq, heads, dim)."""
        module = import_module("ring_flash_attn")
        q, k, v = (x.transpose(1, 2).contiguous() for x in (call.q, call.k, call.v))
        options = {"softmax_scale": call.scale, "causal": call.is_causal, "group": call.group}
        if call.window is not None:
            options["window_size"] = call.window
        out: torch.Tensor = module.zigzag_ring_flash_attn_func(q, k, v, **options).transpose(1, 2)
        return out


class Ringmaster(Target):
    """`ringmaster.ring.ring_attention` with its math provider; keys and values travel from neighbour to neighbour."""

    name = "axolotl-ringmaster"
    features: Collection[str] = ("full", "causal", "float32", "bfloat16", "backward", "gqa", "scale", "few_heads")
    layouts = ("contiguous",)
    ranks = "processes"
    _rotate = "ALLTOALL"

    def can_ask(self, case: VerifyCase) -> bool:
        """It takes full and causal attention, windows and scales, over shards of one length."""
        return not case.features - {*self.features, "float64", "window"}

    def attend(self, call: TargetCall) -> torch.Tensor:
        """(batch, heads, seq, dim) in, (batch, seq, heads, dim) out."""
        ring, config = import_module("ringmaster.ring"), import_module("ringmaster.config")
        scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
        out: torch.Tensor = ring.ring_attention(
            *(call.q, call.k, call.v),
            group=call.group,
            causal=call.is_causal,
            scaling=scale,
            dropout=0.0,
            provider="math",
            rotate_method=getattr(config.RotateMethod, self._rotate),
            attn_implementation="math",
            window=call.window,
        )
        return out.transpose(1, 2)


class RingmasterGathering(Ringmaster):
    """The same with all keys and values gathered, which is its default."""

    name = "axolotl-ringmaster:allgather"
    features = (*Ringmaster.features, "window")
    _rotate = "ALLGATHER"


class Yunchang(Target):
    """`yunchang.ring.ring_pytorch_attn_func` with its torch kernel; tensors are (batch, seq, heads, dim)."""

    name = "yunchang"
    features = ("full", "causal", "float32", "bfloat16", "scale")
    layouts = ("contiguous",)
    ranks = "processes"

    def can_ask(self, case: VerifyCase) -> bool:
        """Its signature takes a window and soft cap too; shards have one length."""
        return not case.features - {*self.features, "backward", "gqa", "few_heads", "window", "softcap"}

    def attend(self, call: TargetCall) -> torch.Tensor:
        """Contiguous shards."""
        ring, kernels = import_module("yunchang.ring"), import_module("yunchang.kernels")
        q, k, v = (x.transpose(1, 2).contiguous() for x in (call.q, call.k, call.v))
        result = ring.ring_pytorch_attn_func(
            *(q, k, v),
            softmax_scale=call.scale,
            causal=call.is_causal,
            window_size=call.window or (-1, -1),
            softcap=call.softcap or 0.0,
            group=call.group,
            attn_type=kernels.AttnType.TORCH_MATH,
        )
        out: torch.Tensor = (result[0] if isinstance(result, tuple) else result).transpose(1, 2)
        return out


class Diffusers(Target):
    """The attention that models of diffusers call, over ranks as `enable_parallelism` sets it up; Ulysses."""

    name = "diffusers"
    features = ("full", "float32", "float64", "bfloat16", "backward", "scale")
    layouts = ("contiguous",)
    ranks = "processes"
    _degree = "ulysses_degree"

    def can_ask(self, case: VerifyCase) -> bool:
        """It takes causal and GQA too, which it must refuse; shards have one length, and ranks are two or more."""
        return case.world_size > 1 and not case.features - {*self.features, "causal", "gqa"}

    def attend(self, call: TargetCall) -> torch.Tensor:
        """(batch, seq, heads, dim), with PyTorch's attention as the kernel."""
        models = import_module("diffusers.models")
        dispatch = import_module("diffusers.models.attention_dispatch")
        config = models.ContextParallelConfig(**{self._degree: call.world_size})
        shape = config.mesh_shape
        mesh = _two_level_mesh(shape, config.mesh_dim_names)
        config.setup(call.rank, call.world_size, call.q.device, mesh)
        out: torch.Tensor = dispatch.dispatch_attention_fn(
            *(x.transpose(1, 2) for x in (call.q, call.k, call.v)),
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1],
            backend=dispatch.AttentionBackendName.NATIVE,
            parallel_config=models.ParallelConfig(context_parallel_config=config),
        )
        return out.transpose(1, 2)


class DiffusersRing(Diffusers):
    """The same with its ring, which gathers keys and values."""

    name = "diffusers:ring"
    _degree = "ring_degree"


@functools.cache
def _two_level_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


PEERS: dict[str, tuple[str, Callable[[], Target]]] = {
    "torch": ("torch", TorchContextParallel),
    "ring_flash_attn": ("ring_flash_attn", RingFlashAttn),
    "ring_attention_pytorch": ("ring_attention_pytorch.ring_flash_attention", RingAttentionPytorch),
    "axolotl-ringmaster": ("ringmaster.ring", Ringmaster),
    "axolotl-ringmaster:allgather": ("ringmaster.ring", RingmasterGathering),
    "yunchang": ("yunchang.ring", Yunchang),
    "diffusers": ("diffusers.models.attention_dispatch", Diffusers),
    "diffusers:ring": ("diffusers.models.attention_dispatch", DiffusersRing),
}
"""By name: the module that must import, and what makes a target."""


def load_peer(name: str) -> Target:
    """The target of a named peer; refused with the reason if it cannot run here."""
    module, make = PEERS[name]
    try:
        import_module(module)
    except Exception as error:
        raise UnsupportedError(
            f"{module} cannot be imported on this machine: {type(error).__name__}: {error}",
            argument="target",
            value=name,
        ) from error
    return make()
