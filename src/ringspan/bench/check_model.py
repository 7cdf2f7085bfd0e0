"""Is what the ranks computed right? Held to one process that knows nothing of this library.

In float32 and float64 the results of one process are the right ones. Half types round at every step, so there both are
held to one process with the same weights in float32, and ranks may be twice as far off as one process is.
"""

import copy
from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import torch

from ringspan.bench.model_runs import OneProcess, Trained
from ringspan.bench.one_device import largest_error
from ringspan.bench.result import ResultCheck

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
TIMES = 2  # error allowed in a half type, relative to that of one process in the same type

Answer = list[torch.Tensor]
"""The logits (batch, vocabulary) after the prompts and after each token that follows."""


class Outcome(NamedTuple):
    """What one run of the model computed."""

    answer: Answer
    trained: Trained


class Checked(NamedTuple):
    """Errors of logits, loss and gradients, and how many of the tokens that the ranks chose are right."""

    checks: dict[str, ResultCheck]
    right_tokens: int
    num_tokens: int


def check_model(
    alone: OneProcess,
    given: Sequence[torch.Tensor],
    of_one_process: Outcome,
    of_ranks: Outcome,
    chosen: Sequence[Sequence[Sequence[int]]],
) -> Checked:
    """Compare the ranks with one process. `chosen` holds, for every rank, its likeliest token after each step."""
    dtype = alone.model.embedding.dtype
    name, exact = "one process", of_one_process
    tolerances = dict.fromkeys(_errors(exact, exact), TOLERANCE.get(dtype, 0.0))
    if dtype not in TOLERANCE:
        name, exact = "one process in float32", _in_float32(alone, given)
        tolerances = {what: TIMES * error for what, error in _errors(of_one_process, exact).items()}
        tolerances["loss"] = tolerances["logits"]  # the loss is a mean, which can be right by chance
    found = _errors(of_ranks, exact)
    checks = {
        what: ResultCheck(error if isfinite(error) else None, tolerances[what], name) for what, error in found.items()
    }
    tokens = [
        _is_likeliest(logits, sequence, token, tolerances["logits"])
        for of_rank in chosen
        for logits, row in zip(exact.answer, of_rank, strict=True)
        for sequence, token in enumerate(row)
    ]
    return Checked(checks, sum(tokens), len(tokens))


def _in_float32(alone: OneProcess, given: Sequence[torch.Tensor]) -> Outcome:
    wide = OneProcess(alone.settings, copy.deepcopy(alone.model).float(), alone.tokens)
    return Outcome([wide.prefill(), *(wide.decode(tokens) for tokens in given)], wide.train())


def _errors(found: Outcome, right: Outcome) -> dict[str, float]:
    """Errors of logits and loss are |difference| / max(1, |value|); those of gradients are relative to the largest."""
    (answer, trained), (right_answer, right_trained) = found, right
    gradients = zip(trained.gradients, right_trained.gradients, strict=True)
    scaled = [((x.double() - y.double()).abs().max() / y.double().abs().max()).item() for x, y in gradients]
    return {
        "logits": largest_error(torch.stack(answer), torch.stack(right_answer)).item(),
        "loss": largest_error(trained.loss, right_trained.loss).item(),
        "gradients": torch.tensor(scaled).max().item(),  # NaN if there is one
    }


def _is_likeliest(logits: torch.Tensor, sequence: int, token: int, tolerance: float) -> bool:
    """Two logits count as equal if they differ by less than the sum of their tolerances."""
    likeliest = logits[sequence].max().item()
    return logits[sequence, token].item() >= likeliest - 2 * tolerance * max(1.0, abs(likeliest))
