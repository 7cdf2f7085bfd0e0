"""How long does one pass over all layers take, forward or backward?

A model is a stack of layers: attention, as its timeline says, and dense work around it. Nothing but the messages of
attention overlaps with anything in a pass.

Ranks that hold the same weights reduce gradients while the backward pass runs. Fully sharded weights are gathered layer
by layer, while the layer before computes, in every pass, and their gradients are scattered in the backward one (arXiv
1910.02054).
"""

from dataclasses import replace
from functools import lru_cache
from operator import add
from typing import NamedTuple

from ringspan.algorithms import BY_QUERY, find_algorithm
from ringspan.planner.catalog import Model
from ringspan.planner.cost import (
    WEIGHT_BYTES,
    Dense,
    Shard,
    all_gather_s,
    all_reduce_s,
    dense_layer,
    head_s,
    host_s,
    tile_s,
)
from ringspan.planner.plan.request import CACHE_BYTES, Request, Setup
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
    host_s: float

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return sum(self)

    def scaled(self, times: float) -> "Pass":
        """The seconds of `times` such passes."""
        return Pass(*(times * seconds for seconds in self))

    def plus(self, other: "Pass") -> "Pass":
        """The seconds of both passes, one after the other."""
        return Pass(*map(add, self, other))

    def without_attention(self) -> "Pass":
        """The same pass without attention, whose results were kept."""
        return self._replace(attention_compute_s=0.0, attention_exposed_s=0.0, attention_bubble_s=0.0, host_s=0.0)


NO_PASS = Pass(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


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
        practice=request.software,
        cache_itemsize=CACHE_BYTES[request.kv_cache] if request.phase == "decode" else None,
    )


