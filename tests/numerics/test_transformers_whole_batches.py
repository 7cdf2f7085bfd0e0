"""Training forwards on whole batches: is a loss that every rank computes from whole logits that of one process?"""

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs
from ringspan.adapters.transformers import parallelize

TOKENS = torch.randint(3, 30, (2, 23), generator=torch.Generator().manual_seed(0))


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


def own_loss(logits: torch.Tensor) -> torch.Tensor:
    """A loss that no model computes itself."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), label_smoothing=0.2)


def train(model: Any, *, is_labelled: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    labels = {"labels": TOKENS} if is_labelled else {}
    output = model(input_ids=TOKENS, **labels)
    loss = output.loss if is_labelled else own_loss(output.logits)
    loss.backward()
    return output, {name: x.grad for name, x in model.named_parameters()} | {"loss": loss.detach()}


@pytest.mark.parametrize("is_labelled", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_those_of_one_process(world_size: int, is_labelled: bool) -> None:
    whole = tiny_llama().train()
    _, expected = train(copy.deepcopy(whole), is_labelled=is_labelled)

    def on_rank(group: Any) -> Any:
        model = copy.deepcopy(whole)
        handle = parallelize(model, group)
        handle.take_whole_batches()
        output, _ = train(model, is_labelled=is_labelled)
        assert ("logits" in output) is not is_labelled
        handle.reduce_gradients()
        return {name: x.grad for name, x in model.named_parameters()}

    for grads in rs.run_in_process(on_rank, world_size):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-4)


def test_without_asking_a_training_forward_takes_shards() -> None:
    model = tiny_llama().train()
    with parallelize(model), pytest.raises(rs.UnsupportedError, match=r"handle\.shard"):
        model(input_ids=TOKENS, labels=TOKENS)


def test_a_short_sequence_is_refused_where_its_loss_would_count_twice() -> None:
    whole = tiny_llama().train()

    def on_rank(group: Any) -> Any:
        model = copy.deepcopy(whole)
        handle = parallelize(model, group)
        handle.take_whole_batches()
        with pytest.raises(rs.UnsupportedError, match="count on each"):
            model(input_ids=TOKENS[:, :2])
        loss = model(input_ids=TOKENS[:, :2], labels=TOKENS[:, :2]).loss
        loss.backward()
        return loss.item()

    expected = whole(input_ids=TOKENS[:, :2], labels=TOKENS[:, :2]).loss.item()
    assert rs.run_in_process(on_rank, 3) == pytest.approx([expected] * 3, abs=1e-6)


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])


@pytest.mark.parametrize(
    ("name", "lengths", "is_right"),
    [
        ("cu_seq_lens_q", [0, 4, 7], True),
        ("cu_seq_lens_q", [0, 3, 7], False),
        ("seq_idx", [[0, 0, 0, 0, 1, 1, 1]], True),
        ("seq_idx", [[0, 0, 0, 1, 1, 1, 1]], False),
    ],
)
def test_lengths_of_documents_must_be_those_of_positions(name: str, lengths: Any, is_right: bool) -> None:
    model = tiny_llama().train()
    batch = {"input_ids": TOKENS[:1, :7], "position_ids": PACKED, "labels": TOKENS[:1, :7], "use_cache": False}
    with parallelize(model) as handle:
        handle.take_whole_batches()
        if is_right:
            loss = model(**batch, **{name: torch.tensor(lengths)}).loss
            torch.testing.assert_close(loss, model(**batch).loss)
        else:
            with pytest.raises(rs.UnsupportedError, match="those of position_ids"):
                model(**batch, **{name: torch.tensor(lengths)})
