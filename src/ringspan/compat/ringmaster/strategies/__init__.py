"""The attention functions that axolotl-ringmaster registers."""

from ringspan.compat.ringmaster.config import auto_select
from ringspan.compat.ringmaster.strategies.usp import make_usp_attention

__all__ = ["auto_select", "make_usp_attention"]
