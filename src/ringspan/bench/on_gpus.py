"""How long would the same model take on GPUs? The planner's answer, for context parallelism alone. Needs no torch."""

from ringspan.bench.settings import TransformerSettings
from ringspan.bench.transformer_result import PHASES, PredictedModel
from ringspan.planner.catalog import load_model, parse_devices
from ringspan.planner.plan import Request, build_plan

DEVICES = "16xh100"


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
