"""How does a model's plan follow from dry calls?

A size that changes with the number of video tokens as the first argument of the blocks does, follows the tokens. One
that is larger by a number that does not depend on the video has others beside the tokens, such as a prompt. Ints that
change may count tokens. What the sizes suggest is then seen to be true: by probes (`probe.py`), and by a comparison of
two ranks with one process (`compare.py`).
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import nn

from ringspan.adapters.diffusers.compare import verify
from ringspan.adapters.diffusers.leaves import SizePlace, copy_tensors, numbers_of
from ringspan.adapters.diffusers.plan import ONLY_TOKENS, Attends, AttentionPlan, ForwardPlan, Side, TokenDim
from ringspan.adapters.diffusers.probe import Draft, Probe
from ringspan.adapters.diffusers.sizes import CallFamily, Variant, combine, make_family
from ringspan.adapters.diffusers.trace import BlockCall, Origin, Trace
from ringspan.adapters.diffusers.wiring import BlockWiring
from ringspan.errors import UnsupportedError

_MOST_CANDIDATES = 3
_MOST_COMPARED = 2**14  # tokens of a call that is made whole on every rank to be compared

Vector = tuple[int, ...]  # a size in each of the dry calls


def learn(model: nn.Module, wiring: BlockWiring, arguments: dict[str, Any], *, is_verified: bool = True) -> ForwardPlan:
    """Learn a model's plan for calls with arguments like these.

    A model whose sizes cannot be changed, or do not tell which dims follow the tokens, is learned at these very sizes:
    dims are tokens if there are as many of them, and two ranks must agree with one process on this call.
    """
    refusal: UnsupportedError | None = None
    for family in _families(model, wiring, arguments, is_verified=is_verified):
        try:
            return _learn_family(model, wiring, arguments, family, is_verified=is_verified)
        except UnsupportedError as error:
            refusal = refusal or error
    raise refusal or UnsupportedError(
        f"{type(model).__name__}: no size of its arguments could be changed so that its output and the arguments of "
        "its blocks change too, so it is not known which dims follow its tokens; give parallelize a small call as "
        "example="
    )


def _families(
    model: nn.Module, wiring: BlockWiring, arguments: dict[str, Any], *, is_verified: bool
) -> Iterator[CallFamily]:
    """Small calls, and then the call as it is, unless comparing it with two ranks would take too long."""
    family = find_family(model, wiring, arguments)
    if any(variant.is_video for variant in family.variants):
        yield family
    trace = trace_call(model, wiring, arguments)
    longest = max((x.num_q for call in trace.calls for x in call.attended), default=_MOST_COMPARED + 1)
    if is_verified and longest <= _MOST_COMPARED:
        yield CallFamily(Variant(arguments, trace, frozenset(), False), ())


def _learn_family(
    model: nn.Module, wiring: BlockWiring, arguments: dict[str, Any], family: CallFamily, *, is_verified: bool
) -> ForwardPlan:
    """Learn a plan from some calls.

    If several sequences could be the one to split, the first is taken with which two ranks agree with one process. If a
    model counts rows between its blocks, or works on all of them, it is given them whole there.
    """
    table = _SizeTable(type(model).__name__, family)
    refusal: UnsupportedError | None = None
    for tokens, gathers_all, others_first in product(table.candidates(), (False, True), (None, True, False)):
        sizes = table.with_tokens(tokens, gathers_all=gathers_all)
        try:
            drafts = sizes.draft()
            if others_first is not None and not any(map(_has_unknown_side, drafts)):
                continue
            plan = _learn_plan(model, wiring, arguments, family, sizes, drafts, others_first)
            if is_verified:
                calls = [family.base.arguments]
                if family.variants:
                    calls.append(combine(family, lambda given: dry_call(model, wiring, given)))
                plan = verify(model, wiring, plan, calls)
        except UnsupportedError as error:
            refusal = refusal or error
        else:
            return plan
    assert refusal is not None
    raise refusal


def find_family(model: nn.Module, wiring: BlockWiring, arguments: dict[str, Any]) -> CallFamily:
    """Find small calls of the same structure."""
    name = type(model).__name__
    family = make_family(arguments, lambda given: dry_call(model, wiring, given))
    if family is None:
        reason = ""
        try:
            trace_call(model, wiring, arguments)
        except Exception as error:
            reason = f" ({type(error).__name__}: {error})"
        raise UnsupportedError(
            f"{name} does not take smaller copies of this call{reason}; give parallelize a small call as example="
        )
    return family


def _learn_plan(
    model: nn.Module,
    wiring: BlockWiring,
    arguments: dict[str, Any],
    family: CallFamily,
    sizes: "_SizeTable",
    drafts: list[Draft],
    others_first: bool | None,
) -> ForwardPlan:
    probes = [
        Probe(model, drafts, sizes.tokens[0], token, others_first=others_first, gathers_all=sizes.gathers_all)
        for token in (0, sizes.tokens[0] // 2, sizes.tokens[0] - 1)
    ]
    rows = [_run_probe(model, wiring, family.base.arguments, probe) for probe in probes]
    _leave_whole(sizes.name, drafts, probes)
    numbers = numbers_of(arguments)
    fixed = {place: size for place, size in numbers.items() if place not in family.places and place.dim is not None}
    return ForwardPlan(_plan_calls(drafts, rows, sizes), (), fixed)


def trace_call(model: nn.Module, wiring: BlockWiring, arguments: dict[str, Any]) -> Trace:
    """Make a dry call and return its trace."""
    trace = Trace()
    with wiring.running(trace), torch.no_grad():
        trace.end(model(**copy_tensors(arguments)))
    return trace


def dry_call(model: nn.Module, wiring: BlockWiring, arguments: dict[str, Any]) -> Trace | None:
    """A dry call, or None if the model fails."""
    try:
        return trace_call(model, wiring, arguments)
    except UnsupportedError:
        raise
    except Exception:  # whatever a model raises for sizes it does not take
        return None


class _SizeTable:
    """The sizes in all dry calls, side by side."""

    def __init__(self, name: str, family: CallFamily) -> None:
        self.name = name
        self.traces = [family.base.trace, *(variant.trace for variant in family.variants)]
        self.has_attention = any(call.attended for call in family.base.trace.calls)
        self.is_video = [False, *(variant.is_video for variant in family.variants)]
        self.can_change = any(self.is_video)
        self.tokens: Vector = ()
        self.gathers_all = False
        self.num_dims = 3  # of the tensors that blocks hand on
        self._joint = 0  # if no size can be changed: how many rows attend together

    def with_tokens(self, tokens: Vector, *, gathers_all: bool) -> "_SizeTable":
        """The same table, to be read with this sequence as the one that is split; all blocks may return it whole."""
        self.tokens, self.gathers_all = tokens, gathers_all
        attended = {size for call in self.traces[0].calls for x in call.attended for size in (x.num_q, x.num_keys)}
        self._joint = min((x for x in attended if x > tokens[0]), default=tokens[0])
        return self

    def vector(self, number: int, place: SizePlace) -> Vector:
        """One size in all dry calls."""
        return tuple(trace.calls[number].inputs[place] for trace in self.traces)

    def others(self, vector: Vector) -> int | None:
        """The number of rows beside the tokens in the base call; None if the size does not follow the tokens."""
        if not self.can_change:
            return vector[0] - self.tokens[0] if vector[0] in (self.tokens[0], self._joint) else None
        others = [size - tokens for size, tokens in zip(vector, self.tokens, strict=True)]
        if min(others) < 0 or any(x != others[0] for x, video in zip(others, self.is_video, strict=True) if video):
            return None
        return others[0]

    def follows_video(self, vector: Vector) -> bool:
        """Whether the size changes with the video; if none can be changed, whether it is the number of tokens."""
        if not self.can_change:
            return vector[0] == self.tokens[0] if self.tokens else vector[0] > 1
        return any(x != vector[0] for x, video in zip(vector, self.is_video, strict=True) if video)

    def draft(self) -> list[Draft]:
        """A draft of the plan from sizes alone."""
        drafts: list[Draft] = []
        made: set[Origin] = set()
        for number in range(len(self.traces[0].calls)):
            drafts.append(self._draft_call(number, made))
            made |= {(number, path) for path in drafts[-1].outputs}
        last = max((number for number, draft in enumerate(drafts) if draft.tokens), default=None)
        if last is None:
            raise UnsupportedError(f"{self.name}: no block takes tokens")
        for number, (draft, call) in enumerate(zip(drafts, self.traces[0].calls, strict=True)):
            is_whole = self.gathers_all or number == last
            draft.gathered = {x for x in draft.outputs if is_whole or (number, x) in self.traces[0].output_origins}
            draft.whole = {
                x for x in draft.tokens if self.gathers_all or call.origins[x] & self.traces[0].output_origins
            }
        return drafts

    def candidates(self) -> list[Vector]:
        """The sequences that could be split, beginning with the one that most blocks receive."""
        calls = self.traces[0].calls
        streams: list[set[Vector]] = []
        for number, call in enumerate(calls):
            places = [place for place in call.inputs if self._may_be_tokens(call, place)]
            streams.append({x for x in (self.vector(number, place) for place in places) if self.follows_video(x)})
        found = set[Vector]().union(*streams)
        if not found and self.num_dims == 3:  # perhaps it has no batch
            self.num_dims = 2
            return self.candidates()
        if not found:
            names = ", ".join(sorted({call.name for call in calls})[:4])
            raise UnsupportedError(
                f"{self.name}: none of its blocks ({names} …) takes tokens, (batch, tokens, features), whose number "
                "follows the size of the video"
            )

        def rank(tokens: Vector) -> tuple[int, int, int]:
            self.tokens = tokens
            joined = sum(any(self.others(x) is not None for x in stream) for stream in streams)
            return joined, sum(tokens in stream for stream in streams), tokens[0]

        return sorted(found, key=rank, reverse=True)[:_MOST_CANDIDATES]

    def _draft_call(self, number: int, made: set[Origin]) -> Draft:
        call = self.traces[0].calls[number]
        draft = Draft(call.name)
        by_path: dict[str, dict[int, int]] = {}
        for place in call.inputs:
            vector = self.vector(number, place)
            others = self.others(vector)
            if place.dim is None:
                draft.counts |= {place.path} if self.follows_video(vector) else set()
            elif others is not None:
                by_path.setdefault(place.path, {})[place.dim] = others
        for path, dims in by_path.items():
            if len(dims) == 1:
                dim, others = dims.popitem()
                draft.tokens[path] = (dim, others > 0, bool(call.origins[path] & made))
            elif len(dims) != 2 or any(call.origins[path] & made):
                raise UnsupportedError(
                    f"{self.name}: argument {path} of {call.name} follows the tokens in several dims"
                )
        has_stream = any(self._is_stream(call, path, *found) for path, found in draft.tokens.items())
        # A block of an embedding, say, that does not attend works on all tokens if it is given all.
        needs_all = (
            self.has_attention and not call.attended and not any(is_made for *_, is_made in draft.tokens.values())
        )
        if not has_stream or needs_all:
            draft.tokens.clear()
            return draft
        draft.attended = [self._attended(number, x) for x in range(len(call.attended))]
        for place in call.outputs:
            others = self.others(tuple(trace.calls[number].outputs.get(place, -1) for trace in self.traces))
            if others is not None and place.dim is not None:
                draft.outputs[place.path] = (place.dim, others > 0)
        return draft

    def _may_be_tokens(self, call: BlockCall, place: SizePlace) -> bool:
        """Could this be the dim of (batch, tokens, features), or of (tokens, features)?"""
        return call.ndims.get(place.path) == self.num_dims and place.dim in range(self.num_dims - 1)

    def _is_stream(self, call: BlockCall, path: str, dim: int, has_others: bool, is_made: bool) -> bool:
        del dim
        return call.ndims.get(path, 0) >= self.num_dims and (is_made or not has_others)

    def _attended(self, number: int, which: int) -> tuple[bool | None, bool | None]:
        seen = [trace.calls[number].attended[which] for trace in self.traces]
        q = self.others(tuple(x.num_q for x in seen))
        keys = self.others(tuple(x.num_keys for x in seen))
        return None if q is None else q > 0, None if keys is None else keys > 0


def _has_unknown_side(draft: Draft) -> bool:
    return any(has_others and not is_made for _, has_others, is_made in draft.tokens.values())


def _run_probe(
    model: nn.Module, wiring: BlockWiring, arguments: dict[str, Any], probe: Probe
) -> dict[tuple[int, str], int]:
    """Find how many rows stand before the tokens in every tensor that follows them."""
    hooks = probe.watch(model)
    try:
        with wiring.running(probe), torch.no_grad():
            model(**copy_tensors(arguments))
    except UnsupportedError as error:
        raise UnsupportedError(f"{type(model).__name__}: {error}") from None
    finally:
        for hook in hooks:
            hook.remove()
    return {where: row - probe.token for where, row in probe.rows.items()}


def _leave_whole(name: str, drafts: list[Draft], probes: list[Probe]) -> None:
    """Let a few blocks that join tokens run on all of them; refuse the model if they are half of its blocks."""
    refused = {number: error for probe in probes for number, error in probe.refused.items()}
    num_split = sum(bool(draft.attended) for draft in drafts) - len(refused)
    if refused and num_split <= len(refused):
        raise UnsupportedError(f"{name}: {refused[min(refused)]}")
    for number in refused:
        drafts[number] = Draft(drafts[number].name)


def _plan_calls(
    drafts: list[Draft], rows: list[dict[tuple[int, str], int]], sizes: _SizeTable
) -> tuple[AttentionPlan, ...]:
    sides = _Sides(rows, drafts)
    calls = []
    for number, draft in enumerate(drafts):
        attends = tuple(
            Attends(sides.of(number, f"q of call {call}", q), sides.of(number, f"k of call {call}", keys))
            for call, (q, keys) in enumerate(draft.attended)
        )
        joint = next((side for x in attends for side in (x.q, x.keys) if side is not None and side.has_others), None)
        tokens = {}
        for path, (dim, has_others, is_made) in draft.tokens.items():
            side: Side | None = ONLY_TOKENS
            if has_others:
                side = sides.of(number, f"argument {path}", True) if is_made else joint
            if side is None:
                raise UnsupportedError(
                    f"{sizes.name}: argument {path} of {draft.name} has a row for each token and for others, and it is "
                    "not known which come first"
                )
            tokens[path] = TokenDim(dim, side, is_made and path not in draft.whole)
        outputs = {}
        for path, (dim, has_others) in draft.outputs.items():
            side = sides.of(number, path, has_others)
            if side is not None:
                outputs[path] = TokenDim(dim, side, path not in draft.gathered)
        tensors = tuple(sizes.traces[0].calls[number].origins)
        calls.append(AttentionPlan(draft.name, tensors, tokens, outputs, tuple(sorted(draft.counts)), attends))
    attends = tuple(x for call in calls for x in call.attends)
    if attends and all(x.q is None for x in attends):  # it is the prompt that would be split
        raise UnsupportedError(f"{sizes.name}: none of its blocks attends from the tokens that could be split")
    return tuple(calls)


class _Sides:
    """The rows beside the tokens, as the probes found them."""

    def __init__(self, rows: list[dict[tuple[int, str], int]], drafts: list[Draft]) -> None:
        self._rows = rows
        self._drafts = drafts

    def of(self, number: int, what: str, has_others: bool | None) -> Side | None:
        """The sides of a tensor's dim; None if it has no tokens."""
        offsets = {found.get((number, what)) for found in self._rows}
        if has_others is None or offsets == {None}:
            return None
        if len(offsets) > 1:
            raise UnsupportedError(f"{what} of {self._drafts[number].name} has the tokens in another order, or not all")
        (offset,) = offsets
        assert offset is not None
        if not has_others and offset:
            raise UnsupportedError(f"{what} of {self._drafts[number].name} shifts its tokens by {offset}")
        return Side(has_others, bool(offset))
