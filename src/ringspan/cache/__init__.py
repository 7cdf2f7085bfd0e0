"""The KV cache over ranks: turns, placement, storage, saving."""

from ringspan.cache._kv_cache import KVCache
from ringspan.cache._turn import Turn

__all__ = ["KVCache", "Turn"]
