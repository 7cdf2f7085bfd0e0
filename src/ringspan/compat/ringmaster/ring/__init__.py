"""`ring_attention` of axolotl-ringmaster, and the layouts and documents of its other functions."""

from ringspan.compat.ringmaster.ring.loop import ring_attention

__all__ = ["ring_attention"]
