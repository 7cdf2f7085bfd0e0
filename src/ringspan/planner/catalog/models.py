"""How is a model found by name? In the catalogue, in a local `config.json`, or in a `dense:` line.

A model without a needed figure is refused with the name of the figure; the release's own `config.json` usually has it.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringspan.errors import ShapeError, UnsupportedError
from ringspan.planner.catalog.config import read_config
from ringspan.planner.catalog.files import find, plain, read_data, unverified
from ringspan.planner.catalog.shapes import Experts, Latent, Model, Video, Window

DENSE_KEYS = ("layers", "heads", "kv_heads", "head_dim", "hidden", "mlp", "mlp_matrices", "vocab")
DENSE_FORM = (
    "dense:layers=16,heads=32,head_dim=128,mlp=16384[,kv_heads=8][,hidden=4096][,mlp_matrices=2][,vocab=128256]"
)


def load_model(name: str) -> Model:
    """Load a model by its id in any case, from the path of a `config.json`, or from a `dense:` line."""
    if name.startswith("dense:"):
        return _parse_dense(name)
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return read_config(path / "config.json" if path.is_dir() else path)
    data = read_data("models.toml")
    videos = {entry["id"] for entry in data["video_dit"]}
    entry = find([*data["llm"], *data["video_dit"]], name.lower(), "model", "model")
    figures = plain(entry)
    model = _video_model(figures) if entry["id"] in videos else _llm(figures)
    return model_with_notes(model, unverified(entry))


def model_names() -> list[str]:
    """Return all ids of the catalogue."""
    data = read_data("models.toml")
    return [entry["id"] for entry in (*data["llm"], *data["video_dit"])]


def model_with_notes(model: Model, doubtful: Iterable[str]) -> Model:
    """Return the model with a note of its unconfirmed figures."""
    keys = [key for key in doubtful if key not in ("max_position_tokens", "kv_bytes_per_token_bf16")]
    if not keys:
        return model
    note = f"not confirmed from the release: {', '.join(keys)}"
    return dataclasses.replace(model, notes=(*model.notes, note))


def _llm(figures: dict[str, Any]) -> Model:
    latent = None
    if figures["attention"] == "mla":
        _need(figures, "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
        rope_dim = figures["qk_rope_head_dim"]
        latent = Latent(figures["q_lora_rank"], figures["kv_lora_rank"], figures["qk_head_dim"] - rope_dim, rope_dim)
        figures = figures | {"heads_kv": figures["heads_q"], "head_dim": figures["qk_head_dim"]}
    _need(figures, "layers", "heads_q", "heads_kv", "head_dim", "hidden_size")
    experts = None
    if "moe_mlp_size" in figures:
        _need(figures, "experts", "experts_per_token")
        experts = Experts(
            figures["experts"],
            figures["experts_per_token"],
            figures["moe_mlp_size"],
            figures.get("shared_experts", 0),
            figures.get("dense_layers", 0),
        )
    else:
        _need(figures, "mlp_size")
    window = None
    if "sliding_window_tokens" in figures:
        _need(figures, "full_attention_every_n_layers")
        full_layers = figures["layers"] // figures["full_attention_every_n_layers"]
        window = Window(figures["sliding_window_tokens"], full_layers)
    notes = []
    if "vocab_size" not in figures:
        notes.append("embeddings are not counted: the vocabulary is not in the catalogue")
    if figures.get("is_chunked"):
        notes.append("layers that attend within chunks are planned as windows: up to twice their attention")
    return Model(
        id=figures["id"],
        layers=figures["layers"],
        num_heads=figures["heads_q"],
        num_kv_heads=figures["heads_kv"],
        head_dim=figures["head_dim"],
        v_head_dim=figures.get("v_head_dim", figures["head_dim"]),
        hidden_size=figures["hidden_size"],
        mlp_size=figures.get("mlp_size", 0),
        experts=experts,
        latent=latent,
        window=window,
        vocab_size=figures.get("vocab_size"),
        is_tied=figures.get("tied_embeddings", False),
        parameters=figures.get("parameters"),
        max_tokens=figures.get("max_position_tokens"),
        notes=tuple(notes),
    )


def _video_model(figures: dict[str, Any]) -> Model:
    _need(
        figures,
        *("heads", "head_dim", "hidden_size", "patch_t", "patch_h", "patch_w"),
        *("vae_temporal_stride", "vae_spatial_stride", "text_mode", "text_tokens"),
    )
    if "layers" not in figures:
        _need(figures, "double_blocks", "single_blocks")
    if "mlp_size" not in figures:
        _need(figures, "mlp_ratio")
    usual_keys = ("usual_frames", "usual_height_px", "usual_width_px")
    usual = tuple(figures[key] for key in usual_keys) if all(key in figures for key in usual_keys) else None
    video = Video(
        patch=(figures["patch_t"], figures["patch_h"], figures["patch_w"]),
        temporal_stride=figures["vae_temporal_stride"],
        spatial_stride=figures["vae_spatial_stride"],
        text_tokens=figures["text_tokens"],
        is_text_joint=figures["text_mode"] == "joint",
        usual=usual,
        forwards=figures.get("forwards", 1),
        steps=figures.get("steps"),
        models=figures.get("models", 1),
        encoder_parameters=figures.get("text_encoder_parameters"),
        vae_parameters=figures.get("vae_parameters"),
    )
    layers = figures.get("layers") or figures["double_blocks"] + figures["single_blocks"]
    return Model(
        id=figures["id"],
        layers=layers,
        num_heads=figures["heads"],
        num_kv_heads=figures["heads"],
        head_dim=figures["head_dim"],
        v_head_dim=figures["head_dim"],
        hidden_size=figures["hidden_size"],
        mlp_size=figures.get("mlp_size") or int(figures["mlp_ratio"] * figures["hidden_size"]),
        mlp_matrices=2,
        video=video,
        parameters=figures.get("parameters"),
    )


def _need(figures: dict[str, Any], *keys: str) -> None:
    missing = [key for key in keys if key not in figures]
    if missing:
        raise UnsupportedError(
            f"{figures['id']}: {', '.join(missing)} not found in the catalogue, and nothing is guessed",
            remedy="give the path of its config.json",
        )


def _parse_dense(text: str) -> Model:
    given: dict[str, int] = {}
    for part in text.removeprefix("dense:").split(","):
        key, _, value = part.partition("=")
        if key not in DENSE_KEYS or re.fullmatch(r"-?[0-9]{1,12}", value) is None:
            raise ShapeError(
                f"{part!r} in {text!r}: use KEY=NUMBER with the keys {', '.join(DENSE_KEYS)}: {DENSE_FORM}"
            )
        given[key] = int(value)
    missing = [key for key in ("layers", "heads", "head_dim", "mlp") if key not in given]
    if missing:
        raise ShapeError(f"{text!r}: {', '.join(missing)} is missing", remedy=f"write {DENSE_FORM}")
    return Model(
        id=text,
        layers=given["layers"],
        num_heads=given["heads"],
        num_kv_heads=given.get("kv_heads", given["heads"]),
        head_dim=given["head_dim"],
        v_head_dim=given["head_dim"],
        hidden_size=given.get("hidden", given["heads"] * given["head_dim"]),
        mlp_size=given["mlp"],
        mlp_matrices=given.get("mlp_matrices", 2),
        vocab_size=given.get("vocab"),
    )
