"""The settings of a measurement, checked before any rank is started and as far as possible without torch."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ringspan.algorithms import Direction, Mesh, Side
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.planner.catalog import Model, Video, load_model
from ringspan.program.prepare import DEFAULT, REPRODUCIBLE, ProgramOptions, prepare
from ringspan.program.problem import Problem, Shapes
from ringspan.schedule import Heads
from ringspan.simulate.lesson import check_heads

Carrier = Literal["gloo", "nccl", "mpi", "threads"]
CARRIERS: tuple[Carrier, ...] = ("gloo", "nccl", "mpi", "threads")


class _Sizes(NamedTuple):
    itemsize: int
    sum_itemsize: int


SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names as the planner and most papers write them."""

DTYPES = {
    "float64": _Sizes(8, 8),
    "float32": _Sizes(4, 4),
    "bfloat16": _Sizes(2, 4),
    "float16": _Sizes(2, 4),
}


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    """Prefill: `seq_len` tokens in all. Decode: contexts up to `seq_len`, batches of 1 and of `batch`."""

    phase: Literal["prefill", "decode"]
    seq_len: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kernel: str
    repeats: int
    seed: int

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads)
        if self.phase == "prefill" and self.seq_len < 128:
            raise ShapeError(
                "prefill measures miss rates from 1 %",
                argument="seq_len",
                value=self.seq_len,
                remedy="use at least 128 tokens",
            )
        if self.phase == "decode" and self.seq_len < 16:
            raise ShapeError(
                "decode measures contexts down to a 16th of the longest",
                argument="seq_len",
                value=self.seq_len,
                remedy="use at least 16 tokens",
            )


@dataclass(frozen=True, slots=True)
class TransformerSettings:
    """A dense decoder of random weights, and `batch` sequences of `seq_len` tokens to prefill, train on, continue."""

    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    batch: int
    seq_len: int
    dtype: str
    kernel: str
    repeats: int
    seed: int
    timeout_s: float

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads)
        if self.head_dim % 2:
            raise ShapeError(
                "RoPE rotates dimensions in pairs",
                argument="head_dim",
                value=self.head_dim,
                remedy="use an even number",
            )
        if self.seq_len < 2:
            raise ShapeError(
                "a training step needs a next token as label",
                argument="seq_len",
                value=self.seq_len,
                remedy="use 2 or more",
            )

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement. `carrier` is what carries the messages, `layout_name` how the user called the layout."""

    seq_len: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    mask: Mask
    layout: Layout
    layout_name: str
    algorithm: str
    direction: Direction | None
    mesh: Mesh | None
    kernel: str
    has_backward: bool
    carrier: Carrier
    repeats: int
    seed: int
    timeout_s: float
    reproducible: bool = False

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads)
        mode = REPRODUCIBLE if self.reproducible else DEFAULT
        for side in self.passes():
            prepare(self.problem(), 0, self.algorithm, ProgramOptions(self.mesh, self.direction, side, mode))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.layout.world_size

    def passes(self) -> tuple[Side | None, ...]:
        """The passes: None for the forward pass, and the travelling side of the backward pass if there is one."""
        return (None, self.problem().lighter_side()) if self.has_backward else (None,)

    def problem(self) -> Problem:
        """The attention problem of the measurement."""
        heads = Heads(self.num_heads, self.num_kv_heads)
        shapes = Shapes((self.batch,), heads, self.head_dim, self.head_dim, *DTYPES[self.dtype])
        return Problem(self.mask, self.layout, self.layout, shapes)


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Tiles of up to `seq_len` tokens, and the heads and dtype of their tensors."""

    seq_len: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kernel: str

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads)


VIDEO_MODELS = (
    "wan2.1-1.3b",
    "wan2.1-14b",
    "wan2.2-a14b",
    "wan2.2-5b",
    "hunyuanvideo",
    "cogvideox-2b",
    "cogvideox-5b",
    "ltx-video",
)
"""The models of the catalogue whose shapes `video_models.py` builds."""


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """One forward of a model's first `layers` blocks, with its real widths and random weights."""

    model: str
    frames: int
    height: int
    width: int
    layers: int
    batch: int
    dtype: str
    algorithm: str
    repeats: int
    seed: int
    timeout_s: float

    def __post_init__(self) -> None:
        if self.model not in VIDEO_MODELS:
            raise UnsupportedError(
                "its transformer is not one that can be built here",
                argument="model",
                value=self.model,
                remedy=f"use one of {', '.join(VIDEO_MODELS)}",
            )
        self.video.count_tokens(self.frames, self.height, self.width)

    @property
    def shapes(self) -> Model:
        """The model's entry in the catalogue, all layers."""
        return load_model(self.model)

    @property
    def video(self) -> Video:
        """The rule by which frames become tokens."""
        video = self.shapes.video
        assert video is not None
        return video

    @property
    def latents(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents."""
        stride = self.video.spatial_stride
        return (self.frames - 1) // self.video.temporal_stride + 1, self.height // stride, self.width // stride

    @property
    def num_tokens(self) -> int:
        """Tokens of the video, without those of the text."""
        sides = zip(self.latents, self.video.patch, strict=True)
        frames, height, width = (side // patch for side, patch in sides)
        return frames * height * width


@dataclass(frozen=True, slots=True)
class Job:
    """What ranks are started for: to measure calls, a cache, a model or a denoising step, to calibrate, or to check
    what runs here, on one process or on a group. Only the settings that belong to `name` are given.
    """

    name: Literal["measure", "inference", "transformer", "video", "calibrate", "check_alone", "check_group"]
    carrier: Carrier
    world_size: int
    timeout_s: float
    settings: Settings | None = None
    inference: InferenceSettings | None = None
    transformer: TransformerSettings | None = None
    calibration: CalibrationSettings | None = None
    video: VideoSettings | None = None

    def __post_init__(self) -> None:
        if self.transformer is not None and self.transformer.seq_len < self.world_size:
            raise ShapeError(
                f"each of the {self.world_size} ranks needs at least one token of every sequence",
                argument="seq_len",
                value=self.transformer.seq_len,
                remedy="use more tokens, or fewer ranks",
            )
        if self.video is not None and self.video.num_tokens < self.world_size:
            raise ShapeError(
                f"each of the {self.world_size} ranks needs at least one of the {self.video.num_tokens} tokens",
                argument="frames",
                value=self.video.frames,
                remedy="use more or larger frames, or fewer ranks",
            )

    @property
    def num_processes(self) -> int:
        """The number of processes; ranks that are threads share one."""
        return 1 if self.carrier == "threads" else self.world_size
