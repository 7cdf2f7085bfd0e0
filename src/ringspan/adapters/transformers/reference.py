"""Do ranks compute what the model computes by itself, on a small batch and beyond every size that its config names?

The model runs unchanged, and again on two ranks in threads of this process, on shards and over a cache. If the numbers
differ, an unknown part of the model mixes tokens, and the model is refused.

A window, a compression rate or a temperature floor of 8192 tokens has no effect on twelve tokens. So the model is built
again from a config in which these numbers are 8, with the same weights, and compared on tokens that cross them several
times. A model that does not run with small numbers is compared at its real sizes up to a limit, and refused beyond it.
"""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from ringspan.adapters.modes import in_mode
from ringspan.adapters.transformers.adapter import Adapter, encoder_adapter
from ringspan.adapters.transformers.arguments import Findings
from ringspan.adapters.transformers.examine import examine, left_alone, without_cache
from ringspan.adapters.transformers.layers import switch_off
from ringspan.adapters.transformers.shards import ShardOptions
from ringspan.adapters.transformers.wiring import Wiring, tell_positions
from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.errors import UnsupportedError
from ringspan.training import IGNORE_INDEX, next_token_labels
from ringspan.transports.in_process import run_in_process

_COLUMNS = 12
_FEWER_DECODED = 3  # the decoder has this many columns fewer than the encoder
_PADDING = 2  # padding columns of the second row
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_BY_TOKEN = ("logits", "last_hidden_state")  # outputs with a row per token
_LABELLED = (None, "ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")


class ModelReference(NamedTuple):
    """The results of the unchanged model on a small batch."""

    batch: dict[str, torch.Tensor]
    unlabelled: dict[str, torch.Tensor]  # the batch without labels
    outputs: dict[str, torch.Tensor]
    packed: dict[str, torch.Tensor]  # a batch of packed documents, if the model takes positions

    def tokens(self, output: str) -> torch.Tensor:
        """Return which rows of an output are tokens, (batch, seq)."""
        if output == "packed":
            return torch.ones_like(self.packed["input_ids"]).bool()
        if "decoder_input_ids" in self.unlabelled and not output.startswith("encoder_"):
            return torch.ones_like(self.unlabelled["decoder_input_ids"]).bool()
        return self.unlabelled["attention_mask"].bool()


