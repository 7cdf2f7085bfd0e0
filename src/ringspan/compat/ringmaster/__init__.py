"""The names of axolotl-ringmaster (0.2.7) that a training script calls: `setup`, `shard_batch`, `ring_attention`.

    import ringspan.compat.ringmaster as rm
    runtime = rm.setup(rm.RingmasterConfig(size=2), device_mesh=mesh)
    model.set_attn_implementation(runtime.attn_implementation)
    batch, info = rm.shard_batch(batch, cp_rank=runtime.cp_rank, cp_size=runtime.cp_size)

Sequences are cut into equal shards, padded at the end as there. Attention over them is causal or full, with a window
if asked for; dropout is refused. A model that is set to `runtime.attn_implementation` takes the shards, and its loss is
that of this rank's labels, as there.
"""

from typing import Any

from ringspan.compat.ringmaster.config import (
    AUTO,
    Backend,
    LoadBalance,
    RingImpl,
    RingmasterConfig,
    RotateMethod,
    auto_select,
)
from ringspan.compat.ringmaster.ring import ring_attention
from ringspan.compat.ringmaster.runtime import CPRuntime, get_runtime, intra_node_size, maybe_runtime, set_runtime
from ringspan.compat.ringmaster.shard import ShardInfo, context_parallel_region, shard_batch, varlen_meta
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.runtime.session import session_of

__all__ = [
    "AUTO",
    "Backend",
    "CPRuntime",
    "LoadBalance",
    "RingImpl",
    "RingmasterConfig",
    "RotateMethod",
    "ShardInfo",
    "auto_select",
    "context_parallel_region",
    "get_runtime",
    "intra_node_size",
    "maybe_runtime",
    "ring_attention",
    "set_runtime",
    "setup",
    "shard_batch",
    "teardown",
    "varlen_meta",
]


def setup(
    config: RingmasterConfig,
    *,
    num_kv_heads: int | None = None,
    device_mesh: Any = None,
    cp_dim: str = "cp",
    device_type: str = "cuda",
    inner_attn: str = "flash_attention_2",
) -> CPRuntime:
    """The ranks of `device_mesh[cp_dim]`, or of the default process group.

    Sizes and the backend that `config` leaves open are chosen, in place. `inner_attn` is what one rank attends with.
    """
    del device_type
    if config.load_balance in (LoadBalance.PER_DOCUMENT, LoadBalance.PTRR):
        raise UnsupportedError(
            "the original has no such layout yet", argument="load_balance", value=str(config.load_balance)
        )
    group = None
    if config.enabled:
        config.normalize(num_kv_heads=num_kv_heads, intra_node_size=intra_node_size())
        names = getattr(device_mesh, "mesh_dim_names", None) or ()
        group = device_mesh[cp_dim] if cp_dim in names else None
        world_size = session_of(group).transport.world_size
        if config.size != world_size:
            raise ShapeError(f"the group has {world_size} ranks", argument="config.size", value=config.size)
    runtime = CPRuntime(config, group, inner_attn)
    set_runtime(runtime)
    return runtime


def teardown() -> None:
    """Forget the runtime; models with its attention then refuse."""
    set_runtime(None)
