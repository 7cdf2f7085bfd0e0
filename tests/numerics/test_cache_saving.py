"""A cache saved from some ranks goes on, on other ranks, as if nothing had happened."""

from pathlib import Path

import pytest
import torch

import ringspan as rs
from conversations import Story, live_through
from ringspan.inference import storage
from ringspan.transports.in_process import InProcessRank

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
