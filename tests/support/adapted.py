"""Parallelized models on ranks in threads, and comparisons for their tests."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import ringspan as rs
from ringspan.adapters.transformers import Handle, parallelize
from support.families import VOCABULARY

TOLERANCE = 1e-5
Generated = tuple[torch.Tensor, torch.Tensor]
"""Tokens, and the logits they were chosen from."""

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def tokens(rows: int = 2, seq_len: int = 23, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, seq_len), generator=torch.Generator().manual_seed(seed))


IDS = tokens()


def on_ranks(
    model: PreTrainedModel, fn: Callable[[PreTrainedModel, Handle, Any], Any], world_size: int = 3, **options: Any
) -> list[Any]:
    """Run fn(model, handle, group) on every rank, each with its own model."""

    def run(group: Any) -> Any:
        mine = copy.deepcopy(model)
        with parallelize(mine, group, **options) as handle:
            return fn(mine, handle, group)

    return rs.run_in_process(run, world_size, timeout_s=120)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def sharded_logits(model: PreTrainedModel, handle: Handle, group: Any, batch: dict[str, Any]) -> torch.Tensor:
    part = handle.shard(batch)
    with torch.no_grad():
        logits = model(**part).logits
    return rs.gather(logits, part["ringspan"].layout, group, dim=1)


def generate(model: PreTrainedModel, prompt: torch.Tensor, **options: Any) -> Generated:
    out = model.generate(
        prompt,
        **GREEDY | {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True} | options,
    )
    return out.sequences, torch.stack(out.logits, 1)


def check_ways(
    model: PreTrainedModel,
    ways: dict[str, dict[str, Any]],
    run: Callable[[PreTrainedModel, dict[str, Any]], Generated],
    **options: Any,
) -> None:
    """Check that every way to generate gives the same tokens from the same logits, on every rank."""
    expected = {way: run(model, given) for way, given in ways.items()}
    results = on_ranks(model, lambda mine, *_: {way: run(mine, given) for way, given in ways.items()}, **options)
    for found in results:
        for way, (sequences, logits) in expected.items():
            assert torch.equal(found[way][0], sequences), way
            assert difference(found[way][1], logits) < TOLERANCE, way
