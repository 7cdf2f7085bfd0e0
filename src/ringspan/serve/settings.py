"""The settings of a server: model, address and limits. All are checked before ranks start, without torch."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringspan.arguments import FLAG, NUMBER, PATH, TEXT, WHOLE, check_arguments, optional
from ringspan.errors import ShapeError, UnsupportedError

STORAGES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3")
DTYPES = ("float32", "bfloat16", "float16")
MIN_RANK_TIMEOUT_S = 5.0
"""A rank that computes can be late with a heartbeat by seconds."""
MAX_RANK_TIMEOUT_S = 86400.0


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of one server.

    Attributes:
        folder: The model: a local folder with config, safetensors weights and tokenizer.
        name: The model's name in the API; the folder's name by default.
        num_ranks: Processes that share each conversation.
        host: The address to listen on. An address that is not loopback needs an API key.
        port: The port; 0 lets the system choose.
        api_key: What clients must send as a bearer token; None asks for nothing.
        dtype: The dtype of weights and activations.
        cache_bytes: Upper bound of the KV cache on each rank; None for half of the memory that is free once the
            model is loaded, shared by the ranks.
        storage: How keys and values are stored; None for `dtype`. "int8" and "float8_e4m3" are quantised.
        save_dir: Where conversations are saved when they are evicted and at the end; None saves none.
        prefill_chunk: Prompt tokens computed at once; between chunks others get tokens, and requests can be cancelled.
        batch_size: Requests answered together.
        max_tokens: Upper bound of the tokens one request may generate.
        queue_size: Requests that may wait; others get status 429.
        max_connections: Open connections; others get status 503.
        max_body_bytes: Upper bound of a request body.
        header_timeout_s: For a client to send its request line and headers.
        body_timeout_s: For a client to send its body.
        write_timeout_s: For a client to take what was sent.
        rank_timeout_s: A rank that is silent, or busy with one command, for longer counts as lost.
        grace_s: For answers under way when the server is told to stop.
        verify: Compare the parallelized model with the original at the first start.
        home_page: What GET / sends, as HTML; nothing if it is empty.
        is_under_torchrun: torchrun starts the other ranks, and starts all of them again when one is lost.
    """

    folder: Path
    name: str = ""
    num_ranks: int = 2
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    dtype: str = "float32"
    cache_bytes: int | None = None
    storage: str | None = None
    save_dir: Path | None = None
    prefill_chunk: int = 1024
    batch_size: int = 8
    max_tokens: int = 4096
    queue_size: int = 16
    max_connections: int = 256
    max_body_bytes: int = 2**25
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    rank_timeout_s: float = 60.0
    grace_s: float = 30.0
    verify: bool = True
    home_page: str = field(default="", repr=False)
    is_under_torchrun: bool = False

    def __post_init__(self) -> None:
        self._check_kinds()
        if not (self.folder / "config.json").is_file():
            raise ShapeError(
                "a model is a local folder with config.json, safetensors weights and a tokenizer",
                argument="folder",
                value=str(self.folder),
                remedy="download or convert the model first",
            )
        if not self.name:
            object.__setattr__(self, "name", self.folder.resolve().name)
        counts = ("num_ranks", "prefill_chunk", "batch_size", "max_tokens", "queue_size", "max_connections")
        for name in (*counts, "max_body_bytes"):
            _check_least(name, getattr(self, name), 1)
        _check_least("port", self.port, 0)
        if self.cache_bytes is not None:
            _check_least("cache_bytes", self.cache_bytes, 1)
        _check_least("rank_timeout_s", self.rank_timeout_s, MIN_RANK_TIMEOUT_S)
        if self.rank_timeout_s > MAX_RANK_TIMEOUT_S:
            rule = f"use {MAX_RANK_TIMEOUT_S:g} or less"
            raise ShapeError("a day is enough", argument="rank_timeout_s", value=self.rank_timeout_s, remedy=rule)
        _check_one_of("dtype", self.dtype, DTYPES)
        if self.storage is not None:
            _check_one_of("storage", self.storage, STORAGES)
        self._check_key()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def task(self, *, verify: bool) -> dict[str, Any]:
        """The settings that a rank needs, as JSON."""
        return {
            "folder": str(self.folder.resolve()),
            "num_ranks": self.num_ranks,
            "is_under_torchrun": self.is_under_torchrun,
            "dtype": self.dtype,
            "verify": verify,
            "prefill_chunk": self.prefill_chunk,
            "storage": None if self.storage == self.dtype else self.storage,
            "save_dir": None if self.save_dir is None else str(self.save_dir.resolve()),
            "cache_bytes": self.cache_bytes,
            "rank_timeout_s": self.rank_timeout_s,
        }

    def _check_kinds(self) -> None:
        texts = {"name": TEXT, "host": TEXT, "dtype": TEXT, "home_page": TEXT}
        texts |= {"api_key": optional(TEXT), "storage": optional(TEXT), "save_dir": optional(PATH)}
        whole = dict.fromkeys(("num_ranks", "port", "prefill_chunk", "batch_size", "max_tokens", "queue_size"), WHOLE)
        limits = {"max_connections": WHOLE, "max_body_bytes": WHOLE, "cache_bytes": optional(WHOLE)}
        times = ("header_timeout_s", "body_timeout_s", "write_timeout_s", "rank_timeout_s", "grace_s")
        kinds = {"folder": PATH, **texts, **whole, **limits, **dict.fromkeys(times, NUMBER)}
        kinds |= {"verify": FLAG, "is_under_torchrun": FLAG}
        check_arguments(**{name: (kind, getattr(self, name)) for name, kind in kinds.items()})
        object.__setattr__(self, "folder", Path(self.folder))

    def _check_key(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ShapeError("a key is printable ASCII without line breaks", argument="api_key")
        if self.api_key is None and not self.is_local:
            raise UnsupportedError(
                "other machines can connect to this address, so clients need an API key",
                argument="host",
                value=self.host,
                remedy="give a file with a key, or listen on 127.0.0.1",
            )


def _check_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ShapeError("the number is too small", argument=name, value=value, remedy=f"use {least:g} or more")


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnsupportedError(f"no such {name}", argument=name, value=value, remedy=f"use one of {', '.join(known)}")
