"""Which attention does a model use? Its config and dry calls on a few tokens show it.

The dry calls show the options of each attention layer, the layer that each cache layer serves, and whether modules that
count positions accept them. No model is known by name. `reference.py` then compares the model's results on a small
batch.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from ringspan.adapters.modes import in_mode
from ringspan.adapters.transformers.arguments import Findings, takes_use_cache
from ringspan.adapters.transformers.cache import Conversation, ShardedLayer
from ringspan.adapters.transformers.layers import AttentionLayer, Recorder, Side, describe_layers
from ringspan.adapters.transformers.turns import cached_layers
from ringspan.adapters.transformers.wiring import RUN, Wiring, is_wired
from ringspan.errors import UnsupportedError

_DEPENDS_ON_LENGTH = ("dynamic", "longrope")


def check_config(model: PreTrainedModel) -> None:
    """Refuse a model by its class and config, without a call."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"model is a {type(model).__name__}: give the model of transformers itself, before DDP, FSDP or compile"
        )
    name, config = type(model).__name__, model.config
    if is_wired(config._attn_implementation):
        raise UnsupportedError(
            f"{name} is parallelized already, or shares its config with a model that is; restore it, or copy the config"
        )
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()) or any(
        isinstance(module, OptimizedModule) for module in model.modules()
    ):
        raise UnsupportedError(f"{name} is compiled already: parallelize it first, then compile it")
    if any(x.is_meta for x in model.parameters()):
        raise UnsupportedError(f"{name} has weights on the meta device; load them first")
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        raise UnsupportedError(f"{name}.forward takes no input_ids; only models on tokens are supported")
    if config.is_encoder_decoder and "decoder_input_ids" not in takes:
        raise UnsupportedError(f"{name} has an encoder, and its forward takes no decoder_input_ids")
    for option in ("output_attentions", "output_router_logits"):
        if getattr(config, option, False):
            raise UnsupportedError(
                "it needs all tokens on one rank", argument=f"config.{option}", value=True, remedy="set it to False"
            )
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, Mapping) else (kinds,):
            if kind in _DEPENDS_ON_LENGTH:
                raise UnsupportedError(
                    f"{path}: rope_type={kind!r} depends on the length of the sequence, and a rank sees a part of it"
                )


def examine(model: PreTrainedModel, wiring: Wiring) -> Findings:
    """Find the attention layers and other properties of a model whose attention is wired already."""
    names = {module: name for name, module in model.named_modules()}
    parameters = inspect.signature(model.forward).parameters
    passes_run = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    has_encoder = bool(model.config.is_encoder_decoder)
    positions = torch.arange(6, device=model.device)[None]
    ids = {"input_ids": torch.zeros_like(positions)}
    num_encoded = None
    if has_encoder:
        num_encoded, ids["decoder_input_ids"] = positions.shape[1], torch.zeros_like(positions[:, 1:])
    takes_positions = "position_ids" in parameters and not has_encoder

    def record(position_ids: torch.Tensor = positions, **options: Any) -> Recorder:
        inputs = ids | ({"position_ids": position_ids} if takes_positions else {})
        return _record(model, wiring, inputs, passes_run, **options)

    with _watch(model) as counted:
        plain = record()
    if not plain.asked:
        raise UnsupportedError(f"{type(model).__name__} does not attend by way of transformers' AttentionInterface")
    packed = positions % 3
    layers = describe_layers(names, plain, record(packed), packed, record(training=True), num_encoded)
    counters: dict[nn.Module, Side] = {} if takes_positions else find_counters(counted, num_encoded)
    missing = {"own", "encoder"} - {*counters.values()} if has_encoder else {"own"} - {*counters.values()}
    if missing and not takes_positions:
        raise UnsupportedError(
            f"{type(model).__name__}.forward takes no position_ids, nor does a module that counts positions for it: on "
            "a shard it would count from 0"
        )
    cached, no_cache = _find_cached(model, layers, record)
    return Findings(layers, cached, no_cache, passes_run, counters, has_encoder)


class Counted(NamedTuple):
    """A call of a module that takes position_ids."""

    module: nn.Module
    given: dict[str, Any]
    output: Any


@contextmanager
def _watch(model: nn.Module) -> Iterator[list[Counted]]:
    """Record calls of the model's modules that take position_ids."""
    counted: list[Counted] = []
    hooks = []
    for module in model.modules():
        signature = inspect.signature(module.forward)
        if module is not model and "position_ids" in signature.parameters:

            def see(
                module: nn.Module, args: Any, kwargs: Any, output: Any, signature: inspect.Signature = signature
            ) -> None:
                counted.append(Counted(module, dict(signature.bind(*args, **kwargs).arguments), output))

            hooks.append(module.register_forward_hook(see, with_kwargs=True))
    try:
        yield counted
    finally:
        for hook in hooks:
            hook.remove()


def find_counters(counted: list[Counted], num_encoded: int | None) -> dict[nn.Module, Side]:
    """Find the modules that count positions from 0, and use position_ids instead if they are given."""
    counters: dict[nn.Module, Side] = {}
    for module, given, output in counted:
        if not isinstance(output, torch.Tensor) or output.ndim < 2:
            continue
        num_tokens = output.shape[-2]
        positions = torch.arange(num_tokens, device=output.device)
        try:
            with torch.no_grad():
                told, flipped = (module(**given | {"position_ids": x}) for x in (positions, positions.flip(0)))
        except (TypeError, ValueError, RuntimeError, IndexError):
            continue  # its position_ids are something else
        if told.shape == output.shape and torch.equal(told, output) and torch.equal(flipped, output.flip(-2)):
            counters[module] = "encoder" if num_tokens == num_encoded else "own"
    return counters


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
    """Record what the attention layers ask for in a dry call."""
    recorder = Recorder(model.device)
    if conversation is not None:
        conversation.run = recorder
    if passes_run:
        options[RUN] = recorder
    wiring.run = recorder
    try:
        with in_mode(model, training=training), left_alone(model):
            model(**inputs, **(without_cache(model) | options))
    except Exception as error:
        raise UnsupportedError(
            f"a dry call of {type(model).__name__} fails: {type(error).__name__}: {error}"
        ) from error
    finally:
        wiring.run = None
    return recorder


@contextmanager
def left_alone(model: PreTrainedModel) -> Iterator[None]:
    """Preserve the state of random numbers; enable gradients in training, as checkpoints expect."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.set_grad_enabled(model.training):
        yield


def _find_cached(
    model: PreTrainedModel, layers: dict[nn.Module, AttentionLayer], record: Callable[..., Recorder]
) -> tuple[tuple[AttentionLayer, ...], str]:
    """Return the layers in the order of a cache, or none and the reason."""
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return (), "forward takes no past_key_values"
    conversation = Conversation(None, None)
    cache = DynamicCache()
    cache.layers = [ShardedLayer(conversation, index) for index in range(len(layers))]
    both = EncoderDecoderCache(cache, DynamicCache()) if model.config.is_encoder_decoder else cache
    try:
        recorder = record(past_key_values=both, use_cache=True, conversation=conversation)
        return cached_layers(layers, recorder.cache_indices), ""
    except UnsupportedError as error:
        return (), str(error)


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    """Return the arguments that tell the model to make no cache."""
    return {"use_cache": False} if takes_use_cache(model) else {}
