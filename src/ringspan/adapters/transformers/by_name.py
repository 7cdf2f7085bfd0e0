"""`attn_implementation="ringspan"`: a model that is to be parallelized, and until then runs in one process only.

The name is registered when this package is imported. On a single rank it is PyTorch's attention. On more than one it
refuses, since a model that nobody parallelized would see its own shard only and say nothing.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ringspan.errors import UnsupportedError
from ringspan.runtime.session import session_of

NAME = "ringspan"


def register_name() -> None:
    """Make the name known to transformers."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if session_of(None).transport.world_size > 1:
        raise UnsupportedError(
            "the model was not parallelized, so each rank would attend to its own tokens only",
            argument="attn_implementation",
            value=NAME,
            remedy="call rs.adapters.transformers.parallelize(model) before its first forward",
        )
    for name in ("s_aux", "softcap"):
        if options.get(name) is not None:
            raise UnsupportedError(
                "PyTorch's attention does not compute this on one rank",
                argument=name,
                remedy="load the model with attn_implementation='eager', then parallelize it",
            )
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out, None
