"""A small transformer on gloo processes: compiled, and beside DDP and FSDP2, with the gradients of one process."""

import contextlib
import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ringspan as rs
from transformer import Transformer, make_tokens, token_losses, whole_loss

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

SEQ_LEN = 37
IGNORED = -100
DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"
CAUSAL = rs.causal()


def attend_on(layout: rs.Layout, group: Any) -> Any:
    return partial(rs.attention, mask=CAUSAL, layout=layout, group=group)


# The document


def test_the_script_of_the_document() -> None:
    """On four ranks as written, and on one: the same losses."""
    alone, *others = (values(run_ranks(run_script, world_size))[0] for world_size in (1, 2, 4))
    steps, losses = zip(*re.findall(r"step (\d+): loss (\S+)\n", alone), strict=True)
    assert steps == ("5", "10", "15", "20")
    assert float(losses[-1]) < 0.2 * float(losses[0])
    for printed in others:
        found = [float(loss) for loss in re.findall(r"loss (\S+)\n", printed)]
        assert found == pytest.approx([float(loss) for loss in losses], abs=2e-4)


def run_script(rank: int) -> str:
    (script,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, DOCUMENT.name, "exec"), {"__name__": "train"})
    return printed.getvalue()


# Compiled


def test_a_compiled_model() -> None:
    values(run_ranks(run_compiled, 2))


def run_compiled(rank: int) -> None:
    """In one graph, for the default group and for a mesh."""
    tokens, layout = make_tokens(0, 2, SEQ_LEN), rs.zigzag(SEQ_LEN, 2)
    whole = Transformer(layers=1)
    expected_loss = whole_loss(whole, tokens)
    expected = gradients(whole, expected_loss)
    batch = rs.shard_batch({"input_ids": tokens}, layout)
    for group in (None, init_device_mesh("cpu", (2,))):
        model = Transformer(attend_on(layout, group), layers=1)
        logits = torch.compile(model, backend="aot_eager", fullgraph=True)(batch["input_ids"], batch["position_ids"])
        loss = rs.cross_rank_mean_loss(token_losses(logits, batch["labels"]), batch["labels"], group)
        torch.testing.assert_close(loss.detach(), expected_loss.detach())
        shares = gradients(model, loss)
        for grad in shares:
            dist.all_reduce(grad)
        torch.testing.assert_close(shares, expected)


def test_a_program_compiled_for_one_group_is_not_run_for_another() -> None:
    values(run_ranks(run_other_groups, 3))


def run_other_groups(rank: int) -> None:
    """Groups of the same size, in which a rank has another place or other peers."""
    attend = torch.compile(
        lambda q, group: rs.attention(q, q, q, mask=CAUSAL, layout=layout, group=group),
        backend="aot_eager",
        fullgraph=True,
    )
    layout, whole = rs.zigzag(SEQ_LEN, 2), torch.randn(3, 1, 1, SEQ_LEN, 8, generator=torch.Generator().manual_seed(0))
    groups = {members: dist.new_group(members) for members in ((0, 1), (1, 2), (0, 2))}
    for number, (members, group) in enumerate(list(groups.items()) * 2):
        if rank in members:
            x = whole[number % 3]
            expected = layout.shard(scaled_dot_product_attention(x, x, x, is_causal=True), members.index(rank), 2)
            torch.testing.assert_close(attend(layout.shard(x, members.index(rank), 2), group), expected)


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


# Data parallel


@pytest.mark.parametrize("scope", ["cp", "all"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_two_replicas_of_two_ranks(kind: str, scope: str) -> None:
    values(run_ranks(run_replicas, 4, kind, scope))


def run_replicas(rank: int, kind: str, scope: str) -> None:
    """The mean of the replicas' means, or that of all labels, which differs: one replica has more of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    layout = rs.zigzag(SEQ_LEN, 2)
    replicas = [make_replica(0, num_ignored=4), make_replica(1, num_ignored=SEQ_LEN // 2)]
    group = mesh["cp"] if scope == "cp" else mesh

    model = parallelize(Transformer(attend_on(layout, mesh["cp"])), kind, mesh)
    batch = rs.shard_batch(replicas[mesh.get_local_rank("dp")], layout, mesh["cp"])
    logits = model(batch["input_ids"], batch["position_ids"])
    loss = rs.cross_rank_mean_loss(token_losses(logits, batch["labels"]), batch["labels"], group)
    (loss * group.size()).backward()

    whole = Transformer()
    sums, counts = zip(*(sum_of_losses(whole, replica) for replica in replicas), strict=True)
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    expected = sum(means) / 2 if scope == "cp" else sum(sums) / sum(counts)
    expected.backward()
    torch.testing.assert_close(
        loss.detach(), (means[mesh.get_local_rank("dp")] if scope == "cp" else expected).detach()
    )
    for (name, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad = mine.grad if kind == "ddp" else mine.grad.full_tensor()
        torch.testing.assert_close(grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def make_replica(seed: int, num_ignored: int) -> dict[str, torch.Tensor]:
    tokens = make_tokens(seed, 2, SEQ_LEN)
    labels = tokens.clone()
    labels[:, :num_ignored] = IGNORED
    return {"input_ids": tokens, "labels": labels}


def sum_of_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    labels = batch["labels"][:, 1:].flatten()
    logits = model(batch["input_ids"], torch.arange(SEQ_LEN).expand(2, -1))
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum"), int((labels != IGNORED).sum())


def parallelize(model: nn.Module, kind: str, mesh: DeviceMesh) -> nn.Module:
    """Both dimensions of the mesh hold replicas of the weights, which see other tokens."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    over = mesh if kind == "hsdp" else mesh._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)
