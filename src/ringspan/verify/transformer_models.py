"""Is a model of transformers the same on ranks as in one process? `ringspan verify transformers:MODEL`.

MODEL is a class (LlamaForCausalLM) or a model type (llama), which is made tiny with random weights, or a folder with
weights. Each case trains one step on ranks that are threads: logits, loss and all gradients are compared with the
unmodified model in one process and float64. The bound is a multiple of what one process in float32 misses.
"""

import copy
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringspan.errors import RingspanError, UnsupportedError
from ringspan.transports.in_process import run_in_process
from ringspan.verify.cases import VerifyCase
from ringspan.verify.diagnose import UNKNOWN, Diagnosis
from ringspan.verify.models import compare_models
from ringspan.verify.patterns import Pattern
from ringspan.verify.report import CaseVerdict, VerifyReport

PREFIX = "transformers:"
_SLACK, _RELATIVE = 8.0, 1e-6  # times the error of one process in float32, plus this part of the largest number
_LENGTH, _LARGEST = 23, 20_000_000
_TINY = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_dim"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    "vocab_size": 64,
    "head_dim": 8,
    "sliding_window": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_BY_LAYER = ("layer_types", "mlp_layer_types")

Batch = dict[str, torch.Tensor]


class _Step(NamedTuple):
    """Of one training step."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def verify_model(
    target: str, world_sizes: Iterable[int], progress: Callable[[int, int, VerifyCase], None]
) -> VerifyReport:
    """Run a model over its cases."""
    start = time.monotonic()
    model = _load(target.removeprefix(PREFIX)).float().eval()
    cases = [(case, batch) for size in world_sizes for case, batch in _cases(model, size)]
    verdicts: list[CaseVerdict] = []
    for done, (case, batch) in enumerate(cases):
        progress(done, len(cases), case)
        verdicts.append(_judge(model, case, batch))
    wrong = [verdict for verdict in verdicts if verdict.status == "wrong"]
    diagnosis = (
        Diagnosis(UNKNOWN, "", 0, len(wrong), f"begins in {wrong[0].case}: {wrong[0].message}") if wrong else None
    )
    return VerifyReport(target, tuple(verdicts), diagnosis, time.monotonic() - start)


def _load(name: str) -> Any:
    transformers: Any = import_module("transformers")
    if name and Path(name).is_dir():
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(name)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedError(
                f"no causal language model can be loaded from this folder: {reason}",
                argument="target",
                value=PREFIX + name,
                remedy="give one that save_pretrained has written",
            ) from error
    kinds = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found: Any = getattr(transformers, kinds.get(name, name), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model:
        raise UnsupportedError(
            "transformers has no model class, model type or folder of that name",
            argument="target",
            value=PREFIX + name,
            remedy=f"give one such as {PREFIX}LlamaForCausalLM",
        )
    try:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model: Any = found(_tiny_config(found.config_class))
    except Exception as error:
        raise _too_special(name, f"{type(error).__name__}: {error}") from error
    if model.num_parameters() > _LARGEST:
        raise _too_special(name, f"it has {model.num_parameters()} parameters")
    return model


def _tiny_config(config_class: Any) -> Any:
    usual = config_class()
    names = {*inspect.signature(config_class.__init__).parameters, *usual.to_dict(), *config_class.attribute_map}
    sizes: dict[str, Any] = {name: size for name, size in _TINY.items() if name in names}
    for name in _BY_LAYER:
        kinds = usual.to_dict().get(name)
        if kinds:
            sizes[name] = (list(dict.fromkeys(kinds)) * 4)[:4]
    return config_class(**sizes)


def _too_special(name: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"no tiny model could be made: {reason}",
        argument="target",
        value=PREFIX + name,
        remedy=f"save one with save_pretrained, and give {PREFIX}FOLDER",
    )


def _cases(model: Any, world_size: int) -> Iterator[tuple[VerifyCase, Batch]]:
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", 1))
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    tokens = torch.randint(3, config.vocab_size, (2, _LENGTH), generator=torch.Generator().manual_seed(world_size))
    padded: Pattern = ("rows", (("causal",), ("and", ("documents", (17, _LENGTH)), ("causal",))))
    packed: Pattern = ("and", ("documents", (9, _LENGTH)), ("causal",))
    mask = torch.ones_like(tokens)
    mask[1, 17:] = 0
    positions = torch.cat([torch.arange(9), torch.arange(_LENGTH - 9)]).expand(2, -1)
    batches: list[tuple[Pattern, Batch]] = [
        (("causal",), {"labels": tokens}),
        (padded, {"labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}),
    ]
    if "position_ids" in inspect.signature(model.forward).parameters:
        batches.append((packed, {"labels": tokens, "position_ids": positions}))
    for pattern, batch in batches:
        case = VerifyCase(world_size, "zigzag", pattern, _LENGTH, heads, kv_heads)
        yield case, {"input_ids": tokens, **batch}


def _judge(model: Any, case: VerifyCase, batch: Batch) -> CaseVerdict:
    parallelize = import_module("ringspan.adapters.transformers").parallelize
    whole = {name: x for name, x in batch.items() if name != "labels"}

    def run(group: Any) -> _Step:
        own = copy.deepcopy(model)
        handle = parallelize(own, group)
        step = _train(own, handle.shard(batch))
        handle.reduce_gradients()
        with torch.no_grad():
            return step._replace(logits=own(**whole, use_cache=False).logits, gradients=_gradients(own))

    def compare(group: Any) -> str:
        own = copy.deepcopy(model)
        part = parallelize(own, group).shard(batch)
        alone = copy.deepcopy(model)
        found = compare_models(alone, own, whole, parallel_batch=part, layout=case.q_layout(), group=group)
        return str(found or "no module's output differs")

    try:
        steps = run_in_process(run, case.world_size)
    except RingspanError as error:
        return CaseVerdict(case, "refused", ("this model",), str(error))
    except Exception as error:
        return CaseVerdict(case, "error", (), f"{type(error).__name__}: {error}")
    single = _train(copy.deepcopy(model), batch)
    exact = _train(copy.deepcopy(model).double(), batch)
    for rank, step in enumerate(steps):
        if found := _deviation(step, single, exact, batch.get("attention_mask")):
            difference = run_in_process(compare, case.world_size)[0]
            return CaseVerdict(case, "wrong", (), f"{found} on rank {rank}; {difference}")
    return CaseVerdict(case, "right")


def _train(model: Any, batch: Mapping[str, Any]) -> _Step:
    outputs = model(**batch, use_cache=False)
    outputs.loss.backward()
    return _Step(outputs.logits.detach(), outputs.loss.detach(), _gradients(model))


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def _deviation(step: _Step, single: _Step, exact: _Step, mask: torch.Tensor | None) -> str:
    """The first result beyond its bound, or nothing."""
    rows = torch.ones(exact.logits.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    results = {
        "logits": tuple(x.logits[rows] for x in (step, single, exact)),
        "loss": tuple(x.loss for x in (step, single, exact)),
    }
    for name, gradient in exact.gradients.items():
        none = torch.full_like(gradient, torch.nan)
        results[f"gradient of {name}"] = (
            step.gradients.get(name, none),
            single.gradients.get(name, none),
            gradient,
        )
    for name, (found, alone, right) in results.items():
        usual = float((alone.double() - right).abs().max())
        limit = _SLACK * usual + _RELATIVE * max(1.0, float(right.abs().max()))
        error = float((found.double() - right).abs().max())
        if not error <= limit:
            return f"{name}: error {error:.1e}, bound {limit:.1e}"
    return ""
