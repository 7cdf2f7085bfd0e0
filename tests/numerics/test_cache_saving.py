"""A cache that is saved from some ranks continues on other ranks with the same results."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.cache import _saving as saving
from ringspan.cache import _storage as storage
from ringspan.transports.in_process import InProcessRank
from support.conversations import Story, live_through

HEADS = rs.Heads(4, 2)
CAUSAL = ("causal",)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("kind", [None, "bfloat16", "int8", "float8_e4m3"])
def test_saved_and_loaded(
    before: int, after: int, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MIN_BLOCK", 3)
    first = Story(7, HEADS, [CAUSAL, CAUSAL], torch.float32, storage=kind).turn({4: 23, 1: 6}).truncate(4, 17)
    first.turn({4: 1, 1: 1}).turn({9: 2}).truncate(9, 0)

    def save(group: InProcessRank) -> None:
        live_through(first, group).save(tmp_path)

    rs.run_in_process(save, before)
    rest = Story(8, HEADS, first.specs, torch.float32, storage=kind)
    rest.held = {sequence: list(layers) for sequence, layers in first.held.items() if sequence != 9}
    rest.turn({1: 5, 4: 3}).turn({4: 1, 1: 1}, query="replicated")

    def go_on(group: InProcessRank) -> dict[int, tuple[int, ...]]:
        cache = rest.cache(group)
        cache.load(tmp_path)
        assert cache.lengths == {4: 18, 1: 7}
        return live_through(rest, group, cache).balance()

    for counts in rs.run_in_process(go_on, after)[0].values():
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 1), (2, 4)])
def test_sequences_with_fewer_tokens_than_ranks(before: int, after: int, tmp_path: Path) -> None:
    first = Story(7, HEADS, [CAUSAL]).turn({0: 1, 1: 9}).truncate(1, 1)
    rs.run_in_process(lambda group: live_through(first, group).save(tmp_path), before)
    rest = Story(8, HEADS, first.specs)
    rest.held = {sequence: list(layers) for sequence, layers in first.held.items()}
    rest.turn({0: 5, 1: 3})

    def go_on(group: InProcessRank) -> None:
        cache = rest.cache(group)
        cache.load(tmp_path)
        live_through(rest, group, cache)

    rs.run_in_process(go_on, after)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    story = Story(7, HEADS, [CAUSAL]).turn({0: 5})
    cache = live_through(story, None)
    with pytest.raises(rs.CacheError, match="no complete cache"):
        story.cache(None).load(tmp_path)
    cache.save(tmp_path)
    with pytest.raises(rs.CacheError, match="drop them first"):
        cache.load(tmp_path)
    with pytest.raises(rs.CacheError, match="this one is of 2 layers"):
        Story(7, HEADS, [CAUSAL, CAUSAL]).cache(None).load(tmp_path)


def cache_of(group: InProcessRank | None, **options: int) -> rs.KVCache:
    return rs.KVCache(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, group=group, **options)


def save_eight(group: InProcessRank | None, value: float, folder: Path) -> None:
    cache = cache_of(group)
    with cache.begin([8], algorithm="pass_kv") as turn:
        x = torch.full((1, 1, turn.num_rows, 4), value)
        turn.prefill(x, x, x, layer=0)
    cache.save(folder)


def loaded_value(folder: Path, world_size: int = 1) -> float:
    """Return the one value of all keys and values of `save_eight`."""

    def load(group: InProcessRank) -> set[float]:
        cache = cache_of(group)
        cache.load(folder)
        assert cache.lengths == {0: 8}
        rows = cache._state.stored[0].all_layers(cache.balance()[0][group.rank])
        return {value for _, views in rows for x in views for value in x.flatten().tolist()}

    (value,) = set.union(*rs.run_in_process(load, world_size))
    return value


def test_a_save_that_one_rank_cannot_finish_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks learn at once that one rank could not write."""
    rs.run_in_process(lambda group: save_eight(group, 1.0, tmp_path), 2)
    write_bytes = Path.write_bytes

    def full_disk(path: Path, data: bytes) -> int:
        if path.name == "rank-1.json":
            raise OSError("disk full")
        return write_bytes(path, data)

    messages = []

    def save_again(group: InProcessRank) -> None:
        with pytest.raises((OSError, rs.TransportError)) as caught:
            save_eight(group, 2.0, tmp_path)
        messages.append(str(caught.value))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full_disk)
        rs.run_in_process(save_again, 2, timeout_s=20)
    assert all("disk full" in message for message in messages)
    assert loaded_value(tmp_path) == 1.0
    rs.run_in_process(lambda group: save_eight(group, 3.0, tmp_path), 3)
    assert loaded_value(tmp_path, 2) == 3.0
    assert len([*tmp_path.iterdir()]) == 2  # what the failed save has left is gone too


