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
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from ringspan.adapters.transformers.adapter import Adapter, Found, encoder_adapter
from ringspan.adapters.transformers.cache import Conversation, ShardedLayer
from ringspan.adapters.transformers.layers import Layer, Recorder, Side, describe_layers
from ringspan.adapters.transformers.shards import Options
from ringspan.adapters.transformers.turns import cached_layers
from ringspan.adapters.transformers.wiring import RUN, Wiring, is_wired, tell_positions
from ringspan.errors import UnsupportedError
from ringspan.training import IGNORE_INDEX
from ringspan.transports.in_process import run_in_process

_COLUMNS = 12
_PADDING = 2  # columns of the second row
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_DEPENDS_ON_LENGTH = ("dynamic", "longrope")
_LABELS = {None: True, "ForCausalLM": True, "ForMaskedLM": False, "ForTokenClassification": False}  # are they shifted?
_DECODED = 9  # columns of a decoder that has an encoder
_BY_TOKEN = ("logits", "last_hidden_state")  # of the sequence that has outputs


class Reference(NamedTuple):
    """What the model itself makes of a small batch."""

    batch: dict[str, torch.Tensor]
    unlabelled: dict[str, torch.Tensor]  # the same without labels
    outputs: dict[str, torch.Tensor]

    def tokens(self, output: str) -> torch.Tensor:
        """Which rows of an output count: (batch, seq)."""
        if "decoder_input_ids" in self.unlabelled and not output.startswith("encoder_"):
            return torch.ones_like(self.unlabelled["decoder_input_ids"]).bool()
        return self.unlabelled["attention_mask"].bool()


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
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        raise UnsupportedError(f"{name}.forward takes no input_ids: what else it takes is not known by token")
    if config.is_encoder_decoder and "decoder_input_ids" not in takes:
        raise UnsupportedError(f"{name} has an encoder, and its forward takes no decoder_input_ids")
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
    batch = unlabelled = {"input_ids": ids, "attention_mask": attention_mask}
    own = ids
    if model.config.is_encoder_decoder:
        own = torch.randint(vocabulary, (2, _DECODED), generator=generator)
        batch = unlabelled = batch | {"decoder_input_ids": own}
    if _shifts_labels(model) is not None:
        labels = torch.randint(_num_labels(model), own.shape, generator=generator)
        labels[1, : _PADDING + 1] = labels[0, 3] = -100
        batch = batch | {"labels": labels}
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None and model.config.decoder_start_token_id is not None:
            del batch["decoder_input_ids"]  # so that the model makes them itself
            unlabelled = unlabelled | {"decoder_input_ids": shift(labels)}
    batch, unlabelled = ({name: x.to(model.device) for name, x in given.items()} for given in (batch, unlabelled))
    with _mode(model, training=False), torch.no_grad():
        output = model(**batch, **_without_cache(model))
    outputs = _rows(output)
    rows = [x for name, x in outputs.items() if name in _BY_TOKEN]
    if not rows or any(x.shape[:2] != own.shape for x in rows):
        raise UnsupportedError(
            f"{type(model).__name__} returns nothing that has a row for each token; use its base model"
        )
    return Reference(batch, unlabelled, outputs)


def find_random(model: PreTrainedModel, reference: Reference) -> str | None:
    """What makes the model random in training, if anything does: ranks would draw other numbers than one process."""
    runs = []
    with _mode(model, training=True), _alone(model):
        for seed in (0, 1):
            torch.manual_seed(seed)
            runs.append(model(**reference.unlabelled, **_without_cache(model))[0])
    first, second = runs
    if _is_close(_errors(first, second, reference.tokens("")), model):
        return None
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    where = f"{modules[0]} and {len(modules) - 1} more modules" if modules else "its forward"
    return (
        f"{type(model).__name__} is random in training ({where}): ranks would drop other things than one process; set "
        "all dropout of the config to 0, or call model.eval()"
    )


def takes_num_items(model: PreTrainedModel, reference: Reference) -> bool:
    """Is the loss divided by num_items_in_batch? Some models take it and go on with the mean."""
    if "loss" not in reference.outputs:
        return False
    labels = reference.batch["labels"]
    count = int(((labels[:, 1:] if _shifts_labels(model) else labels) != IGNORE_INDEX).sum())
    try:
        with _mode(model, training=False), torch.no_grad():
            loss = model(**reference.batch, **_without_cache(model), num_items_in_batch=2 * count).loss
    except TypeError:
        return False
    return _is_close(_errors(2 * loss, reference.outputs["loss"], reference.tokens("")), model)


