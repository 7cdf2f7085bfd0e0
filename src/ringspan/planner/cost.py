"""What does one action cost: how many FLOPs, how many bytes, how many seconds?

Every function is one formula with its source. Rates come from a `Device` of the catalogue, that is from data; there is
no rate in this file. Sizes are those of one device, after tensor parallelism.
"""

import math
from dataclasses import dataclass, replace

from ringspan.planner.catalog import AttentionCurve, Device, Link, Model
from ringspan.planner.software import Software
from ringspan.schedule import Kind

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
WIRE_BYTES = {"bf16": 2.0, "int8": 1.0, "fp8": 1.0}
SCALE_BYTES = 2  # of one scale (bfloat16) per token and head, for K and for V, where the wire is quantised

BACKWARD_RATIO = 2.5  # FLOPs of backward over forward attention: five matrix products, not two (arXiv 2307.08691)
WIDE_HEAD_DIM = 128  # kernels are slower for wider heads

TRAINING_BYTES = 16  # per parameter: weight 2, gradient 2, float32 copy 4, two moments of Adam 4 + 4 (arXiv 1910.02054)


@dataclass(frozen=True, slots=True)
class Shard:
    """One device's attention of one layer: sizes after tensor parallelism, elements of `itemsize` bytes."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_elements: int  # per token: what travels and is cached
    itemsize: float
    wire: str
    practice: Software
    cache_itemsize: float | None = None  # of K and V as they lie in the cache; None: as all else

    @classmethod
    def dense(
        cls, batch: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: float, practice: Software
    ) -> "Shard":
        """Attention whose K and V have heads of the same size and travel as they are."""
        elements = 2 * num_kv_heads * head_dim
        return cls(batch, num_heads, num_kv_heads, head_dim, head_dim, elements, itemsize, "bf16", practice)

    def with_heads(self, num_heads: int, num_kv_heads: int) -> "Shard":
        """The same with other heads."""
        elements = self.kv_elements * num_kv_heads // self.num_kv_heads
        return replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads, kv_elements=elements)

    @property
    def q_bytes(self) -> float:
        """Bytes of the queries of one token."""
        return self.batch * self.num_heads * self.head_dim * self.itemsize

    @property
    def kv_bytes(self) -> float:
        """Bytes of K and V of one token as they travel: quantised K and V carry a scale per head."""
        elements = self.batch * self.kv_elements
        if self.wire == "bf16":
            return elements * self.itemsize
        return elements * WIRE_BYTES[self.wire] + 2 * self.batch * self.num_kv_heads * SCALE_BYTES

    @property
    def out_bytes(self) -> float:
        """Bytes of a partial output of one token with its lse, as it travels."""
        return self.batch * self.num_heads * (self.v_head_dim * self.practice.sum_itemsize + 4)

    @property
    def q_grad_bytes(self) -> float:
        """Bytes of q, dout, out and lse of one token."""
        return self.batch * self.num_heads * ((self.head_dim + 2 * self.v_head_dim) * self.itemsize + 4)

    @property
    def dq_bytes(self) -> float:
        return self.batch * self.num_heads * self.head_dim * 4

    @property
    def dkv_bytes(self) -> float:
        """Bytes of dk and dv of one token, as they travel."""
        return self.batch * self.kv_elements * self.practice.gradient_itemsize


def attention_flops(pairs: float, shard: Shard) -> float:
    """Two matrix products of 2 FLOPs per multiply-add: 2 · pairs · heads · (head_dim + v_head_dim)."""
    return 2 * pairs * shard.batch * shard.num_heads * (shard.head_dim + shard.v_head_dim)


def attention_flops_per_s(
    curve: AttentionCurve, head_dim: int, kv_len: float, *, is_causal: bool, is_backward: bool
) -> float:
    """Limit · d/(d + softmax_dims) · n/(n + ramp).

    The first quotient: the softmax of a score costs as much as so many more elements of a head
    (`catalog/kernels.py`). The second: a loop over n keys has a beginning and, under a causal mask, blocks of the
    diagonal that are half wasted.
    """
    limit, ramp = curve.flops_per_s, curve.ramp_causal_tokens if is_causal else curve.ramp_full_tokens
    if is_backward:
        limit *= curve.backward_ratio
        ramp = curve.backward_ramp_causal_tokens if is_causal else curve.backward_ramp_full_tokens
    if head_dim > WIDE_HEAD_DIM:
        limit *= curve.wide_head_ratio
    return limit * head_dim / (head_dim + curve.softmax_dims) * kv_len / (kv_len + ramp)


def tile_s(
    device: Device,
    shard: Shard,
    q_len: float,
    kv_len: float,
    *,
    is_causal: bool = False,
    is_backward: bool = False,
    pairs: float | None = None,
) -> float:
    """Seconds of q_len queries against kv_len keys, at least as long as K and V take to be read (decode).

    A causal tile has q_len · (q_len + 1) / 2 pairs. Backward is 2.5 times the forward FLOPs: five products, not two.
    """
    if q_len <= 0 or kv_len <= 0:
        return 0.0
    if pairs is None:
        pairs = q_len * (q_len + 1) / 2 if is_causal else q_len * kv_len
    rate = attention_flops_per_s(device.attention, shard.head_dim, kv_len, is_causal=is_causal, is_backward=is_backward)
    flops = attention_flops(pairs, shard) * (BACKWARD_RATIO if is_backward else 1.0)
    read_bytes = kv_len * shard.batch * shard.kv_elements * (shard.cache_itemsize or shard.itemsize)
    return max(flops / rate, read_bytes / device.memory_bytes_per_s) + device.attention.call_s


def merge_s(device: Device, shard: Shard, q_len: float, *, is_backward: bool = False) -> float:
    """Seconds to merge a part into q_len rows of out, or of dq: bytes over the memory's rate."""
    per_element = shard.practice.gradient_bytes if is_backward else shard.practice.merge_bytes
    return q_len * shard.batch * shard.num_heads * shard.v_head_dim * per_element / device.merge_bytes_per_s


