"""Unmodified transformers and pipelines of diffusers on ranks."""

from ringspan.adapters.diffusers.frame_cache import FrameCache, FrameChunk
from ringspan.adapters.diffusers.handle import DiffusersHandle, parallelize

__all__ = [
    "DiffusersHandle",
    "FrameCache",
    "FrameChunk",
    "parallelize",
]
