"""Where does every figure of a plan come from, where is the plan less sure than its range says, and why?

The formulas with the numbers put in; and caveats in sentences: the range is that of published runs and says nothing of
work that none of them was like.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ringspan.planner.cost import WIDE_HEAD_DIM, attention_flops, attention_flops_per_s, full_flops_per_s, ring_hides_at
from ringspan.planner.plan.memory import Memory, bytes_per_parameter
from ringspan.planner.plan.passes import ring_of, sequence_of, shard_of
from ringspan.planner.plan.predict import Prediction
from ringspan.planner.plan.request import CACHE_BYTES, Request, Setup


class ExplainedTerm(NamedTuple):
    """A quantity, its formula in words, and with numbers."""

    what: str
    formula: str
    numbers: str


def explain(request: Request, prediction: Prediction, memory: Memory) -> Iterator[ExplainedTerm]:
    """The terms of the best option."""
    setup = prediction.setup
    ring, sequence = ring_of(request, setup), sequence_of(request, setup)
    q_len = -(-sequence.new_tokens // ring.world_size)
    kv_len = -(-(sequence.new_tokens + sequence.cached_tokens) // ring.world_size)
    yield from _explain_memory(request, prediction, memory, kv_len)
    yield from _explain_tiles(request, prediction, q_len, kv_len)
    yield from _explain_messages(request, prediction, kv_len)
    yield from _explain_layers(request, prediction)
    if request.phase == "train":
        yield from _explain_training(request, prediction)


def _explain_memory(request: Request, prediction: Prediction, memory: Memory, kv_len: int) -> Iterator[ExplainedTerm]:
    model, setup, shard = request.model, prediction.setup, shard_of(request, prediction.setup)
    parameters = model.parameters or model.counted_parameters
    formula = "parameters · bytes / tensor parallelism"
    numbers = f"{parameters:,} · {bytes_per_parameter(request):.3g} / {setup.tp}"
    if request.shards_weights:
        formula += " / ranks that share them"
        numbers += f" / {setup.cp * setup.copies}"
    yield ExplainedTerm("weights", formula, f"{numbers} = {memory.weights:.4g} bytes")
    if memory.kv_cache:
        layers, formula = f"{model.full_layers} · {kv_len:,}", "layers · tokens / ranks"
        size = CACHE_BYTES[request.kv_cache]
        if model.window is not None:
            kept = -(-min(request.tokens + request.cached_tokens, model.window.tokens) // setup.cp)
            layers, formula = f"({layers} + {model.layers - model.full_layers} · {kept:,})", f"({formula} + of windows)"
        yield ExplainedTerm(
            "KV cache",
            f"{formula} · elements · batch · bytes",
            f"{layers} · {shard.kv_elements} · {shard.batch} · {size:g} = {memory.kv_cache:.4g} bytes",
        )


def _explain_tiles(request: Request, prediction: Prediction, q_len: int, kv_len: int) -> Iterator[ExplainedTerm]:
    shard, curve = shard_of(request, prediction.setup), request.cluster.device.attention
    dim = shard.head_dim
    rate = attention_flops_per_s(curve, dim, kv_len, is_causal=False, is_backward=False)
    limit, formula = f"{curve.flops_per_s:.4g}", "limit"
    if dim > WIDE_HEAD_DIM:
        limit, formula = f"{limit} · {curve.wide_head_ratio:.4g}", "limit · wide_head_ratio"
    yield ExplainedTerm(
        "attention rate",
        f"{formula} · d/(d + softmax_dims) · n/(n + ramp)",
        f"{limit} · {dim}/({dim} + {curve.softmax_dims:.3g}) · {kv_len:,}/({kv_len:,} + {curve.ramp_full_tokens:.3g})"
        f" = {rate:.4g} FLOP/s ({curve.kernel})",
    )
    yield ExplainedTerm(
        "a full tile",
        "2 · q · kv · heads · (head_dim + v_head_dim) · batch / rate",
        f"2 · {q_len:,} · {kv_len:,} · {shard.num_heads} · {dim + shard.v_head_dim} · {shard.batch} / {rate:.4g} = "
        f"{attention_flops(q_len * kv_len, shard) / rate:.4g} s",
    )


def _explain_messages(request: Request, prediction: Prediction, kv_len: int) -> Iterator[ExplainedTerm]:
    device, ring = request.cluster.device, ring_of(request, prediction.setup)
    shard = shard_of(request, prediction.setup)
    link = device.far if ring.per_node == 1 or ring.world_size > ring.per_node else device.near
    yield ExplainedTerm(
        "a KV message",
        "latency + tokens · bytes / rate",
        f"{link.latency_s:.3g} + {kv_len:,} · {shard.kv_bytes:.4g} / {link.bytes_per_s:.4g} = "
        f"{link.latency_s + kv_len * shard.kv_bytes / link.bytes_per_s:.4g} s over {link.id}",
    )
    if ring.world_size > 1:
        rate, per_pair = full_flops_per_s(device, shard), attention_flops(1, shard)
        yield ExplainedTerm(
            "KV is hidden from",
            "ranks · rate for long n · bytes of K and V / (FLOPs of a pair · link rate) new tokens",
            f"{ring.world_size} · {rate:.4g} · {shard.kv_bytes:.4g} / ({per_pair:.4g} · {link.bytes_per_s:.4g}) = "
            f"{ring_hides_at(link, device, shard, ring.world_size):,.0f} new tokens",
        )


def _explain_layers(request: Request, prediction: Prediction) -> Iterator[ExplainedTerm]:
    model, dense = request.model, prediction.dense
    yield ExplainedTerm(
        "attention of a layer",
        "timeline: compute + messages not hidden + waiting",
        f"{prediction.attention_compute_s:.4g} + {prediction.attention_exposed_s:.4g} + "
        f"{prediction.attention_bubble_s:.4g} = {prediction.attention_s:.4g} s",
    )
    rest = {
        "matrix products": dense.matmul_s,
        "elementwise": dense.elementwise_s,
        "all-reduces": dense.all_reduce_s,
        "cross-attention": prediction.cross_attention_s,
        "host": prediction.host_s,
    }
    kept = {name: seconds for name, seconds in rest.items() if seconds or name in ("matrix products", "elementwise")}
    rest_s = prediction.layer_s - prediction.attention_s
    numbers = " + ".join(f"{seconds:.4g}" for seconds in kept.values())
    yield ExplainedTerm("the rest of a layer", " + ".join(kept), f"{numbers} = {rest_s:.4g} s")
    formula, numbers = "full layers · attention", f"{model.full_layers} · {prediction.attention_s:.4g}"
    if model.window is not None:
        formula += " + sliding layers · theirs"
        numbers += f" + {model.layers - model.full_layers} · {prediction.window_attention_s:.4g}"
    formula, numbers = f"{formula} + layers · rest", f"{numbers} + {model.layers} · {rest_s:.4g}"
    if prediction.logits_s:
        formula, numbers = f"{formula} + logits", f"{numbers} + {prediction.logits_s:.4g}"
    total_s = prediction.forward.total_s
    if request.chunk < request.tokens:
        formula, total_s = f"{formula}, of the last chunk", _last_s(request, prediction)
    yield ExplainedTerm(
        "forward" if request.phase == "train" or request.chunk < request.tokens else "in all",
        formula,
        f"{numbers} = {total_s:.4g} s",
    )
    if request.chunk < request.tokens:
        count = -(-request.tokens // request.chunk)
        yield ExplainedTerm(
            "in all", f"the sum of {count} chunks", f"{prediction.forward.total_s:.4g} = {prediction.total_s:.4g} s"
        )


def _last_s(request: Request, prediction: Prediction) -> float:
    """The figures of the last chunk."""
    model = request.model
    sliding = model.layers - model.full_layers
    attention_s = model.full_layers * prediction.attention_s + sliding * prediction.window_attention_s
    rest_s = prediction.layer_s - prediction.attention_s
    return attention_s + model.layers * rest_s + prediction.logits_s


def _explain_training(request: Request, prediction: Prediction) -> Iterator[ExplainedTerm]:
    forward, backward = prediction.forward, prediction.backward
    yield ExplainedTerm(
        "backward",
        "attention of all layers + layers · (2 · (matrix products + elementwise) + all-reduces + host)",
        f"{sum(backward[:3]):.4g} + {sum(backward[3:]):.4g} = {backward.total_s:.4g} s",
    )
    added, added_s = "reducing gradients", prediction.gradients_s
    if request.shards_weights:
        added, added_s = "gathering weights and scattering gradients", prediction.sharding_s
    yield ExplainedTerm(
        "in all",
        f"forward + once more + backward + {added}, not hidden",
        f"{forward.total_s:.4g} + {prediction.again.total_s:.4g} + {backward.total_s:.4g} + {added_s:.4g} = "
        f"{prediction.total_s:.4g} s",
    )


SHORT_TOKENS = 8192  # new ones on a rank: below, published prefills over a cache took longer than their parts
LATE_S = 4.4e-3  # per layer: arXiv 2411.01783 Table 4 with 320 to 3,200 new tokens on a rank, 2 to 4.4 ms more


def is_short(request: Request, setup: Setup) -> bool:
    """Whether the work is so short that unmodelled costs are visible."""
    new_tokens = -(-request.chunk // setup.cp) * shard_of(request, setup).batch
    return request.phase != "decode" and new_tokens < SHORT_TOKENS


def late_s(request: Request, setup: Setup) -> float:
    """Seconds added to the upper end of the range, for short prefills over a cache on several ranks."""
    is_cached = request.cached_tokens > 0 or request.chunk < request.tokens
    if not (is_cached and setup.cp > 1 and is_short(request, setup)):
        return 0.0
    return LATE_S * request.model.layers * -(-request.tokens // request.chunk)


def list_caveats(request: Request, setup: Setup) -> Iterator[str]:
    """The caveats of a plan, as sentences."""
    if late_s(request, setup):
        yield (
            f"Short work: fewer than {SHORT_TOKENS:,} new tokens on a rank. Published prefills like this took up to "
            f"{LATE_S * 1e3:.1f} ms per layer longer than their parts; the upper end of the range includes that."
        )
    elif is_short(request, setup):
        yield f"Short work: fewer than {SHORT_TOKENS:,} new tokens on a rank, as in few published runs."
    device, model = request.cluster.device, request.model
    if "fp8" in (request.weights, request.mlp_weights) and device.fp8_ratio == 1:
        yield f"How much faster fp8 is on {device.id} is not known: matrix products are planned at the rate of bf16."
    if model.video is not None and not request.is_resident:
        yield "Text encoder and VAE are not counted as memory: they are taken to leave the devices meanwhile."
    if request.phase == "train":
        yield "Optimizer steps, data loading and checkpoints are not counted as time."
