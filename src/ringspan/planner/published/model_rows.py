"""Rows that measure whole models: prefill, decode, generation, training steps, denoising steps and whole videos."""

import math
from dataclasses import replace

from ringspan.errors import UnsupportedError
from ringspan.planner.accuracy import Parts
from ringspan.planner.catalog import Cluster, Constants, Device, Model, Video, load_device, load_model
from ringspan.planner.plan.predict import Prediction, fixed_s, predict
from ringspan.planner.plan.request import Request, Setup
from ringspan.planner.published.rows import Fields, Predicted
from ringspan.planner.software import MEGATRON, PAPER, RING_FLASH, RINGSPAN, USP, Software

SIZES = {"480P": (81, 480, 832), "720P": (81, 720, 1280)}  # of Wan2.1, as its configs have them
STEPS = {"T2V": 50, "I2V": 40}  # of Wan2.1: the defaults of its generate.py


def _predicted(prediction: Prediction, device: Device, scale: float) -> Predicted:
    return Predicted(prediction.total_s * scale, prediction.parts, device)


def _meta(fields: Fields, phase: str, tokens: int, constants: Constants, cached: int = 0) -> tuple[Request, Setup]:
    """FP8 in the feed-forward layers, bf16 elsewhere; FlashAttention-3; CPn is n hosts of tensor parallel 8."""
    tp, cp = int(fields["tp_degree"]), int(fields["cp_degree"])
    network = fields["network"] if fields["network"].startswith("meta-") else None
    device = load_device(fields["device_id"], network, kernel="fa3", constants=constants)
    request = Request(
        model=load_model(fields["model"]),
        cluster=Cluster(int(fields["n_gpus"]) // 8, 8, device),
        phase=phase,  # type: ignore[arg-type]
        tokens=tokens,
        cached_tokens=cached,
        batch=int(fields["batch"]),
        tp=tp,
        mlp_weights="fp8",
        software=PAPER,
    )
    return request, Setup("pass_kv", "zigzag", tp, cp)


def ttft(fields: Fields, constants: Constants) -> Predicted:
    """Milliseconds to the first token."""
    request, setup = _meta(fields, "prefill", int(fields["new_tokens"]), constants, int(fields["cached_tokens"]))
    name = "pass_q" if fields["variant"] == "pass-Q" else "pass_kv"
    return _predicted(predict(request, setup._replace(algorithm=name)), request.cluster.device, 1e3)


def ttit(fields: Fields, constants: Constants) -> Predicted:
    """Milliseconds per token."""
    request, setup = _meta(fields, "decode", int(fields["context_tokens"]), constants)
    name = "pass_q" if setup.cp > 1 else "pass_kv"
    prediction = predict(request, setup._replace(algorithm=name, layout="striped"))
    return _predicted(prediction, request.cluster.device, 1e3)


def generation(fields: Fields, constants: Constants) -> Predicted:
    """Seconds of a prefill by a ring and of tokens decoded one by one: merged on all ranks, or by a ring of K and V."""
    ranks, tokens = int(fields["n_gpus"]), int(fields["seq_len_tokens"])
    device = load_device(fields["device_id"], constants=constants)
    cluster = Cluster(max(1, ranks // 8), min(8, ranks), device)
    request = Request(load_model(fields["model"]), cluster, "prefill", tokens, tp=1, software=RING_FLASH)
    prefill = predict(request, Setup("pass_kv", "zigzag", 1, ranks))
    name = "all_merge" if fields["method"] == "tree" else "pass_kv"
    decode = predict(replace(request, phase="decode"), Setup(name, "striped", 1, ranks))
    count = int(fields["generated_tokens"])
    parts = {part: seconds + count * decode.parts[part] for part, seconds in prefill.parts.items()}
    return Predicted(sum(parts.values()), parts, device)


def training_step(fields: Fields, constants: Constants) -> Predicted:
    """Seconds of a step of a 7B model, weights fully sharded; activations are computed anew but for attention."""
    ranks = int(fields["n_gpus"])
    device = load_device(fields["device_id"], kernel="fa2", constants=constants)
    software, setup = _training_setup(fields["system"], ranks)
    request = Request(
        model=_training_model(fields["model"], ranks if software.name != RING_FLASH.name else 1),
        cluster=Cluster(int(fields["n_nodes"]), ranks // int(fields["n_nodes"]), device),
        phase="train",
        tokens=int(fields["seq_len_tokens"]),
        shards_weights=setup.cp > 1,
        software=software,
    )
    return _predicted(predict(request, setup), device, 1.0)


def _training_model(name: str, split: int) -> Model:
    """Llama 7B with the heads of a row: 8 KV heads, or 33 heads, which software that splits heads must pad.

    See arXiv 2310.03294.
    """
    model = load_model("llama-2-7b")
    if name == "7B":
        return model
    if "GQA" in name:
        return replace(model, num_kv_heads=8)
    if "33H" not in name:
        raise UnsupportedError("its heads are not in the table", argument="model", value=name)
    heads = -(-33 // split) * split
    return replace(model, num_heads=heads, num_kv_heads=heads, hidden_size=33 * model.head_dim)


def _training_setup(system: str, ranks: int) -> tuple[Software, Setup]:
    if system.startswith("Megatron"):
        return MEGATRON, Setup("pass_kv", "contiguous", ranks, 1)
    if "Ulysses" in system:
        return USP, Setup("ulysses", "contiguous", 1, ranks, inner=ranks)
    if system == "DistFlashAttn":
        # It fetches blocks from their owners, so that all ports of a node are in use, as in a double ring.
        software = RING_FLASH._replace(recomputes_attention=False)
        if ranks > 8:
            return software, Setup("double_ring", "zigzag", 1, ranks, inner=8)
        return software, Setup("pass_kv", "zigzag", 1, ranks)
    raise UnsupportedError("how it splits a step is not known", argument="system", value=system)


def speedup(fields: Fields, constants: Constants) -> Predicted:
    """Striped over contiguous, of a whole training step with recomputation; FlashAttention-2 by assumption."""
    ranks, tp = int(fields["sequence_parallel"]), int(fields["model_parallel"])
    device = load_device(fields["device_id"], kernel="fa2", constants=constants)
    request = Request(
        model=load_model(fields["model"]),
        cluster=Cluster(1, int(fields["n_devices"]), device),
        phase="train",
        tokens=int(fields["seq_len_tokens"]),
        software=RING_FLASH,
    )
    ring, striped = (predict(request, Setup("pass_kv", name, tp, ranks)) for name in ("contiguous", "striped"))
    return Predicted(ring.total_s / striped.total_s, striped.parts, device)


def video_latency(fields: Fields, constants: Constants) -> Predicted:
    """Seconds of a whole video; where the split is not stated, Ulysses as far as heads divide."""
    model = load_model(fields["model"])
    video = _video_of(model)
    frames, height, width = _size(video, fields)
    tokens, cfg = video.count_tokens(frames, height, width), int(fields["cfg_degree"] or 1)
    ranks = int(fields["n_gpus"]) // cfg
    ulysses = int(fields["ulysses_degree"] or math.gcd(ranks, model.num_heads))
    ring = int(fields["ring_degree"] or ranks // ulysses)
    steps = int(fields["steps"] or STEPS[fields["task"]])
    software = RINGSPAN if ranks == 1 else USP
    prediction, device = _video(fields, model, tokens, cfg, ulysses, ring, software, constants)
    parts: Parts = {name: steps * seconds for name, seconds in prediction.parts.items()}
    parts["text encoder and VAE"] = fixed_s(device, frames, height, width)
    return Predicted(sum(parts.values()), parts, device)


def _video_of(model: Model) -> Video:
    if model.video is None:
        raise UnsupportedError(f"{model.id} is not a video model")
    return model.video


def _size(video: Video, fields: Fields) -> tuple[int, int, int]:
    if fields.get("frames"):
        return int(fields["frames"]), int(fields["height_px"]), int(fields["width_px"])
    if fields.get("resolution_label") in SIZES:
        return SIZES[fields["resolution_label"]]
    if video.usual is None:
        raise UnsupportedError(f"{fields['row_id']}: neither frames nor a usual size of {fields['model']} is known")
    return video.usual


def video_step(fields: Fields, constants: Constants) -> Predicted:
    """Seconds of a denoising step of the usual clip."""
    model = load_model(fields["model"])
    video = _video_of(model)
    cfg, ulysses, ring = (int(fields[key]) for key in ("cfg_degree", "ulysses_degree", "ring_degree"))
    tokens = video.count_tokens(*_size(video, fields))
    prediction, device = _video(fields, model, tokens, cfg, ulysses, ring, USP, constants)
    return _predicted(prediction, device, 1.0)


def _video(
    fields: Fields,
    model: Model,
    tokens: int,
    cfg: int,
    ulysses: int,
    ring: int,
    software: Software,
    constants: Constants,
) -> tuple[Prediction, Device]:
    """A step with FlashAttention-2; guidance is a batch of two where the model has it."""
    device = load_device(fields["device_id"], kernel="fa2", constants=constants)
    devices = ulysses * ring * cfg
    request = Request(
        model=model,
        cluster=Cluster(-(-devices // 8), min(8, devices), device),
        phase="denoise",
        tokens=tokens,
        batch=_video_of(model).forwards,
        software=software,
    )
    algorithm = "pass_kv" if ulysses == 1 else "ulysses" if ring == 1 else "hybrid"
    return predict(request, Setup(algorithm, "contiguous", 1, ulysses * ring, cfg, ulysses)), device
