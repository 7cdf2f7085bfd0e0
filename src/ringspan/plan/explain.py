"""The formulas with the numbers put in: where every figure of a plan comes from."""

from collections.abc import Iterator
from typing import NamedTuple

from ringspan.cost import attention_flops, attention_flops_per_s, ring_hides_at
from ringspan.plan.memory import Memory
from ringspan.plan.predict import Prediction, ring_of, sequence_of, shard_of
from ringspan.plan.request import Request


class Line(NamedTuple):
    """A quantity, its formula in words, and with numbers."""

    what: str
    formula: str
    numbers: str


def explain(request: Request, prediction: Prediction, memory: Memory) -> Iterator[Line]:
    """For the chosen way."""
    model, device, setup = request.model, request.cluster.device, prediction.setup
    shard, ring, sequence = shard_of(request, setup), ring_of(request, setup), sequence_of(request, setup)
    parameters = model.parameters or model.counted_parameters
    q_len = -(-sequence.new_tokens // ring.world_size)
    kv_len = -(-(sequence.new_tokens + sequence.cached_tokens) // ring.world_size)
    rate = attention_flops_per_s(device.attention, model.head_dim, kv_len, is_causal=False, is_backward=False)
    flops = attention_flops(q_len * kv_len, shard)
    yield Line(
        "weights",
        "parameters · bytes / tensor parallelism",
        f"{parameters:,} / {setup.tp} → {memory.weights:.4g} bytes",
    )
    if memory.kv_cache:
        yield Line(
            "KV cache",
            "layers · tokens / ranks · elements · batch · 2 bytes",
            f"{model.layers} · {kv_len:,} · {shard.kv_elements} · {shard.batch} · 2 = {memory.kv_cache:.4g} bytes",
        )
    curve = device.attention
    yield Line(
        "attention rate",
        "limit · d/(d + softmax_dims) · n/(n + ramp)",
        f"{curve.flops_per_s:.4g} · {model.head_dim}/({model.head_dim} + {curve.softmax_dims:.3g}) · "
        f"{kv_len:,}/({kv_len:,} + {curve.ramp_full_tokens:.3g}) = {rate:.4g} FLOP/s ({curve.kernel})",
    )
    yield Line(
        "a full tile",
        "2 · q · kv · heads · (head_dim + v_head_dim) · batch / rate",
        f"2 · {q_len:,} · {kv_len:,} · {shard.num_heads} · {shard.head_dim + shard.v_head_dim} · {shard.batch} / "
        f"{rate:.4g} = {flops / rate:.4g} s",
    )
    link = device.far if ring.per_node == 1 or ring.world_size > ring.per_node else device.near
    nbytes = kv_len * shard.kv_bytes
    yield Line(
        "a KV message",
        "latency + tokens · bytes / rate",
        f"{link.latency_s:.3g} + {kv_len:,} · {shard.kv_bytes:.4g} / {link.bytes_per_s:.4g} = "
        f"{link.latency_s + nbytes / link.bytes_per_s:.4g} s over {link.id}",
    )
    if ring.world_size > 1:
        hidden = ring_hides_at(link, device, shard, ring.world_size)
        yield Line(
            "KV is hidden from",
            "ranks · rate · bytes of K and V / (FLOPs of a pair · link rate) new tokens",
            f"{ring.world_size} · {rate:.4g} · {shard.kv_bytes:.4g} / ({attention_flops(1, shard):.4g} · "
            f"{link.bytes_per_s:.4g}) = {hidden:,.0f} new tokens",
        )
    yield Line(
        "attention of a layer",
        "timeline: compute + messages not hidden + waiting",
        f"{prediction.attention_compute_s:.4g} + {prediction.attention_exposed_s:.4g} + "
        f"{prediction.attention_bubble_s:.4g} = {prediction.attention_s:.4g} s",
    )
    dense = prediction.dense
    yield Line(
        "the rest of a layer",
        "matrix products + elementwise + all-reduces",
        f"{dense.matmul_s:.4g} + {dense.elementwise_s:.4g} + {dense.all_reduce_s:.4g} = {dense.total_s:.4g} s",
    )
    yield Line("in all", "layers · (attention + rest)", f"{prediction.layers} layers → {prediction.total_s:.4g} s")
