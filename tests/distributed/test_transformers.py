"""Models of transformers on gloo processes, held to themselves on one process without ringspan."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, values

from families import EQUAL, FAMILIES, VOCABULARY, Family

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(240)]

TOLERANCE = 1e-5  # of the largest number in a tensor
NEW_TOKENS = 64


class Measured(NamedTuple):
    """Everything a model says about a batch and a prompt, whole."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: list[torch.Tensor]
    tokens: torch.Tensor | None
    scores: torch.Tensor | None


def make_batch(seed: int = 0, rows: int = 2, seq_len: int = 37) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, seq_len), generator=generator)
    labels = ids.clone()
    labels[0, 5:9] = -100
    return {"input_ids": ids, "labels": labels}


def generate(model: Any, prompt: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the logits they were chosen from."""
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False} | options
    out = model.generate(prompt, return_dict_in_generate=True, output_logits=True, **settings)
    return out.sequences, torch.stack(out.logits, 1)


def differentiate(loss: torch.Tensor, model: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


def measure_alone(model: Any, family: Family) -> Measured:
    batch = make_batch()
    output = model(**batch)
    gradients = differentiate(output.loss, model)
    tokens, scores = generate(model, batch["input_ids"][:1]) if family.generates else (None, None)
    return Measured(output.logits.detach(), output.loss.detach(), gradients, tokens, scores)


def measure_on_ranks(model: Any, family: Family, handle: Any) -> Measured:
    import ringspan as rs

    batch = make_batch()
    part = handle.shard(batch)
    output = model(**part)
    gradients = differentiate(output.loss, model)
    for grad in gradients:
        dist.all_reduce(grad)
    logits = rs.gather(output.logits.detach(), part["ringspan"].layout, dim=1)
    tokens, scores = generate(model, batch["input_ids"][:1]) if family.generates else (None, None)
    return Measured(logits, output.loss.detach(), gradients, tokens, scores)


def differences(found: Measured, expected: Measured) -> dict[str, float]:
    """The largest difference of each kind, in units of the largest number."""
    told = {"logits": relative(found.logits, expected.logits), "loss": relative(found.loss, expected.loss)}
    pairs = zip(found.gradients, expected.gradients, strict=True)
    told["gradients"] = max(relative(*pair) for pair in pairs)
    if expected.tokens is not None:
        told["tokens"] = float((found.tokens != expected.tokens).sum())
        told["generated logits"] = relative(found.scores, expected.scores)
    return told


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=0.1))


def compare_families(rank: int) -> dict[str, dict[str, float]]:
    from ringspan.adapters.transformers import parallelize

    told = {}
    for name in EQUAL:
        family = FAMILIES[name]
        model = family.make()
        expected = measure_alone(model, family)
        with parallelize(model) as handle:
            told[name] = differences(measure_on_ranks(model, family, handle), expected)
        again = measure_alone(model, Family(**vars(family) | {"generates": False}))
        assert torch.equal(again.logits, expected.logits), "restored"
    return told


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_family_is_equal_to_one_process(world_size: int) -> None:
    """Logits, loss, gradients, and 64 tokens with their logits after a prompt of odd length."""
    for told in values(run_ranks(compare_families, world_size, timeout_s=200)):
        for name, found in told.items():
            assert found.keys() >= {"logits", "loss", "gradients"} | ({"tokens"} if FAMILIES[name].generates else set())
            worst = max(found.values())
            assert worst < TOLERANCE, f"{name}: {found}"
