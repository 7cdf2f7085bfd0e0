"""What of a whole video does not shrink with the number of devices, and how long does a video take?"""

from typing import NamedTuple

from ringspan.planner.catalog import Device
from ringspan.planner.plan.request import Request


def fixed_s(device: Device, frames: int, height: int, width: int) -> float:
    """Seconds of text encoder and VAE, which run on one device: bytes per pixel of output over the memory's rate."""
    pixels = frames * height * width
    return pixels * device.constants.video_bytes_per_pixel / device.memory_bytes_per_s


class WholeVideo(NamedTuple):
    """Seconds of a video by what they are spent on; only denoising is shared among the devices."""

    steps: int
    denoising_s: float
    fixed_s: float

    @property
    def total_s(self) -> float:
        """All of it, one after the other."""
        return self.denoising_s + self.fixed_s


def whole_video(request: Request, step_s: float) -> WholeVideo | None:
    """A video of as many steps as its pipeline takes; None where they or its size are not known."""
    video = request.model.video
    if request.phase != "denoise" or video is None or video.steps is None:
        return None
    size = request.size or video.usual
    if size is None:
        return None
    return WholeVideo(video.steps, video.steps * step_s, fixed_s(request.cluster.device, *size))
