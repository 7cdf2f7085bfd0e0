"""What does a training forward on a whole batch return, so that a loss can be computed from it?

Every rank gets the rows of all ranks, and each computes the same loss from them. The gradient of a row goes to the rank
that computed it, once.
"""

from typing import Any

import torch

from ringspan.layout import Layout
from ringspan.runtime.session import session_of
from ringspan.training import gather

FUSED = "fused_lm_head"  # with this argument a model of TRL's trainers returns these rows, and no logits
FUSED_ROWS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


def whole_rows(part: torch.Tensor, layout: Layout, group: Any) -> torch.Tensor:
    """Return the rows of all ranks, (batch, seq, …); this rank's rows keep their gradient."""
    whole = gather(part.detach(), layout, group, dim=1)
    if not part.requires_grad:
        return whole
    positions = torch.from_numpy(layout.positions(session_of(group).transport.rank)).to(part.device)
    return whole.index_copy(1, positions, part)
