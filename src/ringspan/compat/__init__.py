"""The names of other libraries, computed by this one. Each module is loaded when it is first used.

What another library silently ignores is computed here, or refused.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringspan.compat import ring_attention_pytorch, ring_flash_attn, ringmaster, torch_context_parallel

__all__ = ["ring_attention_pytorch", "ring_flash_attn", "ringmaster", "torch_context_parallel"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ringspan.compat' has no attribute {name!r}")
    return import_module(f"ringspan.compat.{name}")
