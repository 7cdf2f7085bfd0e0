"""What is verified: a function that computes this rank's part of attention, and what it says it can do."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch

from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.verify.cases import FEATURES, LAYOUTS, VerifyCase
from ringspan.verify.patterns import parts_of

RanksAs = Literal["threads", "processes"]


class TargetCall(NamedTuple):
    """One attention as one rank sees it: its shards of q, k and v, (batch, heads, seq, dim), and what is asked for."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: Mask
    layout: Layout
    kv_layout: Layout
    scale: float | None
    sinks: torch.Tensor | None
    softcap: float | None
    group: Any
    rank: int
    case: VerifyCase

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.case.world_size

    @property
    def is_causal(self) -> bool:
        """Whether the mask has a causal part, as `causal=True` means it."""
        kinds = [part for part in parts_of(self.case.pattern) if part[0] in ("causal", "window")]
        return any(part[0] == "causal" or part[2] == 0 for part in kinds)

    @property
    def window(self) -> tuple[int, int] | None:
        """(left, right) as flash attention counts them: -1 is unbounded."""
        for part in parts_of(self.case.pattern):
            if part[0] == "window":
                left, right = part[1:]
                return (-1 if left is None else left, -1 if right is None else right)
        return None

    @property
    def document_lengths(self) -> tuple[int, ...] | None:
        """Lengths of the packed documents, cut at the length of the sequence."""
        for part in parts_of(self.case.pattern):
            if part[0] == "documents":
                return _cut(part[1], self.case.length + self.case.past)
        return None

    @property
    def positions(self) -> torch.Tensor:
        """Global positions of this rank's queries."""
        return torch.from_numpy(self.layout.positions(self.rank))

    @property
    def kv_positions(self) -> torch.Tensor:
        """Global positions of this rank's keys."""
        return torch.from_numpy(self.kv_layout.positions(self.rank))


def _cut(lengths: Iterable[int], total: int) -> tuple[int, ...]:
    kept: list[int] = []
    for length in lengths:
        kept.append(min(length, total - sum(kept)))
    return tuple(length for length in kept if length > 0)


class Target:
    """An attention to verify. Subclass it and write `attend`.

    Attributes:
        name: for reports.
        features: what it can do, of `rs.verify.FEATURES`. A case that needs another feature must be refused by it.
        layouts: how it can be sharded, of "contiguous", "zigzag" and "striped".
        ranks: "threads" if `group` may be a rank of `rs.run_in_process`, else "processes" with a gloo group.
    """

    name: str = "target"
    features: Collection[str] = ("causal", "full", "float32", "backward")
    layouts: Collection[str] = LAYOUTS
    ranks: RanksAs = "threads"

    def attend(self, call: TargetCall) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """This rank's out, or (out, lse), with gradients if q asks for them; raise to refuse."""
        raise NotImplementedError

    def surroundings(self, call: TargetCall) -> AbstractContextManager[Any]:
        """A context around the forward and the backward pass."""
        del call
        return nullcontext()

    def can_ask(self, case: VerifyCase) -> bool:
        """Whether the target has a way to be asked for a case at all."""
        del case
        return True


_NAMES: dict[str, Callable[[TargetCall], Any]] = {
    "mask": lambda call: call.mask,
    "layout": lambda call: call.layout,
    "kv_layout": lambda call: call.kv_layout,
    "group": lambda call: call.group,
    "process_group": lambda call: call.group,
    "rank": lambda call: call.rank,
    "world_size": lambda call: call.world_size,
    "causal": lambda call: call.is_causal,
    "is_causal": lambda call: call.is_causal,
    "window": lambda call: call.window,
    "window_size": lambda call: call.window or (-1, -1),
    "document_lengths": lambda call: call.document_lengths,
    "scale": lambda call: call.scale,
    "softmax_scale": lambda call: call.scale,
    "sinks": lambda call: call.sinks,
    "s_aux": lambda call: call.sinks,
    "softcap": lambda call: call.softcap,
    "positions": lambda call: call.positions,
    "position_ids": lambda call: call.positions,
    "kv_positions": lambda call: call.kv_positions,
}
_GIVES = {
    "mask": ("causal", "full", "window", "documents", "prefix", "frames", "empty_rows", "per_row"),
    **dict.fromkeys(("causal", "is_causal"), ("causal", "full")),
    **dict.fromkeys(("window", "window_size"), ("causal", "window")),
    "document_lengths": ("documents",),
    "kv_layout": ("longer_kv",),
    **dict.fromkeys(("scale", "softmax_scale"), ("scale",)),
    **dict.fromkeys(("sinks", "s_aux"), ("sinks",)),
    "softcap": ("softcap",),
    **dict.fromkeys(("positions", "position_ids"), ("rope",)),
}
_ALWAYS = ("float64", "float32", "backward", "gqa", "few_heads", "odd_length")
_NEED_PARAMETER = {"causal", "window", "documents", "prefix", "frames", "per_row", "empty_rows", "longer_kv"} | {
    *("scale", "sinks", "softcap", "rope"),
}


class FunctionTarget(Target):
    """A plain function `f(q, k, v, **options)`: it is passed those options that its signature has."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        features: Collection[str] | None = None,
        layouts: Collection[str] = ("contiguous",),
        ranks: RanksAs = "threads",
    ) -> None:
        parameters = _parameters_of(function)
        self._function = function
        self._options = [name for name in parameters if name in _NAMES]
        self._askable = {feature for option in self._options for feature in _GIVES.get(option, ())} | {"full"}
        missing = [
            parameter.name
            for parameter in list(parameters.values())[3:]
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in _NAMES
        ]
        if missing:
            raise UnsupportedError(
                f"the verifier does not know what to pass for {', '.join(missing)}",
                argument="function",
                value=getattr(function, "__qualname__", function),
                remedy="give a Target, whose attend() calls it",
            )
        self.name = name or str(getattr(function, "__qualname__", type(function).__name__))
        self.features = check_features((*_ALWAYS, *self._askable) if features is None else features)
        self.layouts = tuple(layouts)
        self.ranks = ranks

    def attend(self, call: TargetCall) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        options = {name: _NAMES[name](call) for name in self._options}
        result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self._function(call.q, call.k, call.v, **options)
        return result

    def can_ask(self, case: VerifyCase) -> bool:
        """Refuse a case with an option that no parameter can express."""
        return not (case.features & _NEED_PARAMETER) - self._askable


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function that takes q, k and v first."""
    try:
        signature = inspect.signature(function)
        signature.bind_partial(*"qkv")
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            f"the verifier passes q, k and v by position: {error}",
            argument="function",
            value=getattr(function, "__qualname__", function),
            remedy="give a Target, whose attend() calls it",
        ) from error
    return signature.parameters


def check_features(features: Collection[str], argument: str = "features") -> frozenset[str]:
    """Refuse a feature that no case asks for."""
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        raise ShapeError(
            f"a feature is one of {', '.join(FEATURES)}", argument=argument, value=unknown, remedy="leave it out"
        )
    return frozenset(features)


def load_object(path: str) -> Any:
    """The object that `module:name` names."""
    module, _, name = path.partition(":")
    try:
        found = import_module(module)
    except (Exception, SystemExit) as error:
        cause = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UnsupportedError(
            f"the module cannot be imported: {cause}",
            argument="target",
            value=path,
            remedy="install it, or check its name",
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UnsupportedError(
                f"the module has no {name}", argument="target", value=path, remedy="check the name after the colon"
            )
        found = getattr(found, part)
    return found
