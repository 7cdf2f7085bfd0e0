"""Saved caches that were damaged by chance or on purpose: loaded right, or refused; never wrong, never executed.

Chance flips, cuts, swaps and deletes bytes. Purpose writes other numbers and makes all checksums right again.
"""

import json
import os
import pickle
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.transports.in_process import InProcessRank
from support.campaign import HOW_MANY, count

LENGTHS = {0: 23, 3: 1, 7: 40}
OPTIONS: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
_SAVED: dict[int, Path] = {}


def contents(cache: rs.KVCache) -> dict[tuple[int, int], list[float]]:
    """Every token on this rank, by sequence and position."""
    rank = cache._state.rank
    found = {}
    for sequence, placement in cache._state.placements.items():
        positions = placement.positions(rank).tolist()
        for start, views in cache._state.stored[sequence].all_layers(len(positions)):
            rows = torch.cat([x.transpose(0, 2).flatten(1) for x in views], 1)
            for i, row in enumerate(rows.tolist()):
                found[sequence, positions[start + i]] = row
    return found


def expected() -> dict[tuple[int, int], list[float]]:
    return {(s, p): [100.0 * s + p] * 16 for s, length in LENGTHS.items() for p in range(length)}


def saved(world_size: int) -> Path:
    """A cache in which every number says where it belongs, made once."""
    if world_size not in _SAVED:
        _SAVED[world_size] = folder = Path(tempfile.mkdtemp(prefix="fuzz-cache-"))

        def save(group: InProcessRank) -> None:
            cache = rs.KVCache(**OPTIONS, group=group)
            turn = cache.begin(LENGTHS, algorithm="pass_kv")
            for part in turn.parts:
                stored = cache._state.stored[part.sequence]
                positions = torch.from_numpy(part.after.positions(group.rank))
                for _, views in stored.all_layers(len(positions)):
                    for x in views:
                        x[:] = (100.0 * part.sequence + positions)[None, None, :, None]
            turn.layers_done.update({0: None, 1: None})
            turn.commit()
            cache.save(folder)

        rs.run_in_process(save, world_size)
    return _SAVED[world_size]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# By chance


def flip(data: st.DataObject, folder: Path) -> None:
    path = data.draw(st.sampled_from(files(folder)))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)


def cut_off(data: st.DataObject, folder: Path) -> None:
    path = data.draw(st.sampled_from(files(folder)))
    raw = path.read_bytes()
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])


def overwrite(data: st.DataObject, folder: Path) -> None:
    path = data.draw(st.sampled_from(files(folder)))
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    new = data.draw(st.binary(min_size=1, max_size=64))
    path.write_bytes(raw[:at] + new + raw[at + len(new) :])


def insert(data: st.DataObject, folder: Path) -> None:
    path = data.draw(st.sampled_from(files(folder)))
    raw = path.read_bytes()
    at = data.draw(st.integers(0, len(raw)))
    path.write_bytes(raw[:at] + data.draw(st.binary(min_size=1, max_size=64)) + raw[at:])


def delete(data: st.DataObject, folder: Path) -> None:
    data.draw(st.sampled_from(files(folder))).unlink()


def swap(data: st.DataObject, folder: Path) -> None:
    one, other = (data.draw(st.sampled_from(files(folder))) for _ in range(2))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def replace(data: st.DataObject, folder: Path) -> None:
    """By a folder, a pipe, a device, nothing, other JSON, or something that would be executed if it were unpickled."""
    path = data.draw(st.sampled_from(files(folder)))
    texts = [b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"version": 1e999}', b"NaN"]
    new = data.draw(st.sampled_from([Path.mkdir, os.mkfifo, _link_to_endless_zeros, _harm(folder), *texts]))
    path.unlink()
    if callable(new):
        new(path)
    else:
        path.write_bytes(new)


def _link_to_endless_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


class _Harm:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def _harm(folder: Path) -> bytes:
    return pickle.dumps(_Harm(folder / "executed"))


# On purpose


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something in a JSON value."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, part in below for path in paths_of(part, (*at, key)))]


def forge(data: st.DataObject, folder: Path) -> None:
    """Change, drop or double something in the index or in a list of blocks, and sign it again."""
    path = data.draw(st.sampled_from([path for path in files(folder) if path.suffix == ".json"]))
    value = json.loads(path.read_text())
    is_index = path.name == "cache.json"
    whole = value["body"] if is_index else value
    # The name of the model's kind and the names of sequences are content: another one is another cache.
    place = data.draw(st.sampled_from([at for at in paths_of(whole) if at and at[0] != "cache"]))
    parent = whole
    for key in place[:-1]:
        parent = parent[key]
    old = parent[place[-1]]
    how = data.draw(st.sampled_from(["drop", "number", "double", "nonsense"]))
    if how == "drop":
        del parent[place[-1]]
    elif how == "number":
        near = [old + by for by in (-1, 1, 2)] if isinstance(old, int) else [0]
        parent[place[-1]] = data.draw(st.sampled_from([*near, -1, 0, 10**6, 10**12, 2**62, 10**30]))
    elif how == "double" and isinstance(parent, list):
        parent.append(old)
    else:
        nonsense: list[Any] = [None, True, 1.5, "x", [], {}, [[]], "../../etc", float("nan")]
        parent[place[-1]] = data.draw(st.sampled_from(nonsense))
    sign(path, value, folder)


def sign(path: Path, value: Any, folder: Path) -> None:
    index_path = folder / "cache.json"
    if path == index_path:
        index = value
    else:
        path.write_text(json.dumps(value))
        index = json.loads(index_path.read_text())
        index["body"]["checksums"][int(path.stem.split("-")[1])] = zlib.crc32(path.read_bytes())
    index["checksum"] = zlib.crc32(json.dumps(index["body"], sort_keys=True).encode())
    index_path.write_text(json.dumps(index))


DAMAGES: list[Callable[[st.DataObject, Path], None]] = [flip, cut_off, overwrite, insert, delete, swap, replace, forge]


@HOW_MANY
@given(st.data(), st.sampled_from(DAMAGES), st.sampled_from([1, 3]), st.sampled_from([1, 2]))
def test_a_damaged_cache_is_loaded_right_or_refused(
    data: st.DataObject, damage: Callable[[st.DataObject, Path], None], before: int, after: int
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "saved"
        shutil.copytree(saved(before), folder)
        damage(data, folder)

        def load(group: InProcessRank) -> tuple[str, dict[tuple[int, int], list[float]]]:
            cache = rs.KVCache(**OPTIONS, group=group)
            try:
                cache.load(folder)
            except rs.RingspanError as error:
                assert cache.lengths == {}
                return str(error), {}
            return "", contents(cache)

        ends = rs.run_in_process(load, after)
        refused = [bool(message) for message, _ in ends]
        assert all(refused) or not any(refused)
        if not any(refused):
            found = {place: row for _, rows in ends for place, row in rows.items()}
            wanted = expected()
            if damage is forge:  # a signed index without a sequence is that of another cache
                wanted = {place: row for place, row in wanted.items() if place[0] in {key[0] for key in found}}
            assert found == wanted
        assert not (folder / "executed").exists()
        count(f"damaged cache, {damage.__name__}: {'refused' if any(refused) else 'loaded right'}")
