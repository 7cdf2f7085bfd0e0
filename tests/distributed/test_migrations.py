"""Does a small training run in the shape of each library's own example give the losses of one process?

The reference is one process with plain PyTorch or an unmodified model, which nothing of Ringspan touches.
"""

import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ringspan as rs
from ringspan.compat import ring_attention_pytorch, ring_flash_attn, ringmaster
from support.ranks import run_ranks, values

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(200), pytest.mark.slow]

STEPS, VOCABULARY, WIDTH, HEADS = 5, 40, 24, 4


def draw(batch=2, seq=24):
    return torch.randint(1, VOCABULARY, (batch, seq), generator=torch.Generator().manual_seed(0))


def train(model, loss_of, reduce=lambda parameters: None, around=nullcontext):
    """The losses of some steps; forward and backward are within `around()`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(STEPS):
        with around():
            loss = loss_of(model)
            loss.backward()
        reduce(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sum_over_ranks(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)


def summed(losses):
    """Losses of shares, added over the ranks."""
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return total.tolist()


def assert_equal(ended, expected):
    assert expected[-1] < expected[0] - 0.05
    for losses in values(ended):
        assert losses == pytest.approx(expected, abs=1e-5)


class Decoder(nn.Module):
    """A layer of attention; `attend` takes q, k, v (batch, seq, heads, dim)."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.out, self.head = (nn.Linear(WIDTH, n) for n in (3 * WIDTH, WIDTH, VOCABULARY))

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        return self.head(x + self.out(self.attend(q, k, v).flatten(2)))


def attend_heads_first(q, k, v):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def batch_of_decoder():
    tokens = draw(seq=25)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(24)


def decoder_losses():
    tokens, labels, positions = batch_of_decoder()
    return train(
        Decoder(attend_heads_first),
        lambda model: F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten()),
    )


def with_context_parallel(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    tokens, labels, positions = batch_of_decoder()

    def loss_of(model):
        assert tokens.shape[1] == 12
        logits = model(tokens, positions)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2  # two ranks with as many labels

    def around():
        return rs.context_parallel(mesh, buffers=[tokens, labels, positions], buffer_seq_dims=[1, 1, 0])

    rs.set_rotate_method("alltoall")
    return summed(train(Decoder(attend_heads_first), loss_of, sum_over_ranks, around))


def test_torch_context_parallel():
    assert_equal(run_ranks(with_context_parallel, 2), decoder_losses())


def with_zigzag(rank):
    layout = rs.zigzag(24, 2)
    tokens, labels, positions = (layout.shard(x, rank, -1) for x in batch_of_decoder())
    model = Decoder(lambda q, k, v: ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, causal=True))
    losses = train(
        model, lambda it: F.cross_entropy(it(tokens, positions).flatten(0, 1), labels.flatten()) / 2, sum_over_ranks
    )
    return summed(losses)


def test_ring_flash_attn_functions():
    assert_equal(run_ranks(with_zigzag, 2), decoder_losses())


def llama(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **options)
    return LlamaForCausalLM(config).train()


LENGTHS = [9, 2, 13]


def packed_documents():
    """Tokens, positions that restart, and labels that are shifted and end with each document; one row."""
    tokens = draw(batch=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    labels = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    labels[:, torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    return tokens, positions, labels


def packed_loss(model, tokens, positions, labels, number):
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / number


def with_substituted_attention(rank):
    ring_flash_attn.substitute_hf_flash_attn(None, 1)
    tokens, positions, labels = packed_documents()
    number = (labels != -100).sum()
    part = slice(12 * rank, 12 * (rank + 1))
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    model = llama(attn_implementation="ring_attn")

    def loss_of(model):
        ring_flash_attn.update_ring_flash_attn_params(ends, None)
        return packed_loss(model, *(x[:, part] for x in (tokens, positions, labels)), number)

    with pytest.raises(rs.UnsupportedError, match="no batch was announced"):
        model(input_ids=tokens[:, part], position_ids=positions[:, part], use_cache=False)
    losses = summed(train(model, loss_of, sum_over_ranks))
    with pytest.raises(rs.UnsupportedError, match="positions of this rank"):
        model(input_ids=tokens[:, part], position_ids=positions[:, part] + 1, use_cache=False)
    with pytest.raises(rs.ShapeError, match="call update_ring_flash_attn_params for each batch"):
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    return losses


def test_ring_flash_attn_in_models_of_transformers():
    tokens, positions, labels = packed_documents()
    number = (labels != -100).sum()
    expected = train(llama(), lambda model: packed_loss(model, tokens, positions, labels, number))
    assert_equal(run_ranks(with_substituted_attention, 2, timeout_s=120), expected)


def with_ringmaster(rank, balance, backend):
    config = ringmaster.RingmasterConfig(
        size=2, backend=ringmaster.Backend(backend), load_balance=ringmaster.LoadBalance(balance)
    )
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    runtime = ringmaster.setup(config, num_kv_heads=2, device_mesh=mesh, device_type="cpu", inner_attn="sdpa")
    model = llama()
    model.set_attn_implementation(runtime.attn_implementation)
    tokens = draw(seq=23)
    number = tokens[:, 1:].numel()

    def loss_of(model):
        with ringmaster.context_parallel_region({"input_ids": tokens, "labels": tokens}) as shard:
            return model(**shard, num_items_in_batch=number, use_cache=False).loss

    losses = summed(train(model, loss_of, sum_over_ranks))
    ringmaster.teardown()
    with pytest.raises(rs.UnsupportedError, match="no batch was announced"):
        model(input_ids=tokens)
    return losses


@pytest.mark.parametrize(
    ("balance", "backend"), [("none", "ring"), ("head_tail", "ring"), ("none", "ulysses"), ("none", "auto")]
)
def test_ringmaster(balance, backend):
    tokens = draw(seq=23)
    expected = train(llama(), lambda model: model(input_ids=tokens, labels=tokens).loss)
    assert_equal(run_ranks(with_ringmaster, 2, balance, backend, timeout_s=120), expected)


def two_rows_of_documents():
    """Two rows of 23 tokens, positions that restart, and labels as a collator gives them."""
    tokens = draw(seq=23)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([9, 2, 12], [4, 19])])
    return tokens, positions, tokens.masked_fill(positions == 0, -100)