def ring_of(request: Request, setup: Setup) -> Ring:
    """The context-parallel ranks: a rank is `tp` devices, and a node holds as many ranks as fit."""
    return Ring(setup.cp, max(1, request.cluster.per_node // setup.tp), setup.inner)


def sequence_of(request: Request, setup: Setup, window: int = 0) -> Sequence:
    """The sequence that attention sees; in decode every sequence has one new token."""
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
    shard, sequence, device = shard_of(request, setup), sequence_of(request, setup, window), request.cluster.device
    device = replace(device, near=device.near.for_group(_exchange_size(request, setup)))
    if request.phase == "decode" and setup.algorithm == BY_QUERY["sharded"].name:
        shard = replace(shard, batch=-(-shard.batch // setup.cp))  # every rank starts with its own sequences
    return _timeline(setup.algorithm, ring_of(request, setup), sequence, shard, device, is_backward)


def _exchange_size(request: Request, setup: Setup) -> int:
    """Ranks of a node that take part in an exchange at once, those of other groups beside them."""
    ring = ring_of(request, setup)
    group = setup.inner if "heads" in find_algorithm(setup.algorithm).options else setup.cp
    return min(group, ring.per_node)


def shown_window(model: Model) -> int:
    """The window of the layers shown as an example; 0 if a layer attends fully."""
    return 0 if model.window is None or model.full_layers else model.window.tokens


def run_pass(request: Request, setup: Setup, dense: Dense, *, is_backward: bool) -> Pass:
    """All layers once: full ones, sliding ones, and the dense work of each."""
    model, device = request.model, request.cluster.device
    kinds = [(model.full_layers, 0)]
    if model.window:
        kinds.append((model.layers - model.full_layers, model.window.tokens))
    compute_s = model.layers * cross_attention_s(request, setup, is_backward=is_backward)
    exposed_s = bubble_s = 0.0
    num_operations = 0
    for layers, window in kinds:
        timeline = timeline_of(request, setup, window=window, is_backward=is_backward)
        busiest = int(timeline.compute_s.argmax())
        compute_s += layers * float(timeline.compute_s[busiest])
        exposed_s += layers * float(timeline.exposed_s[busiest])
        bubble_s += layers * float(timeline.bubble_s[busiest])
        num_operations += layers * (timeline.num_operations + (2 if setup.tp > 1 else 0))
    times = model.layers * (TRAIN_PASSES if is_backward else 1)
    spent = Pass(
        attention_compute_s=compute_s,
        attention_exposed_s=exposed_s,
        attention_bubble_s=bubble_s,
        matmul_s=times * dense.matmul_s + logits_s(request, setup) * (TRAIN_PASSES if is_backward else 1),
        elementwise_s=times * dense.elementwise_s,
        all_reduce_s=model.layers * dense.all_reduce_s,
        host_s=0.0,
    )
    if request.phase in request.software.host_free:
        return spent
    return spent._replace(host_s=host_s(device, num_operations, spent.total_s))


def dense_of(request: Request, setup: Setup) -> Dense:
    """Everything of one layer but attention, forward."""
    tokens = 1 if request.phase == "decode" else -(-request.tokens // setup.cp)
    return dense_layer(
        request.model,
        request.cluster.device,
        float(tokens * -(-request.batch // setup.copies)),
        tp=setup.tp,
        per_node=request.cluster.per_node,
        mlp_weights=request.mlp_weights or request.weights,
        weights=request.weights,
        is_eager=request.software.is_eager,
    )


def logits_s(request: Request, setup: Setup) -> float:
    """Seconds for the logits: of all tokens in training, else of the last token of every sequence."""
    model = request.model
    if model.vocab_size is None:
        return 0.0
    batch = -(-request.batch // setup.copies)
    tokens = batch * (-(-request.tokens // setup.cp) if request.phase == "train" else 1)
    return head_s(request.cluster.device, model.hidden_size, model.vocab_size, tokens, setup.tp)


def cross_attention_s(request: Request, setup: Setup, *, is_backward: bool) -> float:
    """Seconds for cross-attention to the text, if the model has it; every rank holds the text."""
    video = request.model.video
    if video is None or video.is_text_joint:
        return 0.0
    q_len = -(-request.tokens // setup.cp)
    shard = shard_of(request, setup)
    return tile_s(request.cluster.device, shard, q_len, video.text_tokens, is_backward=is_backward)


def reduce_gradients_s(request: Request, setup: Setup) -> float:
    """Every device holds 1/tp of the gradients and reduces them with the ranks that hold the same part."""
    device = request.cluster.device
    return all_reduce_s(device.near, device.far, _held_bytes(request, setup), *_holders(request, setup))


def gathering_s(request: Request, setup: Setup, forward_s: float) -> float:
    """Seconds of gathering weights that a forward pass does not hide behind the previous layer's compute.

    The first gather has none to hide behind, and of the others shows what takes longer than a layer's compute.
    """
    layers, gather_s = request.model.layers, _gather_s(request, setup)
    return gather_s + (layers - 1) * max(0.0, gather_s - forward_s / layers)


def scattering_s(request: Request, setup: Setup, backward_s: float) -> float:
    """The same of a backward pass, which gathers weights and scatters their gradients; the last scatter shows too."""
    layers, gather_s = request.model.layers, _gather_s(request, setup)
    return 2 * gather_s + (layers - 1) * max(0.0, 2 * gather_s - backward_s / layers)


def _gather_s(request: Request, setup: Setup) -> float:
    """Seconds to gather one layer's weights; scattering their gradients takes as long."""
    device = request.cluster.device
    nbytes = request.model.layer_parameters * WEIGHT_BYTES["bf16"] / setup.tp
    return all_gather_s(device.near, device.far, nbytes, *_holders(request, setup))


def _held_bytes(request: Request, setup: Setup) -> float:
    """Bytes of the weights, or of their gradients, of one tensor-parallel rank."""
    return (request.model.parameters or request.model.counted_parameters) * WEIGHT_BYTES["bf16"] / setup.tp


def _holders(request: Request, setup: Setup) -> tuple[int, int]:
    """How many ranks hold the same weights or share them, and how many of them are in a node."""
    return setup.cp * setup.copies, max(1, request.cluster.per_node // setup.tp)
