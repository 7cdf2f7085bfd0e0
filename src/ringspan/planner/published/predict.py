"""What would the planner have said? The set-up of each published row, put as a request.

What a source does not state is assumed here, once for each source and in words: the kernel, the way results are merged,
the number of forward passes in a denoising step.
"""

from collections.abc import Callable

from ringspan.algorithms.choose import DEFAULT_ALGORITHM, KV_RING, Q_RING, ring_of_degrees
from ringspan.planner.catalog import Cluster, Device, load_device, load_model
from ringspan.planner.cost import EAGER, PAPER, Practice, Shard, attention_flops_per_s, message_s, tile_s
from ringspan.planner.plan.predict import predict
from ringspan.planner.plan.request import Request, Setup
from ringspan.planner.published.rows import Fields, Row
from ringspan.planner.timeline import Ring, Sequence, attention_timeline

LAYOUT = {"ring": "contiguous", "basic": "contiguous", "zigzag": "zigzag", "stripe": "striped"}


def predict_row(row: Row) -> float:
    """The prediction, in the unit of the row."""
    return _PREDICT[row.table](row.fields)


def _shard(heads: int, kv_heads: int, head_dim: int, batch: int, practice: Practice) -> Shard:
    return Shard(batch, heads, kv_heads, head_dim, head_dim, 2 * kv_heads * head_dim, 2, "bf16", practice)


def _kernel(fields: Fields) -> float:
    """TF/s of one call: forward, backward, or both in 3.5 times the FLOPs of the forward."""
    kernel = "fa3" if fields["kernel"] == "FA3" else "fa2"
    curve = load_device(fields["device_id"], kernel=kernel).attention
    seq_len, head_dim = int(fields["seq_len_tokens"]), int(fields["head_dim"] or 128)

    def rate(is_backward: bool) -> float:
        is_causal = fields["mask"] == "causal"
        return attention_flops_per_s(curve, head_dim, seq_len, is_causal=is_causal, is_backward=is_backward) / 1e12

    passes = fields["pass"]
    if passes == "fwd_bwd":
        return 3.5 / (1 / rate(False) + 2.5 / rate(True))
    return rate(passes == "bwd")


def _ring_step(fields: Fields) -> float:
    """Microseconds of one message, tile or exchange of one ring step; 16 heads over 1 KV head on each of 4 ranks."""
    device, shard = load_device(fields["device_id"]), _shard(16, 1, 128, 1, PAPER)
    new, keys = int(fields["new_tokens"]) / 4, (int(fields["new_tokens"]) + int(fields["cached_tokens"])) / 4
    if fields["component"] == "attention":
        return tile_s(device, shard, new, keys) * 1e6
    if fields["component"] == "all2all":
        link = device.far
        return (link.exchange_latency_s + 3 * new * shard.out_bytes / link.exchange_bytes_per_s) * 1e6
    nbytes = keys * shard.kv_bytes if fields["variant"] == "pass-KV" else new * shard.q_bytes
    return message_s(device.far, nbytes) * 1e6


