"""What does the planner predict for a measured call, model or denoising step? Needs no torch.

A call is predicted as the same schedule on a calibrated device, a model or step as the same work on GPUs with context
parallelism alone.
"""

from dataclasses import replace

from ringspan.algorithms import Side
from ringspan.bench.result import PHASES, PredictedModel, PredictedStep
from ringspan.bench.settings import Settings, TransformerSettings, VideoSettings
from ringspan.planner.catalog import Device, load_model, parse_devices
from ringspan.planner.cost import Shard
from ringspan.planner.plan import Request, build_plan
from ringspan.planner.software import RINGSPAN
from ringspan.planner.timeline import Timeline, schedule_timeline
from ringspan.program.prepare import ProgramOptions, build


def predict_pass(settings: Settings, device: Device, side: Side | None) -> Timeline:
    """The timeline of the forward pass, or of the backward pass in which one side travels, in the default mode."""
    problem = settings.problem()
    shard = Shard.dense(
        settings.batch, settings.num_heads, settings.num_kv_heads, settings.head_dim, problem.shapes.itemsize, RINGSPAN
    )
    schedule = build(problem, settings.algorithm, ProgramOptions(settings.mesh, settings.direction, side))
    return schedule_timeline(schedule, problem, shard, device, device.node_size, record=True)


DEVICES = "16xh100"
VIDEO_DEVICES = ("1xh100", "2xh100", "8xh100")


def predict_on_gpus(settings: TransformerSettings) -> tuple[PredictedModel, ...]:
    """Predict prefill, training step and token, each with its fastest setup; training keeps activations."""
    s = settings
    sizes = f"layers={s.layers},heads={s.num_heads},kv_heads={s.num_kv_heads},head_dim={s.head_dim},mlp={s.mlp_size}"
    model, cluster = load_model(f"dense:{sizes}"), parse_devices(DEVICES)
    predicted = []
    for phase in PHASES:
        asked = Request(model, cluster, phase, s.seq_len, batch=s.batch, tp=1, recomputes=False)
        best = build_plan(asked).best
        tokens = s.batch * (1 if phase == "decode" else s.seq_len)
        seconds = best.prediction.total_s
        predicted.append(PredictedModel(phase, DEVICES, str(best.setup), seconds, tokens, best.memory.total, best.fits))
    return tuple(predicted)


def predict_step_on_gpus(settings: VideoSettings) -> tuple[PredictedStep, ...]:
    """Predict the same denoising step on some numbers of devices, each with its fastest setup."""
    s = settings
    model = replace(s.shapes, layers=s.layers, parameters=None)
    tokens, size = s.video.count_tokens(s.frames, s.height, s.width), (s.frames, s.height, s.width)
    predicted = []
    for devices in VIDEO_DEVICES:
        asked = Request(model, parse_devices(devices), "denoise", tokens, batch=s.batch, tp=1, size=size)
        best = build_plan(asked).best
        step_s = best.prediction.total_s
        predicted.append(PredictedStep(devices, str(best.setup), step_s, best.memory.total, best.fits))
    return tuple(predicted)
