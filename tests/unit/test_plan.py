"""The answers of a plan: consistent with its own predictions, and with what a reader would work out."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from ringspan.cli.plan.files import plot_plan
from ringspan.errors import RingspanError
from ringspan.planner.accuracy import is_tie
from ringspan.planner.catalog import load_model, parse_devices
from ringspan.planner.plan import Request, Setup, build_plan, count_memory, predict, timeline_of
from ringspan.planner.plan.candidates import list_setups
from ringspan.planner.plan.settings import list_recipes
from ringspan.planner.software import MEGATRON, RINGSPAN


def request_for(model="llama-3.1-8b", devices="8xh100", phase="prefill", tokens=2**17, **options):
    return Request(load_model(model), parse_devices(devices), phase, tokens, **options)


def test_options_are_ranked_and_what_fits_comes_first():
    plan = build_plan(request_for("llama-3.1-70b", "8xh100"))
    fast = [option.prediction.total_s for option in plan.options if option.fits]
    near = [option.memory.total for option in plan.options if not option.fits]
    assert [option.fits for option in plan.options] == [True] * len(fast) + [False] * len(near)
    assert fast == sorted(fast)
    assert near == sorted(near)
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
        ours, theirs = predict(asked, plan.best.setup), predict(asked, alone)
        return ours.total_s < theirs.total_s and not is_tie(ours.parts, theirs.parts, request.cluster.device)

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


def test_impossible_options_are_listed_with_the_reason():
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
    tokens = 2**24 if phase == "decode" else 2**20
    times = [
        build_plan(request_for(devices=f"{nodes}x8xh100", phase=phase, tokens=tokens, tp=8)).best.prediction.total_s
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
    kept, anew = (predict(request_for(phase="train", recomputes=flag), setup) for flag in (False, True))
    assert 2.5 < kept.total_s / predict(request_for(), setup).total_s < 4
    assert anew.total_s - kept.total_s == pytest.approx(kept.forward.total_s)
    software = RINGSPAN._replace(recomputes_attention=False)
    without = predict(request_for(phase="train", software=software), setup)
    assert without.again.attention_compute_s == 0
    assert without.again.matmul_s == kept.forward.matmul_s


def test_sharded_weights_are_gathered_twice_and_their_gradients_scattered():
    """As arXiv 1910.02054 counts them: three times the parameters travel, where an all-reduce moves them twice."""
    layer_bytes = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # of llama-3.1-8b, in bf16
    device = parse_devices("8xh100").device
    gather_s = device.near.latency_s + 7 / 8 * layer_bytes / (0.844 * 450e9)
    setup = Setup("pass_kv", "zigzag", 1, 8)
    options = {"phase": "train", "shards_weights": True, "software": MEGATRON}
    long, short = (predict(request_for(tokens=n, **options), setup) for n in (2**20, 64))
    assert long.sharding_s == pytest.approx(
        3 * gather_s
    )  # the first of each pass and the last have nothing to hide behind
    assert long.gradients_s == 0
    assert short.total_s > 32 * 3 * gather_s > short.forward.total_s
    assert short.bottleneck == "gathering sharded weights"
    assert (
        predict(request_for(phase="train", shards_weights=True), Setup("pass_kv", "contiguous", 8, 1)).sharding_s == 0
    )


def test_the_bottleneck_is_that_of_the_whole():
    """A full layer of gemma-3-27b is mostly attention; but of six layers five see 1,024 tokens only."""
    prediction = build_plan(request_for("gemma-3-27b", tokens=2**18)).best.prediction
    assert prediction.attention_compute_s > 1.5 * prediction.dense.matmul_s
    assert 10 * prediction.attention_compute_s + 52 * prediction.window_attention_s < 62 * prediction.dense.matmul_s
    assert prediction.bottleneck == "projections and MLP"


@pytest.mark.parametrize(
    ("model", "devices", "phase", "options"),
    [
        ("llama-3.1-70b", "8x8xh100", "train", {"shards_weights": True}),
        ("llama-3.1-8b", "8xh100", "train", {"recomputes": False}),
        ("gemma-3-27b", "8xh100", "prefill", {}),
        ("gemma-3-27b", "4x8xh100", "train", {"shards_weights": True}),
        ("wan2.1-14b", "8xh100", "denoise", {}),
        ("dense:layers=4,heads=8,head_dim=256,mlp=4096", "8xa100", "prefill", {}),
        ("llama-3.1-405b", "4x8xh100", "prefill", {"weights": "fp8"}),
    ],
)
def test_the_numbers_of_a_formula_give_the_number_behind_it(model, devices, phase, options):
    plan = build_plan(request_for(model, devices, phase, **options))
    for what, _, numbers in plan.explanation:
        left, right = numbers.split(" = ")
        worked_out = eval(left.replace("·", "*").replace(",", ""))
        assert worked_out == pytest.approx(float(right.split()[0].replace(",", "")), rel=0.01), what
    last = plan.explanation[-1]
    assert last.what == "in all"
    assert float(last.numbers.split(" = ")[1].split()[0]) == pytest.approx(plan.best.prediction.total_s, rel=0.001)


def test_what_the_range_does_not_cover_is_told():
    def caveats(*words, **options):
        return " ".join(build_plan(request_for(*words, **options)).caveats)

    assert caveats() == ""
    assert "Short work" in caveats(tokens=2**13, tp=1)
    assert "Short work" not in caveats(phase="decode")
    assert "Optimizer steps" in caveats(phase="train", shards_weights=True)
    assert "ms per layer longer" in caveats(tokens=2**12, cached_tokens=2**17, tp=1)
    assert "fp8 is on a100-sxm-80gb" in caveats("llama-3.1-8b", "8xa100", weights="fp8")
    assert "fp8" not in caveats(weights="fp8")


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
    request = request_for("wan2.1-14b", "8xh100", "denoise", 75600)
    ways = (Setup("ulysses", "contiguous", 2, 4, inner=4), Setup("hybrid", "contiguous", 1, 8, inner=4))
    diffusers = {recipe.library: recipe for recipe in list_recipes(request, [predict(request, way) for way in ways])}
    assert "ring_degree=2, ulysses_degree=4" in diffusers["diffusers"].settings
    way = "has no setting for ulysses beside tensor parallelism 2; this is hybrid 2×4 over 8 ranks"
    pattern = way + r", (as fast|-?\d+\.\d % slower)"
    assert re.match(pattern, diffusers["diffusers"].caveat)

    plan = build_plan(request_for(devices="2x8xh100", phase="train", tp=1, shards_weights=True))
    assert {recipe.library for recipe in plan.recipes} == {"ringspan", "accelerate", "torchtitan"}


def test_settings_of_decode_are_those_of_the_cache():
    plan = build_plan(request_for("llama-3.1-405b", "2x8xh200", "decode", 2**17, tp=8))
    assert "rs.decode(" in plan.recipes[0].settings
    assert plan.recipes[1].settings == "--tensor-parallel-size 16 --decode-context-parallel-size 2"


def test_vllm_shards_a_cache_over_no_more_ranks_than_hold_the_same_heads(tmp_path):
    """At most tensor parallelism / KV heads; latent K and V are one for all heads."""
    vllm = build_plan(request_for(devices="2x8xh100", phase="decode", tp=1)).recipes[1]
    assert (vllm.library, vllm.settings) == ("vllm", "")
    assert "16 / 8 ranks, not 16" in vllm.caveat

    from test_catalog import DEEPSEEK, write

    vllm = build_plan(request_for(write(tmp_path, DEEPSEEK), "2x8xh200", "decode", tp=8, weights="fp8")).recipes[1]
    assert vllm.settings == "--tensor-parallel-size 16 --decode-context-parallel-size 2"


def test_settings_with_a_cache_are_a_turn_of_it():
    ringspan = build_plan(request_for(tokens=2**12, cached_tokens=2**17, tp=1)).recipes[0]
    assert re.fullmatch(
        r'rs\.prefill\(q, k, v, cache\.begin\(new_lengths, algorithm="pass_(kv|q)"\), layer=i\)', ringspan.settings
    )


def test_settings_name_the_wire_and_the_masks_of_sliding_layers():
    for wire, name in (("int8", "int8"), ("fp8", "float8_e4m3")):
        ringspan = build_plan(request_for(tp=1, wire=wire)).recipes[0]
        assert f'wire="{name}")' in ringspan.settings
    caveat = build_plan(request_for("gemma-3-27b")).recipes[0].caveat
    assert "10 layers take mask=rs.causal(), and 52 sliding ones mask=rs.sliding_window(1023, 0)" in caveat


def test_what_does_not_fit_has_no_settings_and_shows_what_lacks_least():
    plan = build_plan(request_for("llama-3.1-405b", "8xh100", tokens=2**13))
    assert not plan.best.fits
    assert plan.recipes == ()
    assert plan.best.setup.tp == 8  # 405 billion parameters of 2 bytes over 8 devices are 101 GB; over fewer, more


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp=3"),
        ({"tokens": 0}, "tokens=0"),
        ({"batch": -1}, "batch=-1"),
        ({"wire": "int3"}, "wire='int3'"),
        ({"phase": "denoise"}, "is a model for prefill"),
        ({"phase": "decode", "cached_tokens": 5}, "give the length of the cache as the number of tokens"),
        ({"phase": "train", "cached_tokens": 5}, "only a prefill"),
        (
            {"shards_weights": True},
            "shards_weights=True: in prefill .*tensor parallelism or fp8 weights take less memory",
        ),
        ({"phase": "decode", "shards_weights": True}, "gathered again in every pass"),
        ({"phase": "train", "kv_cache": "fp8"}, "kv_cache='fp8': it is for prefill or decode, and the phase is train"),
        ({"phase": "decode", "chunk_tokens": 64}, "chunk_tokens=64: it is for prefill, and the phase is decode"),
        ({"accumulate": 4}, "accumulate=4: it is for train, and the phase is prefill"),
        ({"is_resident": True}, "is_resident=True: it is for denoise, and the phase is prefill"),
        ({"kv_cache": "int2"}, "kv_cache='int2'"),
        ({"phase": "train", "weights": "fp8"}, "weights='fp8': training is planned with weights in bf16"),
        ({"phase": "train", "wire": "int8"}, "would not be exact"),
        ({"phase": "decode", "wire": "int8"}, "no K and V travel"),
        ({"devices": "2x6xh100", "tp": 4}, "of the 6 devices of a node; use one of 1, 2$"),
        ({"tokens": 2**41}, "at most"),
    ],
)
def test_requests_that_make_no_sense_are_refused(options, message):
    with pytest.raises(RingspanError, match=message):
        request_for(**options)


MISTRAL = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


def test_a_model_of_sliding_layers_alone_is_shown_by_one_of_them(tmp_path):
    from test_catalog import write

    request = request_for(write(tmp_path, MISTRAL))
    for option in build_plan(request).options:
        it = option.prediction
        assert it.attention_s == it.window_attention_s
        assert it.total_s == pytest.approx(32 * it.layer_s + it.logits_s)
    recipe = build_plan(replace(request, tp=1)).recipes[0]
    assert "mask=rs.sliding_window(4095, 0)" in recipe.settings
    assert recipe.caveat == "all layers take mask=rs.sliding_window(4095, 0)"


@pytest.mark.parametrize("model", ["gemma-3-27b", "gpt-oss-20b"])
def test_sliding_layers_of_decode_are_no_slower_than_full_ones(model):
    for option in build_plan(request_for(model, phase="decode", tokens=2**17)).options:
        it = option.prediction
        assert 0 < it.window_attention_s <= it.attention_s
        assert it.forward.attention_compute_s > 0


def test_nothing_is_called_impossible_that_is_among_the_ways():
    """Two sequences on two nodes: one on each node has no ring between nodes, both over all devices may have one."""
    setups, illegal = list_setups(request_for(devices="2x8xh100", batch=2), [1])
    assert {setup.copies for setup in setups if setup.algorithm == "double_ring"} == {1}
    assert "double-ring" not in dict(illegal)
    _, illegal = list_setups(request_for(devices="8xh100"), [1])
    assert "double-ring" in dict(illegal)


@pytest.mark.parametrize(("phase", "devices"), [("decode", "8xh100"), ("prefill", "8xh100"), ("prefill", "1xh100")])
def test_the_way_without_context_parallelism_is_drawn_once_and_under_its_name(phase, devices):
    plan = build_plan(request_for(phase=phase, devices=devices))
    first = ET.fromstring(plot_plan(plan)).find("{http://www.w3.org/2000/svg}g")
    names = [text.text for text in first.iter("{http://www.w3.org/2000/svg}text")]
    assert names.count("no context parallelism") == 1
    has_ring = any(it.setup.algorithm == "pass_kv" and it.setup.cp > 1 for it in plan.options)
    assert names.count("pass-kv") == has_ring
    assert f"asked for: {plan.request.tokens:,}" in names
    assert has_ring == (phase == "prefill" and devices == "8xh100")
