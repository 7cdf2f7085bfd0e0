"""Which options of generate() must be checked before any forward?

A time limit is refused: each rank would stop by its own clock while the others wait for it. Padding at the end of a
decoder's prompt is refused: the next token would be chosen from its logits. The model gets a generate() that checks
both first; `remove` restores the original.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import MaxTimeCriteria

from ringspan.adapters.transformers.shards import ShardOptions
from ringspan.errors import UnsupportedError

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
                f"max_time={limit}: each rank would stop by its own clock while the others wait; leave it out, "
                "also in a generation_config, and set max_new_tokens"
            )


def _check_prompt(given: Mapping[str, Any]) -> None:
    mask = given.get("decoder_attention_mask")
    if mask is not None and not mask[:, -1].all():
        raise UnsupportedError(
            "decoder_attention_mask has padding in its last column, and the next token would be chosen there: logits "
            "of padding are not computed; put padding before the tokens"
        )
