"""Generate text from a long prompt that is split over ranks; the answer is that of one process.

torchrun --nproc-per-node 2 examples/generate.py
torchrun --nproc-per-node 2 examples/generate.py --model smollm2 --prompt "What is the capital of France?"
"""

import argparse
import sys

import torch.distributed as dist
from small_model import MODELS, load

import ringspan as rs

PROMPT = "Attention compares every query with every key. " * 40 + "What does attention compare?"


def main(argv: list[str]) -> str:
    """Generate on all ranks; rank 0 prints. Returns the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="random")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=24, help="how many to generate")
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # between GPUs: "nccl"

    small = load(args.model)
    prompt = small.question(args.prompt)  # every rank has the whole prompt
    with rs.adapters.transformers.parallelize(small.model):  # the KV cache is spread over the ranks
        tokens = small.model.generate(prompt, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0)
    answer = small.answer(tokens[0, prompt.shape[1] :])
    if dist.get_rank() == 0:
        print(f"{prompt.shape[1]} prompt tokens on {dist.get_world_size()} ranks\n{answer}")
    return answer


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
