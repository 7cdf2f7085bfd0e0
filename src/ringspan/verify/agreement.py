"""Do all ranks hold the same numbers? Digests of what must be equal everywhere, and which rank is odd."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ringspan.arguments import Kind, check_arguments
from ringspan.errors import ShapeError
from ringspan.runtime.contract import Signature
from ringspan.runtime.session import session_of

_DIGEST_BYTES = 16
_TENSORS = Kind(
    "tensors by name, or a list of them",
    'give {"weight": w}',
    lambda value: isinstance(value, Mapping | list | tuple),
)


class Disagreement(NamedTuple):
    """A tensor that differs; `odd_ranks` are not as most, or not as rank 0 if there is no majority."""

    name: str
    odd_ranks: tuple[int, ...]


class Agreement(NamedTuple):
    """True if all ranks hold the same tensors."""

    disagreements: tuple[Disagreement, ...]

    def __bool__(self) -> bool:
        return not self.disagreements

    def __str__(self) -> str:
        if self:
            return "all ranks agree"
        told = (f"{name} differs on rank {', '.join(map(str, ranks))}" for name, ranks in self.disagreements)
        return "; ".join(told)


def ranks_agree(
    tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor, group: Any = None
) -> Agreement:
    """Compare tensors that must be equal on all ranks: weights, inputs, a loss. All ranks must call this.

    Bits, shapes and types are compared; NaN equals NaN of the same bits. A digest of each is sent.

    Args:
        tensors: By name, or a list; in the same order on every rank.
        group: As in `rs.attention`.

    Returns:
        The same on every rank; use it as a condition: `assert rs.verify.ranks_agree({"weight": w})`.
    """
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    check_arguments(tensors=(_TENSORS, tensors))
    named = tensors if isinstance(tensors, Mapping) else {f"tensors[{i}]": x for i, x in enumerate(tensors)}
    names = list(named)
    with session_of(group).call() as call:
        own = [_digest("names", repr(names).encode()), *(digest_of(name, x) for name, x in named.items())]
        everyone = call.gather(Signature.of({"call": "ranks_agree"}), b"".join(own))
    numbers = [len(payload) // _DIGEST_BYTES - 1 for payload in everyone]
    if len(set(numbers)) > 1:
        raise ShapeError(f"ranks give {numbers} tensors", argument="tensors", remedy="give the same ones on every rank")
    found = []
    for i, name in enumerate(["the list of names", *names]):
        digests = [payload[i * _DIGEST_BYTES : (i + 1) * _DIGEST_BYTES] for payload in everyone]
        odd = _odd_ones(digests)
        if odd:
            found.append(Disagreement(name, odd))
    return Agreement(tuple(found))


def digest_of(name: str, x: torch.Tensor) -> bytes:
    """A digest of the bits, shape and dtype of a tensor."""
    if not isinstance(x, torch.Tensor):
        raise ShapeError("expected a tensor", argument=f"tensors[{name!r}]", value=x)
    raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return _digest(f"{tuple(x.shape)} {x.dtype}", raw)


def _digest(about: str, raw: bytes) -> bytes:
    return hashlib.blake2b(about.encode() + b"\0" + raw, digest_size=_DIGEST_BYTES).digest()


def _odd_ones(digests: Sequence[bytes]) -> tuple[int, ...]:
    ((most_common, number),) = Counter(digests).most_common(1)
    usual = most_common if number > len(digests) / 2 else digests[0]
    return tuple(rank for rank, digest in enumerate(digests) if digest != usual)
