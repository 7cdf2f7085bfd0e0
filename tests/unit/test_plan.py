"""The answers of a plan: consistent with its own predictions, and with what a reader would work out."""

import re
from dataclasses import replace

import pytest

from ringspan.catalog import load_model, parse_devices
from ringspan.errors import RingspanError
from ringspan.plan import Request, Setup, build_plan, count_memory, predict, timeline_of
from ringspan.plan.candidates import list_setups


def request_for(model="llama-3.1-8b", devices="8xh100", phase="prefill", tokens=2**17, **options):
    return Request(load_model(model), parse_devices(devices), phase, tokens, **options)


def test_options_are_ranked_and_what_fits_comes_first():
    plan = build_plan(request_for("llama-3.1-70b", "8xh100"))
    order = [(not option.fits, option.prediction.total_s) for option in plan.options]
    assert order == sorted(order)
    assert {option.fits for option in plan.options} == {True, False}  # 141 GB of weights do not fit on one device
    assert plan.best.setup.tp > 1
    assert all(option.setup.tp * option.setup.cp * option.setup.copies == 8 for option in plan.options)


def test_the_longest_sequence_fits_and_a_longer_one_does_not():
    request = request_for()
    plan = build_plan(request)
    room = request.cluster.device.memory_bytes
    longest = plan.longest_tokens
    for tokens, is_within in ((longest, True), (int(longest * 1.01), False)):
        memory = count_memory(replace(request, tokens=tokens), plan.best.setup)
        assert (memory.total <= room) == is_within


