"""The KV cache over ranks: turns, placement, storage, saving."""

from ringspan.cache.kv_cache import KVCache
from ringspan.cache.turn import Turn

__all__ = ["KVCache", "Turn"]
