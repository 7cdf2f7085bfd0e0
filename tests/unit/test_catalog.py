"""Models and devices by name, from config.json and from lines; missing or wrong figures are refused by name."""

import json
import re

import pytest

from ringspan.errors import RingspanError
from ringspan.planner.catalog import load_device, load_model, load_network, model_names, parse_devices
from ringspan.planner.catalog.files import plain, read_data

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}


WAN = {
    "_class_name": "WanTransformer3DModel",
    "num_layers": 40,
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "ffn_dim": 13824,
    "patch_size": [1, 2, 2],
}


def write(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def loadable(kind):
    for entry in read_data("models.toml")[kind]:
        try:
            yield plain(entry), load_model(entry["id"])
        except RingspanError:
            continue


def test_the_cache_is_as_large_as_the_catalogue_says(subtests):
    known = [(figures, model) for figures, model in loadable("llm") if "kv_bytes_per_token_bf16" in figures]
    assert len(known) > 5
    for figures, model in known:
        with subtests.test(str(figures["id"])):
            assert model.layers * model.kv_elements * 2 == figures["kv_bytes_per_token_bf16"]


def test_videos_have_as_many_tokens_as_the_catalogue_says(subtests):
    known = [(figures, model) for figures, model in loadable("video_dit") if "video_tokens" in figures]
    assert len(known) > 4
    for figures, model in known:
        with subtests.test(str(figures["id"])):
            text = figures["text_tokens"] if figures["text_mode"] == "joint" else 0
            assert model.video.count_tokens(*model.video.usual) == figures["video_tokens"] + text


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-405b", 405.9),
        ("deepseek-v3", 671),
        ("llama-4-scout", 107.8),
    ],
)
def test_parameters_are_those_of_the_release(name, billions):
    model = load_model(name)
    assert model.counted_parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_config_of_transformers(tmp_path):
    model = load_model(write(tmp_path, LLAMA))
    assert (model.layers, model.num_heads, model.num_kv_heads, model.head_dim) == (32, 32, 8, 128)
    assert model.counted_parameters / 1e9 == pytest.approx(8.03, rel=0.001)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            {
                "model_type": "gpt_neox",
                "num_hidden_layers": 44,
                "num_attention_heads": 64,
                "hidden_size": 6144,
                "intermediate_size": 24576,
                "vocab_size": 50432,
                "tie_word_embeddings": False,
            },
            20_554_567_680,  # GPT-NeoX-20B
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 32,
                "num_attention_heads": 71,
                "hidden_size": 4544,
                "ffn_hidden_size": 18176,
                "vocab_size": 65024,
                "multi_query": True,
                "tie_word_embeddings": True,
            },
            6_921_720_704,  # Falcon-7B
        ),
    ],
)
def test_an_mlp_without_a_gate_has_two_matrices(tmp_path, config, parameters):
    model = load_model(write(tmp_path, config))
    assert model.counted_parameters == pytest.approx(parameters, rel=0.001)  # norms and biases are not counted
    assert model.notes == ()


def test_what_is_not_known_of_an_mlp_is_told(tmp_path):
    assert load_model(write(tmp_path, LLAMA)).notes == ()
    unknown = load_model(write(tmp_path, LLAMA | {"model_type": "no_such_model"}))
    assert unknown.mlp_matrices == 3
    assert "model_type='no_such_model' is not known" in unknown.notes[0]


def test_a_nested_text_config_with_sliding_layers(tmp_path):
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 8
    text = LLAMA | {"num_hidden_layers": 48, "head_dim": 256, "sliding_window": 1024, "layer_types": types}
    model = load_model(write(tmp_path, {"model_type": "gemma3", "text_config": text}))
    assert (model.window.tokens, model.full_layers, model.head_dim) == (1024, 8, 256)


def test_latent_attention_and_experts(tmp_path):
    model = load_model(write(tmp_path, DEEPSEEK))
    assert model.layers * model.kv_elements * 2 == 70272  # the catalogue's figure
    assert model.counted_parameters / 1e9 == pytest.approx(671, rel=0.01)  # as the release is called
    active = model.layers * model.attention_parameters + model.active_mlp_parameters + 2 * 129280 * 7168
    assert active / 1e9 == pytest.approx(37, rel=0.05)


def test_a_config_of_diffusers(tmp_path):
    model = load_model(write(tmp_path, WAN))
    assert model.video.count_tokens(81, 720, 1280) == 75600
    assert model.counted_parameters == load_model("wan2.1-14b").counted_parameters


FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "patch_size": 1,
}
HUNYUAN = FLUX | {
    "_class_name": "HunyuanVideoTransformer3DModel",
    "num_layers": 20,
    "num_single_layers": 40,
    "mlp_ratio": 4,
    "patch_size": 2,
    "patch_size_t": 1,
}


@pytest.mark.parametrize(("config", "name"), [(WAN, "wan2.1-14b"), (FLUX, "flux.1"), (HUNYUAN, "hunyuanvideo")])
def test_a_config_of_diffusers_is_planned_like_the_catalogue_entry(tmp_path, config, name):
    ours, known = load_model(write(tmp_path, config)), load_model(name)
    assert ours.video == known.video  # with its guidance, steps, text encoder and VAE
    parameters = ours.parameters or ours.counted_parameters
    assert parameters == pytest.approx(known.parameters, rel=0.05)
    assert (ours.layers, ours.num_heads, ours.mlp_size) == (known.layers, known.num_heads, known.mlp_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": None}, "no num_attention_heads or n_head"),
        ({"num_attention_heads": -1}, "num_attention_heads=-1 is not a whole number"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"hidden_size": 4095}, "gives no whole head_dim"),
        ({"num_key_value_heads": 5}, "32 query heads over 5 KV heads"),
        ({"num_local_experts": 8}, "no num_experts_per_tok"),
        ({"kv_lora_rank": 512}, "no q_lora_rank"),
        ({"sliding_window": 4096}, "without layer_types"),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention"] * 31}, "31 entries for 32 layers"),
        ({"sliding_window": 4096, "layer_types": ["linear_attention"] * 32}, "layer_types has kinds other"),
        ({"layer_types": ["sliding_attention"] * 32}, "has no sliding_window"),
        ({"sliding_window": 0, "layer_types": ["sliding_attention"] * 32}, "sliding_window=0; a window has"),
        ({"sliding_window": "4096"}, "sliding_window=.4096. is not a whole number"),
        ({"max_position_embeddings": "131072"}, "max_position_embeddings=.131072. is not a whole number"),
        ({"ssm_cfg": {"d": 1}}, "not plain attention"),
        ({"model_type": "bert"}, "model_type='bert' attends to both sides"),
    ],
)
def test_a_config_that_lacks_something_is_refused_by_its_name(tmp_path, change, message):
    with pytest.raises(RingspanError, match=message):
        load_model(write(tmp_path, LLAMA | change))


EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
FIRST_DENSE = ["dense"] * 2 + ["sparse"] * 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm_state_size": 128}, "ssm_state_size=128 means layers that are not plain attention"),
        ({"mamba_num_heads": 128}, "mamba_num_heads=128 means layers that are not plain attention"),
        ({"hybrid_override_pattern": "M-M*-"}, "hybrid_override_pattern='M-M*-' means layers"),
        ({"layers_block_type": ["mamba", "full_attention"]}, "layers_block_type="),
        ({"lru_width": 2560}, "lru_width=2560 means layers that are not plain attention"),
        (
            {"block_types": ["recurrent", "recurrent", "attention"]},
            "block_types=['recurrent', 'recurrent', 'attention']",
        ),
        ({"attn_type_list": [0] * 7 + [1]}, "attn_type_list=[0, 0, 0, 0, 0, 0, ...] means layers"),
        ({"attention_window_size": 2048}, "attention_window_size=2048 means windows"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size=8192 means layers that attend within chunks"),
        ({"index_topk": 2048}, "index_topk=2048 means attention to some keys"),
        ({"moe_num_experts": 64, "moe_k": 6}, "moe_num_experts=64 means experts"),
        (EXPERTS | {"intermediate_size_mlp": 16384}, "intermediate_size_mlp=16384 means experts beside MLPs"),
        (EXPERTS | {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step=2 means experts in some layers only"),
        (EXPERTS | {"moe_layer_freq": 2}, "moe_layer_freq=2 means experts in some layers only"),
        (EXPERTS | {"moe_layer_freq": [0] + [1] * 31}, "moe_layer_freq=[0, 1, 1, 1, 1, 1, ...] means experts in some"),
        (EXPERTS | {"decoder_sparse_step": 2}, "decoder_sparse_step=2 means experts in some layers only"),
        (EXPERTS | {"mlp_only_layers": [0]}, "mlp_only_layers=[0] means experts in some layers only"),
        (EXPERTS | {"moe_layers": [1, 3]}, "moe_layers=[1, 3] means experts in some layers only"),
        (EXPERTS | {"num_dense_layers": 1}, "num_dense_layers=1 means experts in some layers only"),
        (EXPERTS | {"mlp_layer_types": FIRST_DENSE}, "mlp_layer_types=['dense', 'dense', 'sparse', "),
        (EXPERTS | {"mlp_layer_types": "sparse"}, "mlp_layer_types='sparse' means"),
        (EXPERTS | {"num_shared_experts": 1}, "num_shared_experts=1 means shared experts"),
        (EXPERTS | {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size=512 means shared"),
    ],
)
def test_a_model_whose_layers_are_not_alike_is_refused_by_the_key_that_says_so(tmp_path, change, message):
    with pytest.raises(RingspanError, match=f"{re.escape(message)}.*; use a model of plain attention"):
        load_model(write(tmp_path, {"model_type": "outer", "text_config": LLAMA | change}))


@pytest.mark.parametrize(
    "change",
    [
        {"ssm_state_size": None, "hybrid_override_pattern": "", "attention_chunk_size": None, "lru_width": None},
        {"attn_type_list": [1] * 32, "block_types": ["attention"]},
        {"interleave_moe_layer_step": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"moe_layer_freq": [1] * 32, "mlp_layer_types": ["sparse"] * 32, "moe_layers": None},
        {"num_experts": 8, "n_routed_experts": 0, "num_local_experts": None},
    ],
)
def test_keys_that_say_that_all_layers_are_alike_change_nothing(tmp_path, change):
    usual = load_model(write(tmp_path, LLAMA | EXPERTS))
    assert load_model(write(tmp_path, LLAMA | EXPERTS | change)) == usual
    assert usual.counted_parameters == 32 * 4096 * (2 * 4096 + 2 * 1024 + 8 * 3 * 14336) + 2 * 128256 * 4096


def test_steps_of_experts_mean_nothing_without_experts(tmp_path):
    change = {"moe_layer_freq": 2, "interleave_moe_layer_step": 2, "num_local_experts": None}
    assert load_model(write(tmp_path, LLAMA | change)) == load_model(write(tmp_path, LLAMA))


def test_a_list_of_mlps_may_say_again_that_the_first_are_dense(tmp_path):
    usual = load_model(write(tmp_path, LLAMA | EXPERTS | {"first_k_dense_replace": 2}))
    listed = LLAMA | EXPERTS | {"first_k_dense_replace": 2, "mlp_layer_types": FIRST_DENSE}
    assert load_model(write(tmp_path, listed)) == usual


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 99}, "num_experts_per_tok=99 of 8 experts: .*; use 1 to 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 of 8 experts: .*; use 1 to 8"),
        ({"first_k_dense_replace": 60}, "first_k_dense_replace=60 of 32 layers: .*; use 0 to 32"),
    ],
)
def test_experts_that_are_not_there_are_refused(tmp_path, change, message):
    with pytest.raises(RingspanError, match=message):
        load_model(write(tmp_path, LLAMA | EXPERTS | change))


def test_all_experts_and_all_layers_may_be_taken(tmp_path):
    assert load_model(write(tmp_path, LLAMA | EXPERTS | {"num_experts_per_tok": 8})).experts.per_token == 8
    dense = load_model(write(tmp_path, LLAMA | EXPERTS | {"first_k_dense_replace": 32}))
    assert dense.counted_parameters == load_model(write(tmp_path, LLAMA)).counted_parameters


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "head_dim", "intermediate_size", "num_hidden_layers"])
def test_a_number_that_no_model_has_is_refused(tmp_path, key):
    with pytest.raises(
        RingspanError, match=rf"{key}=1000+\.\.\.0+ is not a whole number .* at most 1,000,000,000,000; "
    ):
        load_model(write(tmp_path, LLAMA | {key: 10**400}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 0}, "patch_size=0 is not a whole number of at least 1"),
        ({"patch_size": [1, 0, 2]}, "patch_size=0 is not a whole number of at least 1"),
        ({"patch_size": [1, 2, 10**400]}, "patch_size=1000.* is not a whole number of at least 1"),
        ({"patch_size": [1, "2", 2]}, "patch_size=.* is not a whole number"),
        ({"patch_size": 2, "patch_size_t": "1"}, "patch_size_t=.1. is not a whole number"),
        ({"max_text_seq_length": "226"}, "max_text_seq_length=.226. is not a whole number"),
    ],
)
def test_a_video_config_with_text_for_numbers_is_refused(tmp_path, change, message):
    with pytest.raises(RingspanError, match=message):
        load_model(write(tmp_path, WAN | change))


