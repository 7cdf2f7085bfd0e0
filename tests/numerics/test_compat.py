"""The names of other libraries, on ranks that are threads, against dense attention in one process."""

import inspect
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ringspan as rs
from ringspan.compat import ring_attention_pytorch, ring_flash_attn, ringmaster
from ringspan.compat.ringmaster.balancers import contiguous_indices, head_tail_indices
from ringspan.compat.ringmaster.comm import seq_all_to_all
from ringspan.compat.ringmaster.ring import loop
from ringspan.compat.ringmaster.ring.kernels import math_block

SEQ, DIM = 24, 8


def draw(heads=4, kv_heads=2, seq=SEQ, seed=0):
    """q, k, v, dout (batch, seq, heads, dim) in float64."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((2, seq, heads, DIM), (2, seq, kv_heads, DIM), (2, seq, kv_heads, DIM), (2, seq, heads, DIM))
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


def dense(q, k, v, dout, allowed, scale=None, interleaved=False, softcap=None):
    """out and gradients by the definition, tensors (batch, seq, heads, dim)."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat(1, 1, group, 1) if interleaved else x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * (DIM**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, values)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def causal_mask(n=SEQ):
    return torch.ones(n, n, dtype=torch.bool).tril()


def on_ranks(function, layout, tensors, *, dim=1):
    """function(group, q, k, v) on shards; the whole out and gradients."""
    *inputs, dout = tensors

    def run(group):
        shards = [layout.shard(x, group.rank, dim).clone().requires_grad_() for x in inputs]
        out = function(group, *shards)
        out.backward(layout.shard(dout, group.rank, dim))
        return [out.detach(), *(x.grad for x in shards)]

    parts = rs.run_in_process(run, layout.world_size)
    return [layout.unshard(list(part), dim) for part in zip(*parts, strict=True)]


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