def test_a_refused_save_leaves_the_earlier_one(tmp_path: Path) -> None:
    rs.run_in_process(lambda group: save_eight(group, 1.0, tmp_path), 2)

    def save_other(group: InProcessRank) -> None:
        cache = cache_of(group, max_tokens=100 + group.rank)
        with pytest.raises(rs.TransportError, match="max_tokens"):
            cache.save(tmp_path)

    rs.run_in_process(save_other, 2, timeout_s=20)
    assert loaded_value(tmp_path) == 1.0


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_refused(version: int, tmp_path: Path) -> None:
    save_eight(None, 1.0, tmp_path)
    index = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps(index | {"version": version}))
    with pytest.raises(rs.CacheError, match=f"its version is {version}, and .* reads version 2"):
        cache_of(None).load(tmp_path)


@pytest.mark.parametrize("version", [None, "2", 2.0, True])
def test_a_version_that_is_not_a_number_is_refused(version: Any, tmp_path: Path) -> None:
    save_eight(None, 1.0, tmp_path)
    index = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps(index | {"version": version}))
    with pytest.raises(rs.CacheError, match=r"cache\.json: it has no version number; load another copy"):
        cache_of(None).load(tmp_path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """Not where torch.distributed.checkpoint would look, nor in place of a file of ours; and nothing imports it."""
    save_eight(None, 1.0, tmp_path)
    trace = tmp_path / "executed"

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trace,)

    harm = pickle.dumps(Harm())
    (data,) = tmp_path.glob("data-*")
    for folder in (tmp_path, tmp_path / "rank-0", data):
        folder.mkdir(exist_ok=True)
        (folder / ".metadata").write_bytes(harm)
        (folder / "__0_0.distcp").write_bytes(harm)
    assert loaded_value(tmp_path) == 1.0
    for name in ("rank-0.safetensors", "rank-0.json"):
        whole = (data / name).read_bytes()
        (data / name).write_bytes(harm)
        with pytest.raises(rs.CacheError, match=name):
            cache_of(None).load(tmp_path)
        (data / name).write_bytes(whole)
    assert not trace.exists()
    for source in Path(saving.__file__).parent.glob("*.py"):
        assert not re.search(r"\b(pickle|torch\.load|distributed\.checkpoint|marshal|shelve)\b", source.read_text())


def test_a_cache_with_other_room_can_be_filled(tmp_path: Path) -> None:
    rs.run_in_process(lambda group: save_eight(group, 1.0, tmp_path), 2)

    def load(group: InProcessRank) -> dict[int, int]:
        cache = cache_of(group, max_tokens=100)
        cache.load(tmp_path)
        return cache.lengths

    assert rs.run_in_process(load, 1) == [{0: 8}]


def test_all_ranks_hear_of_one_that_cannot_read(tmp_path: Path) -> None:
    rs.run_in_process(lambda group: save_eight(group, 1.0, tmp_path), 2)
    messages = []

    def load(group: InProcessRank) -> None:
        with pytest.raises(rs.RingspanError) as caught:
            cache_of(group).load(tmp_path / "elsewhere" if group.rank else tmp_path)
        messages.append(str(caught.value))

    rs.run_in_process(load, 2, timeout_s=20)
    assert all("no complete cache" in message for message in messages)