def test_a_video_config_with_text_for_a_ratio_is_refused(tmp_path):
    without = {key: value for key, value in WAN.items() if key != "ffn_dim"}
    with pytest.raises(RingspanError, match="mlp_ratio='4' is not a number above 0"):
        load_model(write(tmp_path, without | {"mlp_ratio": "4"}))
    with pytest.raises(RingspanError, match=r"mlp_ratio=1e\+308 is not a number above 0 and up to"):
        load_model(write(tmp_path, without | {"mlp_ratio": 1e308}))


@pytest.mark.parametrize("text", ["[1]", "{", '{"_class_name": "NoSuchModel"}', "[" * 100_000])
def test_a_file_that_is_not_a_config_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(RingspanError):
        load_model(str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama-3.1-8b", "did you mean llama-3.1-8b"),
        ("mochi-1", "mlp_ratio not found"),
        ("dense:layers=2,heads=4", "head_dim, mlp is missing"),
        ("dense:layers=2,heads=-4,head_dim=8,mlp=8", "num_heads=-4"),
        ("dense:layers=2,wings=4", "wings=4"),
        ("dense:layers=²,heads=4,head_dim=8,mlp=8", "use KEY=NUMBER"),
        ("dense:layers=2,heads=4,head_dim=8,mlp=8,mlp_matrices=0", "mlp_matrices=0"),
        ("dense:layers=2,heads=4,head_dim=8,mlp=8,vocab=-1", "vocab_size=-1"),
        ("no/such/config.json", "No such file"),
    ],
)
def test_models_that_cannot_be_used_say_why(name, message):
    with pytest.raises(RingspanError, match=message):
        load_model(name)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"), [("8xh100", 1, 8), ("16x8xh100", 16, 8), ("16xa100", 2, 8), ("3xl40s", 1, 3)]
)
def test_devices_are_counted_in_nodes(text, nodes, per_node):
    assert parse_devices(text)[:2] == (nodes, per_node)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "names no devices"),
        ("0xh100", "at least 1"),
        ("-8xh100", "names no devices"),
        ("9xh100", "do not fill nodes of 8"),
        ("8xh1000", "did you mean"),
        ("2xno_such.toml", "No such file"),
        ("9999999x8xh100", "at most"),
    ],
)
def test_devices_that_cannot_be_used_say_why(text, message):
    with pytest.raises(RingspanError, match=message):
        parse_devices(text)


def test_a_file_of_a_device_that_is_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(RingspanError, match="nested too deeply"):
        load_device(str(path))


def test_names_are_found_in_any_case():
    assert load_model("Llama-3.1-8B") == load_model("llama-3.1-8b")
    assert load_device("H100") == load_device("h100")


def test_what_the_catalogue_doubts_of_a_device_is_told():
    assert load_device("h100").notes == ()
    notes = " ".join(load_device("h800").notes)
    assert "no specification was found" in notes
    assert "peak_bf16_dense_flops_per_s, memory_bytes," in notes


@pytest.mark.parametrize("option", [{"kernel": "fa2"}, {"network": "infiniband-hdr"}, {"link": "nvlink4"}])
def test_a_measured_device_has_its_own_kernel_and_network(option):
    with pytest.raises(RingspanError, match="has its own, as measured"):
        parse_devices("2xmine.toml", **option)


def test_every_device_reaches_no_more_than_its_peaks():
    for entry in read_data("devices.toml")["device"]:
        figures = plain(entry)
        if "memory_bytes_per_s" not in figures:
            continue
        device = load_device(entry["id"])
        peak = figures.get("peak_bf16_dense_flops_per_s", figures.get("peak_fp16_dense_flops_per_s"))
        assert device.dense_flops_per_s < peak
        assert device.memory_bytes_per_s < figures["memory_bytes_per_s"]
        assert device.near.bytes_per_s <= device.near.line_bytes_per_s


