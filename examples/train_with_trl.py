"""Fine-tune with TRL's SFTTrainer and LoRA on sequences that are split over ranks; one line is added to its script.

Losses, gradient norms, entropies and token counts are those of one process:

    python examples/train_with_trl.py --losses one.json
    torchrun --nproc-per-node 2 examples/train_with_trl.py --losses two.json
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ringspan as rs


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes."""
    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")  # noqa: S106


def main(argv: list[str]) -> None:
    """Train, and write the trainer's log to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--packing", action="store_true", help="pack several documents into a sequence")
    parser.add_argument("--output", default="trl-output", help="a folder for checkpoints")
    parser.add_argument("--losses", help="a file for the trainer's log")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    paragraphs = [text for text in Path(torch.__file__).read_text().split("\n\n") if 100 < len(text) < 700][:24]
    settings = SFTConfig(
        output_dir=args.output,
        per_device_train_batch_size=3,  # whole sequences, which all ranks share
        max_length=401,
        packing=args.packing,
        max_steps=args.steps,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=settings,
        train_dataset=Dataset.from_dict({"text": paragraphs[:18]}),
        eval_dataset=Dataset.from_dict({"text": paragraphs[18:]}),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0),
    )
    rs.adapters.accelerate.parallelize_trainer(trainer)  # the line that is added
    trainer.train()
    if args.losses and trainer.is_world_process_zero():
        Path(args.losses).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(sys.argv[1:])
    if dist.is_initialized():
        dist.destroy_process_group()
