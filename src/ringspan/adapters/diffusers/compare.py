"""Do two ranks make of small calls what one process makes of them?

Compared are q, k, v and the output of every call of attention, the outputs of the blocks and those of the model: a gate
that is 0 in fresh weights hides what attention made, and a wrong rotary embedding is seen in q before it is lost in a
sum. So the first difference also tells where to look.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ringspan.adapters.diffusers.leaves import copy_tensors, flatten
from ringspan.adapters.diffusers.plan import ForwardPlan
from ringspan.adapters.diffusers.run import Noted, RankOptions, TokenShardRun, Walk, rows_of
from ringspan.adapters.diffusers.wiring import BlockWiring, SdpaCall
from ringspan.errors import UnsupportedError
from ringspan.transports.in_process import run_in_process

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TIMEOUT_S = 600.0


class AloneRun(Walk):
    """A forward in one process that records tensors for the comparison."""

    def enter(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.begin(name)
        return arguments

    def leave(self, name: str, output: Any) -> Any:  # noqa: ARG002
        call = self.end()
        if call.takes_part:
            self.note_outputs(call, output)
        return output

    def attend(self, asked: SdpaCall) -> torch.Tensor:
        """Run torch's attention and record it."""
        found = self.next_attends()
        out = asked.alone()
        if found is not None:
            self.note_attention(*found, asked, out)
        return out


class _Result(NamedTuple):
    notes: list[Noted]
    outputs: list[Noted]


def verify(model: nn.Module, wiring: BlockWiring, plan: ForwardPlan, calls: Sequence[dict[str, Any]]) -> ForwardPlan:
    """The plan, with the ints that count tokens; refuses the model if two ranks make something else of a call."""
    counts = tuple(sorted({name for call in plan.calls for name in call.counts}))
    guesses: list[tuple[str, ...]] = [(), *([counts, *((name,) for name in counts)] if counts else [])]
    expected = [_run(model, wiring, AloneRun(plan, []), call) for call in calls]
    models = [model, _copy_modules(model)]
    refusal: UnsupportedError | None = None
    for guess in guesses:
        guessed = replace(plan, cut_counts=guess)
        try:
            for call, result in zip(calls, expected, strict=True):
                _compare(models, wiring, guessed, call, result)
        except UnsupportedError as error:
            refusal = refusal or error
        else:
            return guessed
    assert refusal is not None
    raise refusal


def _run(model: nn.Module, wiring: BlockWiring, run: AloneRun | TokenShardRun, call: dict[str, Any]) -> _Result:
    assert run.notes is not None
    with wiring.running(run), torch.no_grad():
        output = model(**copy_tensors(call))
    run.check_complete()
    return _Result(run.notes, [Noted(path, x, 0, None) for path, x in flatten({"the output": output}) if _is_tensor(x)])


def _compare(
    models: Sequence[nn.Module], wiring: BlockWiring, plan: ForwardPlan, call: dict[str, Any], expected: _Result
) -> None:
    name = type(models[0]).__name__

    def on_rank(group: Any) -> str | None:
        options = RankOptions(group, "pass_kv", None)
        run = TokenShardRun(plan, options, [])
        try:
            result = _run(models[options.rank], wiring, run, call)
        except Exception as error:
            raise UnsupportedError(f"{run.where}: {type(error).__name__}: {error}") from error
        assert run.num_tokens is not None
        for mine, whole in zip((*result.notes, *result.outputs), (*expected.notes, *expected.outputs), strict=True):
            assert mine.label == whole.label
            rows = rows_of(whole.side, whole.value, whole.dim, run.num_tokens, options)
            difference = _difference(mine.value, rows, whole.value)
            if difference is not None:
                return (
                    f"{whole.label} differs by {difference} on rank {options.rank} of 2 from one process: something "
                    "besides attention joins tokens, or counts them"
                )
        return None

    try:
        found = [x for x in run_in_process(on_rank, 2, timeout_s=_TIMEOUT_S) if x is not None]
    except Exception as error:
        raise UnsupportedError(f"{name} fails on two ranks, {error}") from error
    if found:
        raise UnsupportedError(f"{found[0]}; verify=False leaves out this check", argument=name)


def _copy_modules(model: nn.Module) -> nn.Module:
    """A copy with the same weights: a forward may change its modules for a while, as the scale of a LoRA does."""
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, shared)
    except Exception:  # a module that holds a lock or a process group cannot be copied
        return model


def _difference(mine: torch.Tensor, rows: torch.Tensor, whole: torch.Tensor) -> str | None:
    """The largest difference relative to the largest number, if it exceeds the tolerance; else None."""
    if mine.shape != rows.shape:
        return f"its shape, {tuple(mine.shape)} instead of {tuple(rows.shape)},"
    if not mine.is_floating_point():
        return None if torch.equal(mine, rows) else "some elements"
    largest = whole.abs().max().double() if whole.numel() else torch.tensor(1.0)
    error = (mine.double() - rows.double()).abs().max() if rows.numel() else torch.tensor(0.0)
    relative = float(error / largest.clamp_min(torch.finfo(torch.float32).tiny))
    return None if relative <= _TOLERANCES.get(mine.dtype, 0.1) else f"{relative:.1e}"


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)
