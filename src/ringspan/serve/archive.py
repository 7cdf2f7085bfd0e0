"""Which conversations are saved on disk? Rank 0 keeps the list; all ranks write and read the keys and values.

    folder/conversation-<number>/cache.json, data-…   keys and values, as `rs.KVCache.save` writes them
    folder/conversation-<number>/tokens.json          the tokens and the model's digest, written last

A folder without tokens.json is what an interrupted save has left, and is removed. Folders of another model stay.
"""

import json
import secrets
import shutil
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringspan.serve.commands import saved_folder
from ringspan.serve.slots import longest

_TOKENS = "tokens.json"


class Archive:
    """The saved conversations of one model.

    Args:
        folder: Where they are; made if it is missing, for this user only.
        model: Digest of everything that keys and values depend on.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self._model = model
        self._tokens: dict[int, array[int]] = {}
        self._slots: dict[int, int] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(folder.glob("conversation-*")):
            self._add(path)

    @property
    def count(self) -> int:
        """Conversations that can be loaded."""
        return len(self._tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The saved conversation with the longest common prefix, and its length, as `SlotBook.find`."""
        return longest(self._tokens, tokens)

    def holds(self, tokens: "array[int]") -> bool:
        """Whether a saved conversation begins with all these tokens."""
        return any(held[: len(tokens)] == tokens for held in self._tokens.values())

    def length(self, number: int) -> int:
        """The number of tokens of a saved conversation."""
        return len(self._tokens[number])

    def tokens(self, number: int) -> "array[int]":
        """The token ids of a saved conversation."""
        return self._tokens[number]

    def slot(self, number: int) -> int:
        """The slot from which a conversation was saved."""
        return self._slots[number]

    def new_number(self) -> int:
        """A number for a conversation to be saved."""
        return secrets.randbits(62)

    def note(self, number: int, slot: int, tokens: "array[int]") -> None:
        """Record that all ranks saved a conversation, and remove the ones that it continues."""
        body = {"model": self._model, "slot": slot, "tokens": tokens.tolist()}
        path = saved_folder(self._folder, number) / _TOKENS
        text = json.dumps({"checksum": _checksum(body), "body": body})
        written = path.with_suffix(".part")
        written.write_text(text)
        written.replace(path)
        for other in [other for other, held in self._tokens.items() if held == tokens[: len(held)]]:
            self.remove(other)
        self._tokens[number], self._slots[number] = array("q", tokens), slot

    def remove(self, number: int) -> None:
        """Remove a conversation and its files, also incomplete ones."""
        self._tokens.pop(number, None)
        self._slots.pop(number, None)
        folder = saved_folder(self._folder, number)
        (folder / _TOKENS).unlink(missing_ok=True)  # first: without it the rest counts for nothing
        shutil.rmtree(folder, ignore_errors=True)

    def _add(self, path: Path) -> None:
        try:
            number = int(path.name.removeprefix("conversation-"), 16)
            whole = json.loads((path / _TOKENS).read_text())
            body = whole["body"]
            is_right = whole["checksum"] == _checksum(body)
            tokens, slot, model = array("q", body["tokens"]), int(body["slot"]), body["model"]
        except FileNotFoundError:
            shutil.rmtree(path, ignore_errors=True)
            return
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return
        if is_right and model == self._model and tokens and saved_folder(self._folder, number) == path:
            self._tokens[number], self._slots[number] = tokens, slot


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
