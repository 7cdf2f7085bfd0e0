"""Run unmodified models of Hugging Face transformers on ranks."""

from ringspan.adapters.transformers.handle import Handle, parallelize

__all__ = [
    "Handle",
    "parallelize",
]