def with_ringmaster_documents(rank, balance, backend):
    config = ringmaster.RingmasterConfig(
        size=4, backend=ringmaster.Backend(backend), load_balance=ringmaster.LoadBalance(balance)
    )
    if backend == "usp":
        config.ulysses_size, config.ring_size = 2, 2
    runtime = ringmaster.setup(config, num_kv_heads=4)
    tokens, positions, labels = two_rows_of_documents()
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    number = (labels[:, 1:] != -100).sum()
    model = llama()
    model.set_attn_implementation(runtime.attn_implementation)

    def loss_of(model):
        shard, info = ringmaster.shard_batch(batch, cp_rank=runtime.cp_rank, cp_size=runtime.cp_size)
        assert info.original_seq_len == 23
        return model(**shard, num_items_in_batch=number, use_cache=False).loss

    losses = summed(train(model, loss_of, sum_over_ranks))
    with pytest.raises(rs.UnsupportedError, match="the runtime has documents"):
        ringmaster.shard_batch({"input_ids": tokens}, cp_rank=rank, cp_size=4)
    ringmaster.teardown()
    return losses


@pytest.mark.parametrize(("balance", "backend"), [("head_tail", "ring"), ("distflash", "ring"), ("none", "usp")])
def test_ringmaster_with_packed_documents(balance, backend):
    tokens, positions, labels = two_rows_of_documents()
    blocks = [torch.block_diag(*(torch.ones(n, n) for n in row)) for row in ([9, 2, 12], [4, 19])]
    mask = torch.stack(blocks).tril().bool()[:, None]

    def loss_of(model):
        options = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        return model(input_ids=tokens, labels=labels, **options).loss

    expected = train(llama(), loss_of)
    assert_equal(run_ranks(with_ringmaster_documents, 4, balance, backend, timeout_s=120), expected)


RING_SIZES = {"num_tokens": VOCABULARY, "dim": WIDTH, "depth": 2, "causal": True, "dim_head": 8, "heads": 4}


class DenseRingTransformer(nn.Module):
    """What `RingTransformer` computes in one process, written apart; the parameters have its names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = ring_attention_pytorch.RingTransformer(**RING_SIZES)  # its parameters only

    def forward(self, tokens):
        x = self.model.token_emb(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1]), 10000 ** -(torch.arange(0, 8, 2) / 8)).repeat(1, 2)[:, None]
        for attend, feed_forward in self.model.layers:
            q, k, v = attend.to_qkv(x).unflatten(-1, (3, 4, 8)).unbind(-3)
            q, k = (y * angles.cos() + torch.cat([-y[..., 4:], y[..., :4]], -1) * angles.sin() for y in (q, k))
            x = x + attend.to_out(attend_heads_first(q, k, v).flatten(2))
            x = x + feed_forward(x)
        return self.model.to_logits(x)


def with_ring_transformer(rank, striped):
    torch.manual_seed(0)
    options = {"ring_attn": True, "striped_ring_attn": striped, "ring_seq_size": 12, "bucket_size": 6}
    model = DistributedDataParallel(ring_attention_pytorch.RingTransformer(**RING_SIZES, **options))
    tokens = draw(batch=3)[rank : 2 * rank + 1]  # ranks have batches of different sizes
    return train(model, lambda it: it(tokens, return_loss=True))


@pytest.mark.parametrize("striped", [False, True])
def test_ring_attention_pytorch(striped):
    tokens = draw(batch=3)
    expected = train(
        DenseRingTransformer(),
        lambda model: F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]),
    )
    assert_equal(run_ranks(with_ring_transformer, 2, striped, timeout_s=120), expected)


def with_a_name(rank, folder):
    import ringspan.adapters.transformers

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ringspan").train()
    tokens = draw(seq=23)
    with pytest.raises(rs.UnsupportedError, match="was not parallelized"):
        model(input_ids=tokens)
    handle = ringspan.adapters.transformers.parallelize(model)
    return train(
        model,
        lambda it: it(**handle.shard({"input_ids": tokens, "labels": tokens})).loss,
        lambda _: handle.reduce_gradients(),
    )


def test_attention_by_name(tmp_path):
    llama().save_pretrained(tmp_path)
    tokens = draw(seq=23)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    expected = train(model, lambda it: it(input_ids=tokens, labels=tokens).loss)
    assert_equal(run_ranks(with_a_name, 2, os.fspath(tmp_path), timeout_s=120), expected)
