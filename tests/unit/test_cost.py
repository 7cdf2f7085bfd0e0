"""Formulas against figures that others have derived: the published tables carry FLOPs and bytes of their own."""

import csv
from importlib.resources import files

import pytest

from ringspan.planner.catalog import load_device, load_model, parse_devices
from ringspan.planner.cost import (
    Shard,
    all_gather_s,
    all_reduce_s,
    attention_flops,
    dense_layer,
    ring_hides_at,
    tile_s,
)
from ringspan.planner.plan import Request, Setup, count_memory
from ringspan.planner.software import PAPER, RINGSPAN

META = Shard(1, 16, 1, 128, 128, 256, 2, "bf16", PAPER)  # one GPU of tensor parallel 8


def table(name):
    return list(csv.DictReader((files("ringspan.planner.published") / "data" / f"{name}.csv").read_text().splitlines()))


def test_flops_and_bytes_of_a_ring_step_are_those_of_the_table():
    num_checked = 0
    for row in table("ring_step_time"):
        new, keys = int(row["new_tokens"]) // 4, (int(row["new_tokens"]) + int(row["cached_tokens"])) // 4
        if row["component"] == "attention":
            assert attention_flops(new * keys, META) == int(row["flops_derived"])
        elif row["component"] == "sendrecv":
            nbytes = keys * META.kv_bytes if row["variant"] == "pass-KV" else new * META.q_bytes
            assert nbytes == int(row["message_bytes_derived"])
        else:
            # The table counts one lse of 2 bytes per token and head, ours has 4.
            assert 3 * new * (META.out_bytes - 16 * 2) == int(row["message_bytes_derived"])
        num_checked += 1
    assert num_checked == 10


def test_the_wire_makes_kv_messages_smaller():
    int8 = Shard(1, 16, 1, 128, 128, 256, 2, "int8", RINGSPAN)
    assert int8.kv_bytes == 256 + 2 * 2  # a bfloat16 scale each for K and V
    assert META.kv_bytes == 512


def test_backward_of_a_tile_costs_more_than_forward_and_a_causal_one_about_half_of_a_full_one():
    device = load_device("a100")
    full, causal = (tile_s(device, META, 8192, 8192, is_causal=is_causal) for is_causal in (False, True))
    assert 2 < tile_s(device, META, 8192, 8192, is_backward=True) / full < 3.5
    assert 0.5 < causal / full < 0.56


def test_decode_reads_the_cache():
    device = load_device("h100")
    seconds = tile_s(device, META, 1, 2**20)
    assert seconds == pytest.approx(2**20 * 512 / device.memory_bytes_per_s)


def test_an_all_reduce_of_one_is_nothing_and_of_two_moves_the_bytes_once():
    device = load_device("h100")
    near, far = device.near, device.far
    assert all_reduce_s(near, far, 1e9, 1, 8) == 0
    assert all_reduce_s(near, far, 1e9, 2, 8) == pytest.approx(near.latency_s + 1e9 / near.bytes_per_s)
    assert all_reduce_s(near, far, 1e9, 16, 8) > all_reduce_s(near, far, 1e9, 8, 8)


def test_a_gather_moves_half_of_what_an_all_reduce_moves():
    device = load_device("h100")
    assert all_gather_s(device.near, device.far, 8e9, 1, 8) == 0
    # 7 of 8 parts over NVLink 4, of whose 450 GB/s 84.4 % are reached, and between two nodes half of a device's share.
    inside = device.near.latency_s + 7e9 / (0.844 * 450e9)
    assert all_gather_s(device.near, device.far, 8e9, 8, 8) == pytest.approx(inside)
    between = device.far.latency_s + 0.5e9 / device.far.exchange_bytes_per_s
    assert all_gather_s(device.near, device.far, 8e9, 16, 8) == pytest.approx(inside + between)


def test_the_dense_part_of_a_layer_is_two_flops_per_weight_and_token():
    model, device = load_model("llama-3.1-8b"), load_device("h100")
    dense = dense_layer(model, device, 8192.0, tp=1, per_node=8, mlp_weights="bf16", weights="bf16")
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert dense.matmul_s == pytest.approx(2 * weights * 8192 / device.dense_flops_per_s)
    assert dense.all_reduce_s == 0
    one = dense_layer(model, device, 1.0, tp=1, per_node=8, mlp_weights="bf16", weights="bf16")
    assert one.matmul_s == pytest.approx(weights * 2 / device.memory_bytes_per_s)


def dense_of(model, device, tokens):
    return dense_layer(model, device, tokens, tp=1, per_node=8, mlp_weights="bf16", weights="bf16")


def test_many_tokens_read_all_experts_and_no_embeddings(tmp_path):
    import json

    config = {  # of gpt-oss-20b, without its windows
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model, device = load_model(str(path)), load_device("h100")
    attention, expert = 2880 * 64 * (64 + 8 + 8 + 64), 3 * 2880 * 2880
    for tokens, experts in ((64.0, 32), (1.0, 4)):
        seconds = (attention + experts * expert) * 2 / device.memory_bytes_per_s
        assert dense_of(model, device, tokens).matmul_s == pytest.approx(seconds, rel=1e-12)
    assert dense_of(model, device, 64.0) == dense_of(load_model("gpt-oss-20b"), device, 64.0)


def test_blocks_that_hide_a_ring_are_those_of_the_table():
    """With one KV head per head and 2 bytes the equation is FLOP/s over bytes/s, which the table prints."""
    device = load_device("a100")
    mha = Shard(1, 8, 8, 128, 128, 8 * 256, 2, "bf16", RINGSPAN)
    link = device.near._replace(bytes_per_s=300e9)
    limit = device.attention.flops_per_s * 128 / (128 + device.attention.softmax_dims)
    per_rank = ring_hides_at(link, device, mha, 4) / 4
    assert per_rank == pytest.approx(limit / 300e9, rel=1e-3)


@pytest.mark.parametrize(
    ("phase", "item", "nbytes"),
    [
        ("prefill", "weights", 8_030_261_248 * 2),
        ("prefill", "kv_cache", 131_072 * 131_072),  # tokens · the catalogue's bytes per token
        ("train", "optimizer", 8_030_261_248 * 14),
    ],
)
def test_memory_items_of_a_known_model(tmp_path, phase, item, nbytes):
    import json

    from test_catalog import LLAMA

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    request = Request(load_model(str(path)), parse_devices("1xh100"), phase, 131_072)
    memory = count_memory(request, Setup("pass_kv", "contiguous", 1, 1))
    assert getattr(memory, item) == pytest.approx(nbytes, rel=1e-4)


def test_context_parallelism_divides_the_cache_and_fsdp_the_weights():
    model, cluster = load_model("llama-3.1-8b"), parse_devices("8xh100")
    request = Request(model, cluster, "train", 2**17, shards_weights=True)
    whole = Request(model, cluster, "train", 2**17)
    setup = Setup("pass_kv", "zigzag", 1, 8)
    assert count_memory(request, setup).weights == pytest.approx(count_memory(whole, setup).weights / 8)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert count_memory(request, setup).gathered_weights == 2 * layer * 2  # the one at work and the next, in bf16
    assert count_memory(whole, setup).gathered_weights == 0
    recomputed, kept = (
        count_memory(Request(model, cluster, "train", 2**17, recomputes=flag), setup).activations
        for flag in (True, False)
    )
    assert recomputed < kept / 8
