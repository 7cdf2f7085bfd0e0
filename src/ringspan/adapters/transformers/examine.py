"""Can this model run on ranks exactly? Everything that can be found out on one rank, before a message is sent.

Dry calls on a few tokens tell what the attention layers ask for. Then the model is run as it is, and once more on two
ranks in threads of this process, on shards and over a cache; if the numbers differ, something in it joins tokens in a
way nobody foresaw, and it is refused. So a model need not be known by name, and none is silently wrong.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ringspan.adapters.transformers.adapter import Adapter, Found
from ringspan.adapters.transformers.cache import Conversation, ShardedLayer
from ringspan.adapters.transformers.layers import Layer, Recorder, describe_layers
from ringspan.adapters.transformers.shards import Options
from ringspan.adapters.transformers.turns import cached_layers
from ringspan.adapters.transformers.wiring import RUN, Wiring, is_wired
from ringspan.errors import UnsupportedError
from ringspan.transports.in_process import run_in_process

_COLUMNS = 12
_PADDING = 2  # columns of the second row
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_DEPENDS_ON_LENGTH = ("dynamic", "longrope")
_LABELS = {None: True, "ForCausalLM": True, "ForMaskedLM": False, "ForTokenClassification": False}  # are they shifted?


class Reference(NamedTuple):
    """What the model itself makes of a small batch."""

    batch: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


def check_config(model: PreTrainedModel) -> None:
    """Refuse what can be told without a call."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"model is a {type(model).__name__}: give the model of transformers itself, before DDP, FSDP or compile"
        )
    name, config = type(model).__name__, model.config
    if is_wired(config._attn_implementation):
        raise UnsupportedError(
            f"{name} is parallelized already, or shares its config with a model that is; restore it, or copy the config"
        )
    if any(x.is_meta for x in model.parameters()):
        raise UnsupportedError(f"{name} has weights on the meta device; load them first")
    if config.is_encoder_decoder:
        raise UnsupportedError(
            f"{name} is an encoder with a decoder: its two sequences would be sharded apart, and most count their "
            "positions themselves; use rs.attention with kv_layout in a model of your own"
        )
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes or "position_ids" not in takes:
        raise UnsupportedError(f"{name}.forward takes no input_ids and position_ids: it would count positions by shard")
    for option in ("output_attentions", "output_router_logits"):
        if getattr(config, option, False):
            raise UnsupportedError(f"config.{option}=True: it needs all tokens in one place; set it to False")
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, Mapping) else (kinds,):
            if kind in _DEPENDS_ON_LENGTH:
                raise UnsupportedError(
                    f"{path}: rope_type={kind!r} depends on the length of the sequence, and a rank sees a part of it"
                )


