"""What does a saved cache look like on disk, and how is damage found?

    folder/cache.json                   the index: what cache this is, which rank holds which token, the data folder
    folder/data-<id>/rank-0.json        the blocks of rank 0, with a checksum of each of their tensors
    folder/data-<id>/rank-0.safetensors the tensors themselves, as they are stored
    …

The index carries a checksum of itself and of every `rank-*.json`, so a flipped bit anywhere is noticed. Checksums do
not stop a forger: so every number that is read is checked as well, nothing is allocated for more tokens than the files
have bytes for, and no file is unpickled. Only `cache.json` is ever replaced, by a rename.
"""

import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ringspan.cache._placement import Placement
from ringspan.cache._storage import RowSpec
from ringspan.errors import CacheError, LayoutError
from ringspan.span import Span

INDEX = "cache.json"
_FORMAT, _VERSION = "ringspan cache", 2
_DATA_NAME = re.compile(r"data-[0-9a-f]{16}")
_MOST_INDEX_BYTES = 2**28


class SavedBlock(NamedTuple):
    """Tokens start … stop-1 of those that a rank holds of a sequence, and a checksum of each tensor."""

    start: int
    stop: int
    checksums: tuple[int, ...]

    def key(self, sequence: int, i: int) -> str:
        """The name of the block's i-th tensor."""
        return f"{sequence}.{self.start}.{i}"


SavedBlocks = Mapping[int, tuple[SavedBlock, ...]]
"""By sequence, ascending."""


class SavedIndex(NamedTuple):
    """The checked contents of `cache.json`."""

    data: str
    placements: Mapping[int, Placement]
    checksums: tuple[int, ...]  # of each rank's `rank-*.json`


def checksum(tensor: torch.Tensor) -> int:
    """The checksum of a contiguous tensor's bytes."""
    return zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data)


def write_rank(data: Path, rank: int, tensors: Mapping[str, torch.Tensor], blocks: SavedBlocks) -> int:
    """Write one rank's files so that they survive a loss of power; returns the checksum of its list of blocks."""
    from safetensors.torch import save_file

    save_file(dict(tensors), data / f"rank-{rank}.safetensors")
    text = json.dumps({str(sequence): of_sequence for sequence, of_sequence in blocks.items()}).encode()
    (data / f"rank-{rank}.json").write_bytes(text)
    for path in (data / f"rank-{rank}.safetensors", data / f"rank-{rank}.json", data, data.parent):
        _flush(path)
    return zlib.crc32(text)


def write_index(folder: Path, contents: str, index: SavedIndex) -> None:
    """Make the index name this data folder. All of its files must be visible to this rank."""
    for rank, expected in enumerate(index.checksums):
        path = folder / index.data / f"rank-{rank}.json"
        if not path.exists() or zlib.crc32(path.read_bytes()) != expected:
            raise CacheError(
                f"rank 0 does not see the files of rank {rank}",
                argument="folder",
                value=str(folder),
                remedy="give a folder that all ranks share",
            )
    body = {
        "cache": contents,
        "data": index.data,
        "checksums": index.checksums,
        "placements": {
            str(sequence): [[[span.start, span.stop, span.step] for span in spans] for spans in placement.spans]
            for sequence, placement in index.placements.items()
        },
    }
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "checksum": _checksum_of(body), "body": body})
    written = folder / f"{INDEX}.{index.data}"
    written.write_text(text)
    _flush(written)
    written.replace(folder / INDEX)
    _flush(folder)


def read_index(folder: Path, contents: str) -> SavedIndex:
    """Read the index; CacheError if it is missing or damaged, or if it is of another kind of cache."""
    with _refusing(folder, INDEX):
        whole = _parse(folder / INDEX)
        version = whole.get("version") if isinstance(whole, dict) else None
        _check(type(version) is int, "it has no version number")
        if version != _VERSION:
            raise CacheError(
                f"its version is {version}, and this release of ringspan reads version {_VERSION}",
                argument="folder",
                value=str(folder),
                remedy="load it with the release that wrote it",
            )
        body = whole["body"]
        _check(whole["format"] == _FORMAT and whole["checksum"] == _checksum_of(body), "its checksum is wrong")
        if body["cache"] != contents:
            raise CacheError(
                f"it has a cache of {body['cache']}; this one is of {contents}", argument="folder", value=str(folder)
            )
        checksums = tuple(map(_whole, body["checksums"]))
        _check(isinstance(body["data"], str) and _DATA_NAME.fullmatch(body["data"]) is not None, "no data folder")
        placements = {int(sequence): _placement(ranks) for sequence, ranks in body["placements"].items()}
        same = all(len(placement.spans) == len(checksums) for placement in placements.values())
        _check(same and len(checksums) > 0 and all(sequence >= 0 for sequence in placements), "its ranks do not match")
        return SavedIndex(body["data"], placements, checksums)


