"""Train with a loop of accelerate on sequences that are split over ranks; one line is added to it.

Losses and gradient norms are those of one process:

    python examples/train_with_accelerate.py --losses one.json
    torchrun --nproc-per-node 2 examples/train_with_accelerate.py --losses two.json
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from small_model import load
from torch.utils.data import DataLoader

import ringspan as rs


def main(argv: list[str]) -> None:
    """Train; the main process prints and writes the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=301, help="tokens of a sequence, whole")
    parser.add_argument("--losses", help="a file for losses and gradient norms")
    args = parser.parse_args(argv)

    set_seed(0)  # the same on all ranks, so that they draw the same batches
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    small = load("random")
    tokens = torch.tensor(small.tokenizer.encode(Path(torch.__file__).read_text())[: 12 * args.seq_len])
    loader = DataLoader(tokens.view(12, args.seq_len), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(small.model.parameters(), lr=3e-3)

    rs.adapters.accelerate.parallelize(accelerator, small.model)  # the line that is added
    model, optimizer, loader = accelerator.prepare(small.model, optimizer, loader)
    model.train()
    log = []
    while len(log) < args.steps:
        for ids in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss  # the loss of the whole batch, on every rank
                accelerator.backward(loss)  # sums the gradients over the ranks at the last batch of a step
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    log.append({"loss": loss.item(), "grad_norm": norm.item()})
                    accelerator.print(f"step {len(log)}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}")
                optimizer.step()
                optimizer.zero_grad()
    if args.losses and accelerator.is_main_process:
        Path(args.losses).write_text(json.dumps(log))


if __name__ == "__main__":
    main(sys.argv[1:])
    if dist.is_initialized():
        dist.destroy_process_group()
