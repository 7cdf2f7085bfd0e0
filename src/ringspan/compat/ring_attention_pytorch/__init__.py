"""The names of ring-attention-pytorch (0.5.20) on our core.

Its scripts import from the package, from `ring_attention` and from `zig_zag_attention`, and so do ours.
"""

from ringspan.compat.ring_attention_pytorch.ring_attention import (
    RingAttention,
    RingRotaryEmbedding,
    RingTransformer,
    apply_rotary_pos_emb,
)
from ringspan.compat.ring_attention_pytorch.ring_flash_attention import (
    default_attention,
    ring_flash_attn,
    ring_flash_attn_,
    ring_flash_attn_cuda,
    ring_flash_attn_cuda_,
)
from ringspan.compat.ring_attention_pytorch.tree_attn_decoding import tree_attn_decode

__all__ = [
    "RingAttention",
    "RingRotaryEmbedding",
    "RingTransformer",
    "apply_rotary_pos_emb",
    "default_attention",
    "ring_flash_attn",
    "ring_flash_attn_",
    "ring_flash_attn_cuda",
    "ring_flash_attn_cuda_",
    "tree_attn_decode",
]
