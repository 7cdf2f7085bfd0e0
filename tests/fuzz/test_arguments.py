"""Arguments of any kind whatever, one at a time, to every public function: taken, or refused with an error of ours."""

import functools
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from support.campaign import HOW_MANY, count

LAYOUT = rs.zigzag(8, 1)
Q = torch.zeros(1, 2, 8, 4)
KV = Q[:, :1]
ARRAY = np.zeros((2, 8, 4))
FOLDER = tempfile.gettempdir() + "/fuzz-arguments"


class Call(NamedTuple):
    function: Callable[..., Any]
    arguments: dict[str, Any]


def in_cache(name: str) -> Callable[..., Any]:
    return lambda **given: getattr(_cache(), name)(**given)


def in_turn(name: str, num_new: int) -> Callable[..., Any]:
    return lambda **given: getattr(_cache().begin([num_new]), name)(**given)


def _cache() -> rs.KVCache:
    return rs.KVCache(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)


ATTENTION: dict[str, Any] = {
    "q": Q,
    "k": KV,
    "v": KV,
    "mask": rs.causal(),
    "layout": LAYOUT,
    "kv_layout": None,
    "group": None,
    "algorithm": "pass_kv",
    "mesh": None,
    "direction": None,
    "kernel": "auto",
    "scale": None,
    "sinks": None,
    "wire": None,
    "reproducible": False,
    "return_lse": False,
    "timeout_s": None,
    "contract": True,
    "record": None,
}
SIMULATE: dict[str, Any] = {
    "q": ARRAY,
    "k": ARRAY,
    "v": ARRAY,
    "mask": rs.causal(),
    "layout": LAYOUT,
    "kv_layout": None,
    "algorithm": "pass_kv",
    "direction": None,
    "mesh": None,
    "scale": None,
    "reproducible": False,
}
CACHE: dict[str, Any] = {
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "v_head_dim": None,
    "group": None,
    "dtype": torch.float32,
    "storage": None,
    "mask": None,
    "max_tokens": None,
    "kernel": "auto",
    "device": "cpu",
}
BEGIN: dict[str, Any] = {"new_lengths": [3], "starts": None, "algorithm": "auto", "query": "sharded", "wire": None}
CALLS = {
    "sliding_window": Call(rs.sliding_window, {"left": 1, "right": 0}),
    "prefix": Call(rs.prefix, {"n": 3}),
    "documents": Call(rs.documents, {"lengths": [3]}),
    "chunks": Call(rs.chunks, {"size": 2, "start": 0}),
    "blocks": Call(rs.blocks, {"spans": [(0, 2), (3, 5)]}),
    "frame_causal": Call(rs.frame_causal, {"tokens_per_frame": 2, "start": 0}),
    "per_row": Call(rs.per_row, {"masks": [rs.causal()]}),
    "Mask.allowed": Call(rs.causal().allowed, {"q_positions": [0], "kv_positions": [0]}),
    "Mask.coverage": Call(rs.causal().coverage, {"q_span": rs.Span(0, 2), "kv_span": rs.Span(0, 2)}),
    "Span": Call(rs.Span, {"start": 0, "stop": 4, "step": 1}),
    "Layout": Call(rs.Layout, {"spans_by_rank": ((rs.Span(0, 4),),), "replicated": ()}),
    "Layout.positions": Call(LAYOUT.positions, {"rank": 0}),
    "Layout.shard": Call(LAYOUT.shard, {"x": Q, "rank": 0, "dim": 2}),
    "Layout.unshard": Call(LAYOUT.unshard, {"parts": [Q], "dim": 2}),
    "contiguous": Call(rs.contiguous, {"seq_len": 8, "world_size": 2, "align": 1, "start": 0}),
    "zigzag": Call(rs.zigzag, {"seq_len": 8, "world_size": 2}),
    "striped": Call(rs.striped, {"seq_len": 8, "world_size": 2, "block": 1}),
    "balanced": Call(rs.balanced, {"mask": rs.causal(), "seq_len": 8, "world_size": 2}),
    "simulate_attention": Call(rs.simulate_attention, SIMULATE),
    "attention": Call(rs.attention, ATTENTION),
    "gather": Call(rs.gather, {"part": Q, "layout": LAYOUT, "group": None, "dim": 2, "timeout_s": None}),
    "shard": Call(rs.shard, {"whole": Q, "layout": LAYOUT, "group": None, "dim": 2}),
    "KVCache": Call(rs.KVCache, CACHE),
    "KVCache.begin": Call(in_cache("begin"), BEGIN),
    "KVCache.truncate": Call(in_cache("truncate"), {"sequence": 0, "position": 0}),
    "KVCache.drop": Call(in_cache("drop"), {"sequence": 0}),
    "KVCache.select": Call(in_cache("select"), {"sources": []}),
    "KVCache.positions": Call(in_cache("positions"), {"sequence": 0}),
    "KVCache.load": Call(in_cache("load"), {"folder": FOLDER}),
    "Turn.prefill": Call(in_turn("prefill", 8), {"q": Q, "k": KV, "v": KV, "layer": 0, "scale": None}),
    "Turn.store": Call(in_turn("store", 8), {"k": KV, "v": KV, "layer": 0}),
    "Turn.error_bound": Call(in_turn("error_bound", 8), {"q": Q, "layer": 0, "scale": None}),
    "run_in_process": Call(functools.partial(rs.run_in_process, lambda group: 0), {"world_size": 1, "timeout_s": 60.0}),
    "ring_attention_simulate": Call(
        rs.ring_attention_simulate, {"Q": ARRAY[0], "K": ARRAY[0], "V": ARRAY[0], "num_devices": 2}
    ),
    "ring_attention_context_parallel": Call(
        rs.ring_attention_context_parallel, {"total_seq_len": 100, "num_gpus": 2, "hidden_dim": 8, "num_heads": 2}
    ),
}
ANYTHING = [
    *(None, True, -1, 0, 1, 5, 2**31, 2**70, 1.5, float("nan"), float("inf"), "x", "", b"x", [], [1, 2], [None]),
    *((1, 2), {}, {0: 1}, set(), object(), range(3), np.zeros(3), np.int64(2), np.float32(2.5), np.array(1)),
    *(torch.zeros(2), torch.tensor(3), torch.zeros(1, 2, 3, 4), rs.causal(), rs.Span(0, 3), LAYOUT),
]


