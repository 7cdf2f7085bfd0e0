"""Names of other libraries on gloo processes with a real DeviceMesh and the default group."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs
from ringspan.compat import ringmaster as rm
from ringspan.compat.ring_flash_attn import zigzag_ring_flash_attn_func
from ringspan.compat.ringmaster.strategies.usp import make_usp_attention
from support.ranks import run_ranks

SEQ = 13


def values(ended):
    assert all(rank.error is None for rank in ended), [rank.message for rank in ended]
    return [rank.value for rank in ended]


def draw():
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, SEQ, 8, generator=rng) for heads in (4, 2, 2)]


def attend_in_context(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    buffers = draw()
    with rs.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
        out = F.scaled_dot_product_attention(*buffers, is_causal=True, enable_gqa=True)
        return rs.context_parallel_unshard(mesh, [out], [2])[0]


def test_context_parallel_on_a_device_mesh():
    expected = F.scaled_dot_product_attention(*draw(), is_causal=True, enable_gqa=True)
    for out in values(run_ranks(attend_in_context, 2)):
        torch.testing.assert_close(out, expected)


def attend_by_name(rank):
    layout = rs.zigzag(SEQ - 1, 2)
    parts = [layout.shard(x[:, :, :-1].transpose(1, 2), rank, 1) for x in draw()]
    return zigzag_ring_flash_attn_func(*parts, causal=True)


def test_ring_flash_attn_on_the_default_group():
    outs = values(run_ranks(attend_by_name, 2))
    whole = rs.zigzag(SEQ - 1, 2).unshard(outs, 1)
    q, k, v = (x[:, :, :-1] for x in draw())
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(whole, expected)


def attend_by_runtime(rank):
    runtime = rm.setup(rm.RingmasterConfig(size=4, backend=rm.Backend.USP, ulysses_size=2, ring_size=2), num_kv_heads=4)
    runtime.varlen = rm.varlen_meta(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).repeat(2, 1), 8)
    attend = make_usp_attention("math", "math", rm.RotateMethod.ALLGATHER)
    parts = [x[:, :, 2 * rank : 2 * rank + 2] for x in draw()]
    out, weights = attend(None, *parts, None, scaling=None, is_causal=True)
    rm.teardown()
    assert weights is None
    return out


def test_ringmaster_attention_without_a_model():
    out = torch.cat(values(run_ranks(attend_by_runtime, 4)), 1)
    mask = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).tril().bool()
    expected = F.scaled_dot_product_attention(*(x[:, :, :8] for x in draw()), attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def forward_by_name(rank):
    from ringspan.adapters.transformers import parallelize

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, attn_implementation="ringspan", **sizes)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        with pytest.raises(rs.UnsupportedError, match="was not parallelized"):
            model(input_ids=tokens)
        with parallelize(model):
            logits = model(input_ids=tokens, use_cache=False).logits
        model.set_attn_implementation("sdpa")
        return (logits - model(input_ids=tokens).logits).abs().max().item()


def test_a_model_loaded_by_name_must_be_parallelized():
    assert max(values(run_ranks(forward_by_name, 2, timeout_s=120.0))) < 1e-5