def test_the_break_even_length_parts_one_device_from_many():
    request = request_for(tp=1)
    plan = build_plan(request)
    alone = Setup("pass_kv", "contiguous", 1, 1)

    def gains(tokens):
        asked = replace(request, tokens=tokens)
        return predict(asked, plan.best.setup).total_s < predict(asked, alone).total_s

    assert 1 < plan.break_even_tokens < request.tokens
    assert gains(plan.break_even_tokens)
    assert not gains(plan.break_even_tokens * 3 // 4)


def test_the_crossing_parts_pass_q_from_pass_kv():
    request = request_for("llama-3.1-405b", "4x8xh100", tokens=2**13, cached_tokens=2**17 - 2**13, tp=8)
    crossing = build_plan(request).crossing
    assert crossing.num_keys == 2**17

    def q_wins(new):
        asked = replace(request, tokens=new, cached_tokens=2**17 - new)
        q, kv = (timeline_of(asked, Setup(name, "zigzag", 8, 4)).makespan_s for name in ("pass_q", "pass_kv"))
        return q < kv

    assert 4 < crossing.new_tokens < 2**17
    assert q_wins(crossing.new_tokens * 3 // 4)
    assert not q_wins(crossing.new_tokens * 5 // 4)


def test_what_is_not_possible_is_told_with_the_reason():
    illegal = dict(build_plan(request_for("wan2.1-1.3b", "8xh100", "denoise", 32760)).illegal)
    assert "12 query heads" in illegal["ulysses 8"]
    assert "two nodes" in illegal["double-ring"]


def test_every_algorithm_is_among_the_ways_of_two_nodes():
    setups, _ = list_setups(request_for(devices="2x8xh100"), [1])
    names = {setup.algorithm for setup in setups}
    assert names == {"pass_kv", "pass_q", "all_gather", "ulysses", "hybrid", "double_ring"}
    assert {setup.layout for setup in setups} == {"zigzag", "striped", "contiguous"}


def test_a_batch_may_be_split_over_copies():
    plan = build_plan(request_for("cogvideox-5b", "8xa100", "denoise", 17776, batch=2))
    assert {option.setup.copies for option in plan.options} == {1, 2}
    assert plan.best.setup.copies == 2  # guidance in parallel costs no message


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_more_devices_are_faster_for_long_sequences(phase):
    times = [
        build_plan(request_for(devices=f"{nodes}x8xh100", phase=phase, tokens=2**20, tp=8)).best.prediction.total_s
        for nodes in (1, 2, 4)
    ]
    if phase == "decode":
        assert times[1] < times[0]  # the cache is read by more devices, until messages cost more than they save
    else:
        assert times == sorted(times, reverse=True)


def test_a_quantised_wire_shortens_only_messages():
    plain, int8 = (request_for(devices="4x8xl40s", tokens=2**14, tp=1, wire=wire) for wire in ("bf16", "int8"))
    setup = Setup("pass_kv", "zigzag", 1, 32)
    before, after = predict(plain, setup), predict(int8, setup)
    assert after.attention_exposed_s < before.attention_exposed_s
    assert after.attention_compute_s == before.attention_compute_s


def test_sliding_layers_are_cheaper_and_latent_caches_smaller():
    gemma = build_plan(request_for("gemma-3-27b", tokens=2**17)).best.prediction
    assert gemma.window_attention_s < gemma.attention_s / 4


def test_training_costs_a_backward_and_recomputation_a_forward():
    setup = Setup("pass_kv", "zigzag", 1, 8)
    forward = predict(request_for(), setup).total_s
    kept, anew = (predict(request_for(phase="train", recomputes=flag), setup).total_s for flag in (False, True))
    assert 2.5 < kept / forward < 4
    assert anew - kept == pytest.approx(forward)


def test_tensor_parallelism_across_nodes_is_tried_only_if_nothing_else_fits():
    wide = build_plan(request_for("llama-3.1-405b", "4x8xh100", tokens=2**13))
    assert wide.best.fits
    assert wide.best.setup.tp > 8
    assert all(option.setup.tp <= 8 for option in build_plan(request_for(devices="4x8xh100")).options)


def test_a_plan_explains_itself_and_gives_settings():
    plan = build_plan(request_for("wan2.1-14b", "8xh100", "denoise", 75600, tp=1))
    assert {"weights", "attention rate", "in all"} <= {line.what for line in plan.explanation}
    recipes = {recipe.library: recipe for recipe in plan.recipes}
    assert "ContextParallelConfig(" in recipes["diffusers"].settings
    assert "rs.attention(" in recipes["ringspan"].settings


def test_settings_say_where_a_library_cannot_express_the_choice():
    """It then gets the fastest way that it can express, with what that costs."""
    plan = build_plan(request_for("wan2.1-14b", "8xh100", "denoise", 75600))
    assert plan.best.setup.tp > 1  # which diffusers does not have
    diffusers = {recipe.library: recipe for recipe in plan.recipes}["diffusers"]
    degrees = re.search(r"ring_degree=(\d), ulysses_degree=(\d)", diffusers.settings)
    assert degrees is not None
    assert int(degrees[1]) * int(degrees[2]) == 8
    assert re.search(
        r"has no setting for .* beside tensor parallelism .* over 8 ranks, \d+\.\d% slower", diffusers.caveat
    )

    plan = build_plan(request_for(devices="2x8xh100", phase="train", tp=1, shards_weights=True))
    assert {recipe.library for recipe in plan.recipes} == {"ringspan", "accelerate", "torchtitan"}


def test_settings_of_decode_are_those_of_the_cache():
    plan = build_plan(request_for("llama-3.1-405b", "2x8xh100", "decode", 2**17, tp=8))
    assert "rs.decode(" in plan.recipes[0].settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp=3"),
        ({"tokens": 0}, "tokens=0"),
        ({"batch": -1}, "batch=-1"),
        ({"wire": "int3"}, "wire='int3'"),
        ({"phase": "denoise"}, "is a model for prefill"),
        ({"phase": "decode", "cached_tokens": 5}, "only a prefill"),
        ({"tokens": 2**41}, "at most"),
    ],
)
def test_requests_that_make_no_sense_are_refused(options, message):
    with pytest.raises(RingspanError, match=message):
        request_for(**options)
