"""Does it fit? Bytes of one device, item by item.

Weights are counted once per tensor-parallel group, or spread over all ranks that share them (fully sharded); then the
weights of the layer at work are there whole, and those of the next, which is on its way. The buffers of attention are
what the runtime of this library takes above its inputs: `tests/numerics/test_plan_memory.py` measures it.
"""

from typing import NamedTuple

from ringspan.algorithms import BufferSizes, find_algorithm
from ringspan.planner.cost import TRAINING_BYTES, WEIGHT_BYTES, Shard
from ringspan.planner.plan.predict import shard_of
from ringspan.planner.plan.request import Request, Setup

SLAB_BYTES = 2**28  # what a kernel may return at once on a GPU, before it is merged


class Memory(NamedTuple):
    """Bytes on the fullest device."""

    weights: float
    optimizer: float  # gradients, float32 copies and moments
    kv_cache: float
    activations: float
    attention_buffers: float
    gathered_weights: float  # of two layers, where all are sharded

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def count_memory(request: Request, setup: Setup) -> Memory:
    """What one device must hold."""
    model, shard = request.model, shard_of(request, setup)
    parameters = model.parameters or model.counted_parameters
    per_parameter = bytes_per_parameter(request)
    sharers = setup.cp * setup.copies if request.shards_weights else 1
    holders = setup.tp * sharers
    new_len = 1 if request.phase == "decode" else -(-request.tokens // setup.cp)
    cached = request.tokens if request.phase == "decode" else request.tokens + request.cached_tokens
    kv_len = -(-cached // setup.cp)
    gathered_layers = min(2, model.layers) if sharers > 1 else 0
    optimizer = 0.0
    if request.phase == "train":
        optimizer = (TRAINING_BYTES - per_parameter) * parameters / holders
    is_cached = request.phase in ("prefill", "decode")
    return Memory(
        weights=parameters * per_parameter / holders,
        optimizer=optimizer,
        kv_cache=model.layers * kv_len * shard.batch * shard.kv_elements * 2 if is_cached else 0.0,
        activations=_activations(request, setup, new_len * shard.batch),
        attention_buffers=attention_buffers(setup.algorithm, setup.cp, setup.inner, new_len, kv_len, shard),
        gathered_weights=parameters * per_parameter / setup.tp * gathered_layers / model.layers,
    )


def bytes_per_parameter(request: Request) -> float:
    """Of the weights as they are stored, MLP and the rest by their shares."""
    model = request.model
    mlp_share = model.active_mlp_parameters / (model.active_mlp_parameters + model.layers * model.attention_parameters)
    mlp_bytes = WEIGHT_BYTES[request.mlp_weights or request.weights]
    return mlp_share * mlp_bytes + (1 - mlp_share) * WEIGHT_BYTES[request.weights]


def _activations(request: Request, setup: Setup, tokens: int) -> float:
    """Inference: the residual stream, its norm, q, k, v and out, and the inside of the MLP, of one layer.

    Training: s·b·h·(10 + 24/t) bytes per layer, as arXiv 2205.05198 counts without the scores, which a flash kernel
    does not keep; with recomputation only the input of each layer (2 bytes) and one layer whole.
    """
    model = request.model
    hidden = model.hidden_size
    if request.phase != "train":
        heads = model.num_heads * (model.head_dim + model.v_head_dim) + model.kv_elements
        width = model.mlp_size if model.experts is None else model.experts.mlp_size * model.experts.per_token
        return tokens * 2 * (2 * hidden + max(heads, (model.mlp_matrices - 1) * width) / setup.tp)
    layer = tokens * hidden * (10 + 24 / setup.tp)
    return model.layers * tokens * hidden * 2 + layer if request.recomputes else model.layers * layer


def attention_buffers(
    algorithm: str, cp: int, inner: int, q_len: int, kv_len: int, shard: Shard, *, slab_bytes: float = SLAB_BYTES
) -> float:
    """What a call takes above its inputs.

    The output in float32 with its lse; a slab for what a kernel returns; and what the algorithm has under way at once.
    """
    out = q_len * shard.batch * shard.num_heads * (shard.v_head_dim * 4 + 4)
    part = min(out, slab_bytes)
    sizes = BufferSizes(cp, inner, shard.num_kv_heads, q_len * shard.q_bytes, kv_len * shard.kv_bytes, out)
    return out + part + find_algorithm(algorithm).buffer_bytes(sizes)
