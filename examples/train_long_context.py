"""Train a byte-level model on long sequences that are split over ranks, with the same losses on any number of ranks.

The text is the source of Python's standard library. The ranks form a mesh of two dimensions: `cp` ranks share a
sequence by ring attention, and each such group trains on its own sequences. Weights and optimizer are sharded over all
ranks (FSDP2). A checkpoint can be resumed on any number of ranks. With `--reproducible`, losses and weights have the
same bits; every rank then holds all weights.

    python examples/train_long_context.py --losses one.json
    torchrun --nproc-per-node 2 examples/train_long_context.py --compare one.json --plot losses.svg
    torchrun --nproc-per-node 4 examples/train_long_context.py --cp 2 --compare one.json
    torchrun --nproc-per-node 2 examples/train_long_context.py --steps 20 --save half
    python examples/train_long_context.py --resume half --compare one.json
    python examples/train_long_context.py --reproducible --losses bits.json
    torchrun --nproc-per-node 2 examples/train_long_context.py --reproducible --compare bits.json
"""

import argparse
import functools
import json
import math
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import ringspan as rs

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
WIDTH = HEADS * HEAD_DIM
CLOSE = 1e-5  # two losses
LEAST = 1e-9  # smallest difference on the logarithmic axis; smaller ones are drawn there


class Layer(nn.Module):
    """Attention and an MLP; only attention depends on the ranks."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.activation = nn.GELU()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Compute this rank's tokens, x (batch, seq, WIDTH)."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out = self.attend(rotate(q, position_ids), rotate(k, position_ids), v)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.down(self.activation(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """A decoder of bytes."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's tokens."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids)
        return self.head(self.norm(x))


def rotate(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Apply RoPE by the positions of the tokens in their sequence."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = position_ids[:, None, :, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def read_text() -> torch.Tensor:
    """Concatenate the modules of the standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def take_sequences(text: torch.Tensor, step: int, args: argparse.Namespace, mesh: DeviceMesh) -> torch.Tensor:
    """Return this replica's sequences (batch, tokens) of a step; over all replicas they are equal for any mesh."""
    first = step * args.batch * args.tokens % (len(text) - args.batch * args.tokens)
    batch = text[first : first + args.batch * args.tokens].view(args.batch, args.tokens).long()
    return batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]


def build(args: argparse.Namespace, mesh: DeviceMesh) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Build the model on this rank, and its loss(logits, labels) over the labels of all ranks."""
    torch.manual_seed(0)  # the same weights on all ranks
    on = {"layout": layout_of(args, mesh), "group": mesh["cp"]}
    model = Model(functools.partial(rs.attention, mask=rs.causal(), reproducible=args.reproducible, **on))
    if args.reproducible:
        return rs.reproducible.convert(model, **on), functools.partial(rs.reproducible.cross_entropy, **on)
    every_rank = mesh._flatten("all")
    for module in (*model.layers, model):
        fully_shard(module, mesh=every_rank)

    def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return rs.cross_rank_mean_loss(losses, labels, mesh)

    return model, mean_loss


def layout_of(args: argparse.Namespace, mesh: DeviceMesh) -> rs.Layout:
    """Return the layout; on the tile grid in reproducible mode."""
    return rs.zigzag(args.tokens, mesh["cp"].size(), align=rs.TILE if args.reproducible else 1)


def train(args: argparse.Namespace, mesh: DeviceMesh, text: torch.Tensor) -> list[float]:
    """Train, and return the losses of all steps, including those of a resumed checkpoint."""
    model, loss_of = build(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    losses = load(args.resume, model, optimizer) if args.resume else []
    layout = layout_of(args, mesh)
    # Shares of gradients must be summed. FSDP averages; reproducible layers have summed already.
    factor = 1 if args.reproducible else mesh.size()
    for step in range(len(losses), args.steps):
        batch = rs.shard_batch({"input_ids": take_sequences(text, step, args, mesh)}, layout, mesh["cp"])
        loss = loss_of(model(batch["input_ids"], batch["position_ids"]), batch["labels"])
        (loss * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tell(f"step {step + 1}: loss {losses[-1]:.6f}")
    if args.save:
        save(args.save, model, optimizer, losses)
    return losses


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    """Save a checkpoint with all ranks; each writes its own shards."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "losses": losses}, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Load a checkpoint of any number of ranks; return its losses."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "losses": []}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return list(state["losses"])


