"""How does text become tokens, and tokens text again? With the model's own tokenizer and chat template."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from ringspan.errors import UnsupportedError
from ringspan.serve.errors import ApiError

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""The name of a token that is a single byte, in tokenizers with a byte fallback."""


def _byte_level_letters() -> dict[str, int]:
    """Byte-level tokenizers write each byte as a letter: visible Latin-1 as itself, the others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level_letters()


class ModelText:
    """A model's tokenizer and chat template.

    Attributes:
        max_positions: The longest sequence the model was made for.
        eos: Tokens that end an answer.
        has_chat: The tokenizer has a chat template.
    """

    def __init__(self, folder: Path) -> None:
        local = {"local_files_only": True, "trust_remote_code": False}
        config = AutoConfig.from_pretrained(folder, **local)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, **local)
        if not self._tokenizer.is_fast:
            raise UnsupportedError(
                "the tokenizer has no tokenizer.json, by which text is streamed",
                argument="folder",
                value=str(folder),
                remedy="convert the tokenizer",
            )
        self.max_positions = int(config.get_text_config().max_position_embeddings)
        self.has_chat = self._tokenizer.chat_template is not None
        self._max_characters = self.max_positions * max(map(len, self._tokenizer.get_vocab()))
        self.eos = _end_tokens(folder, config, self._tokenizer)

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """The tokens of a conversation, up to where the assistant speaks."""
        if not self.has_chat:
            raise ApiError("this model has no chat template; use /v1/completions", code="no_chat_template")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program, and refuses in its own words
            lines = str(error).splitlines() or [""]
            reason = f"the chat template refuses the messages: {type(error).__name__}: {lines[0][:200]}"
            raise ApiError(reason, param="messages") from None
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, prompt: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer adds."""
        return self._encode(prompt, add_special_tokens=True)

    def decoder(self, continued: Sequence[int]) -> "TextStream":
        """A decoder for the tokens of one answer, which continues the text of some tokens."""
        # Many tokenizers drop the space before the first word of a text. A few tokens before it show that it is none.
        tails = (list(continued[-count:]) for count in range(1, min(8, len(continued)) + 1))
        whole = (tail for tail in tails if "\ufffd" not in self._tokenizer.decode(tail))  # begins with a character
        return TextStream(self._tokenizer.backend_tokenizer, next(whole, []))

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a single token behind others, which may be a part of a character; None if they are unknown."""
        backend = self._tokenizer.backend_tokenizer
        once, twice = (backend.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        if "\ufffd" not in twice:
            # Many tokenizers drop the space before the first word of a text.
            return str(twice[len(once) :]).encode()
        name = backend.id_to_token(token) or ""
        if _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(name[3:5])
        known = all(letter in _BYTE_LEVEL for letter in name)
        return bytes(_BYTE_LEVEL[letter] for letter in name) if known else None

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > self._max_characters:  # its tokens could take gigabytes before they are counted
            raise ApiError(
                f"a conversation has at most {self.max_positions} tokens here, and the prompt has more than "
                f"{self._max_characters} characters",
                code="context_length_exceeded",
            )
        # encode() would hold the interpreter's lock, and every other client would wait while a long text is encoded.
        encode = self._tokenizer.backend_tokenizer.encode_batch_fast
        try:
            tokens: list[int] = encode([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:  # names and tools reach the template unchecked
            raise ApiError("half of a surrogate pair is no text", code="invalid_text") from None
        if not tokens:
            raise ApiError("the prompt has no tokens", code="empty_prompt")
        return tokens


class TextStream:
    """The text of tokens that come one by one; a character of several tokens comes with its last."""

    def __init__(self, tokenizer: Any, continued: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(continued, skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that a token completes."""
        return self._stream.step(self._tokenizer, token) or ""


def _end_tokens(folder: Path, config: Any, tokenizer: Any) -> list[int]:
    sources = [config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    found = [each for source in sources for each in (source if isinstance(source, list) else [source])]
    return sorted({each for each in found if each is not None})
