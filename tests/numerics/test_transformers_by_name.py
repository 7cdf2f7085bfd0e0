"""attn_implementation="ringspan": PyTorch's attention on one rank, refused on several until parallelized."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs
from ringspan.adapters.transformers import parallelize

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
TOKENS = torch.arange(1, 14)[None]


def make(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention, **SIZES)
    return LlamaForCausalLM(config).eval()


def test_on_one_rank_it_is_pytorch_s_attention():
    with torch.no_grad():
        expected, found = (make(name)(input_ids=TOKENS).logits for name in ("sdpa", "ringspan"))
    assert torch.equal(expected, found)


def test_parallelize_takes_such_a_model_and_restore_gives_the_name_back():
    with torch.no_grad():
        expected = make("sdpa")(input_ids=TOKENS).logits

    def run(group):
        model = make("ringspan")
        with parallelize(model, group), torch.no_grad():
            logits = model(input_ids=TOKENS, use_cache=False).logits
        assert model.config._attn_implementation == "ringspan"
        return logits

    torch.manual_seed(0)
    for logits in rs.run_in_process(run, 1):
        torch.testing.assert_close(logits, expected)


def test_sinks_and_soft_caps_are_refused_on_one_rank():
    from ringspan.adapters.transformers.wiring import _attend_alone

    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(rs.UnsupportedError, match="s_aux"):
        _attend_alone(torch.nn.Identity(), x, x, x, None, s_aux=torch.zeros(1))


def test_several_ranks_are_refused_until_the_model_is_parallelized(monkeypatch):
    from ringspan.adapters.transformers import wiring

    class Pair:
        world_size = 2

    class Of:
        transport = Pair()

    model = make("ringspan")
    monkeypatch.setattr(wiring, "session_of", lambda group: Of())
    with pytest.raises(rs.UnsupportedError, match="was not parallelized"), torch.no_grad():
        model(input_ids=TOKENS)
