"""Models of transformers on gloo processes, compared with themselves on one process without ringspan."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringspan as rs
from ringspan.adapters.transformers import encoder_decoder, shards
from support.families import EQUAL, FAMILIES, REFUSED, VOCABULARY, Family
from support.ranks import run_ranks, values

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(240)]

TOLERANCE = 1e-5  # relative to the largest number in a tensor
NEW_TOKENS = 64
FEWER_TOKENS = 16


class Measured(NamedTuple):
    """Compute all results of a model on a batch and a prompt, whole."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: list[torch.Tensor]
    tokens: torch.Tensor | None
    scores: torch.Tensor | None


def make_batch(seed: int = 0, rows: int = 2, seq_len: int = 37) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, seq_len), generator=generator)
    labels = ids.clone()
    labels[0, 5:9] = -100
    return {"input_ids": ids, "labels": labels}


def generate(model: Any, prompt: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Generated tokens and the logits that they were chosen from."""
    numbers = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    out = model.generate(prompt, **numbers, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits, 1)


def differentiate(loss: torch.Tensor, model: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


def measure_alone(model: Any, family: Family, new_tokens: int) -> Measured:
    batch = make_batch()
    output = model(**batch)
    gradients = differentiate(output.loss, model)
    tokens, scores = generate(model, batch["input_ids"][:1], new_tokens) if family.generates else (None, None)
    return Measured(output.logits.detach(), output.loss.detach(), gradients, tokens, scores)


def measure_on_ranks(model: Any, family: Family, handle: Any, new_tokens: int) -> Measured:
    batch = make_batch()
    part = handle.shard(batch)
    output = model(**part)
    gradients = differentiate(output.loss, model)
    for grad in gradients:
        dist.all_reduce(grad)
    logits = rs.gather(output.logits.detach(), part["ringspan"].layout, dim=1)
    tokens, scores = generate(model, batch["input_ids"][:1], new_tokens) if family.generates else (None, None)
    return Measured(logits, output.loss.detach(), gradients, tokens, scores)


def differences(found: Measured, expected: Measured) -> dict[str, float]:
    """Return the largest difference of each kind, relative to the largest number."""
    told = {"logits": relative(found.logits, expected.logits), "loss": relative(found.loss, expected.loss)}
    pairs = zip(found.gradients, expected.gradients, strict=True)
    told["gradients"] = max([0.0, *(relative(*pair) for pair in pairs)])
    if expected.tokens is not None:
        told["tokens"] = float((found.tokens != expected.tokens[:, : found.tokens.shape[1]]).sum())
        told["generated logits"] = relative(found.scores, expected.scores[:, : found.scores.shape[1]])
    return told


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=0.1))


class Compared(NamedTuple):
    """The results of one rank; rank 0 also compares them with one process."""

    measured: Measured
    sound: dict[str, float]
    broken: dict[str, float]


def compare_families(rank: int, world_size: int) -> dict[str, Compared]:
    told = {}
    for name in EQUAL:
        family = FAMILIES[name]
        model = family.make()
        is_first = world_size == 2  # checks that do not depend on the number of ranks run once
        new_tokens = NEW_TOKENS if is_first else FEWER_TOKENS
        expected = measure_alone(model, family, new_tokens) if rank == 0 else None
        with rs.adapters.transformers.parallelize(model, verify=is_first) as handle:
            found = measure_on_ranks(model, family, handle, new_tokens)
            sound = {} if expected is None else differences(found, expected)
            broken = {}
            if is_first:
                with break_attention(rank):
                    lost = measure_on_ranks(model, family, handle, new_tokens=8)
                broken = {} if expected is None else differences(lost, expected)
        if expected is not None:
            assert torch.equal(model(**make_batch()).logits, expected.logits), "restored"
        told[name] = Compared(found._replace(gradients=[]), sound, broken)
    return told


@contextlib.contextmanager
def break_attention(rank: int) -> Iterator[None]:
    """Break the ring: lose the values of rank 1."""

    def lose(attend: Any) -> Any:
        return lambda q, k, v, *args, **kwargs: attend(q, k, v * (rank != 1), *args, **kwargs)

    def lose_in_turn(attend: Any) -> Any:
        return lambda turn, q, k, v, *args, **kwargs: attend(turn, q, k, v * (rank != 1), *args, **kwargs)

    with (
        mock.patch.object(shards, "attention", lose(shards.attention)),
        mock.patch.object(encoder_decoder, "attention", lose(encoder_decoder.attention)),
        mock.patch.object(rs.Turn, "prefill", lose_in_turn(rs.Turn.prefill)),
        mock.patch.object(rs.Turn, "decode", lose_in_turn(rs.Turn.decode)),
    ):
        yield


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_family_is_equal_to_one_process(subtests: pytest.Subtests, world_size: int) -> None:
    """Logits, loss, gradients, and tokens with their logits after a prompt of odd length; on two ranks 64, else 16.

    On two ranks once more with a ring that is broken on purpose: every comparison must fail.
    """
    first, *others = values(run_ranks(compare_families, world_size, world_size, timeout_s=200))
    assert first.keys() == {*EQUAL}
    for name, (measured, sound, broken) in first.items():
        with subtests.test(name):
            kinds = {"logits", "loss", "gradients"}
            kinds |= {"tokens", "generated logits"} if FAMILIES[name].generates else set()
            assert sound.keys() == kinds
            assert max(sound.values()) < TOLERANCE, f"{name}: {sound}"
            assert broken.keys() == (kinds if world_size == 2 else set())
            assert all(value > 100 * TOLERANCE for value in broken.values()), f"{name}: {broken}"
            for told in others:
                same = differences(told[name].measured, measured)
                assert same.keys() == kinds
                assert max(same.values()) < TOLERANCE, f"{name}: {same}"


# Sampling


def sample(rank: int, same_seed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    model, prompt = FAMILIES["Mistral"].make(), make_batch()["input_ids"]
    options = {"do_sample": True, "top_k": 20, "num_return_sequences": 2, "max_new_tokens": 24, "eos_token_id": None}
    torch.manual_seed(7)
    alone = model.generate(prompt, **options)
    with rs.adapters.transformers.parallelize(model):
        torch.manual_seed(7 if same_seed else rank)
        return alone, model.generate(prompt, **options)


def test_sampling_with_one_seed() -> None:
    for alone, together in values(run_ranks(sample, 2, True)):
        assert torch.equal(alone, together)


def test_sampling_with_two_seeds_is_noticed() -> None:
    for ended in run_ranks(sample, 2, False):
        assert "the ranks do not make the same call; input_ids: rank 0 has" in ended.message


# Refusals


def refuse(rank: int) -> list[str]:
    """Refuse every refused family, then run a supported model: no rank is left waiting."""
    told = []
    for name in REFUSED:
        try:
            rs.adapters.transformers.parallelize(FAMILIES[name].make())
        except rs.UnsupportedError as error:
            told.append(str(error))
    model, ids = FAMILIES["Llama"].make(), make_batch()["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
        with rs.adapters.transformers.parallelize(model):
            assert relative(model(ids).logits, expected) < TOLERANCE
    return told


def test_refused_families() -> None:
    for told in values(run_ranks(refuse, 2)):
        for name, reason in zip(REFUSED, told, strict=True):
            assert FAMILIES[name].refused in reason


# Compiled


def train_compiled(rank: int) -> list[int]:
    """Run three steps with different tokens, and count the graphs after each."""
    model = FAMILIES["Llama"].make(num_hidden_layers=1).train()
    batches = [make_batch(seed) for seed in range(3)]
    expected = [(loss := model(**batch).loss, differentiate(loss, model)) for batch in batches]
    handle = rs.adapters.transformers.parallelize(model)
    compiled = torch.compile(model, backend="aot_eager")
    graphs = []
    for batch, (loss_alone, grads_alone) in zip(batches, expected, strict=True):
        loss = compiled(**handle.shard(batch)).loss
        assert relative(loss.detach(), loss_alone.detach()) < TOLERANCE
        for grad, grad_alone in zip(differentiate(loss, model), grads_alone, strict=True):
            dist.all_reduce(grad)
            assert relative(grad, grad_alone) < TOLERANCE
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return graphs


def test_a_compiled_model() -> None:
    """The whole forward between the two hooks is one graph, and it is reused for other tokens."""
    assert values(run_ranks(train_compiled, 2)) == [[1, 1, 1]] * 2


# Data parallel


def train_replicas(rank: int, kind: str) -> None:
    """Two replicas of two ranks with different batches: the gradient is the mean of theirs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = FAMILIES["Llama"].make().train()
    batches = [make_batch(seed) for seed in (0, 1)]
    losses = [model(**batch).loss for batch in batches]
    expected = differentiate((losses[0] + losses[1]) / 2, model)
    handle = rs.adapters.transformers.parallelize(model, mesh["cp"])
    if kind == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    replica = mesh.get_local_rank("dp")
    loss = wrapped(**handle.shard(batches[replica])).loss
    (loss * mesh["cp"].size()).backward()
    assert relative(loss.detach(), losses[replica].detach()) < TOLERANCE
    for x, grad in zip(model.parameters(), expected, strict=True):
        assert relative(x.grad if kind == "ddp" else x.grad.full_tensor(), grad) < TOLERANCE


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_replicas_of_two_ranks(kind: str) -> None:
    values(run_ranks(train_replicas, 4, kind))
