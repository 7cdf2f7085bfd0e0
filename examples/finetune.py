"""Fine-tune a model of transformers on sequences that are split over ranks; the losses are those of one process.

torchrun --nproc-per-node 2 examples/finetune.py
torchrun --nproc-per-node 2 examples/finetune.py --model smollm2 --steps 5
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_model import MODELS, load

import ringspan as rs


def main(argv: list[str]) -> list[float]:
    """Train on all ranks; rank 0 prints. Returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="random")
    parser.add_argument("--text", default=__file__, help="a file to learn")
    parser.add_argument("--seq-len", type=int, default=500, help="tokens of the sequence, whole")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # between GPUs: "nccl"

    small = load(args.model)
    tokens = torch.tensor([small.tokenizer.encode(Path(args.text).read_text())[: args.seq_len]])
    batch = {"input_ids": tokens, "labels": tokens}  # whole and equal on every rank

    handle = rs.adapters.transformers.parallelize(small.model)
    small.model.train()
    optimizer = torch.optim.AdamW(small.model.parameters(), lr=3e-3 if args.model == "random" else 1e-5)
    losses = []
    for step in range(args.steps):
        loss = small.model(**handle.shard(batch)).loss  # the loss of the whole batch, on every rank
        loss.backward()  # this rank's share of the gradients
        handle.reduce_gradients()  # without this line the ranks' weights drift apart
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    handle.restore()
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
