"""Does it fit? Bytes of one device, item by item.

Weights are counted once per tensor-parallel group, or spread over all ranks that share them (fully sharded); then the
weights of the layer at work are there whole, and those of the next, which is on its way. The buffers of attention are
what the runtime of this library takes above its inputs: `tests/numerics/test_plan_memory.py` measures it.
"""

from typing import NamedTuple

from ringspan.algorithms import BufferSizes, find_algorithm
from ringspan.planner.cost import TRAINING_BYTES, WEIGHT_BYTES, Shard
from ringspan.planner.plan.passes import shard_of
from ringspan.planner.plan.request import CACHE_BYTES, Request, Setup

SLAB_BYTES = 2**28  # what a kernel may return at once on a GPU, before it is merged
RESERVE_BYTES = 1.5e9  # unconfirmed: a CUDA context and the buffers of NCCL
RESERVE_SHARE = 0.03  # unconfirmed: of the memory, lost between the blocks of the allocator
BARELY = 0.95  # of the memory: what takes more fits barely
LOGIT_BYTES = 10  # per token and word in training: bf16 logits 2, float32 for the loss 4, their gradient 4
# Per element of the hidden size of a video model in eager mode: residual, norm and its modulation in float32 (4 + 4
# + 4), q, k, v in bf16 (6), q and k rotated in float64 (2 · 8 + 8), out (2).
EAGER_VIDEO_BYTES = 44


class Memory(NamedTuple):
    """Bytes on the fullest device."""

    weights: float
    optimizer: float  # gradients, float32 copies and moments
    kv_cache: float
    activations: float
    logits: float
    attention_buffers: float
    gathered_weights: float  # of two layers, where all are sharded
    resident: float  # text encoder and VAE of a video pipeline, and the VAE's work
    reserve: float  # driver, communication library and allocator

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self)

    def fits(self, room: float) -> bool:
        """Whether a device with this memory is large enough."""
        return self.total <= room

    def fits_barely(self, room: float) -> bool:
        """Whether it fits, with less free memory than the error of the estimate."""
        return BARELY * room < self.total <= room


def count_memory(request: Request, setup: Setup) -> Memory:
    """The memory of the fullest device."""
    model, shard = request.model, shard_of(request, setup)
    parameters = model.parameters or model.counted_parameters
    per_parameter = bytes_per_parameter(request)
    sharers = setup.cp * setup.copies if request.shards_weights else 1
    holders = setup.tp * sharers
    new_len = 1 if request.phase == "decode" else -(-min(request.tokens, request.chunk) // setup.cp)
    cached = request.tokens if request.phase == "decode" else request.tokens + request.cached_tokens
    kv_len = -(-cached // setup.cp)
    gathered_layers = min(2, model.layers) if sharers > 1 else 0
    optimizer = 0.0
    if request.phase == "train":
        optimizer = (TRAINING_BYTES - per_parameter) * parameters / holders
    num_models = model.video.models if model.video is not None else 1
    room = request.cluster.device.memory_bytes
    return Memory(
        weights=num_models * parameters * per_parameter / holders,
        optimizer=optimizer,
        kv_cache=_cache(request, setup, shard),
        activations=_activations(request, setup, new_len * shard.batch),
        logits=_logits(request, setup, new_len * shard.batch),
        attention_buffers=attention_buffers(setup.algorithm, setup.cp, setup.inner, new_len, kv_len, shard),
        gathered_weights=gathered_layers * model.layer_parameters * per_parameter / setup.tp,
        resident=_resident(request, sharers),
        reserve=RESERVE_BYTES + RESERVE_SHARE * room,
    )


def _cache(request: Request, setup: Setup, shard: Shard) -> float:
    """K and V of all layers: of full ones for all tokens, of sliding ones for those in the window."""
    if request.phase not in ("prefill", "decode"):
        return 0.0
    model = request.model
    tokens = request.tokens + request.cached_tokens
    per_token = shard.batch * shard.kv_elements * CACHE_BYTES[request.kv_cache]
    seen = tokens if model.window is None else min(tokens, model.window.tokens)
    sliding = model.layers - model.full_layers
    return per_token * (model.full_layers * -(-tokens // setup.cp) + sliding * -(-seen // setup.cp))


def _logits(request: Request, setup: Setup, tokens: int) -> float:
    """In training of all tokens, as a loss without fused kernels holds them; else of the last token in float32."""
    words = (request.model.vocab_size or 0) / setup.tp
    if request.phase == "train":
        return tokens * words * LOGIT_BYTES
    return -(-request.batch // setup.copies) * words * 4


def _resident(request: Request, sharers: int) -> float:
    """Weights in bf16, spread as those of the transformer are, and what decoding takes: bytes per pixel of a frame."""
    video = request.model.video
    if video is None or not request.is_resident:
        return 0.0
    weights = (video.encoder_parameters or 0) / sharers + (video.vae_parameters or 0)
    return 2 * weights + request.pixels * request.cluster.device.constants.vae_bytes_per_pixel


def bytes_per_parameter(request: Request) -> float:
    """Bytes of the weights as stored; MLP and the rest may have different dtypes."""
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
        if model.video is not None and request.software.is_eager:
            return tokens * hidden * EAGER_VIDEO_BYTES
        width = model.mlp_size if model.experts is None else model.experts.mlp_size * model.experts.per_token
        return tokens * 2 * (2 * hidden + max(heads, (model.mlp_matrices - 1) * width) / setup.tp)
    layer = tokens * hidden * (10 + 24 / setup.tp)
    return model.layers * tokens * hidden * 2 + layer if request.recomputes else model.layers * layer


def attention_buffers(
    algorithm: str, cp: int, inner: int, q_len: int, kv_len: int, shard: Shard, *, slab_bytes: float = SLAB_BYTES
) -> float:
    """Bytes that a call needs in addition to its inputs.

    The output in float32 with its lse; a slab for what a kernel returns; and what the algorithm has under way at once.
    """
    out = q_len * shard.batch * shard.num_heads * (shard.v_head_dim * 4 + 4)
    part = min(out, slab_bytes)
    sizes = BufferSizes(cp, inner, shard.num_kv_heads, q_len * shard.q_bytes, kv_len * shard.kv_bytes, out)
    return out + part + find_algorithm(algorithm).buffer_bytes(sizes)
