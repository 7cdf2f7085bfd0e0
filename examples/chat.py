"""Chat with a model whose KV cache is spread over ranks; each turn computes only its new tokens.

    torchrun --nproc-per-node 2 examples/chat.py --model smollm2
    torchrun --nproc-per-node 2 examples/chat.py --say "Hello." --say "Tell me more."

Without --say, rank 0 reads lines from the terminal; an empty line ends the chat.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from small_model import MODELS, load
from transformers import DynamicCache

import ringspan as rs


def main(argv: list[str]) -> list[str]:
    """Chat on all ranks; rank 0 prints. Returns the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="random")
    parser.add_argument("--say", action="append", metavar="TEXT", help="a turn; repeat it for more")
    parser.add_argument("--tokens", type=int, default=24, help="how many to generate in a turn")
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # between GPUs: "nccl"

    small = load(args.model)
    cache = DynamicCache(config=small.model.config)
    tokens = torch.zeros((1, 0), dtype=torch.int64)  # the whole conversation
    answers = []
    with rs.adapters.transformers.parallelize(small.model):
        for text in iter(args.say) if args.say else lines_of_rank_0():
            tokens = torch.cat([tokens, small.question(text)], dim=1)
            num_cached, start = cache.get_seq_length(), tokens.shape[1]
            tokens = small.model.generate(
                tokens, past_key_values=cache, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0
            )
            answers.append(small.answer(tokens[0, start:]))
            if dist.get_rank() == 0:
                print(f"({start - num_cached} new tokens after {num_cached}) {answers[-1]}")
    return answers


def lines_of_rank_0() -> Iterator[str]:
    """Yield on every rank what rank 0 reads."""
    while True:
        line = [input("> ") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(line)
        if not line[0]:
            return
        yield line[0]


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
