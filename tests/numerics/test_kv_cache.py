"""For any conversation, a cache on any number of ranks answers like one device."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringspan as rs
from ringspan.cache import _storage as storage
from ringspan.runtime import arithmetic
from ringspan.transports.in_process import InProcessRank
from support.conversations import Story, attend, live_through

CAUSAL = ("causal",)
WINDOW = ("and", CAUSAL, ("sliding_window", 5, 0))
GAP = ("or", ("sliding_window", 3, 0), ("sliding_window", 11, -7))
HEADS = [rs.Heads(4, 4), rs.Heads(4, 2), rs.Heads(3, 1)]
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
STORAGES = [None, "float32", "bfloat16", "float16", "int8", "float8_e4m3"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use storage blocks so short that every sequence spans several, and convert a few keys at a time."""
    monkeypatch.setattr(storage, "MIN_BLOCK", 3)
    monkeypatch.setattr(arithmetic, "_CPU_SLAB_BYTES", 700)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    specs = draw(st.sampled_from([[CAUSAL], [CAUSAL, WINDOW], [GAP]]))
    dtype, storage = draw(st.sampled_from(TYPES)), draw(st.sampled_from(STORAGES))
    story = Story(draw(st.integers(0, 2**16)), draw(st.sampled_from(HEADS)), specs, dtype, storage=storage)
    for _ in range(draw(st.integers(1, 7))):
        known = sorted(story.held)
        kind = draw(st.sampled_from(["prefill", "decode", "decode", "abort", "truncate", "drop", "select"]))
        if kind == "select" and known:
            story.select(tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=4))))
            continue
        if kind in ("truncate", "drop") and known:
            sequence = draw(st.sampled_from(known))
            if kind == "drop":
                story.drop(sequence)
            else:
                story.truncate(sequence, draw(st.integers(0, story.length(sequence))))
            continue
        sequences = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
        largest = 1 if kind == "decode" else 13
        lengths = {sequence: draw(st.integers(1, largest)) for sequence in sequences}
        query = draw(st.sampled_from(["sharded", "replicated"]))
        algorithm = "auto" if query == "replicated" else draw(st.sampled_from(["pass_kv", "pass_q"]))
        story.turn(lengths, "abort" if kind == "abort" else "turn", query=query, algorithm=algorithm)
    return story


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(story=stories())
def test_any_conversation(world_size: int, story: Story) -> None:
    rs.run_in_process(lambda group: live_through(story, group), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_ranks_are_level_and_become_so_again(world_size: int) -> None:
    """Ranks differ by at most one token per sequence; after a rollback new tokens go to the ranks with the fewest."""
    story = Story(1, HEADS[0], [CAUSAL]).turn({0: 37, 1: 5}).turn({0: 4, 1: 11})
    for _ in range(5):
        story.turn({0: 1, 1: 1})
    caches = rs.run_in_process(lambda group: live_through(story, group), world_size)
    assert all(cache.balance() == caches[0].balance() for cache in caches)
    for counts in caches[0].balance().values():
        assert max(counts) - min(counts) <= 1
    for sequence in (0, 1):
        held = torch.cat([cache.positions(sequence) for cache in caches])
        assert sorted(held.tolist()) == list(range(story.length(sequence)))

    story.truncate(0, 12)

    def go_on(group: InProcessRank) -> list[tuple[int, ...]]:
        cache = live_through(story, group)
        counts = [cache.balance()[0]]
        story_of_rank = Story(2, HEADS[0], [CAUSAL])
        for _ in range(40):
            turn = cache.begin([1], query="replicated")
            q, k, v = (story_of_rank._tensor(4, 1, dim) for dim in (8, 8, 6))
            turn.decode(q, k, v, layer=0)
            turn.commit()
            counts.append(cache.balance()[0])
        return counts

    counts = rs.run_in_process(go_on, world_size)[0]
    for before, after in itertools.pairwise(counts):
        grown = [a - b for a, b in zip(after, before, strict=True)].index(1)
        assert before[grown] == min(before)
    assert max(counts[-1]) - min(counts[-1]) <= 1


@pytest.mark.parametrize("query", ["sharded", "replicated"])
@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q"])
def test_nothing_of_another_sequence_is_seen(query: str, algorithm: str) -> None:
    """A neighbour full of NaN changes no bit, in the same turn or an earlier one."""
    options = {"query": query, "algorithm": algorithm if query == "sharded" else "auto"}
    story = Story(3, HEADS[1], [CAUSAL, WINDOW])
    story.turn({0: 9, 1: 12, 2: 4}, **options).turn({0: 1, 1: 1, 2: 1}, **options).turn({1: 7, 0: 3}, **options)

    def answers(group: InProcessRank, poison: bool) -> list[torch.Tensor]:
        cache, kept = story.cache(group), []
        for act in story.acts:
            with cache.begin(act.lengths, algorithm=act.algorithm, query=act.query) as turn:
                sequence_of = torch.cat([torch.full((n,), s) for s, n in act.lengths.items()])
                own = turn.layout.shard(sequence_of, group.rank, 0) == 1
                for layer, tensors in enumerate(act.tensors):
                    qkv = [turn.layout.shard(x, group.rank, 2).clone() for x in tensors[:3]]
                    if poison:
                        for x in qkv:
                            x[:, :, own] = torch.nan
                    kept.append(attend(turn, qkv, layer)[:, :, ~own])
        return kept

    for clean, poisoned in zip(
        *(rs.run_in_process(lambda g, p=p: answers(g, p), 3) for p in (False, True)), strict=True
    ):
        for a, b in zip(clean, poisoned, strict=True):
            assert torch.equal(a, b)


def test_blocks_are_never_moved_and_rarely_made() -> None:
    """A thousand tokens, one at a time: few allocations, and stored tokens are not moved."""
    cache = rs.KVCache(num_layers=2, num_heads=1, num_kv_heads=1, head_dim=4)
    x = torch.zeros(1, 1, 1, 4)
    places: list[tuple[int, ...]] = []
    for _ in range(1000):
        with cache.begin([1]) as turn:
            for layer in range(2):
                turn.decode(x, x, x, layer=layer)
        places.append(tuple(block.tensors[0].data_ptr() for block in cache._state.stored[0]._blocks))
    assert all(after[: len(before)] == before for before, after in itertools.pairwise(places))
    assert len(places[-1]) < 30
    assert cache.nbytes <= 1.3 * 1000 * 2 * 2 * 4 * 4


LATER_ONLY = ("sliding_window", -3, None)  # a window that begins after the query: no query sees the first keys


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_masks_under_which_no_query_sees_the_first_keys(world_size: int, wire: str | None) -> None:
    story = Story(11, HEADS[0], [LATER_ONLY], torch.float32).turn({0: 16}, algorithm="pass_kv", wire=wire)
    rs.run_in_process(lambda group: live_through(story, group), world_size)


@pytest.mark.parametrize("wire", [None, "int8"])
def test_ranks_without_a_key(wire: str | None) -> None:
    """Three ranks and one token, then another, and a window that has passed most ranks."""
    story = Story(12, HEADS[0], [CAUSAL, WINDOW], torch.float32)
    for number in (1, 1, 2, 30, 2):
        story.turn({0: number}, algorithm="pass_kv", wire=wire)
    rs.run_in_process(lambda group: live_through(story, group), 3)


@pytest.mark.parametrize("modes", [(True, False), (False, True)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_turns_in_inference_mode_and_outside(world_size: int, modes: tuple[bool, bool]) -> None:
    """Including beams: a cache made in one mode is written to in the other."""
    first = Story(13, HEADS[0], [CAUSAL], torch.float32).turn({0: 9}, algorithm="pass_kv").select((0, 0))
    rest = Story(14, HEADS[0], first.specs, torch.float32)
    rest.held = {sequence: list(layers) for sequence, layers in first.held.items()}
    rest.turn({0: 1, 1: 1}).turn({0: 5, 1: 7}, algorithm="pass_kv")

    def live(group: InProcessRank) -> None:
        cache = None
        for story, is_inference in zip((first, rest), modes, strict=True):
            with torch.inference_mode(is_inference), torch.no_grad():
                cache = live_through(story, group, cache)

    rs.run_in_process(live, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_copy_goes_on_by_itself(world_size: int) -> None:
    """Two answers to one prompt; then the prompt itself continues as if there had been none."""
    first = Story(15, HEADS[1], [CAUSAL, WINDOW], torch.float32).turn({0: 11, 2: 5}, algorithm="pass_kv")
    stories = []
    for seed in range(3):
        story = Story(seed, HEADS[1], first.specs, torch.float32)
        story.held = {sequence: list(layers) for sequence, layers in first.held.items()}
        stories.append(story.turn({0: 1, 2: 1}).truncate(2, 3).turn({2: 6}, algorithm="pass_kv"))

    def live(group: InProcessRank) -> None:
        cache = live_through(first, group)
        for story in stories[1:]:
            live_through(story, group, cache.copy())
        live_through(stories[0], group, cache)

    rs.run_in_process(live, world_size)


def test_more_tokens_than_there_is_memory_for() -> None:
    cache = rs.KVCache(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=64)
    with pytest.raises(rs.CacheError, match=r"^no memory for 4611686018427387904 tokens of a sequence on one rank"):
        cache.begin([2**62])
    with cache.begin([3]) as turn:
        x = torch.zeros(1, 2, 3, 64)
        turn.prefill(x, x, x, layer=0)
    assert cache.lengths == {0: 3}
