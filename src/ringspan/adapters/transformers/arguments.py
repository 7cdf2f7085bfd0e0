"""Which arguments of a forward and of generate() have the same meaning on ranks? All others are refused by name.

Changes to the model after `parallelize`, to its attention or its number of layers, are refused too.

A parallelized model gets a generate() that first refuses two things. A time limit: each rank would stop by its own
clock while the others wait for it. Padding at the end of a decoder's prompt: the next token would be chosen from the
padding's logits.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import MaxTimeCriteria, PreTrainedConfig, PreTrainedModel

from ringspan.adapters.transformers.encoder_decoder import BOTH, ENCODED, encoded_by_caller
from ringspan.adapters.transformers.layers import AttentionLayer, Side
from ringspan.adapters.transformers.shards import BY_TOKEN, ShardOptions, ShardRun
from ringspan.adapters.transformers.wiring import RUN
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.mask import full

_BATCH = {*BY_TOKEN, "attention_mask"}
_OPTIONS = {"past_key_values", "use_cache", "logits_to_keep", "num_items_in_batch", "return_dict"}
_UNUSED = {"tokenizer"}  # generate(stop_strings=…) passes it on to forward, which does not use it
_FUSED = {"fused_lm_head"}  # of TRL's trainers: rows of log-probabilities instead of logits
_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}  # for kernels not used here
_REFUSED = {
    "output_attentions": "no rank has all attention weights",
    "output_router_logits": "the balance of experts over all tokens is not the mean over shards",
}


class Findings(NamedTuple):
    """The properties of a model that dry calls found."""

    layers: dict[nn.Module, AttentionLayer]
    cached: tuple[AttentionLayer, ...]  # in the order of a cache; () if the model cannot use one
    no_cache: str  # the reason if it cannot
    passes_run: bool  # whether forward passes unknown keyword arguments on to attention
    counters: dict[nn.Module, Side]  # modules that count positions, if the model takes no position_ids
    has_encoder: bool  # an encoder and a decoder, each with its own sequence
    shifts_labels: bool | None = None  # None: labels do not belong to tokens
    takes_num_items: bool = False  # whether its loss divides by num_items_in_batch
    is_random: bool = False  # in training, as far as dry calls show
    pads_alike: bool = False  # whether its own attention treats padding as ours does


class Arguments:
    """Checks the arguments of a model's forward."""

    def __init__(self, model: PreTrainedModel, found: Findings, attention: str) -> None:
        self.model = model
        self.found = found
        self.attention = attention
        self.trains_whole = False  # whether training forwards take whole batches
        self._takes = inspect.signature(model.forward).parameters
        self.batch = BOTH if found.has_encoder else _BATCH - ({"position_ids"} - self._takes.keys())
        self.takes_use_cache = takes_use_cache(model)
        # Other modules may hold copies of the config that set_attn_implementation does not reach. Attention layers do
        # not read those copies.
        configs = [
            getattr(module, "config", None)
            for module in model.modules()
            if isinstance(module, PreTrainedModel) or module in found.layers
        ]
        by_id = {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}
        self._configs = [(config, _num_layers(config)) for config in by_id.values()]

    def drop_unused(self, given: Mapping[str, Any]) -> dict[str, Any]:
        unused = _UNUSED
        if self.trains_whole and _PACKED & given.keys():
            check_packed(given)
            unused = _UNUSED | _PACKED
        return {name: value for name, value in given.items() if value is not None and name not in unused}

    def check_batch(self, given: Mapping[str, Any]) -> None:
        """Check the names of a batch that is to be sharded."""
        self._check_names(given, self.batch | {"num_items_in_batch"})

    def check(self, given: Mapping[str, Any]) -> None:
        encoded = {ENCODED} if self.found.has_encoder else set()
        fused = _FUSED if self.trains_whole else set()
        self._check_names(given, self.batch | _OPTIONS | encoded | fused | {"output_hidden_states"})
        self._check_configs()
        if given.get("return_dict") is False:
            raise UnsupportedError(
                "outputs are identified by name", argument="return_dict", value=False, remedy="leave it out"
            )
        if self.model.training:
            check_random(self.model, self.found.is_random)

    def check_part(self, given: Mapping[str, Any], run: object, rank: int) -> None:
        if not isinstance(run, ShardRun) or run.layers is not self.found.layers:
            raise ShapeError(f"{RUN}=…: the batch was sharded by another handle", remedy="use the one of this model")
        prefix = "decoder_" if self.found.has_encoder else ""
        x = given.get(f"{prefix}input_ids", given.get(f"{prefix}inputs_embeds"))
        expected = run.layout.shard_len(rank)
        has_positions = "position_ids" in given or "position_ids" not in self.batch
        if x is None or x.shape[1] != expected or not has_positions:
            raise ShapeError(
                f"the batch is not the one that shard() returned: {expected} tokens with their position_ids"
            )
        for name in ("past_key_values", "logits_to_keep", "attention_mask", "decoder_attention_mask", ENCODED):
            if name in given:
                raise UnsupportedError(f"{name} with a sharded batch: give it to shard(), or give whole sequences")
        if given.get("use_cache"):
            raise UnsupportedError(
                "a sharded batch fills no cache", argument="use_cache", value=True, remedy="give whole sequences"
            )

    def wants_cache(self, given: Mapping[str, Any]) -> bool:
        """Whether a forward on whole sequences uses a cache."""
        model = self.model
        trains = self.wants_gradients(given)
        if trains and not self.trains_whole:
            raise UnsupportedError(
                "a forward on whole sequences with gradients: use model(**handle.shard(batch)) to train, and "
                "torch.no_grad() for inference"
            )
        if given.get("output_hidden_states", getattr(model.config, "output_hidden_states", False)):
            raise UnsupportedError("output_hidden_states of whole sequences: use model(**handle.shard(batch))")
        self._check_num_kept(given.get("logits_to_keep", 0))
        has_cache = "past_key_values" in given
        default = self._makes_caches() and "labels" not in given and not trains
        wants_cache = has_cache or bool(given.get("use_cache", default and bool(self.found.cached)))
        if wants_cache and not self.found.cached:
            raise UnsupportedError(f"use_cache, past_key_values: its cache cannot be sharded: {self.found.no_cache}")
        if "labels" in given and (wants_cache or given.get("logits_to_keep")):
            raise UnsupportedError("labels with use_cache, past_key_values or logits_to_keep: leave those out")
        if trains and (wants_cache or given.get("logits_to_keep")):
            raise UnsupportedError(
                "use_cache, past_key_values or logits_to_keep in a forward with gradients: leave those out"
            )
        return wants_cache

    def wants_gradients(self, given: Mapping[str, Any]) -> bool:
        """Whether the outputs of a forward have gradients."""
        learned = (*self.model.parameters(), *given.values(), encoded_by_caller(given))
        return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in learned)

    def check_documents(self, given: Mapping[str, Any]) -> None:
        """Refuse packed whole sequences with a cache: with a cache the model does not keep documents apart."""
        if not any(layer.keeps_documents for layer in self.found.layers.values()):
            return
        if self.takes_use_cache and given.get("use_cache", self._makes_caches()):
            raise UnsupportedError(
                "position_ids restart, but the model makes a cache by default and then sees one document",
                remedy="pass use_cache=False to keep packed documents apart",
            )

    def _check_num_kept(self, num_kept: object) -> None:
        if not isinstance(num_kept, int):
            raise UnsupportedError("logits_to_keep as a tensor: give the number of last tokens")
        if num_kept < 0:
            raise UnsupportedError(
                "it is the number of last tokens",
                argument="logits_to_keep",
                value=num_kept,
                remedy="use 1 or more, or 0 for all tokens",
            )
        if num_kept and "logits_to_keep" not in self._takes:
            raise UnsupportedError(
                f"{type(self.model).__name__}.forward has no such argument and returns all tokens",
                argument="logits_to_keep",
                value=num_kept,
                remedy="leave it out",
            )

    def _makes_caches(self) -> bool:
        return bool(getattr(self.model.config.get_text_config(), "use_cache", False))

    def _check_names(self, given: Mapping[str, Any], known: set[str]) -> None:
        for name, value in given.items():
            if name in _REFUSED and value:
                raise UnsupportedError(_REFUSED[name], argument=name, value=value, remedy="leave it out")
            if name not in known | {*_REFUSED}:
                raise UnsupportedError(
                    "its effect on a shard of a sequence is unknown",
                    argument=name,
                    remedy=f"leave it out, or use some of {', '.join(sorted(known))}",
                )
        if "num_items_in_batch" in given and not self.found.takes_num_items:
            raise UnsupportedError(
                f"num_items_in_batch: {type(self.model).__name__} does not use it, its loss is the mean "
                "over the labels of the batch",
                remedy="leave it out",
            )
        if "token_type_ids" in given and any(layer.mask != full() for layer in self.found.layers.values()):
            raise UnsupportedError(
                "token_type_ids: a decoder may derive masks from them, such as tokens of an image that see each other",
                remedy="leave them out, or call rs.attention with rs.causal() | rs.blocks([...])",
            )
        if "labels" in given and self.found.shifts_labels is None:
            raise UnsupportedError(
                f"labels: {type(self.model).__name__} has a loss that is not over tokens; compute it from the outputs"
            )

    def _check_configs(self) -> None:
        for config, num_layers in self._configs:
            if config._attn_implementation != self.attention:
                raise UnsupportedError(
                    f"the attention of {type(self.model).__name__} was set to {config._attn_implementation!r}, which "
                    "sees a rank's own tokens only; restore the model before, and parallelize it again"
                )
            if _num_layers(config) != num_layers:
                raise UnsupportedError(
                    f"it was {num_layers} when the model was parallelized",
                    argument="config.num_hidden_layers",
                    value=_num_layers(config),
                    remedy="set it back, and leave out assistant_early_exit, which changes it",
                )


