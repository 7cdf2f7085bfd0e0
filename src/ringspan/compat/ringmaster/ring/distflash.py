"""Contiguous shards whose work axolotl-ringmaster deals to idle ranks."""

from ringspan.compat.ringmaster.ring.loop import distflash_attention

__all__ = ["distflash_attention"]
