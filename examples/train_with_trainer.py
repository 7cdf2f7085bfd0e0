"""Train with the Trainer of transformers on sequences that are split over ranks; one line is added to its script.

Losses, gradient norms and evaluation are those of one process:

    python examples/train_with_trainer.py --losses one.json
    torchrun --nproc-per-node 2 examples/train_with_trainer.py --losses two.json
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_model import load
from transformers import Trainer, TrainingArguments

import ringspan as rs


def main(argv: list[str]) -> None:
    """Train, and write the Trainer's log to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=301, help="tokens of a sequence, whole")
    parser.add_argument("--output", default="trainer-output", help="a folder for checkpoints")
    parser.add_argument("--losses", help="a file for the Trainer's log")
    args = parser.parse_args(argv)

    small = load("random")
    tokens = torch.tensor(small.tokenizer.encode(Path(torch.__file__).read_text())[: 12 * args.seq_len])
    sequences = [{"input_ids": part, "labels": part} for part in tokens.view(12, args.seq_len)]
    settings = TrainingArguments(
        output_dir=args.output,
        per_device_train_batch_size=2,  # whole sequences, which all ranks share
        gradient_accumulation_steps=2,
        max_steps=args.steps,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=small.model, args=settings, train_dataset=sequences[:9], eval_dataset=sequences[9:])
    rs.adapters.accelerate.parallelize_trainer(trainer)  # the line that is added
    trainer.train()
    if args.losses and trainer.is_world_process_zero():
        Path(args.losses).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(sys.argv[1:])
    if dist.is_initialized():
        dist.destroy_process_group()