def message_s(link: Link, nbytes: float) -> float:
    """Latency + n / rate."""
    return link.latency_s + nbytes / link.bytes_per_s


def all_reduce_s(near: Link, far: Link, nbytes: float, group: int, per_node: int) -> float:
    """Scatter, then gather: 2 (n - 1)/n · bytes / rate, inside the node and between nodes."""
    return _collective_s(near, far, 2 * nbytes, group, per_node)


def all_gather_s(near: Link, far: Link, nbytes: float, group: int, per_node: int) -> float:
    """All `nbytes` on every device, from equal shares; scattering sums of as many takes as long: (n - 1)/n · bytes."""
    return _collective_s(near, far, nbytes, group, per_node)


def _collective_s(near: Link, far: Link, nbytes: float, group: int, per_node: int) -> float:
    """A ring inside the node, then between nodes on the device's own share of the bytes: (n - 1)/n · bytes / rate."""
    inside = min(group, per_node)
    seconds = 0.0
    if inside > 1:
        seconds += near.latency_s + (inside - 1) / inside * nbytes / near.bytes_per_s
    outside = -(-group // inside)
    if outside > 1:
        seconds += far.latency_s + (outside - 1) / outside * nbytes / inside / far.exchange_bytes_per_s
    return seconds


@dataclass(frozen=True, slots=True)
class Dense:
    """Seconds of one layer without attention, on one device."""

    matmul_s: float
    elementwise_s: float
    all_reduce_s: float

    @property
    def total_s(self) -> float:
        """The sum of all parts, which do not overlap."""
        return self.matmul_s + self.elementwise_s + self.all_reduce_s


def dense_layer(
    model: Model,
    device: Device,
    tokens: float,
    *,
    tp: int,
    per_node: int,
    mlp_weights: str,
    weights: str,
    is_eager: bool = False,
) -> Dense:
    """Projections and MLP: 2 FLOPs per weight and token, no faster than the weights are read from memory.

    Elementwise work is counted in passes over memory: two norms (read, write), two residual sums (two reads, a write),
    an activation between the matrices of the MLP (its inputs read, its output written), q and k rotated; eager software
    makes more of them, by a fitted ratio. Tensor parallelism adds two all-reduces of the layer's activations (arXiv
    1909.08053).
    """
    hidden, itemsize = model.hidden_size, 2
    active_mlp = model.active_mlp_parameters / model.layers
    read_mlp = min(model.mlp_parameters / model.layers, active_mlp * max(1.0, tokens))  # all experts, for many tokens
    matmul_s = 0.0
    for active, read, kind in (
        (float(model.projected_parameters), float(model.attention_parameters), weights),
        (active_mlp, read_mlp, mlp_weights),
    ):
        rate = device.dense_flops_per_s * (device.fp8_ratio if kind == "fp8" else 1.0)
        flops_s = 2 * active * tokens / tp / rate
        matmul_s += max(flops_s, read * WEIGHT_BYTES[kind] / tp / device.memory_bytes_per_s)
    inner = active_mlp / hidden / tp
    rotated = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim / tp
    passes = tokens * itemsize * (4 * hidden + 6 * hidden + inner + rotated)
    if is_eager:
        passes *= device.constants.elementwise_ratio
    reduce_s = 0.0
    if tp > 1:
        nbytes = tokens * hidden * itemsize
        reduce_s = 2 * all_reduce_s(device.near, device.far, nbytes, tp, per_node)
    return Dense(matmul_s, passes / device.memory_bytes_per_s, reduce_s)


def head_s(device: Device, hidden_size: int, vocab_size: int, tokens: float, tp: int) -> float:
    """Seconds of the logits of so many tokens: 2 FLOPs per weight and token, no faster than the weights are read."""
    weights = hidden_size * vocab_size / tp
    return max(2 * weights * tokens / device.dense_flops_per_s, 2 * weights / device.memory_bytes_per_s)


def host_s(device: Device, num_operations: float, device_s: float) -> float:
    """Seconds that a host adds if it issues so many operations while the device computes for `device_s`.

    It runs ahead of the device in part: where either takes much longer than the other that one counts, and between
    them the root of the sum of squares.
    """
    return math.hypot(device.constants.host_operation_s * num_operations, device_s) - device_s


def full_flops_per_s(device: Device, shard: Shard) -> float:
    """Rate for tiles so long that the ramp does not matter."""
    return attention_flops_per_s(device.attention, shard.head_dim, 1e9, is_causal=False, is_backward=False)


def ring_hides_at(link: Link, device: Device, shard: Shard, world_size: int) -> float:
    """New tokens from which a full ring step hides the KV message: N · C · NKV · e / (2 · NH · BW), C as reached.

    arXiv 2411.01783, equation 2; with e = 2 bytes, NH = NKV and one block per rank it is the block of C / BW tokens of
    arXiv 2310.01889, section 3.
    """
    per_pair = attention_flops(1, shard)
    return world_size * shard.kv_bytes * full_flops_per_s(device, shard) / (per_pair * link.bytes_per_s)


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """One shard on one device, forward or backward."""

    shard: Shard
    device: Device
    is_backward: bool

    @property
    def num_heads(self) -> int:
        return self.shard.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.shard.num_kv_heads

    @property
    def joins_tiles(self) -> bool:
        """Whether blocks that an exchange of heads has brought are attended as one."""
        return self.shard.practice.joins_tiles

    @property
    def returns_after(self) -> bool:
        """Whether partial results of pass-Q go home in one exchange after the ring."""
        return self.shard.practice.returns_after

    def tile_s(self, q_len: float, kv_len: float, *, is_causal: bool = False) -> float:
        """Seconds of q_len queries against kv_len keys."""
        return tile_s(self.device, self.shard, q_len, kv_len, is_causal=is_causal, is_backward=self.is_backward)

    def merge_s(self, q_len: float) -> float:
        """Seconds to merge a partial result, or backward to add to dq."""
        return merge_s(self.device, self.shard, q_len, is_backward=self.is_backward)

    def token_bytes(self, kind: Kind) -> float:
        """Bytes of one token of a block of this kind, as it travels."""
        shard = self.shard
        match kind:
            case "q":
                return shard.q_bytes
            case "kv":
                return shard.kv_bytes
            case "q_grad":
                return shard.q_grad_bytes
            case "out":
                return shard.out_bytes
            case "dq":
                return shard.dq_bytes
            case "dkv":
                return shard.dkv_bytes

    def with_heads(self, num_heads: int, num_kv_heads: int) -> "DeviceCosts":
        """The same for another number of heads."""
        return DeviceCosts(self.shard.with_heads(num_heads, num_kv_heads), self.device, self.is_backward)
