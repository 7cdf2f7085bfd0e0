"""How does an unmodified model of Hugging Face transformers run on ranks?

    handle = parallelize(model)
    loss = model(**handle.shard(batch)).loss      # training: the loss of one process, on every rank
    loss.backward()
    handle.reduce_gradients()                     # the gradients of one process, on every rank
    tokens = model.generate(**prompt)             # inference: the whole prompt on every rank
    handle.restore()

The model's modules are not replaced. The model looks attention up under a name that is registered for it (`wiring.py`).
A hook takes this rank's part before a forward, and another handles the outputs afterwards (`adapter.py`). Everything
that cannot be exact is refused before a message is sent: models by `parallelize` (`examine.py`, `reference.py`),
arguments at the call (`arguments.py`).
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ringspan.adapters.gradients import digest_weights, reduce_gradients
from ringspan.adapters.transformers.adapter import Adapter, LastTurn, encoder_adapter
from ringspan.adapters.transformers.arguments import CheckedGenerate, check_random
from ringspan.adapters.transformers.cache import ShardedCache
from ringspan.adapters.transformers.examine import check_config, examine
from ringspan.adapters.transformers.layers import AttentionLayer, switch_off
from ringspan.adapters.transformers.reference import check_sizes, compare, find_loss, find_random, make_reference
from ringspan.adapters.transformers.shards import ShardOptions, check_options
from ringspan.adapters.transformers.wiring import NAME, Wiring, tell_positions
from ringspan.arguments import FLAG, TEXT, Kind, check_arguments
from ringspan.errors import UnsupportedError
from ringspan.runtime.contract import Signature

__all__ = ["Handle", "parallelize"]


class Removable(Protocol):
    def remove(self) -> None:
        """Undo what was done."""


_REMOVABLE = Kind(
    "something to remove", "give an object with remove()", lambda value: callable(getattr(value, "remove", None))
)


class Handle:
    """A parallelized model. As a context manager it restores the model on exit."""

    def __init__(self, adapter: Adapter, attention: "list[tuple[PreTrainedModel, str]]") -> None:
        self._adapter = adapter
        self._attention = attention
        self._hooks: list[Removable] = [
            *_hooks(adapter),
            *tell_positions(adapter.wiring, adapter.found.counters),
            *switch_off(adapter.found.layers),
        ]
        if adapter.found.has_encoder:
            self._hooks += _hooks(encoder_adapter(adapter), is_part=True)
        if adapter.model.can_generate():
            self._hooks.append(CheckedGenerate(adapter.model, adapter.options))

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The attention layers and the options that they were found to use."""
        return tuple(self._adapter.found.layers.values())

    @property
    def last_turn(self) -> LastTurn | None:
        """The algorithm of the last forward over a cache, and why it was chosen; None before the first."""
        return self._adapter.last_turn

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Cut this rank's part out of a batch that every rank holds, for `model(**handle.shard(batch))`.

        Args:
            batch: `input_ids` or `inputs_embeds`, (batch, seq, …). Optional: `attention_mask` (2-D, padding before or
                after a row's tokens), `position_ids`, `token_type_ids`, unshifted `labels` as transformers takes them,
                and `num_items_in_batch`. Positions that restart without an attention_mask are packed documents, which
                do not see each other, as in transformers without a cache. For a model with an encoder these belong to
                the encoder; the decoder takes `decoder_input_ids`, `decoder_attention_mask` and `labels`, or labels
                alone.

        Returns:
            Arguments for the model. Its outputs then cover this rank's tokens, except the loss, which is the loss of
            the whole batch on every rank. Sum the gradients over the ranks with `reduce_gradients`, or let DDP or FSDP
            do it as for `rs.cross_rank_mean_loss`. Labels are shifted already, to the position that predicts them.
        """
        if not self._hooks:
            name = type(self._adapter.model).__name__
            raise UnsupportedError(
                f"shard() of a closed handle: {name} was restored, and would see only a part of the batch",
                remedy="give it the whole batch, or parallelize it again",
            )
        return self._adapter.shard(batch)

    def cache(self, *, storage: str | None = None, max_tokens: int | None = None) -> ShardedCache:
        """Make an empty cache for `step`, or for `past_key_values` of the model's forward and generate().

        Args:
            storage: How keys and values are stored, as in `rs.KVCache`: None for the model's dtype, a dtype's name, or
                "int8" and "float8_e4m3", which are quantised with a bounded error.
            max_tokens: Upper bound of the tokens on a rank; None is unbounded.
        """
        return self._adapter.new_cache(storage, max_tokens)

    def step(self, cache: ShardedCache, new: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run the model on new tokens of some sequences of a cache, each behind its own earlier tokens.

        One token for each sequence is a decode step, computed by all ranks over the keys that each of them stores.
        Otherwise the new tokens are shared out among the ranks. Sequences may join and leave between any two steps.

        Args:
            cache: From `cache`.
            new: One or more tokens by sequence number; an unknown number begins a new sequence. Equal on all ranks.

        Returns:
            By sequence: the logits of its last token, (vocabulary,), on every rank.
        """
        if not self._hooks:
            raise UnsupportedError("step() of a closed handle: the model was restored; parallelize it again")
        with torch.no_grad():
            return self._adapter.step(cache, new)

    def reduce_gradients(self) -> None:
        """Sum the parameters' gradients over the ranks, so that each rank has the gradients of one process.

        Call it on every rank after the last `backward()` of a step and before clipping and the optimizer's step. Do not
        call it if DDP or FSDP reduces gradients.
        """
        reduce_gradients(self._adapter.model, self._adapter.options.group)

    def take_whole_batches(self) -> None:
        """Let training forwards take whole batches, `model(**batch)`, as inference does.

        Such a forward returns the loss of the whole batch if it is given labels, and no logits. Without labels it
        returns whole logits: compute the loss from them on every rank, the same on each. Sum the gradients with
        `reduce_gradients`; DDP and FSDP would average them.
        """
        self._adapter.arguments.trains_whole = True

    def on_restore(self, hook: Removable) -> None:
        """Let `restore` remove this first."""
        check_arguments(hook=(_REMOVABLE, hook))
        self._hooks.insert(0, hook)

    def restore(self) -> None:
        """Make the model what it was before `parallelize`; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        _set_attention(self._attention)
        self._hooks, self._attention = [], []

    def __repr__(self) -> str:
        options = self._adapter.options
        closed = "" if self._hooks else ", restored"
        return (
            f"Handle({type(self._adapter.model).__name__}, rank {options.rank} of {options.world_size}, "
            f"algorithm={options.algorithm!r}, {len(self.layers)} attention layers{closed})"
        )

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def _hooks(adapter: Adapter, *, is_part: bool = False) -> list[RemovableHandle]:
    """Add hooks around a model's forward; forwards of a part (an encoder) can belong to a forward of the whole."""
    model = adapter.model
    names = [*adapter.parameters]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if is_part and adapter.is_within(kwargs):
            return args, kwargs
        return (), adapter.before(dict(zip(names, args, strict=False)) | kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(*ended: Any) -> Any:
        return adapter.after(ended[-1])

    return [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def parallelize(
    model: PreTrainedModel,
    group: Any = None,
    *,
    layout: str = "zigzag",
    algorithm: str = "auto",
    kernel: str = "auto",
    verify: bool = True,
) -> Handle:
    """Make a model run on the ranks of a group; every rank must call this with the same model.

    Args:
        model: A decoder, an encoder or both of transformers, with its weights, before DDP, FSDP or compilation.
        group: As in `rs.attention`.
        layout: How `handle.shard` splits sequences: "zigzag", "contiguous" or "striped".
        algorithm: As in `rs.attention`. Over a cache, every choice but "pass_kv" and "pass_q" means "auto".
        kernel: As in `rs.attention`.
        verify: Run the model on a few tokens, alone and on ranks in threads, and refuse it if the numbers differ.

    Raises:
        UnsupportedError: The model cannot run on ranks exactly; the message says which layers, and why.
        TransportError: The ranks do not have the same model, or the same weights.
    """
    options = ShardOptions(group, layout, algorithm, kernel)
    session = options.session
    with session.call():
        check_arguments(kernel=(TEXT, kernel), verify=(FLAG, verify))
        check_options(layout, algorithm)
        check_config(model)
        with torch.autocast(model.device.type, enabled=False):  # the threads of `verify` do not inherit it
            handle = _parallelize(model, options, verify)
    fields = {
        "call": "parallelize",
        "model": f"{type(model).__name__} with {len(handle.layers)} attention layers #{_short(handle.layers)}",
        "options": options[1:],
        "weights": digest_weights(model),
    }
    try:
        with session.call() as call:
            call.agree(Signature.of(fields), once=True)
    except BaseException:
        handle.restore()
        raise
    return handle


def _parallelize(model: PreTrainedModel, options: ShardOptions, verify: bool) -> Handle:
    attention = [
        (module, module.config._attn_implementation)
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    ]
    # A model loaded under our name has transformers' attention until now, and gets the name back when it is restored.
    own = [(module, _default_attention(module) if name == NAME else name) for module, name in attention]
    wiring = Wiring()
    try:
        model.set_attn_implementation(wiring.name)
        found = examine(model, wiring)
        _set_attention(own)
        reference = make_reference(model)
        found = found._replace(
            is_random=find_random(model, reference),
            pads_alike=_pads_alike(own, found.layers.values()),
            **find_loss(model, reference)._asdict(),
        )
        if model.training:
            check_random(model, found.is_random)
        model.set_attn_implementation(wiring.name)
        if verify:
            compare(model, wiring, options, found, reference)
            _set_attention(own)
            check_sizes(model, options)
            model.set_attn_implementation(wiring.name)
    except BaseException:
        _set_attention(attention)
        raise
    return Handle(Adapter(model, wiring, options, found), attention)


def _default_attention(model: PreTrainedModel) -> str:
    return "sdpa" if model._supports_sdpa else "eager"


def _pads_alike(attention: "list[tuple[PreTrainedModel, str]]", layers: Iterable[AttentionLayer]) -> bool:
    """Whether the model's own attention treats padding queries as this library does.

    The output of a query that sees no token is 0 here, in sdpa, and with sinks; in eager attention it is the mean of
    all values. Flash attention returns 0 for all padding.
    """
    has_sinks = all(layer.has_sinks for layer in layers)
    return all(name == "sdpa" or (name == "eager" and has_sinks) for _, name in attention)


def _set_attention(attention: "list[tuple[PreTrainedModel, str]]") -> None:
    """Set the attention from the outermost model to the innermost, because each sets those within it."""
    for module, name in attention:
        module.set_attn_implementation(name)


def _short(value: object) -> str:
    return hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()
