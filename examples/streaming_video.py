"""Stream a video in chunks over a rolling cache: the numbers of one frame-causal pass.

The blocks are those of diffusers' WanTransformer3DModel with random weights. A chunk of frames is denoised in several
passes, in which it attends to the past but writes nothing. One pass over the clean chunk writes its keys and values.
Ranks are threads; under torchrun a process group takes the place of `group`.

    python examples/streaming_video.py --ranks 2
    python examples/streaming_video.py --ranks 3 --chunks 4 --frames-per-chunk 3
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import ringspan as rs

HEIGHT, WIDTH = 6, 10  # of latents
TOKENS = HEIGHT * WIDTH // 4  # of a frame
CLOSE = 1e-5

SelfAttention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class BlocksAttend(TorchFunctionMode):
    """Every block attends twice: to the video, by `attend`, and to the prompt, which every rank has."""

    def __init__(self, attend: SelfAttention) -> None:
        super().__init__()
        self.attend = attend
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        layer, is_cross = divmod(self.num_calls, 2)
        self.num_calls += 1
        return (
            func(*args, **kwargs) if is_cross else self.attend(layer, kwargs["query"], kwargs["key"], kwargs["value"])
        )


def run_blocks(
    model: WanTransformer3DModel, latents: torch.Tensor, prompt: torch.Tensor, rows: torch.Tensor, attend: SelfAttention
) -> torch.Tensor:
    """The blocks' output for some tokens of a video, (1, rows, channels); `rows` are positions in the whole video."""
    hidden = model.patch_embedding(latents).flatten(2).transpose(1, 2)[:, rows]
    rotary = tuple(x[:, rows] for x in model.rope(latents))
    _, timestep, text, _ = model.condition_embedder(torch.tensor([0]), prompt, None)
    with BlocksAttend(attend):
        for block in model.blocks:
            hidden = block(hidden, text, timestep.unflatten(1, (6, -1)), rotary)
    return hidden


def attend_alone(num_frames: int) -> SelfAttention:
    """The whole video in one pass, with a dense mask."""
    frames = torch.arange(num_frames * TOKENS) // TOKENS
    mask = frames[None, :] <= frames[:, None]
    return lambda _, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def stream(
    model: WanTransformer3DModel, latents: torch.Tensor, prompt: torch.Tensor, options: argparse.Namespace, group: Any
) -> tuple[torch.Tensor, int]:
    """The blocks' output for all chunks, gathered, and the bytes of keys and values that this rank holds."""
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))
    cache = rs.adapters.diffusers.FrameCache(TOKENS, group)
    outputs = []
    for _ in range(options.chunks):
        for share in (0.9, 0.5, 0.0):  # of noise: two passes that write nothing, and the clean one
            with cache.chunk(options.frames_per_chunk, is_clean=share == 0) as chunk:
                rows = torch.from_numpy(chunk.layout.positions(group.rank))
                noisy = (1 - share) * latents + share * noise
                hidden = run_blocks(model, noisy, prompt, rows, chunk.attend)
        outputs.append(rs.gather(hidden, chunk.layout, group, dim=1))
    return torch.cat(outputs, 1), cache.held_bytes


def main() -> int:
    """Compare a stream on ranks with one pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--frames-per-chunk", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        rope_max_seq_len=64,
    ).eval()
    num_frames = options.chunks * options.frames_per_chunk
    latents, prompt = torch.randn(1, 4, num_frames, HEIGHT, WIDTH), torch.randn(1, 12, 16)
    with torch.no_grad():
        alone = run_blocks(model, latents, prompt, torch.arange(num_frames * TOKENS), attend_alone(num_frames))
        ranks = rs.run_in_process(lambda group: stream(model, latents, prompt, options, group), options.ranks)
    error = max(float((whole - alone).abs().max() / alone.abs().max()) for whole, _ in ranks)
    print(f"{options.chunks} chunks on {options.ranks} ranks differ from one pass by {error:.1e} of the largest number")
    print(f"bytes of keys and values on each rank: {', '.join(f'{held:,}' for _, held in ranks)}")
    return int(error > CLOSE)


if __name__ == "__main__":
    sys.exit(main())
