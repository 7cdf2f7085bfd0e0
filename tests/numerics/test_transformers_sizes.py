"""Models that differ only beyond a number of tokens of their config, and models that were silently wrong."""

from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSWAConfig,
    GraniteMoeSWAForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    PreTrainedModel,
)

import ringspan as rs
from ringspan.adapters.transformers import Handle, parallelize, reference
from ringspan.adapters.transformers.layers import QueryScaling
from ringspan.adapters.transformers.reference import find_sizes
from support.adapted import IDS, TOLERANCE, difference, generate, on_ranks, sharded_logits, tokens
from support.families import FAMILIES, MORE, Family, _decoder

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE = {
    "GraniteMoe": Family(GraniteMoeForCausalLM, GraniteMoeConfig, _decoder(**_EXPERTS), ""),
    "GraniteMoeShared": Family(
        GraniteMoeSharedForCausalLM, GraniteMoeSharedConfig, _decoder(**_EXPERTS, shared_intermediate_size=32), ""
    ),
    "GraniteSWA": Family(GraniteSWAForCausalLM, GraniteSWAConfig, _decoder(sliding_window=5), ""),
    "GraniteMoeSWA": Family(GraniteMoeSWAForCausalLM, GraniteMoeSWAConfig, _decoder(**_EXPERTS, sliding_window=5), ""),
}
DEEPSEEK_V4 = Family(
    DeepseekV4ForCausalLM,
    DeepseekV4Config,
    {name: value for name, value in _decoder().items() if name != "intermediate_size"}
    | {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "layer_types": ["heavily_compressed_attention"] * 2,
    },
    "",
)
_FULL = {"layer_types": ["full_attention"] * 4}


@pytest.mark.parametrize("name", GRANITE)
def test_packed_documents_where_use_cache_is_passed_on(name: str) -> None:
    """These models take use_cache only through **kwargs."""
    model, ids = GRANITE[name].make(), tokens(2, 29)
    batch = {"input_ids": ids, "position_ids": (torch.arange(29) % 11)[None]}
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
    sequences, logits = generate(model, IDS)

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> tuple[Any, ...]:
        return sharded_logits(mine, handle, group, batch), *generate(mine, IDS)

    for found in on_ranks(model, run):
        # Granite's multipliers amplify rounding: the unmodified model in float32 is 5e-6 off itself in float64.
        assert difference(found[0], expected) < 5 * TOLERANCE
        assert torch.equal(found[1], sequences)
        assert difference(found[2], logits) < 5 * TOLERANCE


def test_a_compression_rate_that_a_small_batch_does_not_reach() -> None:
    with pytest.raises(rs.UnsupportedError, match=r"compress_rates.heavily_compressed_attention=128.*here made 8"):
        parallelize(DEEPSEEK_V4.make())


def test_a_temperature_that_changes_far_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 counts the positions itself, so its layers are scaled by the adapter; without that it is refused."""
    far = {"floor_scale": 8192, **_FULL}
    parallelize(MORE["Llama 4"].make(**far)).restore()
    parallelize(MORE["Llama 4"].make(**far, attn_temperature_tuning=False)).restore()
    monkeypatch.setattr(QueryScaling, "apply", lambda scaling, q, columns: q)
    with pytest.raises(rs.UnsupportedError, match=r"floor_scale=8192, here made 8, .* positions that it counts itself"):
        parallelize(MORE["Llama 4"].make(**far))


def test_a_temperature_by_given_positions_is_equal() -> None:
    model = Family(Ministral3ForCausalLM, Ministral3Config, _decoder(head_dim=16), "").make()
    assert [size.name for size in find_sizes(model.config)] == ["rope_parameters.original_max_position_embeddings"]
    parallelize(model).restore()


def test_a_model_that_does_not_run_with_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs at its real sizes, or is refused."""

    def fail(_: PreTrainedModel) -> PreTrainedModel:
        raise ValueError("no copy")

    monkeypatch.setattr(reference, "_shrunk_copy", fail)
    with parallelize(FAMILIES["Mistral"].make(sliding_window=20)) as handle:
        assert {layer.mask for layer in handle.layers} == {rs.sliding_window(19, 0)}
    with pytest.raises(
        rs.UnsupportedError, match=r"sliding_window=4096, and a copy with 8 .* fails: ValueError: no copy"
    ):
        parallelize(FAMILIES["Mistral"].make(sliding_window=4096))


def test_a_copy_with_small_sizes_shares_the_weights() -> None:
    model = FAMILIES["Mistral"].make(sliding_window=4096)
    copied = reference._shrunk_copy(model)
    assert copied.config.sliding_window == 8
    assert model.config.sliding_window == 4096
    assert all(x is y for x, y in zip(model.parameters(), copied.parameters(), strict=True))
