"""Denoise a video on ranks: the latents of one process, and its frames as a strip of images.

The pipeline is diffusers' own WanPipeline with a small transformer and a small VAE of random weights, so the frames
show noise with a structure; a real checkpoint is loaded with WanPipeline.from_pretrained and used in the same way.

    python examples/video_denoise.py --strip one.png
    torchrun --nproc-per-node 2 examples/video_denoise.py --strip two.png
"""

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from PIL import Image

import ringspan as rs

CLOSE = 5e-6  # of the largest latent


def make_pipeline() -> WanPipeline:
    """The same random weights in every process."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        rope_max_seq_len=64,
    )
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, transformer=transformer.eval(), vae=vae.eval(), scheduler=scheduler
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def denoise(pipe: WanPipeline, options: argparse.Namespace) -> torch.Tensor:
    """Latents, (batch, channels, frames, height, width); all ranks start from the same noise."""
    prompts = torch.randn(2, 1, 12, 16, generator=torch.Generator().manual_seed(1))
    latents: Any = pipe(
        prompt_embeds=prompts[0],
        negative_prompt_embeds=prompts[1],
        height=options.height,
        width=options.width,
        num_frames=options.frames,
        num_inference_steps=options.steps,
        generator=torch.Generator().manual_seed(options.seed),
        output_type="latent",
        return_dict=False,
    )[0]
    return latents


def save_strip(pipe: WanPipeline, latents: torch.Tensor, path: Path) -> None:
    """The decoded frames, one beside the other."""
    with torch.no_grad():
        frames = pipe.vae.decode(latents, return_dict=False)[0][0].movedim(0, -1).numpy()
    low, high = frames.min(), frames.max()
    pixels = ((frames - low) / max(high - low, 1e-6) * 255).astype(np.uint8)
    Image.fromarray(np.concatenate(list(pixels), axis=1)).save(path)


def main() -> int:
    """Denoise on the ranks that torchrun started, or alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--height", type=int, default=80)
    parser.add_argument("--width", type=int, default=112)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--strip", type=Path, help="where to save the frames")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    pipe = make_pipeline()
    alone = denoise(pipe, options)
    with rs.adapters.diffusers.parallelize(pipe) as handle:
        latents = denoise(pipe, options)
    error = float((latents - alone).abs().max() / alone.abs().max())
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0:
        print(f"{world_size} ranks; {handle.plans['transformer'][0]}")
        print(f"latents {tuple(latents.shape)} differ from one process by {error:.1e} of the largest")
        if options.strip is not None:
            save_strip(pipe, latents, options.strip)
            print(f"frames: {options.strip}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(error > CLOSE)


if __name__ == "__main__":
    sys.exit(main())