def make_reference(model: PreTrainedModel) -> Reference:
    """Run the model as it is on two rows, one with padding."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (2, _COLUMNS), generator=generator)
    attention_mask = torch.ones_like(ids)
    attention_mask[1, :_PADDING] = 0
    batch = {"input_ids": ids, "attention_mask": attention_mask}
    if _shifts_labels(model) is not None:
        labels = torch.randint(_num_labels(model), ids.shape, generator=generator)
        labels[1, : _PADDING + 1] = labels[0, 3] = -100
        batch["labels"] = labels
    batch = {name: x.to(model.device) for name, x in batch.items()}
    with _mode(model, training=False), torch.no_grad():
        output = model(**batch, **_without_cache(model))
    outputs = {name: output[name] for name in ("logits", "last_hidden_state", "loss") if name in output}
    rows = [x for name, x in outputs.items() if name != "loss"]
    if not rows or any(x.shape[:2] != ids.shape for x in rows):
        raise UnsupportedError(
            f"{type(model).__name__} returns nothing that has a row for each token; use its base model"
        )
    return Reference(batch, outputs)


def find_random(model: PreTrainedModel, reference: Reference) -> str | None:
    """What makes the model random in training, if anything does: ranks would draw other numbers than one process."""
    batch = {name: x for name, x in reference.batch.items() if name != "labels"}
    runs = []
    with _mode(model, training=True), _alone(model):
        for seed in (0, 1):
            torch.manual_seed(seed)
            runs.append(model(**batch, **_without_cache(model))[0])
    tokens = reference.batch["attention_mask"].bool()
    first, second = runs
    if _is_close(_errors(first, second, tokens), model):
        return None
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    where = f"{modules[0]} and {len(modules) - 1} more modules" if modules else "its forward"
    return (
        f"{type(model).__name__} is random in training ({where}): ranks would drop other things than one process; set "
        "all dropout of the config to 0, or call model.eval()"
    )


def examine(model: PreTrainedModel, wiring: Wiring, random: str | None) -> Found:
    """The layers of a model whose attention is wired already."""
    names = {module: name for name, module in model.named_modules()}
    passes_run = any(x.kind is x.VAR_KEYWORD for x in inspect.signature(model.forward).parameters.values())
    positions = torch.arange(6, device=model.device)[None]

    def record(position_ids: torch.Tensor = positions, **options: Any) -> Recorder:
        inputs = {"input_ids": torch.zeros_like(positions), "position_ids": position_ids}
        return _record(model, wiring, inputs, passes_run, **options)

    plain = record()
    if not plain.asked:
        raise UnsupportedError(f"{type(model).__name__} does not attend by way of transformers' AttentionInterface")
    packed = positions % 3
    layers = describe_layers(names, plain, record(packed), packed, record(training=True))
    cached, no_cache = _find_cached(model, layers, record)
    return Found(layers, cached, no_cache, passes_run, _shifts_labels(model), random)


def compare(model: PreTrainedModel, wiring: Wiring, options: Options, found: Found, reference: Reference) -> None:
    """Refuse the model if two ranks do not get the numbers it gets alone."""
    batch, expected = reference
    tokens = batch["attention_mask"].bool()
    options = options._replace(algorithm="pass_kv")  # neither measured nor dependent on a mesh

    def run(group: Any) -> dict[str, torch.Tensor]:
        adapter = Adapter(model, wiring, options._replace(group=group), found)
        outputs = {f"{name} on shards": x for name, x in _rows(adapter.call(**batch, use_cache=False)).items()}
        if not found.cached:
            return outputs
        cache = DynamicCache()
        inputs = {"input_ids": batch["input_ids"], "past_key_values": cache}
        parts = []
        for start, stop in ((0, _COLUMNS - 3), (_COLUMNS - 3, _COLUMNS - 1), (_COLUMNS - 1, _COLUMNS)):
            inputs["input_ids"] = batch["input_ids"][:, start:stop]
            parts.append(_rows(adapter.call(**inputs, attention_mask=batch["attention_mask"][:, :stop])))
        joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        return outputs | {f"{name} over a cache": x for name, x in joined.items()}

    try:
        with _mode(model, training=False), torch.no_grad():
            results = run_in_process(run, 2)
    except Exception as error:
        name = type(model).__name__
        raise UnsupportedError(f"{name} fails on two ranks: {type(error).__name__}: {error}") from error
    for rank, found_outputs in enumerate(results):
        for name, x in found_outputs.items():
            y = expected[name.split()[0]]
            errors = _errors(x, y, tokens)
            if not _is_close(errors, model):
                raise UnsupportedError(
                    f"{type(model).__name__}: {name} of a small batch differ by {errors.max():.1e} on "
                    f"rank {rank} of two from one process: something besides attention joins tokens, such as a "
                    "convolution, a recurrence or positions it counts itself; verify=False leaves out this check"
                )


def _record(
    model: PreTrainedModel,
    wiring: Wiring,
    inputs: dict[str, torch.Tensor],
    passes_run: bool,
    *,
    training: bool = False,
    conversation: Conversation | None = None,
    **options: Any,
) -> Recorder:
    """What a dry call asks for."""
    recorder = Recorder(model.device)
    if conversation is not None:
        conversation.run = recorder
    if passes_run:
        options[RUN] = recorder
    wiring.run = recorder
    try:
        with _mode(model, training=training), _alone(model):
            model(**inputs, **(_without_cache(model) | options))
    except Exception as error:
        raise UnsupportedError(
            f"a dry call of {type(model).__name__} fails: {type(error).__name__}: {error}"
        ) from error
    finally:
        wiring.run = None
    return recorder


@contextmanager
def _alone(model: PreTrainedModel) -> Iterator[None]:
    """Without a trace in the random numbers that come later; with gradients in training, as checkpoints expect."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.set_grad_enabled(model.training):
        yield


def _find_cached(
    model: PreTrainedModel, layers: dict[nn.Module, Layer], record: Callable[..., Recorder]
) -> tuple[tuple[Layer, ...], str]:
    """The layers in the order of a cache, or none and why."""
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return (), "its forward takes no past_key_values"
    conversation = Conversation(None, None)
    cache = DynamicCache()
    cache.layers = [ShardedLayer(conversation, index) for index in range(len(layers))]
    try:
        recorder = record(past_key_values=cache, use_cache=True, conversation=conversation)
        return cached_layers(layers, recorder.cache_indices), ""
    except UnsupportedError as error:
        return (), str(error)


def _rows(output: Any) -> dict[str, torch.Tensor]:
    return {name: output[name] for name in ("logits", "last_hidden_state", "loss") if name in output}


def _without_cache(model: PreTrainedModel) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _shifts_labels(model: PreTrainedModel) -> bool | None:
    """Are labels those of the next token? None if they are no labels of tokens at all."""
    if "labels" not in inspect.signature(model.forward).parameters or hasattr(model, "_loss_function"):
        return None
    return _LABELS.get(model.loss_type)


def _num_labels(model: PreTrainedModel) -> int:
    is_by_class = model.loss_type == "ForTokenClassification"
    return model.config.num_labels or 2 if is_by_class else int(model.config.get_text_config().vocab_size)


def _errors(x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The largest error of each token, in units of the largest number; of a loss a single one."""
    x, y = (part.float()[tokens] if part.ndim else part.float() for part in (x, y))
    errors = (x - y).abs() / y.abs().max()
    return errors.flatten(1).amax(1) if errors.ndim else errors


def _is_close(errors: torch.Tensor, model: nn.Module) -> bool:
    """Within the rounding of the weights' type. In half types a rounding may send a token to another expert."""
    dtypes = [x.dtype for x in model.parameters() if x.is_floating_point()]
    dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    is_exact = dtype in (torch.float64, torch.float32)
    worst = errors.max() if is_exact else errors.quantile(0.75)
    return bool(worst <= _TOLERANCES.get(dtype, 0.1))  # false for NaN


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or not, for a while."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
