"""What is a video model of the catalogue as a transformer of diffusers, and with which arguments is it called?

The widths are those of the release, the weights are random. They are drawn here, since parameters that start at 0 would
hide what stands before them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ringspan.bench.settings import VideoSettings
from ringspan.errors import UnsupportedError

try:  # at once, since diffusers cannot be imported by several threads
    from diffusers import (
        CogVideoXTransformer3DModel,
        HunyuanVideoTransformer3DModel,
        LTXVideoTransformer3DModel,
        WanTransformer3DModel,
    )
except ImportError as error:
    raise UnsupportedError("this needs diffusers", remedy="pip install '.[diffusers]' in a checkout") from error

Latents = tuple[int, int, int]  # frames, height, width
EXAMPLE: Latents = (3, 10, 14)  # from which the model is learned, with a text of so many tokens
EXAMPLE_TEXT = 24

_TEXT_DIM = 4096
_POOLED_DIM = 768
_STEP = 500.0


class VideoFamily(NamedTuple):
    """Models of one class of diffusers."""

    build: Callable[..., Any]
    channels: int
    config: Callable[[VideoSettings], dict[str, Any]]
    arguments: Callable[[VideoSettings, "Draw", Latents, int], dict[str, Any]]


class Draw:
    """Random tensors, the same on every rank."""

    def __init__(self, settings: VideoSettings, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(settings.seed + 1)
        self._device = device
        self._dtype = getattr(torch, settings.dtype)
        self._batch = settings.batch

    def __call__(self, *shape: int) -> torch.Tensor:
        """Rows of normally distributed numbers."""
        drawn = torch.randn(self._batch, *shape, generator=self._generator)
        return drawn.to(self._device, self._dtype)

    def filled(self, value: float, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows filled with one number."""
        return torch.full((self._batch, *shape), value, device=self._device, dtype=dtype or self._dtype)

    def angles(self, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of a rotary embedding."""
        angles = torch.rand(rows, dim, generator=self._generator).to(self._device) * 6.3
        return angles.cos(), angles.sin()


def build_video_model(settings: VideoSettings, device: torch.device) -> nn.Module:
    """The transformer with random weights, the same on every rank, though ranks that are threads share torch's seed."""
    model = new_transformer(settings).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(settings.seed)
    for x in model.parameters():
        x.copy_(_draw_parameter(x, generator))
    model = model.to(device)
    dtype = getattr(torch, settings.dtype)
    return model if dtype == torch.float32 else model.to(dtype)


def _draw_parameter(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A matrix that keeps the size of what it is multiplied with, or a vector of numbers about 1."""
    if like.ndim < 2:
        drawn = torch.rand(like.shape, generator=generator) + 0.5
    else:
        drawn = torch.randn(like.shape, generator=generator) * like[0].numel() ** -0.5
    return drawn


def new_transformer(settings: VideoSettings) -> nn.Module:
    """The transformer as diffusers makes it."""
    family, shapes = _FAMILIES[settings.model], settings.shapes
    heads = {"num_attention_heads": shapes.num_heads, "attention_head_dim": shapes.head_dim}
    model: nn.Module = family.build(**heads, **family.config(settings))
    return model


def draw_call(settings: VideoSettings, device: torch.device) -> dict[str, Any]:
    """The arguments of a denoising step."""
    return _draw(settings, device, settings.latents, settings.video.text_tokens)


def draw_example(settings: VideoSettings, device: torch.device) -> dict[str, Any]:
    """The arguments of a small call of the same kind."""
    return _draw(settings, device, EXAMPLE, EXAMPLE_TEXT)


def _draw(settings: VideoSettings, device: torch.device, latents: Latents, text: int) -> dict[str, Any]:
    arguments = _FAMILIES[settings.model].arguments(settings, Draw(settings, device), latents, text)
    return arguments | {"return_dict": False}


def _wan(settings: VideoSettings) -> dict[str, Any]:
    channels = _FAMILIES[settings.model].channels
    sizes = {"ffn_dim": settings.shapes.mlp_size, "num_layers": settings.layers}
    return sizes | {"in_channels": channels, "out_channels": channels}


def _wan_call(settings: VideoSettings, draw: Draw, latents: Latents, text: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(_FAMILIES[settings.model].channels, *latents),
        "timestep": draw.filled(_STEP),
        "encoder_hidden_states": draw(text, _TEXT_DIM),
    }


def _hunyuan(settings: VideoSettings) -> dict[str, Any]:
    """As in the release, one block in three has weights of its own for the text."""
    double = -(-settings.layers // 3)
    return {"num_layers": double, "num_single_layers": settings.layers - double}


def _hunyuan_call(_: VideoSettings, draw: Draw, latents: Latents, text: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(16, *latents),
        "timestep": draw.filled(_STEP, dtype=torch.long),
        "encoder_hidden_states": draw(text, _TEXT_DIM),
        "encoder_attention_mask": draw.filled(1, text, dtype=torch.bool),
        "pooled_projections": draw(_POOLED_DIM),
        "guidance": draw.filled(6000),
    }


def _cogvideox(settings: VideoSettings) -> dict[str, Any]:
    _, height, width = settings.latents
    return {
        "num_layers": settings.layers,
        "use_rotary_positional_embeddings": settings.model == "cogvideox-5b",
        "sample_width": width,
        "sample_height": height,
        "sample_frames": settings.frames,
    }


def _cogvideox_call(settings: VideoSettings, draw: Draw, latents: Latents, text: int) -> dict[str, Any]:
    frames, height, width = latents
    if settings.model == "cogvideox-2b":  # its embedding of positions knows one length of text
        text = settings.video.text_tokens
    arguments = {
        "hidden_states": draw(frames, 16, height, width),
        "timestep": draw.filled(_STEP, dtype=torch.long),
        "encoder_hidden_states": draw(text, _TEXT_DIM),
    }
    if settings.model == "cogvideox-5b":
        rotary = draw.angles(frames * (height // 2) * (width // 2), settings.shapes.head_dim)
        return arguments | {"image_rotary_emb": rotary}
    return arguments


def _ltx(settings: VideoSettings) -> dict[str, Any]:
    return {"num_layers": settings.layers}


def _ltx_call(_: VideoSettings, draw: Draw, latents: Latents, text: int) -> dict[str, Any]:
    frames, height, width = latents
    return {
        "hidden_states": draw(frames * height * width, 128),
        "encoder_hidden_states": draw(text, _TEXT_DIM),
        "timestep": draw.filled(_STEP),
        "encoder_attention_mask": draw.filled(1, text, dtype=torch.long),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


_WAN = VideoFamily(WanTransformer3DModel, 16, _wan, _wan_call)
_COGVIDEOX = VideoFamily(CogVideoXTransformer3DModel, 16, _cogvideox, _cogvideox_call)
_FAMILIES = {
    "wan2.1-1.3b": _WAN,
    "wan2.1-14b": _WAN,
    "wan2.2-a14b": _WAN,
    "wan2.2-5b": _WAN._replace(channels=48),
    "hunyuanvideo": VideoFamily(HunyuanVideoTransformer3DModel, 16, _hunyuan, _hunyuan_call),
    "cogvideox-2b": _COGVIDEOX,
    "cogvideox-5b": _COGVIDEOX,
    "ltx-video": VideoFamily(LTXVideoTransformer3DModel, 128, _ltx, _ltx_call),
}
