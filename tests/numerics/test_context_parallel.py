"""`rs.context_parallel` with PyTorch's semantics, on ranks that are threads."""

import pytest
import torch
from torch.nn import functional as F

import ringspan as rs


def draw(seq, heads=4, kv_heads=4):
    rng = torch.Generator().manual_seed(seq)
    shapes = ((2, heads, seq, 8), (2, kv_heads, seq, 8), (2, kv_heads, seq, 8))
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("seq", "world_size"), [(16, 2), (17, 2), (23, 3), (5, 4), (9, 1)])
def test_outputs_and_gradients_are_those_of_one_process(seq, world_size, is_causal):
    inputs = draw(seq, kv_heads=2)
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*whole, is_causal=is_causal, enable_gqa=True, scale=0.3)
    expected.square().sum().backward()

    def run(group):
        buffers = [x.clone() for x in inputs]
        with rs.context_parallel(group, buffers=buffers, buffer_seq_dims=[2] * 3):
            parts = [x.detach().clone().requires_grad_() for x in buffers]
            out = F.scaled_dot_product_attention(*parts, is_causal=is_causal, enable_gqa=True, scale=0.3)
            out.square().sum().backward()
            assert out.shape[2] == rs.zigzag(seq, world_size).shard_len(group.rank)
            found = rs.context_parallel_unshard(group, [out.detach(), *(x.grad for x in parts)], [2] * 4)
        assert all(torch.equal(x, y) for x, y in zip(buffers, inputs, strict=True))
        return found

    for found in rs.run_in_process(run, world_size):
        for x, y in zip(found, [expected.detach(), *(x.grad for x in whole)], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_a_module_inside_needs_no_change():
    torch.manual_seed(0)
    tokens, positions = torch.randn(2, 13, 8), torch.arange(13.0)
    project = torch.nn.Linear(8, 24)

    def attend(x, where):
        q, k, v = project(x + where[None, :, None]).view(2, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad():
        expected = attend(tokens, positions)

    def run(group):
        own, where = tokens.clone(), positions.clone()
        kept = {where}
        with (
            torch.no_grad(),
            rs.context_parallel(group, buffers=[own, where], buffer_seq_dims=[1, 0], no_restore_buffers=kept),
        ):
            out = attend(own, where)
        assert own.shape == tokens.shape
        assert where.tolist() == rs.zigzag(13, 2).positions(group.rank).tolist()
        return rs.context_parallel_unshard(group, [out], [2])[0]

    for out in rs.run_in_process(run, 2):
        torch.testing.assert_close(out, expected)


def attend_with_modules(x, mask):
    """Modules of torch that attend, causal and not, in training and in evaluation."""
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    out = attention(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]
    outs = [layer(out, src_mask=mask, is_causal=True), layer(out), layer.eval()(out)]
    return [out, *outs]


def test_modules_of_torch_attend_over_the_ranks():
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(12)
    expected = attend_with_modules(x, mask)

    def run(group):
        own = x.clone()
        with rs.context_parallel(group, buffers=[own], buffer_seq_dims=[1]):
            outs = attend_with_modules(own, mask[:6, :6])
            with pytest.raises(rs.UnsupportedError, match="need_weights"):
                torch.nn.MultiheadAttention(8, 2, batch_first=True)(own, own, own)
            return rs.context_parallel_unshard(group, [out.detach() for out in outs], [1] * 4)

    for found in rs.run_in_process(run, 2):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dims", [2, 3])
def test_tensors_without_heads(dims):
    q, k, v = (x[0, 0] if dims == 2 else x[:, 0] for x in draw(9))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def run(group):
        buffers = [x.clone() for x in (q, k, v)]
        with rs.context_parallel(group, buffers=buffers, buffer_seq_dims=[-2] * 3):
            out = F.scaled_dot_product_attention(*buffers, is_causal=True)
        return rs.context_parallel_unshard(group, [out], [-2])[0]

    for out in rs.run_in_process(run, 2):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_expanded_buffer_is_cut_and_restored(world_size):
    def run(group):
        positions = torch.arange(6).expand(2, -1)
        with rs.context_parallel(group, buffers=[positions], buffer_seq_dims=[1]):
            own = positions.tolist()
        return own == [rs.zigzag(6, world_size).positions(group.rank).tolist()] * 2, positions.tolist()

    assert rs.run_in_process(run, world_size) == [(True, [list(range(6))] * 2)] * world_size


def test_attention_outside_is_left_alone():
    q, k, v = draw(6)
    with rs.context_parallel(None, buffers=[q], buffer_seq_dims=[2]):
        pass
    assert F.scaled_dot_product_attention(q, k, v).shape == q.shape


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_the_rotate_method_chooses_the_algorithm(method):
    inputs = draw(12)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)

    def run(group):
        rs.set_rotate_method(method)
        buffers = [x.clone() for x in inputs]
        with rs.context_parallel(group, buffers=buffers, buffer_seq_dims=[2] * 3):
            out = F.scaled_dot_product_attention(*buffers, is_causal=True)
        return rs.context_parallel_unshard(group, [out], [2])[0]

    for out in rs.run_in_process(run, 2):
        torch.testing.assert_close(out, expected)
    with pytest.raises(rs.UnsupportedError, match="allgather"):
        rs.set_rotate_method("carrier pigeon")


def test_buffers_are_restored_after_an_error():
    q, k, v = draw(8)
    before = q.clone()

    def stop(own):
        assert own.shape[2] == 4
        raise RuntimeError("stop")

    def run(group):
        own = q.clone()
        with pytest.raises(RuntimeError, match="stop"), rs.context_parallel(group, buffers=[own], buffer_seq_dims=[2]):
            stop(own)
        return own

    assert all(torch.equal(own, before) for own in rs.run_in_process(run, 2))
    assert k.shape == v.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, "attn_mask"),
        ({"dropout_p": 0.1}, "dropout_p"),
    ],
)
def test_what_cannot_be_exact_is_refused(options, message):
    q, k, v = draw(4)
    with rs.context_parallel(None, buffers=[q], buffer_seq_dims=[2]), pytest.raises(rs.UnsupportedError, match=message):
        F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_attention_is_refused():
    """PyTorch compiles it by itself and wraps the error."""
    attend = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    q, k, v = (x.float() for x in draw(4))
    with (
        torch.no_grad(),
        rs.context_parallel(None, buffers=[q], buffer_seq_dims=[2]),
        pytest.raises(Exception, match=r"UnsupportedError|keys of this rank only"),
    ):
        attend(q, k, v)