def test_links_are_one_way_and_every_figure_has_a_source(subtests):
    data = read_data("devices.toml")
    for entry in (*data["device"], *data["link"]):
        with subtests.test(str(entry["id"])):
            for key, figure in entry.items():
                if isinstance(figure, dict):
                    assert figure["source"] in data["sources"], key
                    if "one_way" in key:
                        assert figure["direction"] == "one_way"
    assert load_network("infiniband-ndr").line_bytes_per_s == 400e9 / 8
    models = read_data("models.toml")
    for entry in (*models["llm"], *models["video_dit"]):
        with subtests.test(str(entry["id"])):
            assert all(figure["source"] in models["sources"] for figure in entry.values() if isinstance(figure, dict))
    assert len(set(model_names())) == len(model_names())


@pytest.mark.parametrize(
    ("frames", "height", "width"), [(80, 720, 1280), (81, 721, 1280), (81, 720, 8), (0, 720, 1280)]
)
def test_sizes_a_video_model_cannot_take_are_refused(frames, height, width):
    with pytest.raises(RingspanError, match=r"frames|height|width"):
        load_model("wan2.1-14b").video.count_tokens(frames, height, width)


@pytest.mark.parametrize("name", ["frames", "height", "width"])
def test_sizes_that_no_video_has_are_refused(name):
    size = {"frames": 81, "height": 720, "width": 1280} | {name: 10**400}
    with pytest.raises(RingspanError, match=f"{name}=1000.*: too large; use at most 1,000,000"):
        load_model("wan2.1-14b").video.count_tokens(**size)


@pytest.mark.parametrize(("full", "layers"), [(28, 36), (3, 8), (0, 4), (1, 1)])
def test_full_layers_are_counted(tmp_path, full, layers):
    types = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    changes = {"num_hidden_layers": layers, "sliding_window": 512, "layer_types": types}
    assert load_model(write(tmp_path, LLAMA | changes)).full_layers == full


def test_every_sixth_layer_of_a_pattern_is_full(tmp_path):
    changes = {"num_hidden_layers": 62, "sliding_window": 1024, "sliding_window_pattern": 6}
    assert load_model(write(tmp_path, LLAMA | changes)).window == (1024, 10)
    assert load_model("gemma-3-27b").window == (1024, 10)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bytes_per_s = 1000000000.0", "bytes_per_s = 0", "bytes_per_s=0: expected a number above 0"),
        ("bytes_per_s = 1000000000.0", "bytes_per_s = -1.5", "bytes_per_s=-1.5: expected a number"),
        ("memory_bytes = ", "memory_bytes = nan #", "memory_bytes=nan: expected"),
        ("dense_flops_per_s = ", "dense_flops_per_s = inf #", "dense_flops_per_s=inf: expected"),
        ("flops_per_s = 6", "flops_per_s = '6' #", "flops_per_s='6': expected"),
        ("wide_head_ratio = 1.0", "wide_head_ratio = true", "wide_head_ratio=True: expected"),
        ("steals = 0.5", "steals = -0.5", "steals=-0.5: expected a number of at least 0"),
        ("node_size = 2", "node_size = 0", "node_size=0: expected"),
        ("latency_s = ", "latency_s = 1e308 #", "latency_s=1e+308: expected a number of at least 0 and up to 1e+30"),
    ],
)
def test_a_calibrated_file_whose_figures_are_none_is_refused(tmp_path, old, new, message):
    from test_calibration import calibration

    from ringspan.bench.calibration import format_calibration

    text = format_calibration(calibration())
    assert f"\n{old}" in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(f"\n{old}", f"\n{new}"))
    with pytest.raises(RingspanError, match=f"{re.escape(message)}.*ringspan bench calibrate"):
        load_device(str(path))


def test_a_calibrated_file_may_have_nothing_added_to_times(tmp_path):
    from test_calibration import calibration

    from ringspan.bench.calibration import format_calibration

    path = tmp_path / "mine.toml"
    zeros = re.sub(r"\n(steals|latency_s|call_s|ramp_full_tokens) = .*", r"\n\1 = 0", format_calibration(calibration()))
    path.write_text(zeros)
    device = load_device(str(path))
    assert (device.near.steals, device.near.latency_s, device.attention.call_s) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("qwen3-235b-a22b", 235.0, 22.1), ("qwen3-30b-a3b", 30.5, 3.3), ("mixtral-8x7b", 46.7, 12.9)],
)
def test_mixtures_have_as_many_parameters_as_their_names_say(name, billions, active):
    model = load_model(name)
    visited = model.active_mlp_parameters + model.layers * model.attention_parameters + model.embedding_parameters
    assert model.counted_parameters / 1e9 == pytest.approx(billions, abs=0.1)
    assert visited / 1e9 == pytest.approx(active, abs=0.1)
