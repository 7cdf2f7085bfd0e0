"""Do all ranks make the same call?

gloo accepts a message shorter than the receive buffer silently, and a longer one kills the process. So every call
begins with a header of fixed size from every rank to every rank: the number of the call and a digest of its signature.
No payload is received before the headers agree. If a signature is new, or headers differ, the full descriptions follow;
every rank then raises the same error, which names the field, the odd rank and both values, and the group stays usable.

A rank that refuses its arguments says so in its header, so the others do not wait for it.

`session.call` is the interface to this file.
"""

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ringspan.errors import TransportError
from ringspan.transports.base import Transport

_HEADER = struct.Struct("<4sBxxxIQQ")  # magic, state, length of the description, call number, digest
_MAGIC = b"RSP1"
_KNOWN, _NEW, _REFUSED = range(3)
_READABLE = 200  # characters of one value in an error
_OF_BATCH = ("batch", "input_ids", "labels")  # fields that differ if ranks have different data
_SHOWN = 8  # elements of a tensor in one


class Place(NamedTuple):
    """Identifies one of several identical calls, so that ranks that issue them in a different order are detected."""

    among: str
    number: int


class Signature(NamedTuple):
    """Everything about a call that must be equal on all ranks, as JSON text, and its digest."""

    text: bytes
    digest: int

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> "Signature":
        """Make a signature from values; two values are equal if their texts are."""
        return cls.of_text(json.dumps({name: str(value) for name, value in fields.items()}).encode())

    @classmethod
    def of_text(cls, text: bytes) -> "Signature":
        """Make a signature from JSON text."""
        return cls(text, int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))

    def at(self, place: Place) -> "Signature":
        return Signature.of_text(self.text[:-1] + f', "{place.among}": "{place.number}"}}'.encode())


def describe(values: Mapping[str, Any]) -> dict[str, str]:
    """Short texts of values, tensors by a digest; they differ if the values do."""
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if not isinstance(value, torch.Tensor):
        return str(value)
    if value.numel() <= _SHOWN:
        return str(value.tolist())
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{value.dtype} {tuple(value.shape)} #{hashlib.blake2b(raw.tobytes(), digest_size=8).hexdigest()}"


@dataclass(slots=True)
class Contract:
    """One rank's side of the agreement, for the lifetime of a group."""

    transport: Transport
    num_calls: int = 0
    num_layers: int = 0
    """Layers run since the last call whose forward sends nothing; their gradients do."""
    num_told: int = 0
    """Errors of this rank that the other ranks were told of."""
    agreed: set[int] = field(default_factory=set)

    def agree(self, signature: Signature, timeout_s: float | None, *, is_new: bool = True) -> None:
        """Return once all ranks are known to make this call; raise the same TransportError on all if they do not.

        With `is_new=False` for a signature that will not be used again, descriptions follow only if digests differ.
        """
        if self.transport.world_size == 1:
            return
        state = _KNOWN if not is_new or signature.digest in self.agreed else _NEW
        headers, texts = self._tell(state, signature, timeout_s)
        if texts is None:
            return
        complaint = _complaint(headers, texts)
        if complaint is not None:
            raise TransportError(complaint)
        if is_new:
            self.agreed.add(signature.digest)

    def refuse(self, reason: str, timeout_s: float | None) -> None:
        """Tell the other ranks, if they can be reached, that this one refuses the call they are about to make."""
        with suppress(TransportError):  # the others then end at their deadlines; this rank raises the reason
            self._tell(_REFUSED, Signature.of({"refused": reason}), timeout_s)

    def _tell(
        self, state: int, signature: Signature, timeout_s: float | None
    ) -> "tuple[list[_Header], list[dict[str, str]] | None]":
        """All ranks' headers, and their descriptions unless all headers are the same and known."""
        self.num_calls += 1
        self.num_layers = 0
        mine = _HEADER.pack(_MAGIC, state, len(signature.text), self.num_calls, signature.digest)
        try:
            everyone = self.transport.all_gather_bytes(mine, timeout_s)
        except TransportError as error:
            rank = self.transport.rank
            raise TransportError(f"rank {rank}, call {self.num_calls}, before its first step: {error}") from None
        if state == _KNOWN and everyone.count(mine) == len(everyone):
            return [], None
        headers = [_Header(*_HEADER.unpack(header)) for header in everyone]
        strangers = [str(rank) for rank, header in enumerate(headers) if header.magic != _MAGIC]
        if strangers:
            raise TransportError(
                f"rank {', '.join(strangers)} did not send a header; use one version of ringspan on all ranks"
            )
        longest = max(header.length for header in headers)
        padded = self.transport.all_gather_bytes(signature.text.ljust(longest), timeout_s)
        return headers, [json.loads(text) for text in padded]


class _Header(NamedTuple):
    magic: bytes
    state: int
    length: int
    call: int
    digest: int


def _complaint(headers: list[_Header], texts: list[dict[str, str]]) -> str | None:
    """The difference between the ranks' calls, as the same text on every rank; None if they agree."""
    refusals = [f"rank {rank}: {text['refused']}" for rank, text in enumerate(texts) if "refused" in text]
    if refusals:
        return f"the call was refused, on {'; '.join(refusals)}"
    calls = _by_value({rank: f"call {header.call}" for rank, header in enumerate(headers)})
    if len(calls) > 1:
        return f"the ranks are out of step: {_tell_apart(calls)}; every rank must make every call"
    # For different calls their names suffice, and the dtype: another dtype may have made a rank calibrate first.
    names = {name: None for text in texts for name in text}
    if len({text.get("call") for text in texts}) > 1:
        names = dict.fromkeys(["call", *(["dtype"] if all("dtype" in text for text in texts) else [])])
    differences = {name: _by_value({rank: text.get(name, "-") for rank, text in enumerate(texts)}) for name in names}
    told = [f"{name}: {_tell_apart(values)}" for name, values in differences.items() if len(values) > 1]
    if any(len(differences.get(name, ())) > 1 for name in _OF_BATCH):
        told.append("give all ranks of the group the same batch")
    return f"the ranks do not make the same call; {'; '.join(told)}" if told else None


def _by_value(values: dict[int, str]) -> dict[str, list[int]]:
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return ranks


def _tell_apart(values: dict[str, list[int]]) -> str:
    """Odd ranks first: "rank 2 has A, ranks 0, 1, 3 have B"."""
    parts = []
    for value, ranks in sorted(values.items(), key=lambda item: len(item[1])):
        who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
        parts.append(f"{who} {_brief(value)}")
    return ", ".join(parts)


def _brief(value: str) -> str:
    """A long value, shortened, with a digest that distinguishes it."""
    if len(value) <= _READABLE:
        return value
    digest = hashlib.blake2b(value.encode(), digest_size=4).hexdigest()
    return f"{value[:_READABLE]}… ({len(value)} characters, #{digest})"
