"""Small models of transformers with random weights, one for each family, for tests of the adapter.

The weights are larger than in a fresh model, so that attention is far from uniform and tokens differ.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 97
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_SMALL_HEADS = {"head_dim": 16}
_BOTH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 256,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """A model and the feature that it stands for; `refused` is a part of the reason if it cannot run on ranks."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    options: dict[str, Any]
    shows: str
    refused: str = ""
    generates: bool = True

    def make(self, **options: Any) -> PreTrainedModel:
        """Build the model with the same weights every time, in eval mode."""
        config = self.config(**self.options | options)
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = self.model(config)
        return enlarge(model).eval()


def enlarge(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                weights.copy_(torch.randn(weights.shape, generator=generator) * 1.5 / weights.shape[-1] ** 0.5)
            elif "norm" not in name and "ln" not in name and not name.endswith("bias"):
                weights.copy_(torch.randn(weights.shape, generator=generator))  # sinks
    model.tie_weights()
    return model


def _decoder(**options: Any) -> dict[str, Any]:
    return _DECODER | options


FAMILIES: dict[str, Family] = {
    "Llama": Family(LlamaForCausalLM, LlamaConfig, _decoder(), "causal, GQA"),
    "Mistral": Family(MistralForCausalLM, MistralConfig, _decoder(sliding_window=5), "sliding window"),
    "Qwen2": Family(
        Qwen2ForCausalLM,
        Qwen2Config,
        _decoder(num_key_value_heads=1, use_sliding_window=True, sliding_window=5, max_window_layers=1),
        "MQA, windows in some layers",
    ),
    "Qwen3": Family(Qwen3ForCausalLM, Qwen3Config, _decoder(**_SMALL_HEADS), "norms of q and k"),
    "Gemma 2": Family(
        Gemma2ForCausalLM,
        Gemma2Config,
        _decoder(**_SMALL_HEADS, sliding_window=5, attn_logit_softcapping=1.5),
        "softcap",
    ),
    "Gemma 3": Family(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        _decoder(**_SMALL_HEADS, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
        "windows in some layers, two RoPEs",
    ),
    "gpt-oss": Family(
        GptOssForCausalLM,
        GptOssConfig,
        _decoder(
            **_SMALL_HEADS,
            sliding_window=5,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "sinks, windows in some layers, experts",
    ),
    "Mixtral": Family(
        MixtralForCausalLM, MixtralConfig, _decoder(num_local_experts=4, num_experts_per_tok=2), "experts"
    ),
    "Phi": Family(PhiForCausalLM, PhiConfig, _decoder(), "RoPE of some dims"),
    "GPT-2": Family(
        GPT2LMHeadModel,
        GPT2Config,
        {
            "vocab_size": VOCABULARY,
            "n_positions": 256,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        },
        "learned positions",
    ),
    "BERT": Family(
        BertForMaskedLM,
        BertConfig,
        _decoder(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        "bidirectional",
        generates=False,
    ),
    "T5": Family(
        T5ForConditionalGeneration,
        T5Config,
        {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        "encoder and decoder, relative positions",
        refused="a bias for relative positions is added to the scores",
    ),
    "BART": Family(
        BartForConditionalGeneration,
        BartConfig,
        _BOTH,
        "encoder and decoder, cross-attention",
    ),
}
# Tested on threads only, which is faster.
MORE: dict[str, Family] = {
    "DeepSeek V3": Family(
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        _decoder(
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
        ),
        "latent attention, other dims for v, experts",
    ),
    "Qwen3 MoE": Family(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        _decoder(**_SMALL_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        "experts",
    ),
    "GPT-NeoX": Family(GPTNeoXForCausalLM, GPTNeoXConfig, _decoder(attention_dropout=0.0), "attention beside the MLP"),
    "OLMo 2": Family(Olmo2ForCausalLM, Olmo2Config, _decoder(), "norms after the layers"),
    "Llama 4": Family(
        Llama4ForCausalLM,
        Llama4TextConfig,
        _decoder(
            **_SMALL_HEADS,
            num_hidden_layers=4,
            intermediate_size_mlp=96,
            num_local_experts=2,
            attention_chunk_size=6,
            floor_scale=7,
            attn_scale=0.5,
        ),
        "chunked attention, queries scaled by position, layers without RoPE, experts",
    ),
    "Qwen3-Next": Family(
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        _decoder(**_SMALL_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_hidden_layers=4),
        "linear attention",
        refused="something besides attention mixes tokens",
    ),
    "mBART": Family(MBartForConditionalGeneration, MBartConfig, _BOTH, "encoder and decoder, norms before the layers"),
    "Marian": Family(MarianMTModel, MarianConfig, _BOTH, "encoder and decoder, sinusoidal positions"),
    "M2M100": Family(
        M2M100ForConditionalGeneration,
        M2M100Config,
        _BOTH,
        "encoder and decoder, positions that depend on padding",
        refused="takes no position_ids, nor does a module",
    ),
    "RoBERTa": Family(
        RobertaForMaskedLM,
        RobertaConfig,
        _decoder(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        "positions that depend on padding",
        refused="positions that it counts itself",
        generates=False,
    ),
}
EQUAL = [name for name, family in FAMILIES.items() if not family.refused]
REFUSED = [name for name, family in FAMILIES.items() if family.refused]


def table() -> str:
    """Return the table of docs/transformers.md."""
    rows = [_row(name, family) for name, family in (FAMILIES | MORE).items()]
    return "\n".join(rows)


def _row(name: str, family: Family) -> str:
    says = f"refused: {family.refused}" if family.refused else "equal" + (", on threads" if name in MORE else "")
    return f"| {name} | {family.shows} | {says} |"
