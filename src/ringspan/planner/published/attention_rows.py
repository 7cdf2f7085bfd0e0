"""Rows that measure attention alone: kernels, single steps of a ring, and whole attention calls on several devices."""

from dataclasses import replace

from ringspan.errors import UnsupportedError
from ringspan.planner.accuracy import Parts
from ringspan.planner.catalog import Constants, Device, load_device
from ringspan.planner.cost import Shard, attention_flops_per_s, host_s, message_s, tile_s
from ringspan.planner.published.rows import Fields, Predicted
from ringspan.planner.software import MEGATRON, PAPER, RING_FLASH, USP
from ringspan.planner.timeline import Ring, Sequence, Timeline, attention_timeline

LAYOUT = {"ring": "contiguous", "basic": "contiguous", "zigzag": "zigzag", "stripe": "striped"}
KERNEL = {"FA2": "fa2", "FA (version not stated)": "fa2", "FA3": "fa3", "FA4": "fa4"}
BENCHMARKS = {  # MagiAttention's names: whose ring, and how many ranks exchange heads, at most a node
    "ulysses": ("ulysses", USP),
    "ring_p2p": ("pass_kv", MEGATRON),
    "ring_allgather": ("all_gather", MEGATRON),
    "usp": ("hybrid", USP),
    "loongtrain": ("hybrid", USP),
    "hybrid_dcp": ("pass_kv", MEGATRON),
}


def kernel(fields: Fields, constants: Constants) -> Predicted:
    """TF/s of one call: forward, backward, or both in 3.5 times the FLOPs of the forward."""
    device = load_device(fields["device_id"], kernel=KERNEL[fields["kernel"]], constants=constants)
    seq_len, head_dim = int(fields["seq_len_tokens"]), int(fields["head_dim"] or 128)

    def rate(is_backward: bool) -> float:
        is_causal, curve = fields["mask"] == "causal", device.attention
        return attention_flops_per_s(curve, head_dim, seq_len, is_causal=is_causal, is_backward=is_backward) / 1e12

    passes, parts = fields["pass"], {"attention compute": 1.0}
    if passes == "fwd_bwd":
        return Predicted(3.5 / (1 / rate(False) + 2.5 / rate(True)), parts, device)
    return Predicted(rate(passes == "bwd"), parts, device)


def ring_step(fields: Fields, constants: Constants) -> Predicted:
    """Microseconds of one message, tile or exchange of one ring step; 16 heads over 1 KV head on each of 4 ranks."""
    device = load_device(fields["device_id"], kernel="fa3", constants=constants)
    shard = Shard.dense(1, 16, 1, 128, 2, PAPER)
    new, keys = int(fields["new_tokens"]) / 4, (int(fields["new_tokens"]) + int(fields["cached_tokens"])) / 4
    if fields["component"] == "attention":
        return Predicted(tile_s(device, shard, new, keys) * 1e6, {"attention compute": 1.0}, device)
    link = device.far
    if fields["component"] == "all2all":
        seconds = link.exchange_latency_s + 3 * new * shard.out_bytes / link.exchange_bytes_per_s
    else:
        nbytes = keys * shard.kv_bytes if fields["variant"] == "pass-KV" else new * shard.q_bytes
        seconds = message_s(link, nbytes)
    return Predicted(seconds * 1e6, {"messages of attention": 1.0}, device)


