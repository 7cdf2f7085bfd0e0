"""Masks of images and biases of positions: models that need them are refused, with the reason."""

from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MptConfig,
    MptForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
)

import ringspan as rs
from ringspan.adapters.transformers import parallelize
from ringspan.compat import ring_flash_attn
from support.adapted import IDS, TOLERANCE, difference, on_ranks, sharded_logits
from support.families import _decoder, enlarge

_TEXT = _decoder(head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
IMAGE = torch.zeros_like(IDS)
IMAGE[:, 3:9] = 1


def gemma() -> PreTrainedModel:
    config = Gemma3Config(
        text_config=_TEXT,
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=95,
        boi_token_index=94,
        eoi_token_index=96,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return enlarge(Gemma3ForConditionalGeneration(config)).eval()


def paligemma() -> PreTrainedModel:
    text = _decoder(num_key_value_heads=1) | {"model_type": "gemma"}
    vision = _VISION | {"projection_dim": 64}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=95, projection_dim=64)
    return PaliGemmaForConditionalGeneration(config).eval()


def test_tokens_of_a_model_with_images_that_has_none() -> None:
    model = gemma()
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
    run = lambda mine, handle, group: sharded_logits(mine, handle, group, {"input_ids": IDS})  # noqa: E731
    for found in on_ranks(model, run, 2):
        assert difference(found, expected) < TOLERANCE


def test_tokens_of_an_image_see_each_other_and_are_refused() -> None:
    """The logits would be wrong if token_type_ids were ignored."""
    model = gemma()
    with torch.no_grad():
        plain, seen = (model(IDS, token_type_ids=x, use_cache=False).logits for x in (None, IMAGE))
    assert difference(plain, seen) > 100 * TOLERANCE
    with parallelize(model, verify=False) as handle:
        for given in ({"token_type_ids": IMAGE}, {"pixel_values": torch.zeros(1, 3, 8, 8)}):
            with pytest.raises(rs.UnsupportedError, match=next(iter(given))), torch.no_grad():
                model(IDS, **given, use_cache=False)
        with pytest.raises(rs.UnsupportedError, match=r"rs\.causal\(\) \| rs\.blocks"):
            handle.shard({"input_ids": IDS, "token_type_ids": IMAGE})


def test_the_mask_of_such_an_image_is_one_of_ours() -> None:
    """What transformers computes for token_type_ids, in the mask algebra."""
    from transformers.masking_utils import create_causal_mask
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    config = gemma().config.get_text_config()
    config._attn_implementation = "sdpa"
    theirs = create_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(*IDS.shape, 64),
        attention_mask=None,
        past_key_values=None,
        block_sequence_ids=get_block_sequence_ids_for_mask(IMAGE),
    )
    ours = (rs.causal() | rs.blocks([(3, 9)])).allowed(range(23), range(23))
    assert torch.equal(theirs[0, 0], torch.from_numpy(ours))


def test_a_prefix_that_is_bidirectional_is_refused() -> None:
    with pytest.raises(rs.UnsupportedError, match="is_causal=False, but its mask is causal"):
        parallelize(paligemma())


@pytest.mark.parametrize(
    "model",
    [
        lambda: BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)),
        lambda: MptForCausalLM(MptConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=4)),
    ],
    ids=["Bloom", "MPT"],
)
def test_biases_of_positions_are_refused(model: Any) -> None:
    """ALiBi; T5's are refused in test_transformers_refusals."""
    with pytest.raises(rs.UnsupportedError, match=r"does not attend by way of transformers' AttentionInterface|alibi"):
        parallelize(model().eval())


def test_slopes_of_flash_attention_are_refused() -> None:
    q = torch.zeros(1, 8, 4, 8)
    with pytest.raises(rs.UnsupportedError, match="alibi_slopes: biases are not added"):
        ring_flash_attn.ring_flash_attn_func(q, q, q, causal=True, alibi_slopes=torch.ones(4))
