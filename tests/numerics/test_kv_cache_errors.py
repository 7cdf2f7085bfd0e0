"""What does a cache refuse, and is it unchanged afterwards?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.transports.in_process import InProcessRank
from support.conversations import HEAD_DIM, V_HEAD_DIM, Story, attend, live_through

HEADS = rs.Heads(4, 2)
CAUSAL = ("causal",)


def story() -> Story:
    return Story(5, HEADS, [CAUSAL, CAUSAL], max_tokens=40).turn({0: 11, 1: 6}).turn({0: 1, 1: 1})


def tensors(turn: rs.Turn, more: int = 0, heads: rs.Heads = HEADS, dtype: torch.dtype = torch.float64) -> list[Any]:
    rows = turn.num_rows + more
    dims = ((heads.num_heads, HEAD_DIM), (heads.num_kv_heads, HEAD_DIM), (heads.num_kv_heads, V_HEAD_DIM))
    return [torch.zeros(1, n, rows, dim, dtype=dtype) for n, dim in dims]


def contents(cache: rs.KVCache) -> list[torch.Tensor]:
    state = cache._state
    return [
        x.clone()
        for sequence, placement in state.placements.items()
        for layer in range(state.model.num_layers)
        for rows in state.stored[sequence].rows(layer, 0, placement.counts[state.rank])
        for x in rows
    ]


def run_layer_twice(cache: rs.KVCache) -> None:
    turn = cache.begin([2, 2])
    for _ in range(2):
        turn.prefill(*tensors(turn), layer=0)


def commit_too_early(cache: rs.KVCache) -> None:
    turn = cache.begin([2, 2])
    turn.prefill(*tensors(turn), layer=1)
    try:
        turn.commit()
    finally:
        turn.abort()


def begin_twice(cache: rs.KVCache) -> None:
    turn = cache.begin([2, 2])
    try:
        cache.begin([1])
    finally:
        turn.abort()


def bound_of(run: Callable[..., Any], **options: Any) -> Callable[[rs.KVCache], None]:
    def ask(cache: rs.KVCache) -> None:
        with cache.begin([2, 2], **options) as turn:
            q, k, v = tensors(turn)
            run(q, k, v, turn)
            turn.error_bound(q, layer=1)

    return ask


def prefill_with_gradients(cache: rs.KVCache) -> None:
    turn = cache.begin([2, 2])
    turn.prefill(*(x.requires_grad_() for x in tensors(turn)), layer=0)


REFUSALS: dict[str, tuple[Callable[[rs.KVCache], Any], type[Exception], str]] = {
    "a position twice": (lambda c: c.begin([2, 2], starts=[12, 5]), rs.CacheError, "5 to 6 are cached already"),
    "a gap": (lambda c: c.begin({1: 2}, starts={1: 9}), rs.CacheError, "7 to 8 would be missing"),
    "starts of others": (lambda c: c.begin({1: 2}, starts={0: 12}), rs.CacheError, "give both"),
    "a full cache": (lambda c: c.begin([200, 1]), rs.CacheError, "max_tokens is 40"),
    "no tokens": (lambda c: c.begin([1, 0]), rs.ShapeError, r"new_lengths\[1\]=0"),
    "no sequence": (lambda c: c.begin([]), rs.CacheError, "at least one sequence"),
    "no such algorithm": (lambda c: c.begin([1], algorithm="ulysses"), rs.UnsupportedError, "auto, pass_kv, pass_q"),
    "a hyphen": (lambda c: c.begin([1], algorithm="pass-q"), rs.UnsupportedError, 'write "pass_q"'),
    "no such query": (lambda c: c.begin([1], query="half"), rs.UnsupportedError, "sharded"),
    "truncate too far": (lambda c: c.truncate(1, 8), rs.CacheError, "has 7 tokens; use 0 to 7"),
    "drop of nothing": (lambda c: c.drop(7), rs.CacheError, "the cache holds sequences 0, 1"),
    "select of nothing": (lambda c: c.select([0, 7]), rs.CacheError, "the cache holds sequences 0, 1"),
    "select of too much": (lambda c: c.select([0, 1] * 20), rs.CacheError, "sources=.*max_tokens is 40"),
    "a layer twice": (run_layer_twice, rs.CacheError, "has been run in this turn"),
    "a commit too early": (commit_too_early, rs.CacheError, r"without layers \[0\]"),
    "a bound of what was not run": (
        bound_of(lambda q, k, v, turn: turn.prefill(q, k, v, layer=0)),
        rs.CacheError,
        "layer=1: it was not attended",
    ),
    "a bound of what was only stored": (
        bound_of(lambda q, k, v, turn: turn.store(k, v, layer=1), algorithm="pass_kv", wire="int8"),
        rs.CacheError,
        "layer=1: it was not attended",
    ),
    "gradients": (prefill_with_gradients, rs.UnsupportedError, "q: it requires a gradient"),
    "two turns": (begin_twice, rs.CacheError, "commit or abort the turn first"),
}

WRONG_TENSORS: dict[str, Callable[[rs.Turn], list[Any]]] = {
    "too many": lambda turn: tensors(turn, more=1),
    "k too short": lambda turn: [tensors(turn)[0], tensors(turn)[1][:, :, :-1], tensors(turn)[2]],
    "another model's heads": lambda turn: tensors(turn, heads=rs.Heads(4, 4)),
    "another type": lambda turn: tensors(turn, dtype=torch.float32),
}


@pytest.mark.parametrize("name", [*REFUSALS, *WRONG_TENSORS])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_refused_leaves_no_trace(name: str, world_size: int) -> None:
    if name in REFUSALS:
        run, kind, text = REFUSALS[name]
    else:

        def run(cache: rs.KVCache) -> None:
            turn = cache.begin([2, 2])
            turn.prefill(*WRONG_TENSORS[name](turn), layer=0)

        kind, text = rs.ShapeError, "rank|is torch.float32"
    told = story()

    def refuse(group: InProcessRank) -> None:
        cache = live_through(told, group)
        before, lengths, balance = contents(cache), cache.lengths, cache.balance()
        # A layer that fails in the middle of a turn ends the group; another test covers that.
        if name == "a layer twice" and world_size > 1:
            return
        with pytest.raises(kind, match=text):
            run(cache)
        assert (cache.lengths, cache.balance()) == (lengths, balance)
        for a, b in zip(before, contents(cache), strict=True):
            assert torch.equal(a, b)
        live_through_rest(told, cache, group)

    rs.run_in_process(refuse, world_size)


def live_through_rest(told: Story, cache: rs.KVCache, group: InProcessRank) -> None:
    """The cache continues as if the turn had not been."""
    rest = Story(6, HEADS, told.specs)
    rest.held, rest.lengths, rest.acts = {s: list(layers) for s, layers in told.held.items()}, [], []
    live_through(rest.turn({1: 3, 0: 2}), group, cache)


def test_ranks_that_disagree_about_a_turn() -> None:
    """All ranks learn which rank asks for what, and the group stays usable."""
    told = story()

    def disagree(group: InProcessRank) -> str:
        cache = live_through(told, group)
        turn = cache.begin([2, 2 + group.rank])
        with pytest.raises(rs.TransportError) as caught:
            turn.prefill(*tensors(turn), layer=0)
        live_through_rest(told, cache, group)
        return str(caught.value)

    texts = rs.run_in_process(disagree, 2)
    assert texts[0] == texts[1]
    assert "new tokens: rank 0 has {0: 2, 1: 2}, rank 1 has {0: 2, 1: 3}" in texts[0]


def test_a_rank_whose_cache_went_another_way_is_found() -> None:
    told = story()

    def truncate_on_one(group: InProcessRank) -> str:
        cache = live_through(told, group)
        if group.rank:
            cache.truncate(0, 12)
        turn = cache.begin([1, 1])
        with pytest.raises(rs.TransportError) as caught:
            attend(turn, tensors(turn), 0)
        return str(caught.value)

    assert "history" in rs.run_in_process(truncate_on_one, 2)[0]


def test_a_rank_that_refuses_does_not_leave_the_others_waiting() -> None:
    told = story()

    def refuse_on_one(group: InProcessRank) -> str:
        cache = live_through(told, group)
        turn = cache.begin([2, 2])
        kind = rs.ShapeError if group.rank else rs.TransportError
        with pytest.raises(kind) as caught:
            turn.prefill(*tensors(turn, more=group.rank), layer=0)
        live_through_rest(told, cache, group)
        return str(caught.value)

    assert "rank 1: ShapeError: q.shape=" in rs.run_in_process(refuse_on_one, 2, timeout_s=20)[0]


def test_a_failure_in_a_later_layer_ends_all_waits() -> None:
    told = story()

    def fail_late(group: InProcessRank) -> tuple[str, dict[int, int]]:
        cache = live_through(told, group)
        turn = cache.begin([2, 2])
        turn.prefill(*tensors(turn), layer=0)
        with pytest.raises(rs.RingspanError) as caught:
            turn.prefill(*tensors(turn, more=group.rank), layer=1)
        return str(caught.value), cache.lengths

    (text, lengths), other = rs.run_in_process(fail_late, 2, timeout_s=20)
    assert "rank 1 failed: ShapeError" in text
    assert lengths == other[1] == story().lengths[-1]


LOOKING_AHEAD = {
    "all": (rs.full(), True),
    "a prefix": (rs.prefix(8), True),
    "frames": (rs.frame_causal(8), True),
    "a window": (rs.sliding_window(2, 2), True),
    "a document": (rs.documents([8]), True),
    "only an early token": (rs.sliding_window(-2, 9) & rs.prefix(5), True),
    "a prefix that is whole": (rs.prefix(4), False),
    "frames that are whole": (rs.frame_causal(2), False),
    "documents that are whole": (rs.documents([4, 4]), False),
    "causal documents": (rs.documents([8]) & rs.causal(), False),
    "a chunk": (rs.chunks(8), True),
    "causal chunks": (rs.chunks(8) & rs.causal(), False),
    "a block": (rs.causal() | rs.blocks([(2, 6)]), True),
    "blocks that are whole": (rs.causal() | rs.blocks([(2, 4), (5, 9)]), False),
    "ahead, but at nothing": (rs.sliding_window(-2, 9) & rs.causal(), False),
}


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_a_token_that_would_see_those_of_a_later_turn(name: str) -> None:
    """By the definition of the mask: a turn may continue only where no earlier token sees a later one."""
    mask, is_refused = LOOKING_AHEAD[name]
    assert mask.allowed(range(4), range(4, 8)).any() == is_refused
    cache = rs.KVCache(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, mask=mask)
    x = torch.randn(1, 1, 4, 4)
    with cache.begin([4]) as turn:
        turn.prefill(x, x, x, layer=0)
    if is_refused:
        with pytest.raises(rs.MaskError, match=r"sequence 0 has 4 cached tokens, and by this mask .* in the same turn"):
            cache.begin([4])
    else:
        cache.begin([4]).abort()


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, rs.ShapeError, "multiple"),
        ({"num_layers": 0}, rs.ShapeError, "num_layers=0"),
        ({"storage": "int4"}, rs.UnsupportedError, "float8_e4m3"),
        ({"dtype": torch.int32}, rs.ShapeError, "bfloat16"),
        ({"mask": [rs.causal()]}, rs.MaskError, "2 layers"),
        ({"mask": rs.per_row([rs.causal()])}, rs.MaskError, "per_row"),
        ({"max_tokens": 0}, rs.ShapeError, "max_tokens=0"),
        ({"kernel": "none"}, rs.UnsupportedError, "sdpa_cpu"),
    ],
)
def test_a_cache_that_cannot_be(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    options = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8} | change
    with pytest.raises(kind, match=text):
        rs.KVCache(**options)


def test_a_mask_that_ends() -> None:
    cache = rs.KVCache(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, mask=rs.causal() & rs.documents([5]))
    with pytest.raises(rs.MaskError, match="5 positions"):
        cache.begin([6])


def test_a_refusal_that_others_hear_of_while_they_measure_leaves_the_group_usable() -> None:
    """Rank 0 refuses; the others learn of it in `begin` and raise no error of their own."""

    def run(group: InProcessRank) -> str:
        cache = rs.KVCache(num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8, group=group)

        def turn(number: int) -> None:
            with cache.begin([number], algorithm="pass_kv") as turn:
                x = torch.randn(1, 4, turn.num_rows, 8)
                turn.prefill(x, x, x, layer=0)

        turn(400)
        with pytest.raises(rs.RingspanError) as caught:
            cache.begin([4], wire="int4" if group.rank == 0 else None)
        turn(4)
        assert cache.lengths == {0: 404}
        return str(caught.value)

    messages = rs.run_in_process(run, 2, timeout_s=20)
    assert all("wire='int4'" in message for message in messages)


@pytest.mark.parametrize("what", ["order", "first scale", "later scale"])
def test_layers_that_differ_between_ranks_are_found(what: str) -> None:
    """The first layer of a turn at once, the others when the next turn begins."""

    def run(group: InProcessRank) -> None:
        cache = rs.KVCache(num_layers=3, num_heads=1, num_kv_heads=1, head_dim=4, group=group)
        for _ in range(2):
            with cache.begin([8], algorithm="pass_kv") as turn:
                layers = [0, 2, 1] if what == "order" and group.rank else [0, 1, 2]
                for layer in layers:
                    odd = {"first scale": 0, "later scale": 1}.get(what) == layer and group.rank
                    x = torch.zeros(1, 1, turn.num_rows, 4)
                    turn.prefill(x, x, x, layer=layer, scale=0.25 if odd else None)

    with pytest.raises(rs.TransportError, match="scale: rank" if what == "first scale" else "history: rank"):
        rs.run_in_process(run, 2, timeout_s=20)


def test_another_first_layer_is_found_at_once() -> None:
    def run(group: InProcessRank) -> None:
        cache = rs.KVCache(num_layers=2, num_heads=1, num_kv_heads=1, head_dim=4, group=group)
        turn = cache.begin([8], algorithm="pass_kv")
        x = torch.zeros(1, 1, turn.num_rows, 4)
        turn.prefill(x, x, x, layer=group.rank)

    with pytest.raises(rs.TransportError, match=r"layer: rank \d has"):
        rs.run_in_process(run, 2, timeout_s=20)