def check_random(model: PreTrainedModel, is_random: bool) -> None:
    """Refuse a model that is random in training, because ranks would draw other numbers than one process.

    Dropout is looked up at each forward: adapters such as LoRA add their own, and dry calls do not show it while their
    weights are 0.
    """
    modules = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _DropoutNd) and module.training and module.p > 0
    ]
    if modules or is_random:
        where = f"{modules[0]} and {len(modules) - 1} more modules" if modules else "its forward"
        raise UnsupportedError(
            f"{type(model).__name__} is random in training ({where}): ranks would drop other things than one process",
            remedy="set all dropout of the config and of adapters to 0, or call model.eval()",
        )


def check_packed(given: Mapping[str, Any]) -> None:
    """Refuse lengths of documents that are not those of `position_ids`, from which documents are taken here."""
    positions = given.get("position_ids")
    starts = None if positions is None or len(positions) > 1 else positions[0] == 0
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        found = given.get(name)
        if found is None:
            continue
        if starts is None:
            is_same = False
        elif name == "seq_idx":
            is_same = found.tolist() == [(starts.cumsum(0) - 1).tolist()]
        else:
            is_same = found.tolist() == [*starts.nonzero().flatten().tolist(), len(starts)]
        if not is_same:
            raise UnsupportedError(
                "documents are those of position_ids, in one row, and these lengths are others",
                argument=name,
                remedy="leave it out",
            )


