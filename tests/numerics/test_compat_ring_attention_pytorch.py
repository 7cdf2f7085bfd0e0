"""The modules of ring-attention-pytorch on ranks that are threads, against a dense attention written apart."""

import copy

import pytest
import torch
from torch.nn import functional as F

import ringspan as rs
from ringspan.compat import ring_attention_pytorch as names
from ringspan.compat.ring_attention_pytorch.zig_zag_attention import zig_zag_attn, zig_zag_pad_seq, zig_zag_shard

SEQ, DIM, HEADS, HEAD_DIM = 31, 12, 4, 6
SIZES = {"dim": DIM, "dim_head": HEAD_DIM, "heads": HEADS}


def draw(batch, seq=SEQ, seed=0):
    return torch.randn(batch, seq, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(module, x, *, causal, kv_heads, theta=None):
    """What the module computes in one process, by the definition; query head i reads KV head i mod kv_heads."""
    normal = F.normalize(x, dim=-1) * DIM**0.5 * module.to_qkv[0].gamma
    q, k, v = (
        (normal @ module.to_qkv[1].weight.T).view(*x.shape[:2], -1, HEAD_DIM).split([HEADS, kv_heads, kv_heads], 2)
    )
    if theta is not None:
        angles = torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
        q, k = (pairs(pairs(heads, to=True) * turn, to=False) for heads in (q, k))
    k, v = (heads.repeat(1, 1, HEADS // kv_heads, 1) for heads in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * HEAD_DIM**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2) @ module.to_out.weight.T


def pairs(x, *, to):
    """Halves of a head as complex numbers, and back."""
    return torch.complex(*x.chunk(2, -1)) if to else torch.cat([x.real, x.imag], -1)


def make(**options):
    torch.manual_seed(0)
    return names.RingAttention(**SIZES, **options).double()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("causal", "striped"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rotary", [False, True])
def test_ranks_with_batches_of_their_own_get_their_outputs(rotary, causal, striped, world_size):
    options = {"causal": causal, "num_grouped_query_heads": 2, "rotary_embed": rotary}
    alone = make(**options)
    inputs = [draw(1 + rank % 2, seed=rank) for rank in range(world_size)]

    def run(group):
        shapes = {"ring_attn": True, "auto_shard_seq": True, "striped_ring_attn": striped, "bucket_size": 4}
        module = make(**options, **shapes, group=group)
        module.load_state_dict(alone.state_dict())
        x = inputs[group.rank].clone().requires_grad_()
        out = module(x)
        out.square().sum().backward()
        return out.detach(), x.grad, module.to_qkv[1].weight.grad

    found = rs.run_in_process(run, world_size)
    for x, (out, grad, _) in zip(inputs, found, strict=True):
        x = x.clone().requires_grad_()
        expected = dense(alone, x, causal=causal, kv_heads=2, theta=10000 if rotary else None)
        expected.square().sum().backward()
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if rotary else {"rtol": 1e-9, "atol": 1e-10}  # float32 angles
        torch.testing.assert_close(out, expected.detach(), **tolerance)
        torch.testing.assert_close(grad, x.grad, **tolerance)
    share = sum(weight for *_, weight in found)
    torch.testing.assert_close(share, alone.to_qkv[1].weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bucket_size", [4, 2, 8])
def test_striped_shards_have_one_bucket_after_another(bucket_size):
    """Row i of bucket b of rank r is position i * (ranks * buckets) + r * buckets + b."""
    world_size, shard_len, buckets = 3, 8, 8 // bucket_size
    alone = make(causal=True, rotary_embed=True)
    whole = draw(2, seq=world_size * shard_len)
    expected = dense(alone, whole, causal=True, kv_heads=HEADS, theta=10000).detach()

    def run(group):
        rows = [i * world_size * buckets + group.rank * buckets + b for b in range(buckets) for i in range(bucket_size)]
        options = {"ring_attn": True, "striped_ring_attn": True, "auto_shard_seq": False, "rotary_embed": True}
        module = make(causal=True, **options, bucket_size=bucket_size, ring_seq_size=shard_len, group=group)
        module.load_state_dict(alone.state_dict())
        positions = torch.tensor(rows)
        angles = module.rotary_embed(positions)
        torch.testing.assert_close(module(whole[:, rows], rotary_emb=angles), expected[:, rows], rtol=1e-5, atol=1e-6)
        return True

    assert rs.run_in_process(run, world_size) == [True] * world_size


def test_the_transformer_has_logits_and_loss_of_one_process():
    sizes = {"num_tokens": 50, "dim": DIM, "depth": 2, "causal": True, "dim_head": HEAD_DIM, "heads": HEADS}
    torch.manual_seed(0)
    alone = names.RingTransformer(**sizes).double()
    tokens = torch.randint(0, 50, (2, SEQ), generator=torch.Generator().manual_seed(1))
    logits = alone(tokens)
    loss = F.cross_entropy(alone(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
    loss.backward()

    def run(group):
        model = names.RingTransformer(**sizes, ring_attn=True, striped_ring_attn=True, group=group).double()
        model.load_state_dict(copy.deepcopy(alone.state_dict()))
        torch.testing.assert_close(model(tokens[group.rank :]), logits[group.rank :], rtol=1e-5, atol=1e-5)
        mine = model(tokens[group.rank :][:1], return_loss=True)
        mine.backward()
        return mine.item(), model.token_emb.weight.grad

    found = rs.run_in_process(run, 2)
    assert [mine for mine, _ in found] == pytest.approx([loss.item()] * 2, abs=1e-6)
    mean = sum(grad for _, grad in found) / 2  # as DDP reduces
    torch.testing.assert_close(mean, alone.token_emb.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_zig_zag_shards_attend_over_all_ranks(causal):
    whole = torch.randn(2, 4, SEQ, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kv = whole[:, :2].repeat(1, 2, 1, 1)
    expected = F.scaled_dot_product_attention(whole, kv, kv, is_causal=causal)

    def run(group):
        x = whole.transpose(1, 2).flatten(2)
        padded, remove = zig_zag_pad_seq(x, group=group)
        (mine, q_positions, kv_positions), gather = zig_zag_shard(padded, group=group)
        q = mine.unflatten(2, (4, 8)).transpose(1, 2)
        mask = q_positions[:, None] >= kv_positions[None]
        out = zig_zag_attn(q, q[:, :2], q[:, :2], attn_mask=mask if causal else None, group=group)
        return remove(gather(out.transpose(1, 2).flatten(2))).unflatten(2, (4, 8)).transpose(1, 2)

    if causal:
        for out in rs.run_in_process(run, 2):
            torch.testing.assert_close(out, expected)
    else:  # padding is attended to, as there; so without it
        whole, kv = whole[:, :, :28], kv[:, :, :28]
        expected = F.scaled_dot_product_attention(whole, kv, kv)
        for out in rs.run_in_process(run, 2):
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_lookback_seq_len": 8}, "max_lookback_seq_len"),
        ({"auto_shard_seq": True}, "auto_shard_seq"),
    ],
)
def test_options_that_are_not_computed_are_refused_when_a_module_is_made(options, says):
    with pytest.raises(rs.UnsupportedError, match=says):
        make(**options)


@pytest.mark.parametrize(("causal", "striped"), [(False, False), (True, True)])
def test_key_masks_of_ranks_with_batches_of_their_own(causal, striped):
    alone = make(causal=causal)
    inputs = [draw(1 + rank, seed=rank) for rank in range(2)]
    masks = [torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(3)) > 0.3 for x in inputs]
    for mask in masks:
        mask[:, 0] = True

    def run(group):
        options = {"ring_attn": True, "auto_shard_seq": True, "striped_ring_attn": striped}
        module = make(causal=causal, **options, group=group)
        module.load_state_dict(alone.state_dict())
        return module(inputs[group.rank], masks[group.rank]).detach()

    for x, mask, out in zip(inputs, masks, rs.run_in_process(run, 2), strict=True):
        normal = F.normalize(x, dim=-1) * DIM**0.5
        q, k, v = (normal @ alone.to_qkv[1].weight.T).view(*x.shape[:2], 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        allowed = mask[:, None, None] & (torch.ones(SEQ, SEQ).tril().bool() if causal else torch.tensor(True))
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2)
        torch.testing.assert_close(out, expected @ alone.to_out.weight.T)


def test_the_transformer_ignores_masked_keys_and_labels():
    sizes = {"num_tokens": 50, "dim": DIM, "depth": 2, "causal": True, "dim_head": HEAD_DIM, "heads": HEADS}
    torch.manual_seed(0)
    alone = names.RingTransformer(**sizes).double()
    tokens = torch.randint(0, 50, (2, SEQ), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(SEQ) < torch.tensor([[20], [SEQ]])
    logits = alone(tokens[:, :-1]).transpose(1, 2)  # keys behind a row's tokens are not seen anyway
    loss = F.cross_entropy(logits, tokens[:, 1:].masked_fill(~mask[:, 1:], -100))

    def run(group):
        model = names.RingTransformer(**sizes, ring_attn=True, group=group).double()
        model.load_state_dict(copy.deepcopy(alone.state_dict()))
        mine = slice(group.rank, group.rank + 1)
        out = model(tokens[mine], mask=mask[mine])
        torch.testing.assert_close(out[mask[mine]], alone(tokens[mine])[mask[mine]], rtol=1e-5, atol=1e-5)
        return model(tokens[mine], mask=mask[mine], return_loss=True).item()

    assert rs.run_in_process(run, 2) == pytest.approx([loss.item()] * 2, abs=1e-6)


def test_masks_and_dropout_of_zig_zag_shards_are_refused():
    q = torch.randn(1, 4, 8, 8)
    with pytest.raises(rs.UnsupportedError, match="causal mask"):
        zig_zag_attn(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(rs.UnsupportedError, match="dropout"):
        zig_zag_attn(q, q, q, dropout=0.1)