def compare(losses: list[float], others: list[float], limit: float, plot: str | None) -> bool:
    """Return whether two runs have the same losses; draw both and their difference."""
    steps = range(1, min(len(losses), len(others)) + 1)
    apart = [abs(a - b) for a, b in zip(losses, others, strict=False)]
    tell(f"largest difference of {len(apart)} losses from the other run: {max(apart):.1e}")
    if plot:
        from ringspan.cli.svg import Chart, Line, draw_charts

        lines = [Line(name, list(zip(steps, run, strict=False))) for name, run in (("this", losses), ("other", others))]
        apart_line = [Line("difference", [(step, max(x, LEAST)) for step, x in zip(steps, apart, strict=True)])]
        charts = [
            Chart("Loss of the two runs", "step", "loss", lines, format_y="{:g}".format),
            Chart(f"How far they are apart, {LEAST:g} for 0", "step", "difference", apart_line, format_y="{:g}".format),
        ]
        Path(plot).write_text(draw_charts(charts))
    return all(x <= limit for x in apart)  # False for NaN


def tell(text: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace, text: torch.Tensor) -> None:
    """Refuse sizes without training data."""
    for name, least in (("tokens", 2), ("batch", 1), ("steps", 1), ("cp", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value}: give {least} or more")
    if args.batch * args.tokens >= len(text):
        parser.error(
            f"--batch {args.batch}, --tokens {args.tokens}: a step takes {args.batch * args.tokens} bytes, and the "
            f"text has {len(text)}; give fewer of them"
        )


def check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse bad files before training starts."""
    if args.plot and not args.compare:
        parser.error("--plot draws two runs; give the losses of the other with --compare")
    for name in ("losses", "plot"):
        path = getattr(args, name)
        if path and Path(path).is_dir():
            parser.error(f"--{name} {path}: this is a folder; give a file")
        if path and not Path(path).parent.is_dir():
            parser.error(f"--{name} {path}: there is no folder {Path(path).parent}; make it first")
    if args.resume and not Path(args.resume, ".metadata").is_file():
        parser.error(f"--resume {args.resume}: no checkpoint is there; write one with --save")


def read_losses(parser: argparse.ArgumentParser, path: str) -> list[float]:
    """The losses of another run."""
    try:
        losses = [float(loss) for loss in json.loads(Path(path).read_text())]
    except (OSError, TypeError, ValueError) as error:
        parser.error(f"--compare {path}: no losses to be read there ({error}); write them with --losses")
    if not losses:
        parser.error(f"--compare {path}: no losses are there; write them with --losses")
    return losses


def main(argv: Sequence[str] | None = None) -> bool:
    """Train, and compare if asked to; return whether all checks passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences in a step, over all replicas")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cp", type=int, help="ranks that share a sequence; all by default")
    parser.add_argument("--reproducible", action="store_true", help="the same bits on any number of ranks")
    parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint after the last step")
    parser.add_argument("--resume", metavar="FOLDER", help="begin with a checkpoint, from any number of ranks")
    parser.add_argument("--losses", metavar="FILE", help="write all losses as JSON")
    parser.add_argument("--compare", metavar="FILE", help="with the losses of another run: exit code 1 if they differ")
    parser.add_argument("--plot", metavar="FILE", help="with --compare: draw both, an SVG file")
    args = parser.parse_args(argv)
    text = read_text()
    check_numbers(parser, args, text)
    check_files(parser, args)
    others = read_losses(parser, args.compare) if args.compare else None
    world_size = dist.get_world_size()
    cp = args.cp or world_size
    if world_size % cp or args.batch % (world_size // cp):
        parser.error(f"{world_size} ranks, --cp {cp}, --batch {args.batch}: cp divides the ranks, replicas the batch")
    if args.reproducible and cp != world_size:
        parser.error(f"--reproducible, --cp {cp}: all {world_size} ranks share a sequence; leave out --cp")
    mesh = init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("dp", "cp"))
    tell(f"{mesh['dp'].size()} replicas of {cp} ranks, {args.tokens} tokens, batch {args.batch}")
    losses = train(args, mesh, text)
    if args.losses and dist.get_rank() == 0:
        Path(args.losses).write_text(json.dumps(losses))
    tell(f"bits per byte: {losses[-1] / math.log(2):.2f}")
    if others is not None:
        return compare(losses, others, 0.0 if args.reproducible else CLOSE, args.plot if dist.get_rank() == 0 else None)
    return True


if __name__ == "__main__":
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:  # a single rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    is_well = main()
    dist.destroy_process_group()
    sys.exit(not is_well)