def test_fewer_kv_heads_need_enable_gqa():
    q, k, v = draw(4, kv_heads=2)
    with rs.context_parallel(None, buffers=[q], buffer_seq_dims=[2]), pytest.raises(rs.ShapeError, match="enable_gqa"):
        F.scaled_dot_product_attention(q, k, v)


def test_bad_buffers_are_refused():
    x = torch.zeros(2, 8)
    cases = [
        ({"buffers": [x], "buffer_seq_dims": []}, "one dim for each"),
        ({"buffers": [x], "buffer_seq_dims": [1], "no_restore_buffers": {torch.zeros(1)}}, "subset"),
        ({"buffers": [x, torch.zeros(3)], "buffer_seq_dims": [1, 0]}, "one sequence length"),
        ({"buffers": [x.clone().requires_grad_()], "buffer_seq_dims": [1]}, "requires_grad inside"),
        ({"buffers": [x], "buffer_seq_dims": [4]}, "has 2 dims"),
    ]
    for options, message in cases:
        with pytest.raises(rs.RingspanError, match=message), rs.context_parallel(None, **options):
            pass


def test_shards_that_no_context_made_are_refused():
    def run(group):
        return rs.context_parallel_unshard(group, [torch.zeros(1 + 4 * group.rank)], [0])

    with pytest.raises(rs.LayoutError, match="the ranks hold"):
        rs.run_in_process(run, 2)
