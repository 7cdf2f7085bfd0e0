"""What does a cache hold on this rank, and what does this rank know of all ranks?"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ringspan.cache._placement import Placement
from ringspan.cache._storage import RowSpec, Stored
from ringspan.errors import CacheError
from ringspan.kernels import Kernel, KernelRequest, choose_kernel
from ringspan.mask import Mask
from ringspan.runtime.codec import Codec
from ringspan.runtime.session import Session
from ringspan.schedule import Heads

if TYPE_CHECKING:
    from ringspan.cache._turn import Turn


@dataclass(frozen=True, slots=True)
class CacheModel:
    num_layers: int
    heads: Heads
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    masks: tuple[Mask, ...]
    """By layer."""

    def __str__(self) -> str:
        heads = f"{self.heads.num_heads} heads over {self.heads.num_kv_heads}"
        dims = f"head_dim {self.head_dim}, {self.v_head_dim} for v"
        masks = ", ".join(map(str, dict.fromkeys(self.masks)))
        digest = hashlib.blake2b(str(self.masks).encode(), digest_size=4).hexdigest()
        return f"{self.num_layers} layers, {heads}, {dims}, {self.dtype}, masks {masks} #{digest}"


@dataclass(slots=True)
class CacheState:
    """One rank's tokens, and the placement of all ranks' tokens."""

    model: CacheModel
    group: Any
    """Kept alive: a session is collected with its group."""
    session: Session
    spec: RowSpec
    codec: Codec
    """How K and V are stored."""
    kernel_name: str
    """The argument `kernel=`."""
    max_tokens: int | None
    contents: str
    """Model and storage, as text: a saved cache fits only a cache of equal contents."""
    description: str
    """Everything that must be equal on all ranks."""
    placements: dict[int, Placement] = field(default_factory=dict)
    stored: dict[int, Stored] = field(default_factory=dict)
    history: str = ""
    """Digest of all operations so far; equal on all ranks."""
    turn: "Turn | None" = None
    kernels: dict[float | None, Kernel] = field(default_factory=dict)
    """By softcap."""

    @property
    def rank(self) -> int:
        return self.session.transport.rank

    @property
    def world_size(self) -> int:
        return self.session.transport.world_size

    def kernel(self, softcap: float | None) -> Kernel:
        """The kernel of a layer with this softcap."""
        if softcap not in self.kernels:
            model = self.model
            request = KernelRequest(self.spec.device, model.dtype, model.head_dim, model.v_head_dim, softcap=softcap)
            self.kernels[softcap] = choose_kernel(self.kernel_name, request)
        return self.kernels[softcap]

    def note(self, *operation: object) -> None:
        """Add an operation to the history."""
        text = f"{self.history} {operation}"
        self.history = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def tidy(self) -> None:
        """Free all memory without committed tokens."""
        for sequence in [*self.stored]:
            if sequence in self.placements:
                self.stored[sequence].trim(self.placements[sequence].counts[self.rank])
            else:
                del self.stored[sequence]

    def refuse_during_turn(self, operation: str) -> None:
        if self.turn is not None:
            raise CacheError(f"{operation} during a turn", remedy="commit or abort the turn first")

    def check_room(self, after: Mapping[int, Placement], argument: str, value: object) -> None:
        """Refuse an operation after which some rank would hold too many tokens."""
        if self.max_tokens is None:
            return
        held = [sum(placement.counts[rank] for placement in after.values()) for rank in range(self.world_size)]
        fullest = max(range(self.world_size), key=held.__getitem__)
        if held[fullest] > self.max_tokens:
            raise CacheError(
                f"rank {fullest} would hold {held[fullest]} tokens and max_tokens is {self.max_tokens}",
                argument=argument,
                value=value,
                remedy="drop or truncate sequences, or make a larger cache",
            )