def make_reference(model: PreTrainedModel, num_columns: int = _COLUMNS) -> ModelReference:
    """Run the unchanged model on two rows, one with padding."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (2, num_columns), generator=generator)
    attention_mask = torch.ones_like(ids)
    attention_mask[1, :_PADDING] = 0
    batch = unlabelled = {"input_ids": ids, "attention_mask": attention_mask}
    own = ids
    if model.config.is_encoder_decoder:
        own = torch.randint(vocabulary, (2, num_columns - _FEWER_DECODED), generator=generator)
        batch = unlabelled = batch | {"decoder_input_ids": own}
    if _takes_labels(model):
        labels = torch.randint(_num_labels(model), own.shape, generator=generator)
        labels[1, : _PADDING + 1] = labels[0, 3] = -100
        batch = batch | {"labels": labels}
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if model.config.is_encoder_decoder and shift is not None and model.config.decoder_start_token_id is not None:
            del batch["decoder_input_ids"]  # so that the model makes them itself
            unlabelled = unlabelled | {"decoder_input_ids": shift(labels)}
    batch, unlabelled = ({name: x.to(model.device) for name, x in given.items()} for given in (batch, unlabelled))
    with in_mode(model, training=False), torch.no_grad():
        output = model(**batch, **without_cache(model))
    outputs = _rows(output)
    rows = [x for name, x in outputs.items() if name in _BY_TOKEN]
    if not rows or any(x.shape[:2] != own.shape for x in rows):
        raise UnsupportedError(
            f"{type(model).__name__} has no output with a row for each token", remedy="use its base model"
        )
    packed: dict[str, torch.Tensor] = {}
    if "position_ids" in inspect.signature(model.forward).parameters and not model.config.is_encoder_decoder:
        positions = torch.arange(num_columns, device=model.device) % (num_columns // 2 - 1)
        packed = {"input_ids": batch["input_ids"], "position_ids": positions[None]}
        outputs |= {"packed": _packed_rows(model, packed)}
    return ModelReference(batch, unlabelled, outputs, packed)


def _packed_rows(model: PreTrainedModel, packed: dict[str, torch.Tensor]) -> torch.Tensor:
    with in_mode(model, training=False), torch.no_grad():
        return next(iter(_rows(model(**packed, **without_cache(model))).values()))


def find_random(model: PreTrainedModel, reference: ModelReference) -> bool:
    """Whether two training forwards of the model differ."""
    runs = []
    with in_mode(model, training=True), left_alone(model):
        for seed in (0, 1):
            torch.manual_seed(seed)
            runs.append(model(**reference.unlabelled, **without_cache(model))[0])
    first, second = runs
    drops_layers = any(
        getattr(module, "layerdrop", 0) for module in model.modules()
    )  # layers are dropped rarely, so two forwards may agree
    return drops_layers or not _is_close(_errors(first, second, reference.tokens("")), model)


class Loss(NamedTuple):
    """How a model computes its loss from labels."""

    shifts_labels: bool | None  # None: labels do not belong to tokens
    takes_num_items: bool  # whether it divides by num_items_in_batch; some models accept it and use the mean


def find_loss(model: PreTrainedModel, reference: ModelReference) -> Loss:
    """Find out how the model uses the labels of a small batch."""
    if "loss" not in reference.outputs:
        return Loss(None, False)
    labels = reference.batch["labels"]
    batch = reference.unlabelled | {"labels": labels}

    def loss_of(**options: Any) -> torch.Tensor:
        with in_mode(model, training=False), torch.no_grad():
            loss: torch.Tensor = model(**batch | options, **without_cache(model)).loss
        return loss

    first_only = torch.full_like(labels, IGNORE_INDEX)
    first_only[:, 0] = labels[:, 0]
    alone = loss_of(labels=first_only)
    shifts_labels = not (bool(alone.isfinite()) and bool(alone))  # the first token is never a next token
    own = next_token_labels(labels) if shifts_labels else labels
    loss = cross_entropy(reference.outputs["logits"].float().flatten(0, 1), own.flatten(), ignore_index=IGNORE_INDEX)
    if not _is_close(_errors(loss, reference.outputs["loss"]), model):
        return Loss(None, False)
    try:
        halved = loss_of(num_items_in_batch=2 * int((own != IGNORE_INDEX).sum()))
    except TypeError:
        return Loss(shifts_labels, False)
    return Loss(shifts_labels, _is_close(_errors(2 * halved, loss), model))


def compare(
    model: PreTrainedModel,
    wiring: Wiring,
    options: ShardOptions,
    found: Findings,
    reference: ModelReference,
    world_size: int = 2,
) -> None:
    """Refuse the model if ranks do not compute the numbers of one process."""
    options = options._replace(algorithm=DEFAULT_ALGORITHM)  # needs no measurement and no mesh
    batch = reference.unlabelled if found.shifts_labels is None else reference.batch

    def run(group: Any) -> dict[str, torch.Tensor]:
        mine = options._replace(group=group)
        adapter = Adapter(model, wiring, mine, found)
        shards = adapter.call(**batch, use_cache=False)
        outputs = {f"{name} on shards": x for name, x in _rows(shards).items()}
        if found.has_encoder:
            encoder = encoder_adapter(adapter)
            outputs["encoder_last_hidden_state alone"] = encoder.call(
                **{name: x for name, x in reference.unlabelled.items() if not name.startswith("decoder_")}
            )[0]
        if reference.packed:
            packed = adapter.call(**reference.packed, use_cache=False)
            outputs["packed documents on shards"] = next(iter(_rows(packed).values()))
        if not found.cached:
            return outputs
        parts = [_rows(adapter.call(**inputs)) for inputs in _turns(reference, outputs)]
        joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0] if name in _BY_TOKEN}
        return outputs | {f"{name} over a cache": x for name, x in joined.items()}

    hooks: list[Any] = [*tell_positions(wiring, found.counters), *switch_off(found.layers)]
    try:
        with in_mode(model, training=False), torch.no_grad():
            results = run_in_process(run, world_size)
    except Exception as error:
        name = type(model).__name__
        raise UnsupportedError(f"{name} fails on {_ranks(world_size)}: {type(error).__name__}: {error}") from error
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
                    f"rank {rank} of {world_size} from one process: something besides attention mixes tokens, such as "
                    "a convolution, a recurrence, a quantisation scale or positions that it counts itself; "
                    "verify=False skips this check"
                )


def _ranks(world_size: int) -> str:
    return "two ranks" if world_size == 2 else f"{world_size} ranks"


def _turns(reference: ModelReference, outputs: Mapping[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Yield the small batch as three turns over a cache: many tokens, two, and one."""
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


def _rows(output: Any) -> dict[str, torch.Tensor]:
    return {name: output[name] for name in (*_BY_TOKEN, "encoder_last_hidden_state", "loss") if name in output}


def _takes_labels(model: PreTrainedModel) -> bool:
    takes = "labels" in inspect.signature(model.forward).parameters and not hasattr(model, "_loss_function")
    return takes and model.loss_type in _LABELLED


def _num_labels(model: PreTrainedModel) -> int:
    is_by_class = model.loss_type == "ForTokenClassification"
    return model.config.num_labels or 2 if is_by_class else int(model.config.get_text_config().vocab_size)


