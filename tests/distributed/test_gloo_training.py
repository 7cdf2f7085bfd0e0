"""A small transformer on gloo processes, compiled and with DDP and FSDP2, has the gradients of one process."""

import contextlib
import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ringspan as rs
from support.ranks import run_ranks, values
from support.transformer import Transformer, make_tokens, token_losses, whole_loss

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

SEQ_LEN = 37
IGNORED = -100
DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"
CAUSAL = rs.causal()


def attend_on(layout: rs.Layout, group: Any) -> Any:
    return partial(rs.attention, mask=CAUSAL, layout=layout, group=group)


# The document


def test_the_script_of_the_document() -> None:
    """Run the script of the document on four ranks and on one: the same losses."""
    alone, together = (values(run_ranks(run_script, world_size))[0] for world_size in (1, 4))
    steps, losses = zip(*re.findall(r"step (\d+): loss (\S+)\n", alone), strict=True)
    assert steps == ("5", "10", "15", "20")
    assert float(losses[-1]) < 0.2 * float(losses[0])
    found = [float(loss) for loss in re.findall(r"loss (\S+)\n", together)]
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
    tokens, layout = make_tokens(0, 2, SEQ_LEN), rs.zigzag(SEQ_LEN, 2)
    whole = Transformer(layers=1)
    expected = whole_loss(whole, tokens)
    model = Transformer(attend_on(layout, None), layers=1)
    batch = rs.shard_batch({"input_ids": tokens}, layout)
    logits = torch.compile(model, backend="aot_eager", fullgraph=True)(batch["input_ids"], batch["position_ids"])
    loss = rs.cross_rank_mean_loss(token_losses(logits, batch["labels"]), batch["labels"])
    torch.testing.assert_close(loss.detach(), expected.detach())
    shares = gradients(model, loss)
    for grad in shares:
        dist.all_reduce(grad)
    torch.testing.assert_close(shares, gradients(whole, expected))


def test_a_program_compiled_for_one_group_is_not_run_for_another() -> None:
    values(run_ranks(run_other_groups, 3))


def run_other_groups(rank: int) -> None:
    """Groups of the same size in which a rank has another place or other peers, and a mesh."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(x: torch.Tensor, layout: rs.Layout, group: Any) -> Any:
        return rs.attention(x, x, x, mask=CAUSAL, layout=layout, group=group)

    members_of = {dist.new_group(members): members for members in ((0, 1), (1, 2), (0, 2))}
    members_of[init_device_mesh("cpu", (3,))] = (0, 1, 2)
    layouts = {size: rs.zigzag(SEQ_LEN, size) for size in (2, 3)}
    for number, (group, members) in enumerate(list(members_of.items()) * 2):
        if rank in members:
            x = torch.randn(1, 1, SEQ_LEN, 8, generator=torch.Generator().manual_seed(number))
            layout, place = layouts[len(members)], members.index(rank)
            expected = layout.shard(scaled_dot_product_attention(x, x, x, is_causal=True), place, 2)
            torch.testing.assert_close(attend(layout.shard(x, place, 2), layout, group), expected)


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


# Data parallel


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_two_replicas_of_two_ranks(kind: str) -> None:
    values(run_ranks(run_replicas, 4, kind))


def run_replicas(rank: int, kind: str) -> None:
    """The mean of the replicas' means, and the mean of all labels; they differ because one replica has more labels."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    layout, replica = rs.zigzag(SEQ_LEN, 2), mesh.get_local_rank("dp")
    batches = [make_batch(0, num_ignored=4), make_batch(1, num_ignored=SEQ_LEN // 2)]
    batch = rs.shard_batch(batches[replica], layout, mesh["cp"])
    whole = Transformer()
    sums, counts = zip(*(sum_of_losses(whole, batch) for batch in batches), strict=True)
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    mean = sum(sums) / sum(counts)
    for group, value, differentiated in (
        (mesh["cp"], means[replica], sum(means) / 2),
        (mesh, mean, mean),
    ):
        model = parallelize(Transformer(attend_on(layout, mesh["cp"])), kind, mesh)
        logits = model(batch["input_ids"], batch["position_ids"])
        loss = rs.cross_rank_mean_loss(token_losses(logits, batch["labels"]), batch["labels"], group)
        (loss * group.size()).backward()
        torch.testing.assert_close(loss.detach(), value.detach())
        expected = torch.autograd.grad(differentiated, list(whole.parameters()), retain_graph=True)
        found = [x.grad if kind == "ddp" else x.grad.full_tensor() for x in model.parameters()]
        torch.testing.assert_close(found, list(expected))


def make_batch(seed: int, num_ignored: int) -> dict[str, torch.Tensor]:
    tokens = make_tokens(seed, 2, SEQ_LEN)
    labels = tokens.clone()
    labels[:, :num_ignored] = IGNORED
    return {"input_ids": tokens, "labels": labels}


def sum_of_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    labels = batch["labels"][:, 1:].flatten()
    logits = model(batch["input_ids"], torch.arange(SEQ_LEN).expand(2, -1))
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum"), int((labels != IGNORED).sum())


def parallelize(model: nn.Module, kind: str, mesh: DeviceMesh) -> nn.Module:
    """Wrap a model over both dimensions of the mesh."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    over = mesh if kind == "hsdp" else mesh._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)