def give(name: str, argument: str, value: Any) -> None:
    call = CALLS[name]
    # It is no error to ask for much work; the bounds of what is too much have tests of their own.
    if argument == "timeout_s" or (isinstance(value, int) and not isinstance(value, bool) and value > 1000):
        return
    try:
        call.function(**call.arguments | {argument: value})
    except rs.RingspanError:
        count("argument: refused")
    except Exception as error:
        raise AssertionError(f"{name}({argument}={value!r}): {type(error).__name__}: {error}") from error
    else:
        count("argument: taken")


@HOW_MANY
@given(st.data(), st.sampled_from(sorted(CALLS)), st.sampled_from(range(len(ANYTHING))))
def test_one_argument_of_any_kind(data: st.DataObject, name: str, index: int) -> None:
    give(name, data.draw(st.sampled_from(sorted(CALLS[name].arguments))), ANYTHING[index])


@pytest.mark.parametrize("name", sorted(CALLS))
def test_each_argument_with_each_thing(name: str) -> None:
    for argument in CALLS[name].arguments:
        for value in ANYTHING:
            give(name, argument, value)


def test_numbers_of_ranks_have_a_bound() -> None:
    for build in (rs.contiguous, rs.zigzag, rs.striped):
        with pytest.raises(rs.LayoutError, match="at most 65536 ranks"):
            build(8, 10**7)
    with pytest.raises(rs.ShapeError, match="at most 1024 threads"):
        rs.run_in_process(lambda group: None, 10**7)
