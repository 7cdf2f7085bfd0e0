"""Models of Hugging Face transformers on ranks, as they are: sequences are split, attention goes round the ring.

    handle = parallelize(model)
    loss = model(**handle.shard(batch)).loss      # training: the loss of one process, on every rank
    loss.backward()
    handle.reduce_gradients()                     # the gradients of one process, on every rank
    tokens = model.generate(**prompt)             # inference: the whole prompt on every rank
    handle.restore()

Nothing of the model is replaced: it looks attention up by a name that is registered for it (`wiring.py`), and two hooks
take this rank's part before a forward and see to the outputs afterwards (`adapter.py`). What cannot be computed exactly
is refused by `parallelize` (`examine.py`, `reference.py`), or where an argument asks for it (`arguments.py`, for
generate() `generating.py`), before a message is sent.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ringspan.adapters.transformers.adapter import Adapter, LastTurn, encoder_adapter
from ringspan.adapters.transformers.arguments import check_random
from ringspan.adapters.transformers.examine import check_config, examine
from ringspan.adapters.transformers.generating import CheckedGenerate
from ringspan.adapters.transformers.gradients import digest_weights, reduce_gradients
from ringspan.adapters.transformers.layers import Layer
from ringspan.adapters.transformers.reference import compare, find_loss, find_random, make_reference
from ringspan.adapters.transformers.shards import Options, check_options
from ringspan.adapters.transformers.sizes import check_sizes
from ringspan.adapters.transformers.wiring import Wiring, tell_positions
from ringspan.errors import UnsupportedError
from ringspan.runtime.contract import Signature

__all__ = ["Handle", "parallelize"]


class Handle:
    """A parallelized model. As a context manager it restores the model at the end."""

    def __init__(self, adapter: Adapter, attention: "list[tuple[PreTrainedModel, str]]") -> None:
        self._adapter = adapter
        self._attention = attention
        self._hooks: list[RemovableHandle | CheckedGenerate] = [
            *_hooks(adapter),
            *tell_positions(adapter.wiring, adapter.found.counters),
        ]
        if adapter.found.has_encoder:
            self._hooks += _hooks(encoder_adapter(adapter), is_part=True)
        if adapter.model.can_generate():
            self._hooks.append(CheckedGenerate(adapter.model, adapter.options))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What the attention layers were found to ask for."""
        return tuple(self._adapter.found.layers.values())

    @property
    def last_turn(self) -> LastTurn | None:
        """The algorithm of the last forward over a cache, and why it was chosen; None before the first."""
        return self._adapter.last_turn

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch that every rank holds, for `model(**handle.shard(batch))`.

        Args:
            batch: `input_ids` or `inputs_embeds`, (batch, seq, …), and if need be `attention_mask` (2-D, padding before
                or behind a row's tokens), `position_ids`, `token_type_ids`, `labels` as transformers takes them, each
                beside its own token, and `num_items_in_batch`. Positions that begin anew without an attention_mask are
                packed documents, which do not see each other, as in transformers without a cache. A model with an
                encoder takes these for it, and `decoder_input_ids`, `decoder_attention_mask` and `labels`, or labels
                alone, for the decoder.

        Returns:
            Arguments for the model. Its outputs are then those of this rank's tokens, except the loss, which is that
            of the whole batch, on every rank. Sum the gradients over the ranks with `reduce_gradients`, or as with
            `rs.cross_rank_mean_loss`. Labels are shifted already: each stands at the position that predicts it.
        """
        if not self._hooks:
            name = type(self._adapter.model).__name__
            raise UnsupportedError(
                f"shard() of a closed handle: {name} was restored, and would see a part of the batch only; give it "
                "the whole batch, or parallelize it anew"
            )
        return self._adapter.shard(batch)

    def reduce_gradients(self) -> None:
        """Sum the parameters' gradients over the ranks: then each rank has the gradients of one process.

        Call it on every rank after the last `backward()` of a step, before gradients are clipped and the optimizer
        steps. Leave it out if DDP or FSDP reduces gradients.
        """
        reduce_gradients(self._adapter.model, self._adapter.options)

    def restore(self) -> None:
        """The model as it was before; a second call does nothing."""
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
    """Around the forwards of a model; a part of one has some that belong to the whole."""
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
    """Let a model run on the ranks of a group; every rank must call this with the same model.

    Args:
        model: A decoder, an encoder or both of transformers, with its weights, before DDP, FSDP or compilation.
        group: As in `rs.attention`.
        layout: How `handle.shard` splits sequences: "zigzag", "contiguous" or "striped".
        algorithm: As in `rs.attention`. Over a cache "pass_kv" and "pass_q" count, and all else is "auto".
        kernel: As in `rs.attention`.
        verify: Run the model on a few tokens, alone and on two ranks in threads, and refuse it if the numbers differ.

    Raises:
        UnsupportedError: The model cannot run on ranks exactly; the message says which layers, and why.
        TransportError: The ranks do not have the same model, or the same weights.
    """
    options = Options(group, layout, algorithm, kernel)
    session = options.session
    with session.call():
        check_options(layout, algorithm)
        check_config(model)
        with torch.autocast(model.device.type, enabled=False):  # the threads of `verify` would not inherit it
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


def _parallelize(model: PreTrainedModel, options: Options, verify: bool) -> Handle:
    attention = [
        (module, module.config._attn_implementation)
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    ]
    wiring = Wiring()
    try:
        model.set_attn_implementation(wiring.name)
        found = examine(model, wiring)
        _set_attention(attention)
        reference = make_reference(model)
        found = found._replace(
            is_random=find_random(model, reference),
            pads_alike=_pads_alike(attention, found.layers.values()),
            **find_loss(model, reference)._asdict(),
        )
        if model.training:
            check_random(model, found.is_random)
        model.set_attn_implementation(wiring.name)
        if verify:
            compare(model, wiring, options, found, reference)
            _set_attention(attention)
            check_sizes(model, options)
            model.set_attn_implementation(wiring.name)
    except BaseException:
        _set_attention(attention)
        raise
    return Handle(Adapter(model, wiring, options, found), attention)


def _pads_alike(attention: "list[tuple[PreTrainedModel, str]]", layers: Iterable[Layer]) -> bool:
    """Does the model's own attention make of padding what we do?

    A query that sees no token gets 0 here, from sdpa, and wherever there are sinks; from eager attention it gets the
    mean of all values. Flash attention gives 0 to all padding.
    """
    has_sinks = all(layer.has_sinks for layer in layers)
    return all(name == "sdpa" or (name == "eager" and has_sinks) for _, name in attention)


def _set_attention(attention: "list[tuple[PreTrainedModel, str]]") -> None:
    """From the outermost model to the innermost: each sets those within it."""
    for module, name in attention:
        module.set_attn_implementation(name)


def _short(value: object) -> str:
    return hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()