def decode_attention(fields: Fields, constants: Constants) -> Predicted:
    """Microseconds of one layer's attention in decode: queries by sequence, results home in one exchange."""
    device, batch = load_device(fields["device_id"], kernel="fa3", constants=constants), int(fields["batch"])
    ranks = int(fields["cp_degree"])
    if ranks == 1:
        seconds = tile_s(device, Shard.dense(batch, 16, 1, 128, 2, PAPER), 1, int(fields["context_tokens"]))
        return Predicted(seconds * 1e6, {"attention compute": 1.0}, device)
    sequence = Sequence(1, int(fields["context_tokens"]), False, "striped")
    shard = Shard.dense(-(-batch // ranks), 16, 1, 128, 2, PAPER)  # every rank starts with its own sequences
    timeline = attention_timeline("pass_q", Ring(ranks, 1), sequence, shard, device)
    return Predicted(timeline.makespan_s * 1e6, _parts(timeline), device)


def iterations(fields: Fields, constants: Constants) -> Predicted:
    """Calls per second of FlashAttention-2, merged by elementwise operations. Where no batch is given it is 1."""
    device = load_device(fields["device_id"] or "h800", kernel="fa2", constants=constants)
    ulysses, ring = int(fields["ulysses_degree"]), int(fields["ring_degree"])
    software = USP if fields["library"].startswith("USP") else RING_FLASH
    heads, kv_heads, head_dim = (int(fields[key]) for key in ("heads_q", "heads_kv", "head_dim"))
    shard = Shard.dense(int(fields["batch"] or 1), heads, kv_heads, head_dim, 2, software)
    sequence = Sequence(int(fields["seq_len_tokens"]), 0, fields["mask"] == "causal", LAYOUT[fields["scheme"]])
    parts = _call(_algorithm(ulysses, ring), ulysses * ring, ulysses, sequence, shard, device, fields["pass"])
    return Predicted(1 / sum(parts.values()), parts, device)


def throughput(fields: Fields, constants: Constants) -> Predicted:
    """BurstAttention's milliseconds, FlashAttention-2 and a full mask; or MagiAttention's chart of TF/s on H100."""
    devices, heads = int(fields["n_gpus"]), int(fields["heads_q"])
    kv_heads = int(fields["heads_kv"] or heads)
    is_burst = fields["library"] == "BurstAttention"
    if is_burst:
        algorithm, software = "pass_kv", RING_FLASH
    elif fields["method"] in BENCHMARKS:
        algorithm, software = BENCHMARKS[fields["method"]]
    else:
        raise UnsupportedError("its schedule is not modelled", argument="method", value=fields["method"])
    device = load_device(fields["device_id"], kernel="fa2" if is_burst else "newest", constants=constants)
    is_causal, seq_len = fields["mask"] == "causal", int(fields["seq_len_tokens"])
    inner = devices if algorithm == "ulysses" else min(devices, 8)
    if algorithm == "hybrid" and inner == devices:
        algorithm = "ulysses"
    shard = Shard.dense(int(fields["batch"]), heads, kv_heads, int(fields["head_dim"]), 2, software)
    sequence = Sequence(seq_len, 0, is_causal, "zigzag" if is_causal else "contiguous")
    parts = _call(algorithm, devices, inner, sequence, shard, device, fields["pass"])
    seconds = sum(parts.values())
    if is_burst:
        return Predicted(seconds * 1e3, parts, device)
    flops = 4 * seq_len**2 * heads * int(fields["head_dim"]) * int(fields["batch"]) * (0.5 if is_causal else 1)
    flops *= {"fwd": 1.0, "bwd": 2.5, "fwd_bwd": 3.5}[fields["pass"]]
    return Predicted(flops / seconds / devices / 1e12, parts, device)


def min_block(fields: Fields, constants: Constants) -> Predicted:
    """Tokens of a block that hide the ring: FLOP/s over bytes/s (arXiv 2310.01889, section 3)."""
    value = float(fields["peak_flops_per_s"]) / float(fields["link_one_way_bytes_per_s"])
    return Predicted(value, {"attention compute": 1.0}, load_device("a100", constants=constants))


def _algorithm(ulysses: int, ring: int) -> str:
    return "pass_kv" if ulysses == 1 else "ulysses" if ring == 1 else "hybrid"


def _call(
    algorithm: str, ranks: int, inner: int, sequence: Sequence, shard: Shard, device: Device, passes: str
) -> Parts:
    """Seconds of one attention call by what they are spent on."""
    group = inner if algorithm in ("ulysses", "hybrid") else ranks
    wired = replace(device, near=device.near.for_group(min(8, group)))
    parts: Parts = {}
    num_operations = 0
    for is_backward in (False, True):
        if passes == ("fwd" if is_backward else "bwd"):
            continue
        timeline = attention_timeline(algorithm, Ring(ranks, 8, inner), sequence, shard, wired, is_backward=is_backward)
        for name, seconds in _parts(timeline).items():
            parts[name] = parts.get(name, 0.0) + seconds
        num_operations += timeline.num_operations
    is_free = "train" in shard.practice.host_free
    parts["the host issuing operations"] = 0.0 if is_free else host_s(device, num_operations, sum(parts.values()))
    return parts


def _parts(timeline: Timeline) -> Parts:
    busiest = int(timeline.compute_s.argmax())
    return {
        "attention compute": float(timeline.compute_s[busiest]),
        "messages of attention": float(timeline.exposed_s[busiest]),
        "ranks waiting for others": float(timeline.bubble_s[busiest]),
    }