def read_blocks(folder: Path, index: SavedIndex, rank: int, spec: RowSpec) -> SavedBlocks:
    """Read the list of blocks of one saving rank; CacheError unless it has exactly the tokens of the index."""
    name = f"{index.data}/rank-{rank}.json"
    with _refusing(folder, name):
        text = _read(folder / name)
        _check(zlib.crc32(text) == index.checksums[rank], "its checksum is wrong")
        blocks = {
            int(sequence): tuple(
                SavedBlock(_whole(start), _whole(stop), tuple(map(_whole, sums))) for start, stop, sums in of_sequence
            )
            for sequence, of_sequence in json.loads(text).items()
        }
        for sequence, placement in index.placements.items():
            at = 0
            for block in blocks.get(sequence, ()):
                _check(block.start == at < block.stop and len(block.checksums) == len(spec.dims), "blocks with gaps")
                at = block.stop
            _check(at == placement.counts[rank], "other tokens than the index says")
    name = f"{index.data}/rank-{rank}.safetensors"
    with _refusing(folder, name):
        num_tokens = sum(placement.counts[rank] for placement in index.placements.values())
        size = _size_of(folder / name)
        _check(size >= num_tokens * spec.bytes_per_token, "it is too short")
    return blocks


def check_coverage(folder: Path, index: SavedIndex) -> None:
    """Raise CacheError unless every position of every sequence is on exactly one rank."""
    with _refusing(folder, INDEX):
        for sequence, placement in index.placements.items():
            held = np.concatenate([placement.positions(rank) for rank in range(len(placement.spans))])
            held.sort()
            _check(
                np.array_equal(held, np.arange(placement.length)),
                f"positions of sequence {sequence} are missing or doubled",
            )


class RankFile:
    """The tensors of one of the ranks that saved."""

    def __init__(self, folder: Path, index: SavedIndex, rank: int, spec: RowSpec) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._name = f"{index.data}/rank-{rank}.safetensors"
        self._spec = spec
        with _refusing(folder, self._name):
            self._opened: Any = safe_open(folder / self._name, framework="pt", device="cpu")

    def rows(self, sequence: int, block: SavedBlock) -> list[torch.Tensor]:
        """The tensors of a block, (layers, KV heads, tokens, dim) each."""
        rows = []
        with _refusing(self._folder, self._name):
            for i, (dim, dtype) in enumerate(zip(self._spec.dims, self._spec.dtypes, strict=True)):
                tensor = self._opened.get_tensor(block.key(sequence, i))
                shape = (self._spec.num_layers, self._spec.num_kv_heads, block.stop - block.start, dim)
                _check(tensor.shape == shape and tensor.dtype == dtype, "a tensor of another shape or type")
                _check(checksum(tensor) == block.checksums[i], "the checksum of a block is wrong")
                rows.append(tensor)
        return rows


@contextmanager
def _refusing(folder: Path, name: str) -> Iterator[None]:
    """Turn every error about a file into a CacheError that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except CacheError as error:
        if error.argument is not None:
            raise
        raise _damaged(folder, name, str(error)) from None
    except FileNotFoundError as error:
        raise _damaged(folder, name, "it is not there") from error
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        raise _damaged(folder, name, str(error) or type(error).__name__) from error
    except (SafetensorError, RecursionError, MemoryError, LayoutError) as error:
        raise _damaged(folder, name, str(error) or type(error).__name__) from error


def _damaged(folder: Path, name: str, why: str) -> CacheError:
    return CacheError(
        f"there is no complete cache in it: {name}: {why}",
        argument="folder",
        value=str(folder),
        remedy="load another copy",
    )


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise CacheError(what)


def _checksum_of(body: object) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _read(path: Path) -> bytes:
    _check(_size_of(path) <= _MOST_INDEX_BYTES, "it is too long")
    return path.read_bytes()


def _size_of(path: Path) -> int:
    """The size of a file. A pipe is refused, since a read would wait for ever, and a device, since it has no end."""
    found = path.stat()
    _check(stat.S_ISREG(found.st_mode), "it is no regular file")
    return found.st_size


def _parse(path: Path) -> Any:
    return json.loads(_read(path))


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise CacheError(f"{value!r:.40} where a number is expected")
    return value


def _placement(ranks: list[list[list[int]]]) -> Placement:
    return Placement(tuple(tuple(Span(*map(_whole, span)) for span in spans) for spans in ranks))


def _flush(path: Path) -> None:
    """Force a file to the disk before anything that is written later."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
