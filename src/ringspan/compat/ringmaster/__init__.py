"""The names of axolotl-ringmaster (0.2.7) that a training script calls: `setup`, `shard_batch`, `ring_attention`.

    import ringspan.compat.ringmaster as rm
    runtime = rm.setup(rm.RingmasterConfig(size=2), device_mesh=mesh)
    model.set_attn_implementation(runtime.attn_implementation)
    batch, info = rm.shard_batch(batch, cp_rank=runtime.cp_rank, cp_size=runtime.cp_size)

Sequences are cut into equal shards, padded at the end as there. Attention over them is causal or full, with a window
if asked for; dropout is refused. A model that is set to `runtime.attn_implementation` takes the shards, and its loss is
that of this rank's labels, as there.
"""

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
from ringspan.compat.ringmaster.runtime import (
    CPRuntime,
    get_runtime,
    intra_node_size,
    maybe_runtime,
    set_runtime,
    setup,
    teardown,
)
from ringspan.compat.ringmaster.shard import ShardInfo, context_parallel_region, shard_batch, varlen_meta

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
