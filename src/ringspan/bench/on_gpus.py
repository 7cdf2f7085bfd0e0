"""How long would the same model take on GPUs? The planner's answer, for context parallelism alone. Needs no torch."""

from dataclasses import replace

from ringspan.bench.settings import TransformerSettings
from ringspan.bench.transformer_result import PHASES, PredictedModel
from ringspan.bench.video_result import PredictedStep
from ringspan.bench.video_settings import VideoSettings
from ringspan.planner.catalog import load_model, parse_devices
from ringspan.planner.plan import Request, build_plan

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
