"""What happens before and after a forward of a parallelized model?

Before: the arguments are checked, the ranks agree on the forward, and this rank's part is taken. After: the loss is
reduced over all ranks, and the outputs of a forward on whole sequences are gathered. The model itself never receives a
label, a mask or a foreign cache.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from ringspan.adapters.gradients import digest_weights, is_digest_due
from ringspan.adapters.transformers.arguments import Arguments, Findings
from ringspan.adapters.transformers.cache import Conversation, ShardedCache, open_cache, open_encoder_decoder_cache
from ringspan.adapters.transformers.encoder_decoder import ENCODED, apart, encoded_by_caller, together
from ringspan.adapters.transformers.layers import AttentionLayer
from ringspan.adapters.transformers.shards import (
    FUSED,
    FUSED_ROWS,
    ShardOptions,
    ShardPart,
    ShardRun,
    mean_loss,
    shard_inputs,
    whole_rows,
)
from ringspan.adapters.transformers.steps import begin_step, by_sequence, check_step
from ringspan.adapters.transformers.turns import (
    Keep,
    NewTokens,
    TurnRun,
    begin_turn,
    check_new_tokens,
    layout_of_positions,
    make_kv,
)
from ringspan.adapters.transformers.wiring import RUN, Wiring
from ringspan.arguments import MAPPING, check_arguments
from ringspan.cache import KVCache
from ringspan.errors import RingspanError, UnsupportedError
from ringspan.layout import Layout
from ringspan.runtime.contract import Signature, describe
from ringspan.training import gather

_ENCODED = "encoder_last_hidden_state"
_OF_BOTH = {_ENCODED, "encoder_hidden_states", "decoder_hidden_states"}
_OUTPUTS = {"loss", "logits", "last_hidden_state", "past_key_values", "hidden_states", *_OF_BOTH}
_WEIGHTS = "weights, which differ unless every rank calls handle.reduce_gradients() (or DDP, FSDP) before its step"
_BY_ROW = ("logits", "last_hidden_state")


class LastTurn(NamedTuple):
    """The algorithm of a forward over a cache, and why it was chosen."""

    algorithm: str
    reason: str


class _Forward(NamedTuple):
    run: ShardRun | TurnRun
    is_whole: bool
    labels: torch.Tensor | None
    num_items: Any
    keep: "Keep | Layout | None"
    encoded: torch.Tensor | None = None  # whole encoder states from the caller
    trains: bool = False  # whole sequences with gradients
    is_fused: bool = False


class Adapter:
    """A model on the ranks of one group."""

    def __init__(self, model: PreTrainedModel, wiring: Wiring, options: ShardOptions, found: Findings) -> None:
        self.model = model
        self.wiring = wiring
        self.options = options
        self.found = found
        self.parameters = inspect.signature(model.forward).parameters
        self.arguments = Arguments(model, found, wiring.name)
        self._batch = self.arguments.batch
        self._forward: _Forward | None = None  # in progress
        self.last_turn: LastTurn | None = None
        self._num_trained = 0  # number of training forwards

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a batch, with the run for its forward."""
        with self.options.session.call():
            check_arguments(batch=(MAPPING, batch))
            given = {name: value for name, value in batch.items() if value is not None}
            self.arguments.check_batch(given)
            num_items = given.pop("num_items_in_batch", None)
            inputs, run = self._split(given)
        run.said |= describe({"num_items_in_batch": num_items})
        return {**inputs, RUN: run} | ({} if num_items is None else {"num_items_in_batch": num_items})

    def before(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(arguments)
        run = given.pop(RUN, None)
        with self.options.session.call():
            given = self.arguments.drop_unused(given)
            self.arguments.check(given)
            new = None
            if run is not None:
                self.arguments.check_part(given, run, self.options.rank)
                forward = _Forward(run, False, given.pop("labels", None), given.get("num_items_in_batch"), None)
                inputs = {name: given[name] for name in self._batch if name in given}
            elif self.arguments.wants_cache(given):
                new = self._check_turn(given)
            else:
                forward, inputs = self._split_whole(given)
        if new is not None:  # a turn tells the other ranks about a refusal itself
            forward, inputs = self._begin(new, given)
        else:
            self._agree(forward.run)
        extra = {"output_hidden_states": True} if given.get("output_hidden_states") else {}
        self._forward, self.wiring.run = forward, forward.run
        inputs = {name: value for name, value in inputs.items() if name != "labels"} | extra
        if self.arguments.takes_use_cache:
            inputs["use_cache"] = isinstance(forward.run, TurnRun)
        return inputs | ({RUN: forward.run} if self.found.passes_run else {})

    def is_within(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a forward with these arguments is part of one in progress; forgets an interrupted forward."""
        is_within = RUN in arguments if self.found.passes_run else self.wiring.run is not None
        if is_within:
            self._forward = None
        return is_within

    def after(self, output: Any) -> Any:
        """Return the outputs that a caller expects; `output` is None if the forward failed."""
        forward, self._forward = self._forward, None
        if forward is None:
            return None
        self.wiring.run = None
        finished = None
        try:
            if output is None:
                self._tell_failure(forward.run)
            else:
                finished = self._finish(forward, output)
        finally:
            if isinstance(forward.run, TurnRun):
                forward.run.end(is_done=finished is not None)
                self.last_turn = LastTurn(forward.run.turn.algorithm, forward.run.turn.reason)
        return finished

    def call(self, **arguments: Any) -> Any:
        inputs = self.before(arguments)
        try:
            output = self.model.forward(**inputs)
        except Exception:
            self.after(None)
            raise
        return self.after(output)

    def new_cache(self, storage: str | None, max_tokens: int | None) -> ShardedCache:
        """An empty cache of this model."""
        with self.options.session.call():
            layers = self._cached_layers()
            kv = make_kv(
                layers,
                self.options,
                _attention_dtype(layers[0], self.model.device),
                self.model.device,
                storage=storage,
                max_tokens=max_tokens,
            )
        return ShardedCache(Conversation(kv, self), len(layers))

    def step(self, cache: object, new: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run the model on new tokens of some sequences; the logits of the last token of each."""
        with self.options.session.call():
            self.arguments.check({})
            self._cached_layers()
            asked = check_step(cache, new, self.model, self)
        keeps_all = "logits_to_keep" not in self.parameters
        inputs, run, keep = begin_step(asked, self.options, self.found.layers, self.model.device, keeps_all=keeps_all)
        inputs |= self._keep(keep.by_rank[self.options.rank], is_all=keep.is_all)
        inputs = {name: x for name, x in inputs.items() if name != "position_ids" or name in self._batch}
        extra: dict[str, Any] = (
            {"past_key_values": cache, "use_cache": True}
            if self.arguments.takes_use_cache
            else {"past_key_values": cache}
        )
        if self.found.passes_run:
            extra[RUN] = run
        self._forward, self.wiring.run = _Forward(run, True, None, None, keep), run
        try:
            output = self.model.forward(**inputs, **extra)
        except BaseException:
            self.after(None)
            raise
        return by_sequence(asked, self.after(output).logits)

    # Before

    def _cached_layers(self) -> tuple[AttentionLayer, ...]:
        if not self.found.cached or self.found.has_encoder:
            reason = self.found.no_cache or "an encoder's sequence has a length of its own"
            raise UnsupportedError(f"handle.cache, handle.step: the cache cannot be sharded by sequence: {reason}")
        return self.found.cached

    def _agree(self, run: ShardRun | TurnRun) -> None:
        assert isinstance(run, ShardRun)
        session = self.options.session
        fields = {"call": f"forward of {type(self.model).__name__}", "training": self.model.training, **run.said}
        if self.model.training and torch.is_grad_enabled():
            if is_digest_due(self._num_trained):
                fields[_WEIGHTS] = digest_weights(self.model)
            self._num_trained += 1
        with session.call() as call:
            call.agree(Signature.of(fields), once=True)

    def _split(self, given: Mapping[str, Any]) -> ShardPart:
        if not self.found.has_encoder:
            return self._shard(given)
        encoder, decoder = apart(self.model, given)
        source, part = self._shard(encoder), self._shard(decoder)
        part.run.source = source.run
        part.run.said = _said_of("the encoder's", source.run.said) | _said_of("the decoder's", part.run.said)
        return ShardPart(together(source.inputs, part.inputs, ENCODED in given), part.run)

    def _shard(self, batch: Mapping[str, torch.Tensor], *, is_known: bool = False) -> ShardPart:
        return shard_inputs(
            batch,
            self.options,
            self.found.layers,
            shifts_labels=bool(self.found.shifts_labels),
            takes_positions="position_ids" in self._batch,
            pads_alike=self.found.pads_alike,
            is_known=is_known,
        )

    def _split_whole(self, given: dict[str, Any]) -> tuple[_Forward, dict[str, Any]]:
        inputs, run = self._split({name: x for name, x in given.items() if name in self._batch | {ENCODED}})
        if run.documents is not None:
            self.arguments.check_documents(given)
        num_kept, layout = given.get("logits_to_keep", 0), run.layout
        first = max(0, layout.num_positions - num_kept) if num_kept else 0
        positions = [layout.positions(rank) for rank in range(self.options.world_size)]
        kept = [np.flatnonzero(mine >= first) for mine in positions]
        if first and not layout.replicated:
            layout = layout_of_positions([mine[rows] - first for mine, rows in zip(positions, kept, strict=True)])
        rows = self._keep(kept[self.options.rank], is_all=not first)
        labels, num_items = inputs.pop("labels", None), given.get("num_items_in_batch")
        run.said |= describe({"num_items_in_batch": num_items})
        trains, is_fused = self.arguments.wants_gradients(given), bool(given.get(FUSED))
        fused: dict[str, Any] = {}
        if is_fused:
            fused, labels = {FUSED: True, "shift_labels": labels}, None
        forward = _Forward(run, True, labels, num_items, layout, encoded_by_caller(given), trains, is_fused)
        return forward, inputs | rows | fused

    def _check_turn(self, given: dict[str, Any]) -> NewTokens:
        layers, device = self.found.cached, self.model.device

        def make() -> KVCache:
            return make_kv(layers, self.options, _attention_dtype(layers[0], device), device)

        num_kept = given.get("logits_to_keep", 0)
        if not self.found.has_encoder:
            conversation = open_cache(given.setdefault("past_key_values", DynamicCache()), make, self, len(layers))
            batch = {name: given[name] for name in self._batch if name in given}
            return check_new_tokens(batch, conversation, self.found.layers, num_kept, None)
        empty = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cache = given.setdefault("past_key_values", empty)
        conversation = open_encoder_decoder_cache(cache, make, self, len(layers))
        encoder, decoder = apart(self.model, given)
        source = self._shard(encoder, is_known=ENCODED in given and conversation.num_encoded > 0)
        return check_new_tokens(decoder, conversation, self.found.layers, num_kept, source)

    def _begin(self, new: NewTokens, given: dict[str, Any]) -> tuple[_Forward, dict[str, Any]]:
        inputs, run, keep = begin_turn(new, self.options, self.found.layers)
        # The ranks agree on this together with the turn, before its first message.
        said = {**new.batch, "tokens": new.columns, "logits_to_keep": new.num_kept}
        run.turn.said = describe(said)
        if run.source is not None:
            run.turn.said |= _said_of("the encoder's", run.source.said)
        rows = self._keep(keep.by_rank[self.options.rank], is_all=run.is_decode)
        cache = {"past_key_values": given["past_key_values"]}
        inputs = {name: x for name, x in inputs.items() if name != "position_ids" or name in self._batch}
        if new.source is not None:
            inputs = together(new.source.inputs, inputs, ENCODED in given)
        return _Forward(run, True, None, None, keep, encoded_by_caller(given)), inputs | rows | cache

    def _keep(self, rows: Any, *, is_all: bool) -> dict[str, torch.Tensor]:
        """Return which rows of this rank go through the model's head; all if the model cannot select rows."""
        if is_all or "logits_to_keep" not in self.parameters:
            return {}
        return {"logits_to_keep": torch.from_numpy(rows).to(self.model.device)}

    # After

    def _tell_failure(self, run: ShardRun | TurnRun) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, RingspanError):  # other ranks know RingspanErrors
            run.fail(error)

    def _finish(self, forward: _Forward, output: Any) -> Any:
        unknown = sorted(output.keys() - (_OUTPUTS | {*FUSED_ROWS} if forward.is_fused else _OUTPUTS))
        if unknown:
            raise UnsupportedError(
                f"{type(self.model).__name__} returns {', '.join(unknown)}, which has no row per token",
                remedy="use a model without it",
            )
        fields = dict(output)
        group = self.options.group
        if forward.labels is not None:
            fields["loss"] = self._loss(forward, fields["logits"])
        if forward.trains or forward.is_fused:
            fields = self._trained(forward, fields)
        elif forward.is_whole:
            for name in _BY_ROW:
                if name in fields:
                    fields[name] = self._whole(forward, fields[name], group)
            if _ENCODED in fields:
                fields[_ENCODED] = self._whole_encoded(forward, fields[_ENCODED])
        return type(output)(**fields)

    def _loss(self, forward: _Forward, logits: torch.Tensor) -> torch.Tensor:
        assert forward.labels is not None
        assert isinstance(forward.run, ShardRun)
        loss = mean_loss(logits, forward.labels, self.options.group)
        if forward.num_items is not None:
            loss = loss * (forward.run.num_labels / forward.num_items)
        return loss

    def _trained(self, forward: _Forward, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the loss alone, or whole rows from which every rank computes the same loss."""
        if forward.labels is not None:
            return {"loss": fields["loss"]}
        assert isinstance(forward.run, ShardRun)
        layout = forward.run.layout
        if layout.replicated:
            raise UnsupportedError(
                f"a sequence of {layout.num_positions} tokens is not cut over {layout.world_size} ranks, "
                "and a loss from its outputs would count on each",
                remedy="pad it to one token per rank",
            )
        names = FUSED_ROWS if forward.is_fused else _BY_ROW
        return {name: whole_rows(fields[name], layout, self.options.group) for name in names if name in fields}

    def _whole(self, forward: _Forward, part: torch.Tensor, group: Any) -> torch.Tensor:
        if isinstance(forward.keep, Keep):
            assert isinstance(forward.run, TurnRun)
            return part if forward.run.is_decode else forward.keep.whole(part, group)
        assert forward.keep is not None
        return part if forward.keep.replicated else gather(part, forward.keep, group, dim=1)

    def _whole_encoded(self, forward: _Forward, part: torch.Tensor) -> torch.Tensor:
        if forward.encoded is not None:
            return forward.encoded
        assert forward.run.source is not None
        layout = forward.run.source.layout
        return part if layout.replicated else gather(part, layout, self.options.group, dim=1)


def encoder_adapter(adapter: Adapter) -> Adapter:
    """Make the adapter of a model's encoder, which generate() calls separately."""
    found = adapter.found
    encoder = adapter.model.get_encoder()
    passes_run = any(x.kind is x.VAR_KEYWORD for x in inspect.signature(encoder.forward).parameters.values())
    alone = found._replace(
        cached=(), no_cache="it is an encoder", passes_run=passes_run, shifts_labels=None, has_encoder=False
    )
    return Adapter(encoder, adapter.wiring, adapter.options, alone)


def _said_of(whose: str, said: Mapping[str, str]) -> dict[str, str]:
    return {f"{whose} {name}": text for name, text in said.items()}


def _attention_dtype(layer: AttentionLayer, device: torch.device) -> torch.dtype:
    """Return the dtype of a layer's attention: that of autocast inside its region."""
    if layer.dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return layer.dtype