def takes_use_cache(model: PreTrainedModel) -> bool:
    """Whether forward takes `use_cache`; some models pass it on to an inner model through `**kwargs`."""
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in parameters:
        return True
    return any(x.kind is x.VAR_KEYWORD for x in parameters.values()) and any(
        "use_cache" in inspect.signature(module.forward).parameters
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    )


def _num_layers(config: PreTrainedConfig) -> int | None:
    return getattr(config, "num_hidden_layers", None)


_Check = Callable[[Mapping[str, Any], Any], None]


class CheckedGenerate:
    """A model's generate() that first checks that its options mean the same on all ranks."""

    def __init__(self, model: Any, options: ShardOptions) -> None:
        def check(given: Mapping[str, Any], default: Any) -> None:
            try:
                _check_time(given, default)
                _check_prompt(given)
            except UnsupportedError as error:
                options.refuse(error)
                raise

        self._model = model
        self._before = vars(model).get("generate")
        # deepcopy copies the model inside a partial; a closure would still refer to this model.
        model.generate = partial(_generate, check, model, model.generate)

    def remove(self) -> None:
        del self._model.generate
        if self._before is not None:
            self._model.generate = self._before


def _generate(check: _Check, model: Any, generate: Callable[..., Any], *args: Any, **options: Any) -> Any:
    given = inspect.signature(generate).bind_partial(*args, **options).arguments
    check({**given, **given.get("kwargs", {})}, model.generation_config)
    return generate(*args, **options)


def _check_time(given: Mapping[str, Any], default: Any) -> None:
    criteria = [x for x in given.get("stopping_criteria") or () if isinstance(x, MaxTimeCriteria)]
    limits = [given.get("max_time"), *(getattr(x, "max_time", None) for x in (given.get("generation_config"), default))]
    for limit in (*limits, *(x.max_time for x in criteria)):
        if limit is not None:
            raise UnsupportedError(
                "each rank would stop by its own clock while the others wait",
                argument="max_time",
                value=limit,
                remedy="leave it out, also in a generation_config, and set max_new_tokens",
            )


def _check_prompt(given: Mapping[str, Any]) -> None:
    mask = given.get("decoder_attention_mask")
    if mask is not None and not mask[:, -1].all():
        raise UnsupportedError(
            "decoder_attention_mask has padding in its last column, and the next token would be chosen "
            "there: logits of padding are not computed",
            remedy="put padding before the tokens",
        )
