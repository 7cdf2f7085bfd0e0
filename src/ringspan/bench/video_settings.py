"""Which denoising step is to be measured? Checked without torch, before any rank is started."""

from dataclasses import dataclass

from ringspan.errors import UnsupportedError
from ringspan.planner.catalog import Model, Video, load_model

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
        """How its frames become tokens."""
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
