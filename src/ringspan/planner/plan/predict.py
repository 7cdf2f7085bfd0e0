"""How long does it take, and where does the time go, if the work is split so?

A model is a stack of layers: attention, as its timeline says, and dense work around it. Nothing but the messages
of attention overlaps with anything. A training step is the forward pass, a second one where activations are computed
anew, and a backward pass whose dense part costs twice the forward's; gradients are reduced over the ranks that hold the
same weights while the backward pass runs. Fully sharded weights are gathered layer by layer, while the layer before
computes, in the forward pass and again in the backward one, where gradients are scattered (arXiv 1910.02054).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ringspan.algorithms import BY_QUERY
from ringspan.planner.catalog import Model
from ringspan.planner.cost import WEIGHT_BYTES, Dense, Shard, all_gather_s, all_reduce_s, dense_layer, tile_s
from ringspan.planner.plan.request import Request, Setup
from ringspan.planner.timeline import Ring, Sequence, Timeline, attention_timeline

TRAIN_PASSES = 2  # backward over forward of a matrix product: gradients of inputs and of weights


class Pass(NamedTuple):
    """Seconds of one pass over all layers, by what they are spent on."""

    attention_compute_s: float
    attention_exposed_s: float
    attention_bubble_s: float
    matmul_s: float
    elementwise_s: float
    all_reduce_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


NO_PASS = Pass(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds. `total_s` is the time to the first token, per token, per training step or per denoising step."""

    setup: Setup
    total_s: float
    layers: int
    attention_s: float  # of a full layer, forward; of a sliding one where none is full
    attention_compute_s: float
    attention_exposed_s: float
    attention_bubble_s: float
    window_attention_s: float  # of a sliding layer, forward
    cross_attention_s: float  # of a layer to the text of a video, forward
    dense: Dense  # of a layer, forward
    forward: Pass
    num_forwards: int  # two where activations are computed anew
    backward: Pass  # nothing but in training
    sharding_s: float  # gathering weights and scattering gradients, as far as compute does not hide it
    gradients_s: float  # reducing them, as far as the backward pass does not hide it
    link_name: str
    link_s: float

    @property
    def layer_s(self) -> float:
        """Of one such layer, forward."""
        return self.attention_s + self.cross_attention_s + self.dense.total_s

    @property
    def bottleneck(self) -> str:
        """What takes most of the whole, by name."""
        spent = [self.num_forwards * ahead + back for ahead, back in zip(self.forward, self.backward, strict=True)]
        names = (
            "attention compute",
            f"messages of attention over {self.link_name}",
            "ranks waiting for others",
            "projections and MLP",
            "norms and other elementwise work",
            "all-reduces of tensor parallelism",
            "gathering sharded weights",
            "reducing gradients",
        )
        parts = dict(zip(names, (*spent, self.sharding_s, self.gradients_s), strict=True))
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
    if request.phase == "decode" and setup.algorithm == BY_QUERY["sharded"].name:
        shard = replace(shard, batch=-(-shard.batch // setup.cp))  # every rank starts with its own sequences
    return _timeline(setup.algorithm, ring_of(request, setup), sequence, shard, request.cluster.device, is_backward)


def shown_window(model: Model) -> int:
    """Of the kind of layer that is shown as an example: 0 for a full one, or the window where none is full."""
    return 0 if model.window is None or model.full_layers else model.window.tokens


def predict(request: Request, setup: Setup) -> Prediction:
    """The time of one forward, or of one training step."""
    model = request.model
    shown = timeline_of(request, setup, window=shown_window(model))
    dense = _dense(request, setup)
    forward, backward = _pass(request, setup, dense, is_backward=False), NO_PASS
    num_forwards, sharding_s, gradients_s = 1, 0.0, 0.0
    if request.phase == "train":
        backward = _pass(request, setup, dense, is_backward=True)
        num_forwards = 2 if request.recomputes else 1
        if request.shards_weights:
            again_s = backward.total_s + (num_forwards - 1) * forward.total_s
            sharding_s = _sharding_s(request, setup, forward.total_s, again_s)
        else:
            gradients_s = max(0.0, _reduce_gradients_s(request, setup) - backward.total_s)
    busiest = int(shown.compute_s.argmax())
    return Prediction(
        setup=setup,
        total_s=num_forwards * forward.total_s + backward.total_s + sharding_s + gradients_s,
        layers=model.layers,
        attention_s=shown.makespan_s,
        attention_compute_s=float(shown.compute_s[busiest]),
        attention_exposed_s=float(shown.exposed_s[busiest]),
        attention_bubble_s=float(shown.bubble_s[busiest]),
        window_attention_s=timeline_of(request, setup, window=model.window.tokens).makespan_s if model.window else 0.0,
        cross_attention_s=_cross_attention_s(request, setup, is_backward=False),
        dense=dense,
        forward=forward,
        num_forwards=num_forwards,
        backward=backward,
        sharding_s=sharding_s,
        gradients_s=gradients_s,
        link_name=shown.link_name,
        link_s=shown.link_s,
    )


def _pass(request: Request, setup: Setup, dense: Dense, *, is_backward: bool) -> Pass:
    """All layers once: full ones, sliding ones, and the dense work of each."""
    model = request.model
    kinds = [(model.full_layers, 0)]
    if model.window:
        kinds.append((model.layers - model.full_layers, model.window.tokens))
    compute_s = model.layers * _cross_attention_s(request, setup, is_backward=is_backward)
    exposed_s = bubble_s = 0.0
    for layers, window in kinds:
        timeline = timeline_of(request, setup, window=window, is_backward=is_backward)
        busiest = int(timeline.compute_s.argmax())
        compute_s += layers * float(timeline.compute_s[busiest])
        exposed_s += layers * float(timeline.exposed_s[busiest])
        bubble_s += layers * float(timeline.bubble_s[busiest])
    times = model.layers * (TRAIN_PASSES if is_backward else 1)
    return Pass(
        attention_compute_s=compute_s,
        attention_exposed_s=exposed_s,
        attention_bubble_s=bubble_s,
        matmul_s=times * dense.matmul_s,
        elementwise_s=times * dense.elementwise_s,
        all_reduce_s=model.layers * dense.all_reduce_s,
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


def _cross_attention_s(request: Request, setup: Setup, *, is_backward: bool) -> float:
    """Of the text, where it enters so; every rank holds the text."""
    video = request.model.video
    if video is None or video.is_text_joint:
        return 0.0
    q_len = -(-request.tokens // setup.cp)
    shard = shard_of(request, setup)
    return tile_s(request.cluster.device, shard, q_len, video.text_tokens, is_backward=is_backward)


def _reduce_gradients_s(request: Request, setup: Setup) -> float:
    """Every device holds 1/tp of the gradients and reduces them with the ranks that hold the same part."""
    device = request.cluster.device
    return all_reduce_s(device.near, device.far, _held_bytes(request, setup), *_holders(request, setup))


def _sharding_s(request: Request, setup: Setup, forward_s: float, again_s: float) -> float:
    """What compute does not hide of gathering each layer's weights twice and scattering its gradients once.

    In both passes a layer's messages travel while another layer computes: the first gather of each and the last scatter
    have none to hide behind, and of the others shows what takes longer than a layer's compute.
    """
    device, layers = request.cluster.device, request.model.layers
    nbytes = _held_bytes(request, setup) / layers
    gather_s = scatter_s = all_gather_s(device.near, device.far, nbytes, *_holders(request, setup))
    ahead_s = gather_s + (layers - 1) * max(0.0, gather_s - forward_s / layers)
    return ahead_s + gather_s + scatter_s + (layers - 1) * max(0.0, gather_s + scatter_s - again_s / layers)


def _held_bytes(request: Request, setup: Setup) -> float:
    """Of the weights, or their gradients, of one tensor-parallel rank, in training."""
    return (request.model.parameters or request.model.counted_parameters) * WEIGHT_BYTES["bf16"] / setup.tp


def _holders(request: Request, setup: Setup) -> tuple[int, int]:
    """How many ranks hold the same weights or share them, and how many of them are in a node."""
    return setup.cp * setup.copies, max(1, request.cluster.per_node // setup.tp)
