"""A cache saved from some ranks goes on, on other ranks, as if nothing had happened."""

from pathlib import Path

import pytest
import torch

import ringspan as rs
from ringspan.cache import storage
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


def cache_of(group: InProcessRank, **options: int) -> rs.KVCache:
    return rs.KVCache(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, group=group, **options)


def save_eight(group: InProcessRank, value: float, folder: Path) -> None:
    cache = cache_of(group)
    with cache.begin([8], algorithm="pass_kv") as turn:
        x = torch.full((1, 1, turn.num_rows, 4), value)
        turn.prefill(x, x, x, layer=0)
    cache.save(folder)


def test_what_was_saved_over_by_some_ranks_only_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others hear at once that one rank could not write."""
    rs.run_in_process(lambda group: save_eight(group, 1.0, tmp_path), 2)
    write_text = Path.write_text

    def full_disk(path: Path, *args: str) -> int:
        if path == tmp_path / "rank-1" / "blocks.json":
            raise OSError("disk full")
        return write_text(path, *args)

    monkeypatch.setattr(Path, "write_text", full_disk)
    messages = []

    def save_again(group: InProcessRank) -> None:
        with pytest.raises((OSError, rs.TransportError)) as caught:
            save_eight(group, 2.0, tmp_path)
        messages.append(str(caught.value))

    rs.run_in_process(save_again, 2, timeout_s=20)
    assert all("disk full" in message for message in messages)
    with pytest.raises(rs.CacheError, match="no complete cache"):
        rs.run_in_process(lambda group: cache_of(group).load(tmp_path), 2)


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