def _decode_attention(fields: Fields) -> float:
    """Microseconds of one layer's attention in decode: queries by sequence, results home in one exchange."""
    device, batch = load_device(fields["device_id"]), int(fields["batch"])
    ranks = int(fields["cp_degree"])
    if ranks == 1:
        return tile_s(device, _shard(16, 1, 128, batch, PAPER), 1, int(fields["context_tokens"])) * 1e6
    sequence = Sequence(1, int(fields["context_tokens"]), False, "striped")
    shard = _shard(16, 1, 128, -(-batch // ranks), PAPER)  # every rank starts with its own sequences
    timeline = attention_timeline(Q_RING, Ring(ranks, 1), sequence, shard, device)
    return timeline.makespan_s * 1e6


def _meta(fields: Fields, phase: str, tokens: int, cached: int = 0) -> tuple[Request, Setup]:
    """FP8 in the feed-forward layers, bf16 elsewhere; FlashAttention-3; CPn is n hosts of tensor parallel 8."""
    tp, cp = int(fields["tp_degree"]), int(fields["cp_degree"])
    cluster = Cluster(int(fields["n_gpus"]) // 8, 8, load_device(fields["device_id"]))
    request = Request(
        model=load_model(fields["model"]),
        cluster=cluster,
        phase=phase,  # type: ignore[arg-type]
        tokens=tokens,
        cached_tokens=cached,
        batch=int(fields["batch"]),
        tp=tp,
        mlp_weights="fp8",
        practice=PAPER,
    )
    return request, Setup(KV_RING, "zigzag", tp, cp)


def _ttft(fields: Fields) -> float:
    request, setup = _meta(fields, "prefill", int(fields["new_tokens"]), int(fields["cached_tokens"]))
    name = Q_RING if fields["variant"] == "pass-Q" else KV_RING
    return predict(request, setup._replace(algorithm=name)).total_s * 1e3


def _ttit(fields: Fields) -> float:
    request, setup = _meta(fields, "decode", int(fields["context_tokens"]))
    name = Q_RING if setup.cp > 1 else DEFAULT_ALGORITHM
    return predict(request, setup._replace(algorithm=name, layout="striped")).total_s * 1e3


def _iterations(fields: Fields) -> float:
    """Calls per second of FlashAttention-2, merged by elementwise operations. Where no batch is given it is 1."""
    device = load_device(fields["device_id"] or "h800", kernel="fa2")
    ulysses, ring = int(fields["ulysses_degree"]), int(fields["ring_degree"])
    shard = _shard(
        int(fields["heads_q"]), int(fields["heads_kv"]), int(fields["head_dim"]), int(fields["batch"] or 1), EAGER
    )
    sequence = Sequence(int(fields["seq_len_tokens"]), 0, fields["mask"] == "causal", LAYOUT[fields["scheme"]])
    seconds = _attention_s(device, shard, sequence, ulysses, ring, fields["pass"])
    return 1 / seconds


def _attention_s(device: Device, shard: Shard, sequence: Sequence, ulysses: int, ring: int, passes: str) -> float:
    algorithm = ring_of_degrees(ulysses, ring)
    ranks = Ring(ulysses * ring, 8, ulysses)
    seconds = 0.0
    if passes != "bwd":
        seconds += attention_timeline(algorithm, ranks, sequence, shard, device).makespan_s
    if passes != "fwd":
        seconds += attention_timeline(algorithm, ranks, sequence, shard, device, is_backward=True).makespan_s
    return seconds


def _burst(fields: Fields) -> float:
    """Milliseconds of FlashAttention-2 on 8 or 1 GPUs, full mask."""
    device = load_device(fields["device_id"], kernel="fa2")
    shard = _shard(int(fields["heads_q"]), int(fields["heads_q"]), int(fields["head_dim"]), int(fields["batch"]), EAGER)
    sequence = Sequence(int(fields["seq_len_tokens"]), 0, False, "contiguous")
    return _attention_s(device, shard, sequence, 1, int(fields["n_gpus"]), fields["pass"]) * 1e3


def _speedup(fields: Fields) -> float:
    """Striped over contiguous, of a whole training step with recomputation; FlashAttention-2 by assumption."""
    ranks, tp = int(fields["sequence_parallel"]), int(fields["model_parallel"])
    request = Request(
        model=load_model(fields["model"]),
        cluster=Cluster(1, int(fields["n_devices"]), load_device(fields["device_id"], kernel="fa2")),
        phase="train",
        tokens=int(fields["seq_len_tokens"]),
        practice=EAGER,
    )
    ring, striped = (predict(request, Setup(KV_RING, name, tp, ranks)).total_s for name in ("contiguous", "striped"))
    return ring / striped


STEPS = {"wan2.1-14b": 50}  # where the source does not say
FORWARDS = {"wan2.1-14b": 2, "cogvideox-5b": 2, "hunyuanvideo": 1}  # with and without the text, or both in one


def _video_step(fields: Fields, tokens: int | None, cfg: int, ulysses: int, ring: int) -> float:
    """Seconds of a denoising step, FlashAttention-2; guidance is a batch of two where the model has it."""
    model = load_model(fields["model"])
    assert model.video is not None
    assert model.video.usual is not None
    device = load_device(fields["device_id"], kernel="fa2")
    devices = ulysses * ring * cfg
    request = Request(
        model=model,
        cluster=Cluster(-(-devices // 8), min(8, devices), device),
        phase="denoise",
        tokens=tokens or model.video.count_tokens(*model.video.usual),
        batch=FORWARDS[model.id],
        practice=EAGER,
    )
    algorithm = ring_of_degrees(ulysses, ring)
    return predict(request, Setup(algorithm, "contiguous", 1, ulysses * ring, cfg, ulysses)).total_s


def _latency(fields: Fields) -> float:
    """Seconds of a whole video; where the split is not stated, Ulysses."""
    model = load_model(fields["model"])
    assert model.video is not None
    tokens = None
    if fields["frames"]:
        size = int(fields["frames"]), int(fields["height_px"]), int(fields["width_px"])
        tokens = model.video.count_tokens(*size)
    ulysses = int(fields["ulysses_degree"] or fields["n_gpus"])
    steps = int(fields["steps"] or STEPS[fields["model"]])
    return steps * _video_step(fields, tokens, 1, ulysses, int(fields["ring_degree"] or 1))


def _step(fields: Fields) -> float:
    return _video_step(
        fields, None, int(fields["cfg_degree"]), int(fields["ulysses_degree"]), int(fields["ring_degree"])
    )


def _min_block(fields: Fields) -> float:
    """Tokens of a block that hide the ring: FLOP/s over bytes/s (arXiv 2310.01889, section 3)."""
    return float(fields["peak_flops_per_s"]) / float(fields["link_one_way_bytes_per_s"])


_PREDICT: dict[str, Callable[[Fields], float]] = {
    "attention_kernel_throughput": _kernel,
    "ring_step_time": _ring_step,
    "decode_attention_time": _decode_attention,
    "cp_attention_throughput": _burst,
    "dit_latency": _latency,
    "dit_step_time": _step,
    "prefill_ttft": _ttft,
    "decode_ttit": _ttit,
    "cp_attention_iters": _iterations,
    "cp_speedup": _speedup,
    "ring_min_block": _min_block,
}