DENSE = {
    "ring": (ring_flash_attn.ring_flash_attn_func, rs.contiguous),
    "zigzag": (ring_flash_attn.zigzag_ring_flash_attn_func, rs.zigzag),
    "stripe": (ring_flash_attn.stripe_flash_attn_func, rs.striped),
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("causal", [True, False])
def test_ring_flash_attn_is_dense_attention(name, causal, world_size):
    function, build = DENSE[name]
    tensors = draw()
    allowed = causal_mask() if causal else torch.ones(SEQ, SEQ, dtype=torch.bool)
    call = lambda group, q, k, v: function(q, k, v, causal=causal, softmax_scale=0.4, group=group)  # noqa: E731
    assert_same(on_ranks(call, build(SEQ, world_size), tensors), dense(*tensors, allowed, scale=0.4))


def test_ring_flash_attn_computes_the_window_that_the_original_ignores():
    tensors = draw()
    call = lambda group, q, k, v: ring_flash_attn.ring_flash_attn_func(  # noqa: E731
        q, k, v, causal=True, window_size=(5, -1), group=group
    )
    allowed = causal_mask() & ~causal_mask().tril(-6)
    assert_same(on_ranks(call, rs.contiguous(SEQ, 3), tensors), dense(*tensors, allowed))


def test_ring_flash_attn_packings_and_the_log_sum_exp():
    q, k, v, _ = draw(kv_heads=4)
    layout = rs.zigzag(SEQ, 2)

    def run(group):
        parts = [layout.shard(x, group.rank, 1) for x in (q, k, v)]
        options = {"causal": True, "group": group, "return_attn_probs": True}
        apart = ring_flash_attn.zigzag_ring_flash_attn_func(*parts, **options)
        both = ring_flash_attn.zigzag_ring_flash_attn_kvpacked_func(parts[0], torch.stack(parts[1:], 2), **options)
        packed = ring_flash_attn.zigzag_ring_flash_attn_qkvpacked_func(torch.stack(parts, 2), **options)
        assert all(torch.equal(x, y) for other in (both, packed) for x, y in zip(apart[:2], other[:2], strict=True))
        assert apart[2] is both[2] is packed[2] is None
        return apart[1]

    lse = layout.unshard(rs.run_in_process(run, 2), 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * DIM**-0.5
    expected = scores.masked_fill(~causal_mask(), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected, rtol=1e-9, atol=1e-10)


def documents_mask(lengths):
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return number[:, None] == number[None, :]


@pytest.mark.parametrize(
    ("function", "build"),
    [
        (ring_flash_attn.ring_flash_attn_varlen_func, rs.contiguous),
        (ring_flash_attn.zigzag_ring_flash_attn_varlen_func, rs.zigzag),
    ],
)
def test_varlen_functions_cut_every_document(function, build):
    lengths, world_size = [8, 12, 4], 2
    tensors = draw()
    starts = np.cumsum([0, *lengths])
    rows = [
        np.concatenate(
            [build(n, world_size).positions(rank) + start for n, start in zip(lengths, starts, strict=False)]
        )
        for rank in range(world_size)
    ]
    layout = rs.Layout(tuple(tuple(rs.Span(int(p), int(p) + 1) for p in own) for own in rows))
    cu_seqlens = torch.tensor(starts // world_size, dtype=torch.int32)

    def call(group, q, k, v):
        outs = [
            function(*(x[row] for x in (q, k, v)), cu_seqlens, int(max(lengths) // 2), causal=True, group=group)
            for row in range(2)
        ]
        return torch.stack(outs)

    assert_same(on_ranks(call, layout, tensors), dense(*tensors, causal_mask() & documents_mask(lengths)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_llama3_functions_cut_the_packed_sequence(world_size, causal):
    lengths = [5, 3, 14, 2]
    tensors = draw()
    cu_seqlens = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)

    def call(group, q, k, v):
        prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, group.rank, world_size)
        q_ends, k_ends, max_q, max_k, keys = prepared
        options = {"heads_k_stride": 1, "local_k_slice": keys, "causal": causal, "group": group}
        assert int(k_ends[-1]) == keys.stop - keys.start
        outs = [
            ring_flash_attn.llama3_flash_attn_varlen_func(
                *(x[row] for x in (q, k, v)), q_ends, k_ends, max_q, max_k, **options
            )
            for row in range(2)
        ]
        return torch.stack(outs)

    allowed = documents_mask(lengths)
    if causal:
        allowed = allowed & causal_mask()
    assert_same(on_ranks(call, rs.contiguous(SEQ, world_size), tensors), dense(*tensors, allowed))


def test_prepared_slices_reach_from_the_first_document_to_the_last():
    cu_seqlens = torch.tensor([0, 5, 8, 22, 24])
    q_ends, k_ends, max_q, max_k, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, False, 1, 2)
    assert (q_ends.tolist(), k_ends.tolist(), max_q, max_k, keys) == ([0, 10, 12], [0, 14, 16], 10, 14, slice(8, 24))
    with pytest.raises(rs.ShapeError, match="equal shards"):
        ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, 0, 5)


@pytest.mark.parametrize("option", [{"dropout_p": 0.1}, {"alibi_slopes": torch.ones(4)}])
def test_what_the_original_drops_silently_is_refused(option):
    q, k, v, _ = draw()
    with pytest.raises(rs.UnsupportedError, match=next(iter(option))):
        ring_flash_attn.ring_flash_attn_func(q, k, v, **option)


def test_functions_that_return_an_lse_can_be_compiled():
    qkv = torch.stack(draw(kv_heads=4)[:3], 2)
    ends = torch.tensor([0, 5, SEQ], dtype=torch.int32)
    packed = {"cu_seqlens": ends, "max_seqlen": SEQ}

    def attend(compiled):
        prepared = compiled(ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens)(ends, True, 0, 1)
        llama3 = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), prepared, strict=False))
        results = []
        for function, x, options in (
            (ring_flash_attn.zigzag_ring_flash_attn_qkvpacked_func, qkv, {}),
            (ring_flash_attn.ring_flash_attn_varlen_qkvpacked_func, qkv[0], packed),
            (
                ring_flash_attn.llama3_flash_attn_varlen_qkvpacked_func,
                qkv[0],
                {**llama3, "heads_k_stride": 1, "local_k_slice": prepared[4]},
            ),
        ):
            x = x.clone().requires_grad_()
            out, lse, _ = compiled(function)(x, causal=True, return_attn_probs=True, **options)
            out.square().sum().backward()
            results += [out.detach(), lse.detach(), x.grad]
        return results

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = attend(partial(torch.compile, backend="aot_eager"))
    assert_same(found, attend(lambda function: function))


