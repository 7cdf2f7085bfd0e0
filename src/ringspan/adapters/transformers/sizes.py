"""Does a model stay equal beyond every number of tokens that its config names?

A window, a compression rate or a temperature floor of 8192 tokens has no effect on twelve tokens. So the model is built
again from a config in which these numbers are 8, with the same weights, and compared on tokens that cross them several
times. A model that does not run with small numbers is compared at its real sizes up to a limit, and refused beyond it.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.adapters.transformers.examine import examine
from ringspan.adapters.transformers.reference import ModelReference, compare, make_reference
from ringspan.adapters.transformers.shards import ShardOptions
from ringspan.adapters.transformers.wiring import Wiring
from ringspan.errors import UnsupportedError

_SHRUNK = 8
_COLUMNS = 41  # crosses a shrunk size five times; no rank's part is a multiple of the size
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
        reference = make_reference(subject, _COLUMNS)
    except Exception as error:
        columns = 2 * max(size.value for size in sizes) + _COLUMNS
        if columns > _MOST_COLUMNS:
            raise UnsupportedError(
                f"{name}: config has {told}, and a copy with {_SHRUNK} in their place, which a few tokens would cross, "
                f"fails: {type(error).__name__}: {error}; verify=False skips this check"
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
