"""The KV cache over ranks: turns, placement, storage, saving."""

from ringspan.cache.calls import Turn, decode, error_bound, prefill, store
from ringspan.cache.kv_cache import KVCache

__all__ = [
    "KVCache",
    "Turn",
    "decode",
    "error_bound",
    "prefill",
    "store",
]
