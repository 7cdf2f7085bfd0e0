"""How long does it take, and where does the time go, if the work is split so?

A training step is the forward pass, a second one where activations are computed anew, and a backward pass whose dense
part costs twice the forward's. A prefill in chunks is a forward pass of each, over what is cached by then. A whole
video is its steps, and a part that does not shrink with the number of devices.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from ringspan.planner.catalog import Device
from ringspan.planner.cost import Dense
from ringspan.planner.plan.passes import (
    NO_PASS,
    Pass,
    cross_attention_s,
    dense_of,
    gathering_s,
    logits_s,
    reduce_gradients_s,
    run_pass,
    scattering_s,
    shown_window,
    timeline_of,
)
from ringspan.planner.plan.request import Request, Setup

MOST_CHUNKS = 9  # that are worked out; the time of those between is interpolated
PARTS = (
    "attention compute",
    "messages of attention",
    "ranks waiting for others",
    "projections and MLP",
    "norms and other elementwise work",
    "all-reduces of tensor parallelism",
    "the host issuing operations",
    "gathering sharded weights",
    "reducing gradients",
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one forward, or of one training step, by what they are spent on."""

    setup: Setup
    layers: int
    attention_s: float  # of a full layer, forward; of a sliding one where none is full
    attention_compute_s: float
    attention_exposed_s: float
    attention_bubble_s: float
    window_attention_s: float  # of a sliding layer, forward
    cross_attention_s: float  # of a layer to the text of a video, forward
    dense: Dense  # of a layer, forward
    host_s: float  # of a layer, forward: issuing the messages of attention
    logits_s: float  # forward
    forward: Pass
    again: Pass  # the forward pass once more, where activations are computed anew
    backward: Pass  # nothing but in training
    sharding_s: float  # gathering weights and scattering gradients, as far as compute does not hide it
    gradients_s: float  # reducing them, as far as the backward pass does not hide it
    link_name: str
    link_s: float

    @property
    def layer_s(self) -> float:
        """Seconds of one such layer, forward."""
        return self.attention_s + self.cross_attention_s + self.dense.total_s + self.host_s

    @property
    def total_s(self) -> float:
        """Time to the first token, per token, per training step or per denoising step."""
        return self.forward.total_s + self.again.total_s + self.backward.total_s + self.sharding_s + self.gradients_s

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the whole by what they are spent on."""
        spent = [sum(parts) for parts in zip(self.forward, self.again, self.backward, strict=True)]
        return dict(zip(PARTS, (*spent, self.sharding_s, self.gradients_s), strict=True))

    @property
    def bottleneck(self) -> str:
        """The name of the largest part."""
        name = max(self.parts, key=lambda part: self.parts[part])
        return f"{name} over {self.link_name}" if name == PARTS[1] else name


def predict(request: Request, setup: Setup) -> Prediction:
    """The time of one forward, or of one training step."""
    if request.chunk < request.tokens:
        return _predict_chunks(request, setup)
    model = request.model
    shown = timeline_of(request, setup, window=shown_window(model))
    dense = dense_of(request, setup)
    forward, again, backward = run_pass(request, setup, dense, is_backward=False), NO_PASS, NO_PASS
    sharding_s = gathering_s(request, setup, forward.total_s) if request.shards_weights else 0.0
    gradients_s = 0.0
    if request.phase == "train":
        backward = run_pass(request, setup, dense, is_backward=True)
        if request.recomputes:
            again = forward if request.software.recomputes_attention else forward.without_attention()
        if request.shards_weights:
            sharding_s += scattering_s(request, setup, backward.total_s + again.total_s)
        else:
            gradients_s = max(0.0, reduce_gradients_s(request, setup) - backward.total_s)
    busiest, times = int(shown.compute_s.argmax()), request.accumulate
    return Prediction(
        setup=setup,
        layers=model.layers,
        attention_s=shown.makespan_s,
        attention_compute_s=float(shown.compute_s[busiest]),
        attention_exposed_s=float(shown.exposed_s[busiest]),
        attention_bubble_s=float(shown.bubble_s[busiest]),
        window_attention_s=timeline_of(request, setup, window=model.window.tokens).makespan_s if model.window else 0.0,
        cross_attention_s=cross_attention_s(request, setup, is_backward=False),
        dense=dense,
        host_s=forward.host_s / model.layers,
        logits_s=logits_s(request, setup),
        forward=forward.scaled(times),
        again=again.scaled(times),
        backward=backward.scaled(times),
        sharding_s=sharding_s * times,
        gradients_s=gradients_s,
        link_name=shown.link_name,
        link_s=shown.link_s,
    )


def _predict_chunks(request: Request, setup: Setup) -> Prediction:
    """The last chunk, with the passes of all: their times rise in a line with what is cached, but for windows."""
    count, chunk = -(-request.tokens // request.chunk), request.chunk
    shown = sorted({round(i * (count - 1) / (MOST_CHUNKS - 1)) for i in range(MOST_CHUNKS)})
    predictions = [
        predict(
            replace(
                request,
                tokens=min(chunk, request.tokens - i * chunk),
                cached_tokens=request.cached_tokens + i * chunk,
                chunk_tokens=None,
            ),
            setup,
        )
        for i in shown
    ]
    forward = predictions[-1].forward
    for i, j, first, second in zip(shown, shown[1:], predictions, predictions[1:], strict=False):
        inner = (j - i - 1) / 2  # the mean of both ends for each chunk between them
        forward = forward.plus(first.forward.scaled(1 + inner)).plus(second.forward.scaled(inner))
    return replace(predictions[-1], forward=forward)


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
        """The sum of all parts, which do not overlap."""
        return self.denoising_s + self.fixed_s


def whole_video(request: Request, step_s: float) -> WholeVideo | None:
    """A video of as many steps as its pipeline takes; None where they or its size are not known."""
    video = request.model.video
    if request.phase != "denoise" or video is None or video.steps is None:
        return None
    size = request.size or video.usual
    if size is None:
        return None
    scale = request.tokens / video.count_tokens(*size)  # not 1 where tokens were given instead of a size
    return WholeVideo(video.steps, video.steps * step_s, scale * fixed_s(request.cluster.device, *size))
