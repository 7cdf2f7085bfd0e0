"""How long does it take, and where does the time go, if the work is split so?

A model is a stack of equal layers: attention, as its timeline says, and dense work around it. Nothing but the messages
of attention overlaps with anything. A training step is the forward pass, a second one where activations are computed
anew, and a backward pass whose dense part costs twice the forward's; gradients are reduced over the ranks that hold the
same weights while the backward pass runs.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from ringspan.cost import WEIGHT_BYTES, Dense, Shard, all_reduce_s, dense_layer, tile_s
from ringspan.plan.request import Request, Setup
from ringspan.timeline import Ring, Sequence, Timeline, attention_timeline

TRAIN_PASSES = 2  # backward over forward of a matrix product: gradients of inputs and of weights


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds. `total_s` is the time to the first token, per token, per training step or per denoising step."""

    setup: Setup
    total_s: float
    layers: int
    attention_s: float  # of a full layer, forward
    attention_compute_s: float
    attention_exposed_s: float
    attention_bubble_s: float
    window_attention_s: float  # of a sliding layer, forward
    backward_attention_s: float
    dense: Dense
    gradients_s: float  # reducing them, as far as the backward pass does not hide it
    link_name: str
    link_s: float

    @property
    def layer_s(self) -> float:
        """Of one full layer, forward."""
        return self.attention_s + self.dense.total_s

    @property
    def bottleneck(self) -> str:
        """What takes most of a layer, by name."""
        parts = {
            "attention compute": self.attention_compute_s,
            f"messages of attention over {self.link_name}": self.attention_exposed_s,
            "ranks waiting for others": self.attention_bubble_s,
            "projections and MLP": self.dense.matmul_s,
            "norms and other elementwise work": self.dense.elementwise_s,
            "all-reduces of tensor parallelism": self.dense.all_reduce_s,
        }
        return max(parts, key=lambda name: parts[name])


def shard_of(request: Request, setup: Setup) -> Shard:
    """One device's attention of one layer."""
    model, tp = request.model, setup.tp
    kv_heads = max(1, model.num_kv_heads // tp)
    per_head = model.head_dim + model.v_head_dim
    return Shard(
        batch=-(-request.batch // setup.copies),
        num_heads=model.num_heads // tp,
        num_kv_heads=kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        kv_elements=model.kv_elements if model.latent is not None else kv_heads * per_head,
        itemsize=2,
        wire=request.wire,
        practice=request.practice,
    )


def ring_of(request: Request, setup: Setup) -> Ring:
    """The context-parallel ranks: a rank is `tp` devices, and a node holds as many ranks as fit."""
    return Ring(setup.cp, max(1, request.cluster.per_node // setup.tp), setup.inner)


def sequence_of(request: Request, setup: Setup, window: int = 0) -> Sequence:
    """What attention sees; in decode every sequence has one new token."""
    causal = request.model.is_causal
    if request.phase == "decode":
        return Sequence(1, request.tokens, False, setup.layout, window)
    return Sequence(request.tokens, request.cached_tokens, causal, setup.layout, window)


@lru_cache(maxsize=4096)
def _timeline(
    algorithm: str, ring: Ring, sequence: Sequence, shard: Shard, device: object, is_backward: bool
) -> Timeline:
    return attention_timeline(algorithm, ring, sequence, shard, device, is_backward=is_backward)  # type: ignore[arg-type]


def timeline_of(request: Request, setup: Setup, *, window: int = 0, is_backward: bool = False) -> Timeline:
    """One layer's attention."""
    shard, sequence = shard_of(request, setup), sequence_of(request, setup, window)
    if request.phase == "decode" and setup.algorithm == "pass_q":
        shard = replace(shard, batch=-(-shard.batch // setup.cp))  # every rank starts with its own sequences
    return _timeline(setup.algorithm, ring_of(request, setup), sequence, shard, request.cluster.device, is_backward)


def predict(request: Request, setup: Setup) -> Prediction:
    """The time of one forward, or of one training step."""
    model = request.model
    full = timeline_of(request, setup)
    sliding_s = timeline_of(request, setup, window=model.window.tokens).makespan_s if model.window else 0.0
    dense = _dense(request, setup)
    sliding_layers = model.layers - model.full_layers
    cross_s = _cross_attention_s(request, setup)
    attention_s = model.full_layers * full.makespan_s + sliding_layers * sliding_s + model.layers * cross_s
    total_s = attention_s + model.layers * dense.total_s
    backward_s, gradients_s = 0.0, 0.0
    if request.phase == "train":
        backward = timeline_of(request, setup, is_backward=True)
        backward_s = backward.makespan_s
        ratio = backward_s / full.makespan_s if full.makespan_s else 0.0
        behind_s = attention_s * ratio + model.layers * (
            TRAIN_PASSES * (dense.matmul_s + dense.elementwise_s) + dense.all_reduce_s
        )
        gradients_s = max(0.0, _reduce_gradients_s(request, setup) - behind_s)
        total_s += behind_s + gradients_s + (total_s if request.recomputes else 0.0)
    busiest = int(full.compute_s.argmax())
    return Prediction(
        setup=setup,
        total_s=total_s,
        layers=model.layers,
        attention_s=full.makespan_s,
        attention_compute_s=float(full.compute_s[busiest]),
        attention_exposed_s=float(full.exposed_s[busiest]),
        attention_bubble_s=float(full.bubble_s[busiest]),
        window_attention_s=sliding_s,
        backward_attention_s=backward_s,
        dense=dense,
        gradients_s=gradients_s,
        link_name=full.link_name,
        link_s=full.link_s,
    )


def _dense(request: Request, setup: Setup) -> Dense:
    tokens = 1 if request.phase == "decode" else -(-request.tokens // setup.cp)
    return dense_layer(
        request.model,
        request.cluster.device,
        float(tokens * -(-request.batch // setup.copies)),
        tp=setup.tp,
        per_node=request.cluster.per_node,
        mlp_weights=request.mlp_weights or request.weights,
        weights=request.weights,
    )


def _cross_attention_s(request: Request, setup: Setup) -> float:
    """Of the text, where it enters so; every rank holds the text."""
    video = request.model.video
    if video is None or video.is_text_joint:
        return 0.0
    q_len = -(-request.tokens // setup.cp)
    return tile_s(request.cluster.device, shard_of(request, setup), q_len, video.text_tokens)


def _reduce_gradients_s(request: Request, setup: Setup) -> float:
    """Every device holds 1/tp of the gradients and reduces them with the ranks that hold the same part."""
    device = request.cluster.device
    parameters = request.model.parameters or request.model.counted_parameters
    group = setup.cp * setup.copies
    per_node = max(1, request.cluster.per_node // setup.tp)
    return all_reduce_s(device.near, device.far, parameters * WEIGHT_BYTES["bf16"] / setup.tp, group, per_node)
