"""Training loops on ranks: reduced gradients, weights that drift apart, and the repr of a handle."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import ringspan as rs
from ringspan.adapters.transformers import Handle, parallelize
from support.adapted import GREEDY, IDS, on_ranks
from support.families import FAMILIES

BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_reduced_gradients_are_those_of_one_process(name: str) -> None:
    model = FAMILIES[name].make().train()
    model(**BATCH).loss.backward()
    expected = [x.grad for x in model.parameters()]
    model.zero_grad()

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> list[torch.Tensor]:
        mine(**handle.shard(BATCH)).loss.backward()
        if group.rank == 0:  # like an expert without tokens
            mine.get_output_embeddings().weight.grad = None
        handle.reduce_gradients()
        return [x.grad for x in mine.parameters() if x.grad is not None]

    found = on_ranks(model, run)
    last = len(expected) - 1  # the head, without rank 0's share
    for i, grad in enumerate(expected[:last]):
        torch.testing.assert_close(found[0][i], grad, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("reduces", [True, False])
def test_weights_that_part_are_noticed(reduces: bool) -> None:
    model = FAMILIES["Llama"].make().train()

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> None:
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        for _ in range(3):
            mine(**handle.shard(BATCH)).loss.backward()
            if reduces:
                handle.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()

    if reduces:
        on_ranks(model, run, verify=False)
        return
    with pytest.raises(rs.TransportError, match=r"calls handle.reduce_gradients\(\) .*rank 0 has #\w+, rank 1 has #"):
        on_ranks(model, run, verify=False)


def test_a_handle_says_what_it_is() -> None:
    handle = parallelize(FAMILIES["Llama"].make(), algorithm="pass_q", verify=False)
    assert repr(handle) == "Handle(LlamaForCausalLM, rank 0 of 1, algorithm='pass_q', 2 attention layers)"
    handle.restore()
    assert repr(handle).endswith("2 attention layers, restored)")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [("ring", "algorithm='ring': .* use one of auto, pass_kv"), ("pass-kv", "did you mean 'pass_kv'?")],
)
def test_an_unknown_algorithm_is_refused_at_once(algorithm: str, message: str) -> None:
    with pytest.raises(rs.UnsupportedError, match=message):
        parallelize(FAMILIES["Llama"].make(), algorithm=algorithm)


def test_a_tokenizer_that_generate_passes_on() -> None:
    """As with stop_strings; forward does not use it."""
    model = FAMILIES["Llama"].make()
    expected = model.generate(IDS, **GREEDY, max_new_tokens=3)
    with parallelize(model, verify=False), torch.no_grad():
        assert torch.equal(model.generate(IDS, **GREEDY, max_new_tokens=3), expected)
        assert model(IDS, tokenizer=object()).logits.shape[:2] == IDS.shape
