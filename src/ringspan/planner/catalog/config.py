"""How is a model read from a local `config.json` of transformers or diffusers? As JSON, without either library.

A missing key that changes the cost is refused by name, because the default of a library class need not be that of a
release. Models that the planner cannot count (linear attention, an encoder with a decoder, experts in some layers only)
are refused if a key shows it.
"""

import json
import reprlib
from pathlib import Path
from typing import Any, NoReturn

from ringspan.errors import UnsupportedError
from ringspan.planner.catalog.files import find, plain, read_data
from ringspan.planner.catalog.shapes import Experts, Latent, Model, Video, Window

VIDEO_CLASSES = {  # class in a diffusers config: the catalogue entry with the same VAE and text encoder
    "WanTransformer3DModel": "wan2.1-14b",
    "HunyuanVideoTransformer3DModel": "hunyuanvideo",
    "CogVideoXTransformer3DModel": "cogvideox-5b",
    "LTXVideoTransformer3DModel": "ltx-video",
    "HunyuanVideo15Transformer3DModel": "hunyuanvideo-1.5",
    "FluxTransformer2DModel": "flux.1",
}
PACKED = ("FluxTransformer2DModel",)  # whose pipeline packs patches before the model, so that its own patch_size is 1
PLAIN_MLP = (  # model types whose MLP is two matrices: in and out
    *("biogpt", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron"),
    *("opt", "persimmon", "phi", "starcoder2", "xglm"),
)
GATED_MLP = (  # model types whose MLP, or expert, is three matrices: gate, in and out
    *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "glm"),
    *("glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe", "helium", "llama", "mistral", "mixtral"),
    *("olmo", "olmo2", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm"),
)
ENCODERS = (  # model types that attend in both directions
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "longformer"),
    *("modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "xlm-roberta", "xlm-roberta-xl"),
)
NO_ATTENTION = (  # keys of layers without attention or with another kind of it
    *("ssm_cfg", "ssm_state_size", "mamba_d_state", "mamba_num_heads", "hybrid_override_pattern", "layers_block_type"),
    *("lru_width", "linear_num_key_heads", "linear_attn_config", "rwkv_version"),
)
REFUSED_KEYS = {  # keys of a language model's config, and what a non-empty value means
    **dict.fromkeys(NO_ATTENTION, "layers that are not plain attention"),
    "is_encoder_decoder": "an encoder beside the decoder",
    "attention_chunk_size": "layers that attend within chunks",
    "attention_window_size": "windows in layers that are not listed",
    "index_topk": "attention to some keys of those before",
    "intermediate_size_mlp": "experts beside MLPs of another size",
    "moe_num_experts": "experts whose layers and sizes are named in another way",
}
LAYER_KINDS = {
    "attn_type_list": 1,
    "block_types": "attention",
}  # lists of layer kinds, and the name of plain attention in each
EXPERT_STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")  # 1: experts in every layer
EXPERT_LAYERS = ("mlp_only_layers", "moe_layers", "num_dense_layers")
SHARED_EXPERTS = (
    "num_shared_experts",
    "share_expert_dim",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
LARGEST = 10**12  # limit of every figure, so that products of a few of them fit a float


def read_config(path: Path) -> Model:
    """Read the model that a config.json describes."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedError(f"{path}: {error.strerror}", remedy="give the path of a config.json") from None
    except ValueError as error:
        raise UnsupportedError(f"{path} is not a JSON file: {error}") from None
    except RecursionError:
        raise UnsupportedError(
            f"{path}: lists or objects nested too deeply", remedy="give the path of a config.json"
        ) from None
    if not isinstance(config, dict):
        raise UnsupportedError(f"{path}: a config.json holds an object")
    if "_class_name" in config:
        return _Config(path, config).video_model()
    name = str(config.get("model_type", path.parent.name or path.stem))
    nested = config.get("text_config")
    return _Config(path, nested if isinstance(nested, dict) else config).language_model(name)


class _Config:
    """A config being read; keeps its path for messages."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config

    def need(self, *names: str) -> int:
        """Return the first of several spellings as a whole number; refuse a config that has none."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                return self.number(name, value)
        raise UnsupportedError(
            f"{self.path} has no {' or '.join(names)}, and nothing is guessed",
            remedy="add it, or use a model of the catalogue",
        )

    def number(self, name: str, value: object, least: int = 0) -> int:
        """Check that a value is a whole number within the limits."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise UnsupportedError(
                f"{self.path}: {name}={reprlib.repr(value)} is not a whole number of at least {least} and "
                f"at most {LARGEST:,}",
                remedy="correct it",
            )
        return value

    def may(self, name: str) -> int:
        """Return an optional whole number; 0 if it is missing."""
        return 0 if self.config.get(name) is None else self.need(name)

    def language_model(self, name: str) -> Model:
        config = self.config
        self._refuse_other_layers()
        kind = config.get("model_type")
        if kind in ENCODERS and not config.get("is_decoder"):
            raise UnsupportedError(
                f"{self.path}: model_type={kind!r} attends to both sides, and language models are planned as causal",
                remedy="use the config.json of a decoder",
            )
        notes: tuple[str, ...] = ()
        if "tie_word_embeddings" not in config:
            notes += ("tie_word_embeddings not given: counted twice",)
        if kind not in (*PLAIN_MLP, *GATED_MLP):
            notes += (f"model_type={kind!r} is not known: its MLP is counted as gated, with three matrices",)
        layers, hidden = self.need("num_hidden_layers", "n_layer"), self.need("hidden_size", "n_embd")
        heads = self.need("num_attention_heads", "n_head")
        latent = self._latent()
        if latent is not None:
            head_dim, v_head_dim, kv_heads = latent.nope_dim + latent.rope_dim, self.need("v_head_dim"), heads
        else:
            kv_heads = self._kv_heads()
            head_dim = v_head_dim = self.need("head_dim") if config.get("head_dim") else self._divided(hidden, heads)
        experts = self._experts(layers)
        is_all_experts = experts is not None and not experts.dense_layers
        return Model(
            id=name,
            layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            hidden_size=hidden,
            mlp_size=0 if is_all_experts else self.need("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
            mlp_matrices=2 if kind in PLAIN_MLP else 3,
            experts=experts,
            latent=latent,
            window=self._window(layers),
            vocab_size=self.need("vocab_size"),
            is_tied=config.get("tie_word_embeddings") is True,
            max_tokens=self.may("max_position_embeddings") or None,
            notes=notes,
        )

    def _refuse_other_layers(self) -> None:
        """Refuse layers that are not plain attention, by the keys that say so."""
        for key, meaning in REFUSED_KEYS.items():
            if self.config.get(key):
                self._refuse(key, meaning)
        for key, plain_kind in LAYER_KINDS.items():
            if self._has_other(key, plain_kind):
                self._refuse(key, "layers that are not plain attention")

    def _has_other(self, key: str, usual: object) -> bool:
        """Whether a value, or an element of a list by layer, differs from the usual one; null is ignored."""
        value = self.config.get(key)
        values = value if isinstance(value, list) else [value]
        return value is not None and any(other != usual for other in values)

    def _refuse(self, key: str, meaning: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.path}: {key}={reprlib.repr(self.config[key])} means {meaning}, which cannot be counted here",
            remedy="use a model of plain attention, with the same MLP or experts in all layers",
        )

    def _kv_heads(self) -> int:
        """Return the number of KV heads, by default that of query heads; "multi_query" of falcon means one."""
        if self.config.get("multi_query") and not self.config.get("new_decoder_architecture"):
            return 1
        return self.need("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")

    def _divided(self, hidden: int, heads: int) -> int:
        if not heads or hidden % heads:
            raise UnsupportedError(
                f"{self.path}: hidden_size={hidden} over {heads} heads gives no whole head_dim", remedy="add head_dim"
            )
        return hidden // heads

    def _latent(self) -> Latent | None:
        if self.config.get("kv_lora_rank") is None:
            return None
        if "q_lora_rank" not in self.config:
            self.need("q_lora_rank")
        q_rank = None if self.config["q_lora_rank"] is None else self.need("q_lora_rank")
        return Latent(q_rank, self.need("kv_lora_rank"), self.need("qk_nope_head_dim"), self.need("qk_rope_head_dim"))

    def _experts(self, layers: int) -> Experts | None:
        names = ("n_routed_experts", "num_local_experts", "num_experts")
        given = [name for name in names if self.config.get(name)]
        if not given:
            return None
        mlp_size = self.need("moe_intermediate_size", "intermediate_size")
        shared, dense = self.may("n_shared_experts"), self.may("first_k_dense_replace")
        self._refuse_some_experts(layers, dense)
        return Experts(self.need(*given), self.need("num_experts_per_tok"), mlp_size, shared, dense)

    def _refuse_some_experts(self, layers: int, dense: int) -> None:
        """Refuse layers without experts among layers with experts, except the first `dense` ones."""
        for key in SHARED_EXPERTS:
            if self.config.get(key):
                self._refuse(key, "shared experts of a number or size of their own")
        some = [key for key in EXPERT_STEPS if self._has_other(key, 1)]
        some += [key for key in EXPERT_LAYERS if self.config.get(key)]
        some += [] if self._is_dense_first(layers, dense) else ["mlp_layer_types"]
        if some:
            self._refuse(some[0], "experts in some layers only")

    def _is_dense_first(self, layers: int, dense: int) -> bool:
        """Whether mlp_layer_types, if present, agrees with first_k_dense_replace."""
        kinds = self.config.get("mlp_layer_types")
        if not isinstance(kinds, list):
            return kinds is None
        return len(kinds) == layers and all(
            kind == ("dense" if i < dense else "sparse") for i, kind in enumerate(kinds)
        )

    def _window(self, layers: int) -> Window | None:
        """Return the sliding layers: by a list of layer types, by a pattern, or all of them."""
        full = self._full_layers(layers)
        if full == layers or self.config.get("use_sliding_window") is False:
            return None
        if full is not None:
            return Window(self.need("sliding_window"), full)
        tokens = self.may("sliding_window")
        if not tokens:
            return None
        if self.may("sliding_window_pattern"):
            return Window(tokens, layers // self.need("sliding_window_pattern"))
        if self.config.get("use_sliding_window") is None and self.config.get("model_type") in ("mistral", None):
            return Window(tokens, 0)
        raise UnsupportedError(
            f"{self.path}: sliding_window={tokens} without layer_types or sliding_window_pattern", remedy="add either"
        )

    def _full_layers(self, layers: int) -> int | None:
        """Count full layers by layer_types, if present."""
        types = self.config.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or any(kind not in ("full_attention", "sliding_attention") for kind in types):
            raise UnsupportedError(f"{self.path}: layer_types has kinds other than full_ and sliding_attention")
        if len(types) != layers:
            raise UnsupportedError(
                f"{self.path}: layer_types has {len(types)} entries for {layers} layers",
                remedy="give one for each layer",
            )
        return types.count("full_attention")

    def video_model(self) -> Model:
        name = str(self.config["_class_name"])
        if name not in VIDEO_CLASSES:
            raise UnsupportedError(f"{self.path}: {name} is not known; the known ones are {', '.join(VIDEO_CLASSES)}")
        kin = plain(find(read_data("models.toml")["video_dit"], VIDEO_CLASSES[name], "model", "model"))
        heads, head_dim = self.need("num_attention_heads"), self.need("attention_head_dim")
        hidden = heads * head_dim
        layers, double = self.need("num_layers"), 0
        if "num_single_layers" in self.config:
            layers, double = layers + self.need("num_single_layers"), layers
        mlp = self.need("ffn_dim") if "ffn_dim" in self.config else int(self._mlp_ratio() * hidden)
        frames, height, width = (kin[f"usual_{key}"] for key in ("frames", "height_px", "width_px"))
        video = Video(
            (kin["patch_t"], kin["patch_h"], kin["patch_w"]) if name in PACKED else self._patch(),
            kin["vae_temporal_stride"],
            kin["vae_spatial_stride"],
            self.may("max_text_seq_length") or kin["text_tokens"],
            kin["text_mode"] == "joint",
            (frames, height, width),
            forwards=kin.get("forwards", 1),
            steps=kin.get("steps"),
            encoder_parameters=kin.get("text_encoder_parameters"),
            vae_parameters=kin.get("vae_parameters"),
        )
        notes: tuple[str, ...] = (
            f"VAE, text encoder, usual size, steps and guidance are those of {kin['id']}, of the catalogue",
        )
        if "ffn_dim" not in self.config and "mlp_ratio" not in self.config:
            notes += ("mlp_ratio is not in the config; 4, as the class of diffusers has it",)
        return Model(
            id=name,
            layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            hidden_size=hidden,
            mlp_size=mlp,
            mlp_matrices=2,
            video=video,
            parameters=_two_stream_parameters(hidden, mlp, double, layers - double) if double else None,
            notes=notes,
        )

    def _mlp_ratio(self) -> float:
        ratio = self.config.get("mlp_ratio", 4)
        if not isinstance(ratio, int | float) or not 0 < ratio <= LARGEST:
            raise UnsupportedError(
                f"{self.path}: mlp_ratio={reprlib.repr(ratio)} is not a number above 0 and up to {LARGEST:,}",
                remedy="correct it",
            )
        return ratio

    def _patch(self) -> tuple[int, int, int]:
        size = self.config.get("patch_size")
        if isinstance(size, list) and len(size) == 3:
            time, height, width = (self.number("patch_size", pixels, least=1) for pixels in size)
            return time, height, width
        space = self.number("patch_size", self.need("patch_size"), least=1)
        return self.may("patch_size_t") or 1, space, space


def _two_stream_parameters(hidden: int, mlp: int, double: int, single: int) -> int:
    """Text and video have weights of their own in double blocks; modulations are 6 and 3 hidden-size squares."""
    block = 4 * hidden**2 + 2 * hidden * mlp
    return double * 2 * (block + 6 * hidden**2) + single * (block + 3 * hidden**2)
