"""A folder with a small random Llama and a tokenizer of whole words, made where it is needed."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_WORDS = 200
POSITIONS = 2048
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if tools %}{{ tools | length }} w7 {% endif %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_model(folder: Path, *, seed: int = 0, positions: int = POSITIONS) -> LlamaForCausalLM:
    """Write model and tokenizer; the model never ends an answer by itself."""
    words = ["<unk>", "<system>", "<user>", "<assistant>", *(f"w{i}" for i in range(NUM_WORDS - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    model.eval()
    return model


def words(tokens: list[int]) -> str:
    """The text of an answer: its special token 0 is left out."""
    names = ("<system>", "<user>", "<assistant>")
    return " ".join(f"w{token - 4}" if token >= 4 else names[token - 1] for token in tokens if token)


def tokens_of_text(text: str) -> list[int]:
    """What the tokenizer makes of the words of an answer."""
    names = {"<system>": 1, "<user>": 2, "<assistant>": 3}
    return [names[word] if word in names else int(word[1:]) + 4 for word in text.split()]


@torch.no_grad()
def greedy(model: LlamaForCausalLM, tokens: list[int], count: int) -> list[int]:
    """The tokens of one process, each from a forward over everything before it, without a cache."""
    tokens = list(tokens)
    for _ in range(count):
        logits: Any = model(torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[-count:]