def test_names_and_signatures_are_those_of_the_original(subtests):
    names = [name for name in ring_flash_attn.__all__ if name.endswith("_func")]
    assert len(names) == 18
    for name in names:
        with subtests.test(f"{name}"):
            parameters = list(inspect.signature(getattr(ring_flash_attn, name)).parameters)
            first = ["qkv"] if "qkvpacked" in name else ["q", "kv"] if "kvpacked" in name else ["q", "k", "v"]
            assert parameters[: len(first)] == first, name
            assert parameters[-8:] == [
                *("dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic"),
                *("return_attn_probs", "group"),
            ]


@pytest.mark.parametrize("is_striped", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_ring_attention_pytorch_reads_kv_heads_in_turn(causal, is_striped):
    tensors = draw(heads=6)
    allowed = causal_mask() if causal else torch.ones(SEQ, SEQ, dtype=torch.bool)
    function = partial(ring_attention_pytorch.ring_flash_attn, causal=causal, bucket_size=SEQ // 3)
    call = lambda group, q, k, v: function(  # noqa: E731
        q, k, v, ring_reduce_col=True, striped_ring_attn=is_striped, ring_size=3, group=group
    )
    layout = (rs.striped if is_striped else rs.contiguous)(SEQ, 3)
    assert_same(on_ranks(call, layout, tensors), dense(*tensors, allowed, interleaved=True))
    alone = on_ranks(lambda group, q, k, v: function(q, k, v), rs.contiguous(SEQ, 1), tensors)
    assert_same(alone, dense(*tensors, allowed, interleaved=True))


def test_a_soft_clamp_of_ring_attention_pytorch():
    """Scores are clamped after they are scaled."""
    tensors = draw(heads=4, kv_heads=4)
    call = lambda group, q, k, v: ring_attention_pytorch.ring_flash_attn(  # noqa: E731
        q, k, v, causal=True, ring_reduce_col=True, softclamp_qk_sim=True, softclamp_value=0.7, group=group
    )
    assert_same(on_ranks(call, rs.contiguous(SEQ, 3), tensors), dense(*tensors, causal_mask(), softcap=0.7))


@pytest.mark.parametrize(("is_striped", "causal"), [(False, False), (False, True), (True, True)])
def test_a_key_mask_of_ring_attention_pytorch(is_striped, causal):
    """The original ignores it where attention is causal."""
    tensors = draw()
    keep = torch.rand(2, SEQ, generator=torch.Generator().manual_seed(1)) > 0.4
    keep[0, :9] = False  # the first rows see no key; the first rank has none in this sequence
    layout = (rs.striped if is_striped else rs.contiguous)(SEQ, 3)

    def call(group, q, k, v):
        mask = layout.shard(keep, group.rank, 1)
        options = {"bucket_size": 8, "ring_reduce_col": True, "striped_ring_attn": is_striped, "group": group}
        return ring_attention_pytorch.ring_flash_attn(q, k, v, mask, causal, **options)

    allowed = keep[:, None, None] & (causal_mask() if causal else torch.tensor(True))
    seen = allowed.any(-1)  # (batch, 1, rows)
    found = on_ranks(call, layout, tensors)
    expected = dense(
        *tensors[:3], tensors[3] * seen.transpose(1, 2)[..., None], allowed | ~seen[..., None], interleaved=True
    )
    assert_same(found, [expected[0] * seen.transpose(1, 2)[..., None], *expected[1:]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("is_striped", [False, True])
def test_rings_of_fewer_ranks_than_the_group_has(is_striped, causal):
    """Ranks 0 and 1 share one sequence, 2 and 3 another."""
    tensors = draw()
    build = rs.striped if is_striped else rs.contiguous
    half = build(SEQ // 2, 2).spans_by_rank
    later = build(SEQ // 2, 2, start=SEQ // 2).spans_by_rank
    options = {"causal": causal, "bucket_size": SEQ // 4, "striped_ring_attn": is_striped, "ring_size": 2}
    call = lambda group, q, k, v: ring_attention_pytorch.ring_flash_attn(  # noqa: E731
        q, k, v, ring_reduce_col=True, group=group, **options
    )
    allowed = documents_mask([SEQ // 2] * 2) & (causal_mask() if causal else torch.tensor(True))
    assert_same(on_ranks(call, rs.Layout(half + later), tensors), dense(*tensors, allowed, interleaved=True))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, SEQ), (SEQ, 5)])
def test_keys_of_another_length_end_with_the_queries(num_queries, num_keys):
    q, k, v, dout = draw()
    q, dout = q[:, :num_queries].clone().requires_grad_(), dout[:, :num_queries]
    k, v = (x[:, :num_keys].clone().requires_grad_() for x in (k, v))
    for function in (ring_attention_pytorch.ring_flash_attn, ring_attention_pytorch.default_attention):
        out = function(q, k, v, causal=True)
        allowed = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        seen = allowed.any(-1)
        expected = dense(
            q.detach(), k.detach(), v.detach(), dout * seen[:, None, None], allowed | ~seen[:, None], interleaved=True
        )
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        assert_same([out.detach(), *gradients], [expected[0] * seen[:, None, None], *expected[1:]])


def test_what_ring_attention_pytorch_would_get_wrong_is_refused():
    q, k, v, _ = draw()
    attend = partial(ring_attention_pytorch.ring_flash_attn, causal=True, ring_reduce_col=True)

    def run(group):
        with pytest.raises(rs.UnsupportedError, match="max_lookback_seq_len"):
            attend(q, k, v, max_lookback_seq_len=8, group=group)
        with pytest.raises(rs.UnsupportedError, match="ring_size=3"):
            attend(q, k, v, ring_size=3, group=group)
        with pytest.raises(rs.UnsupportedError, match="keys of this rank only"):
            attend(q[:, :4], k, v, group=group)
        with pytest.raises(rs.ShapeError, match="mask"):
            attend(q, k, v, torch.ones(2, SEQ), group=group)

    rs.run_in_process(run, 2)


@pytest.mark.parametrize("is_whole", [True, False])
def test_tree_attn_decode_is_one_query_against_all_keys(is_whole):
    q, k, v, _ = (x.transpose(1, 2) for x in draw(kv_heads=4, seq=7))
    q = q[:, :, -1:]
    layout = rs.contiguous(7, 3)

    def run(group):
        keys, values = (x if is_whole else layout.shard(x, group.rank, 2) for x in (k, v))
        return ring_attention_pytorch.tree_attn_decode(q, keys, values, shard_kv_seq=is_whole, group=group)

    expected = F.scaled_dot_product_attention(q, k, v)
    for out in rs.run_in_process(run, 3):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("window", [None, 4])
def test_ringmaster_ring_attention(rotate, window):
    tensors = draw()

    def call(group, q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        options = {"group": group, "causal": True, "scaling": None, "rotate_method": rotate, "window": window}
        return ringmaster.ring_attention(*heads_first, **options)

    allowed = causal_mask() if window is None else causal_mask() & ~causal_mask().tril(-window - 1)
    assert_same(on_ranks(call, rs.contiguous(SEQ, 2), tensors), dense(*tensors, allowed))


RINGS = {
    "varlen": (loop.varlen_ring_attention, rs.contiguous),
    "distflash": (loop.distflash_attention, rs.contiguous),
    "zigzag": (loop.zigzag_ring_attention, rs.zigzag),
}


@pytest.mark.parametrize("name", RINGS)
def test_ringmaster_rings_attend_within_documents_of_each_row(name):
    function, build = RINGS[name]
    rows = [[5, 3, 16], [SEQ]]
    cu_seqlens = torch.tensor(np.cumsum([0, *rows[0], *rows[1]]), dtype=torch.int32)
    tensors = draw()

    def call(group, q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return function(*heads_first, group=group, scaling=0.3, cu_seqlens=cu_seqlens)

    allowed = torch.stack([causal_mask() & documents_mask(lengths) for lengths in rows])[:, None]
    assert_same(on_ranks(call, build(SEQ, 2), tensors), dense(*tensors, allowed, scale=0.3))


def test_ringmaster_attention_of_one_block():
    q, k, v, dout = draw()
    out, lse = math_block(q[:, -5:], k, v, causal=True, scaling=None)
    allowed = causal_mask()[-5:]
    torch.testing.assert_close(out, dense(q[:, -5:], k, v, dout[:, -5:], allowed)[0])
    scores = torch.einsum("bihd,bjhd->bhij", q[:, -5:], k.repeat_interleave(2, 2)) * DIM**-0.5
    torch.testing.assert_close(lse, scores.masked_fill(~allowed, -torch.inf).logsumexp(-1))


def test_ringmaster_exchanges_heads_for_tokens():
    whole = torch.randn(2, 4, 6, 3, generator=torch.Generator().manual_seed(0))

    def run(group):
        mine = rs.contiguous(6, 2).shard(whole, group.rank, 2).clone().requires_grad_()
        heads = seq_all_to_all(mine, scatter_dim=1, gather_dim=2, group=group)
        heads.square().sum().backward()
        assert torch.equal(heads, rs.contiguous(4, 2).shard(whole, group.rank, 1))
        assert torch.equal(mine.grad, 2 * mine)
        return torch.equal(seq_all_to_all(heads.detach(), scatter_dim=2, gather_dim=1, group=group), mine)

    assert rs.run_in_process(run, 2) == [True, True]


def test_ringmaster_lists_positions_of_ranks():
    assert contiguous_indices(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert head_tail_indices(8, 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    with pytest.raises(rs.ShapeError, match="seq_len=6"):
        head_tail_indices(6, 2)


@pytest.mark.parametrize(("balance", "pad_len"), [("contiguous", 1), ("head_tail", 1)])
def test_ringmaster_shard_batch(balance, pad_len):
    tokens = torch.arange(1, 8)[None]
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    parts = [ringmaster.shard_batch(batch, cp_rank=rank, cp_size=2, load_balance=balance) for rank in range(2)]
    assert all((info.original_seq_len, info.pad_len) == (7, pad_len) for _, info in parts)
    build = rs.zigzag if balance == "head_tail" else rs.contiguous
    whole = {name: build(8, 2).unshard([part[name] for part, _ in parts], 1)[0].tolist() for name in parts[0][0]}
    assert whole["input_ids"] == [1, 2, 3, 4, 5, 6, 7, 0]
    assert whole["position_ids"] == list(range(8))
    assert whole["shift_labels"] == [2, 3, 4, 5, 6, 7, -100, -100]
    assert set(batch) == {"input_ids", "labels"}


def test_ringmaster_shards_are_cut_as_its_attention_expects():
    def cut(group):
        config = ringmaster.RingmasterConfig(size=2, backend="ring", load_balance="head_tail").normalize(
            num_kv_heads=4, intra_node_size=2
        )
        ringmaster.set_runtime(ringmaster.CPRuntime(config, group))
        tokens = torch.arange(8)[None]
        batch = {"input_ids": tokens, "attention_mask": torch.ones(1, 8)}
        part, _ = ringmaster.shard_batch(batch, cp_rank=group.rank, cp_size=2)
        ringmaster.teardown()
        return part

    part = rs.run_in_process(cut, 1)[0]
    assert part["input_ids"].tolist() == [[0, 1, 6, 7]]
    assert "attention_mask" not in part


def test_ringmaster_refuses_masks_that_causal_attention_does_not_imply():
    tokens = torch.arange(8)[None]
    for mask in (torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]]), torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]])):
        with pytest.raises(rs.UnsupportedError, match="attention_mask"):
            ringmaster.shard_batch({"input_ids": tokens, "attention_mask": mask}, cp_rank=0, cp_size=2)
    ends = torch.tensor([0, 3, 8])
    with pytest.raises(rs.UnsupportedError, match="cu_seq_lens_q"):
        ringmaster.shard_batch({"input_ids": tokens, "cu_seq_lens_q": ends}, cp_rank=0, cp_size=2)


@pytest.mark.parametrize(
    ("total", "kv_heads", "backend", "expected"),
    [
        (8, 8, "auto", (8, 1, "ulysses")),
        (8, 2, "auto", (2, 4, "usp")),
        (8, 1, "auto", (1, 8, "ring")),
        (8, 8, "ring", (1, 8, "ring")),
        (4, None, "auto", (4, 1, "ulysses")),
    ],
)
def test_ringmaster_chooses_sizes_as_the_original(total, kv_heads, backend, expected):
    config = ringmaster.RingmasterConfig(size=total, backend=backend)
    config.normalize(num_kv_heads=kv_heads, intra_node_size=8)
    assert (config.ulysses_size, config.ring_size, config.backend) == expected


def test_ringmaster_refuses_sizes_that_do_not_fit():
    with pytest.raises(rs.ShapeError, match="ulysses_size"):
        ringmaster.RingmasterConfig(size=8, ulysses_size=4, ring_size=4).normalize(num_kv_heads=8, intra_node_size=8)
    with pytest.raises(rs.ShapeError, match="3 KV heads"):
        ringmaster.RingmasterConfig(size=8, backend="ulysses").normalize(num_kv_heads=3, intra_node_size=8)


def test_ringmaster_documents_of_rows_include_the_padding():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    ends, longest = ringmaster.varlen_meta(positions, 6)
    assert (ends.tolist(), longest) == ([0, 3, 5, 6, 11, 12], 5)
    assert ringmaster.varlen_meta(torch.arange(5)[None], 6) is None


def test_ringmaster_setup_knows_the_ranks():
    runtime = ringmaster.setup(ringmaster.RingmasterConfig(size=1))
    assert (runtime.cp_rank, runtime.cp_size, runtime.shard_load_balance) == (0, 1, "contiguous")
    assert ringmaster.get_runtime() is ringmaster.maybe_runtime() is runtime
    ringmaster.teardown()
    assert ringmaster.maybe_runtime() is None
    with pytest.raises(rs.UnsupportedError, match="call setup"):
        ringmaster.get_runtime()
    with pytest.raises(rs.ShapeError, match="has 1 ranks"):
        ringmaster.setup(ringmaster.RingmasterConfig(size=2))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("lfm2", r"conv_L_cache"),
        ("granitemoehybrid", "layer_types"),  # no layer of it attends
        ("llama dynamic", "depends on the length"),
    ],
)
def test_attention_by_name_refuses_models_in_which_more_depends_on_other_ranks(model, says):
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    if model == "lfm2":
        made = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes))
    elif model == "granitemoehybrid":
        mamba = {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 4, "layer_types": ["linear_attention"] * 2}
        made = transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**sizes, **mamba))
    else:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope))
    ring_flash_attn.substitute_hf_flash_attn(None, 1)
    made.set_attn_implementation("ring_attn")
    ring_flash_attn.update_ring_flash_attn_params(torch.tensor([0, 3, 8]), None)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with pytest.raises(rs.UnsupportedError, match=says):
        made(input_ids=torch.ones_like(positions), position_ids=positions, use_cache=False)