def _errors(x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Return the largest error of each token relative to the largest number; a loss has a single error."""
    x, y = (part.float()[tokens] if part.ndim else part.float() for part in (x, y))
    errors = (x - y).abs() / y.abs().max()
    return errors.flatten(1).amax(1) if errors.ndim else errors


def _is_close(errors: torch.Tensor, model: nn.Module) -> bool:
    """Whether errors are within the rounding of the dtype. In half dtypes, rounding can change a token's expert."""
    dtypes = [x.dtype for x in model.parameters() if x.is_floating_point()]
    dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    is_exact = dtype in (torch.float64, torch.float32)
    worst = errors.max() if is_exact else errors.quantile(0.75)
    return bool(worst <= _TOLERANCES.get(dtype, 0.1))  # false for NaN


_SHRUNK = 8
_CROSSING_COLUMNS = 41  # crosses a shrunk size five times; no rank's part is a multiple of the size
_MOST_COLUMNS = 1024  # limit of a comparison at real sizes
_WORLD_SIZE = 3  # two boundaries between ranks, in a contiguous layout too
# Names of integers that count tokens or positions. The longest sequence (max_position_embeddings, n_positions) is not
# among them: RoPE that depends on it is refused, and a learned table ends there.
_SIZE = re.compile(
    "window|chunk|compress|block_size|floor|stride|context|local_attention|radius|topk_blocks|index_topk|distance"
    "|original_max_position|_span|_len$|_length$|_tokens$"
)
_NO_SIZE = re.compile("layers|pattern|theta|_id$|_ids$|feed_forward|dropout|^(max|min)_length$|max_seq_len|experts")


class Size(NamedTuple):
    """An integer of a config that counts tokens."""

    owner: Any  # the config, dict or list that contains it
    key: Any
    name: str
    value: int

    def shrink(self) -> None:
        """Set the size to a number that a small batch crosses."""
        if isinstance(self.owner, PreTrainedConfig):
            setattr(self.owner, self.key, _SHRUNK)
        else:
            self.owner[self.key] = _SHRUNK


def find_sizes(config: PreTrainedConfig) -> list[Size]:
    """Return the sizes of a config and of nested configs that a small batch does not cross."""
    return [size for size in _integers(config, "") if size.value > _SHRUNK and _is_size(size.name)]


def _is_size(name: str) -> bool:
    parts = name.split(".")
    return any(_SIZE.search(part) for part in parts) and not any(_NO_SIZE.search(part) for part in parts)


def _integers(owner: Any, prefix: str) -> Iterator[Size]:
    items = vars(owner) if isinstance(owner, PreTrainedConfig) else owner
    for key, value in [*(items.items() if isinstance(items, dict) else enumerate(items))]:
        name = f"{prefix}{key}"
        if isinstance(value, int) and not isinstance(value, bool):
            yield Size(owner, key, name, value)
        elif isinstance(value, PreTrainedConfig | dict | list) and not str(key).startswith("_"):
            yield from _integers(value, f"{name}.")


def check_sizes(model: PreTrainedModel, options: ShardOptions) -> None:
    """Refuse a model that differs on ranks beyond one of its sizes, or cannot be run beyond them.

    The model must use its own attention implementation; this function may change it.
    """
    sizes = find_sizes(model.config)
    if not sizes:
        return
    name = type(model).__name__
    told = ", ".join(f"{size.name}={size.value}" for size in sizes)
    try:
        subject = _shrunk_copy(model)
        reference = make_reference(subject, _CROSSING_COLUMNS)
    except Exception as error:
        columns = 2 * max(size.value for size in sizes) + _CROSSING_COLUMNS
        if columns > _MOST_COLUMNS:
            raise UnsupportedError(
                f"config has {told}, and a copy with {_SHRUNK} in their place, which a few tokens would "
                f"cross, fails: {type(error).__name__}: {error}; verify=False skips this check",
                argument=name,
            ) from error
        subject, reference = model, make_reference(model, columns)
    try:
        _compare(subject, options, reference)
    except UnsupportedError as error:
        how = "" if subject is model else f", here made {_SHRUNK},"
        raise UnsupportedError(f"{name} beyond {told}{how} of its config: {error}") from error


def _compare(model: PreTrainedModel, options: ShardOptions, reference: ModelReference) -> None:
    wiring = Wiring()
    model.set_attn_implementation(wiring.name)
    compare(model, wiring, options, examine(model, wiring), reference, _WORLD_SIZE)


def _shrunk_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Build the model from a config with small sizes. It shares the weights; weights with another shape are random."""
    config = copy.deepcopy(model.config)
    for size in find_sizes(config):
        size.shrink()
    with torch.device("meta"):
        shrunk = type(model)(config)
    generator = torch.Generator().manual_seed(0)
    weights = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for path, module in shrunk.named_modules():
        prefix = f"{path}." if path else ""
        for name, x in module._parameters.items():
            if x is not None:
                module._parameters[name] = _like(x, weights.get(prefix + name), model, generator)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffers[prefix + name]
    shrunk.train(False)
    return shrunk


def _like(
    x: nn.Parameter, own: nn.Parameter | None, model: PreTrainedModel, generator: torch.Generator
) -> nn.Parameter:
    if own is not None and own.shape == x.shape:
        return own
    drawn = torch.randn(x.shape, generator=generator) / max(1, x.shape[-1] if x.ndim else 1) ** 0.5
    return nn.Parameter(drawn.to(model.device, model.dtype), requires_grad=False)
