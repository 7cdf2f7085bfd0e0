"""What does a step of attention cost on a device of the catalogue? The planner's `Costs`."""

from dataclasses import dataclass

from ringspan.planner.catalog import Device
from ringspan.planner.cost import Shard, merge_s, tile_s
from ringspan.schedule import Kind


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """One shard on one device, forward or backward."""

    shard: Shard
    device: Device
    is_backward: bool

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.shard.num_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
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
        """Bytes of one token of such a block, as it travels."""
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