def examine(model: PreTrainedModel, wiring: Wiring) -> Found:
    """The layers of a model whose attention is wired already."""
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
            f"{type(model).__name__}.forward takes no position_ids, nor does a module that counts positions for it: of "
            "a part of a sequence it would count those of the part"
        )
    cached, no_cache = _find_cached(model, layers, record)
    return Found(layers, cached, no_cache, passes_run, _shifts_labels(model), counters, has_encoder)


class Counted(NamedTuple):
    """A call of a module that takes position_ids."""

    module: nn.Module
    given: dict[str, Any]
    output: Any


@contextmanager
def _watch(model: nn.Module) -> Iterator[list[Counted]]:
    """See the modules of a model that take position_ids being called."""
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
    """The modules that count positions from 0, unless they are given: then they take those."""
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


def compare(model: PreTrainedModel, wiring: Wiring, options: Options, found: Found, reference: Reference) -> None:
    """Refuse the model if two ranks do not get the numbers it gets alone."""
    options = options._replace(algorithm="pass_kv")  # neither measured nor dependent on a mesh

    def run(group: Any) -> dict[str, torch.Tensor]:
        mine = options._replace(group=group)
        adapter = Adapter(model, wiring, mine, found)
        shards = adapter.call(**reference.batch, use_cache=False)
        outputs = {f"{name} on shards": x for name, x in _rows(shards).items()}
        if found.has_encoder:
            encoder = encoder_adapter(adapter)
            outputs["encoder_last_hidden_state alone"] = encoder.call(
                **{name: x for name, x in reference.unlabelled.items() if not name.startswith("decoder_")}
            )[0]
        if not found.cached:
            return outputs
        parts = [_rows(adapter.call(**inputs)) for inputs in _turns(reference, outputs)]
        joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0] if name in _BY_TOKEN}
        return outputs | {f"{name} over a cache": x for name, x in joined.items()}

    hooks = tell_positions(wiring, found.counters)
    try:
        with _mode(model, training=False), torch.no_grad():
            results = run_in_process(run, 2)
    except Exception as error:
        name = type(model).__name__
        raise UnsupportedError(f"{name} fails on two ranks: {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    for rank, found_outputs in enumerate(results):
        for name, x in found_outputs.items():
            output = name.split()[0]
            errors = _errors(x, reference.outputs[output], reference.tokens(output))
            if not _is_close(errors, model):
                raise UnsupportedError(
                    f"{type(model).__name__}: {name} of a small batch differ by {errors.max():.1e} on "
                    f"rank {rank} of two from one process: something besides attention joins tokens, such as a "
                    "convolution, a recurrence or positions it counts itself; verify=False leaves out this check"
                )


def _turns(reference: Reference, outputs: Mapping[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """The small batch in three turns of a cache, of many tokens, of two, and of one."""
    batch = reference.unlabelled
    if "decoder_input_ids" in batch:
        whole, name = batch["decoder_input_ids"], "decoder_input_ids"
        given = {
            "past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache()),
            "encoder_outputs": (outputs["encoder_last_hidden_state alone"],),
            "attention_mask": batch["attention_mask"],
        }
    else:
        whole, name, given = batch["input_ids"], "input_ids", {"past_key_values": DynamicCache()}
    num_columns = whole.shape[1]
    for start, stop in ((0, num_columns - 3), (num_columns - 3, num_columns - 1), (num_columns - 1, num_columns)):
        seen = {} if "attention_mask" in given else {"attention_mask": batch["attention_mask"][:, :stop]}
        yield given | seen | {name: whole[:, start:stop]}


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
    both = EncoderDecoderCache(cache, DynamicCache()) if model.config.is_encoder_decoder else cache
    try:
        recorder = record(past_key_values=both, use_cache=True, conversation=conversation)
        return cached_layers(layers, recorder.cache_indices), ""
    except UnsupportedError as error:
        return (), str(error)


def _rows(output: Any) -> dict[str, torch.Tensor]:
    return {name: output[name] for name in (*_BY_TOKEN, "encoder_last_hidden_state", "loss") if name in output}


def _without_cache(model: PreTrainedModel) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _shifts_labels(model: PreTrainedModel) -> bool | None:
    """Are labels those of the next token? None if they are no labels of tokens at all."""
    if "labels" not in inspect.signature(model.forward).parameters or hasattr(model, "_loss_function"):
        return None
    if model.config.is_encoder_decoder:  # whose decoder is given the tokens before
        return False if model.loss_type in (None, "ForConditionalGeneration") else None
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
