"""A folder with a small random model and a tokenizer of whole words, made where it is needed."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

NUM_WORDS = 200
POSITIONS = 2048
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if tools %}{{ tools | length }} w7 {% endif %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_model(folder: Path, *, seed: int = 0, positions: int = POSITIONS) -> LlamaForCausalLM:
    """Write a Llama and its tokenizer; the model never ends an answer by itself."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, max_position_embeddings=positions, **_SIZES))
    return _write(folder, model)


def make_gemma(folder: Path) -> Gemma3ForCausalLM:
    """The same of Gemma 3, with sliding windows of 24 tokens in two of three layers."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=24,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        pad_token_id=None,
        **_SIZES,
    )
    return _write(folder, Gemma3ForCausalLM(config))


_SIZES: dict[str, Any] = {
    "vocab_size": NUM_WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}


def _write(folder: Path, model: Any) -> Any:
    words = ["<unk>", "<system>", "<user>", "<assistant>", *(f"w{i}" for i in range(NUM_WORDS - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    return model.eval()


def words(tokens: list[int]) -> str:
    """The text of an answer: its special token 0 is left out."""
    names = ("<system>", "<user>", "<assistant>")
    return " ".join(f"w{token - 4}" if token >= 4 else names[token - 1] for token in tokens if token)


def tokens_of_text(text: str) -> list[int]:
    """What the tokenizer makes of the words of an answer."""
    names = {"<system>": 1, "<user>": 2, "<assistant>": 3}
    return [names[word] if word in names else int(word[1:]) + 4 for word in text.split()]


@torch.no_grad()
def greedy(model: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """The tokens of one process, each from a forward over everything before it, without a cache."""
    tokens = list(tokens)
    for _ in range(count):
        logits: Any = model(torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[-count:]
