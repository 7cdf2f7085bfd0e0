"""A parallelized model says which algorithm its last forward over a cache ran."""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from support.adapted import on_ranks


def test_the_last_turn_is_told_with_its_reason():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )

    def run(model, handle, group):
        told = [handle.last_turn]
        cache = DynamicCache()
        for count in (8, 1):
            with torch.no_grad():
                model(torch.ones(1, count, dtype=torch.int64), past_key_values=cache)
            told.append(handle.last_turn)
        return told

    for before, prefill, decode in on_ranks(LlamaForCausalLM(config).eval(), run, 2, algorithm="pass_q", verify=False):
        assert before is None
        assert prefill == ("pass_q", "pass_q: asked for.")
        assert decode.algorithm == "one_shot"
