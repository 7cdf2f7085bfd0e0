"""Does anything besides attention join tokens? A token that is NaN tells.

Attention is left out of the call, so NaN stays in the row of its token, in every tensor that follows the tokens; where
it does not, a module joins tokens, and the model is refused by that module's name. The row of the first and of the
last token also tell on which side of the tokens others stand.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ringspan.adapters.diffusers.leaves import Leaf, flatten, map_leaves
from ringspan.adapters.diffusers.trace import without_attention
from ringspan.adapters.diffusers.wiring import SdpaCall
from ringspan.errors import UnsupportedError


class Draft:
    """What the shapes of one call of a block show."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens: dict[str, tuple[int, bool, bool]] = {}  # by path: dim, has others, is made of blocks' outputs
        self.whole: set[str] = set()  # arguments made of outputs that were gathered
        self.outputs: dict[str, tuple[int, bool]] = {}
        self.gathered: set[str] = set()  # outputs that are used whole, after the blocks
        self.attended: list[tuple[bool | None, bool | None]] = []  # has others, for q and keys; None: no tokens
        self.counts: set[str] = set()


class Probe:
    """A dry call in which one token is NaN."""

    def __init__(
        self,
        model: nn.Module,
        drafts: list[Draft],
        num_tokens: int,
        token: int,
        *,
        others_first: bool | None = None,
        gathers_all: bool = False,
    ) -> None:
        """Prepare a call; with gathers_all, blocks are independent of each other, and each is refused for itself."""
        self.rows: dict[tuple[int, str], int] = {}  # the row of the token, by call and what it is in
        self.refused: dict[int, UnsupportedError] = {}  # by call
        self._others_first = others_first  # in arguments that are not made of blocks' outputs; None: not known
        self._gathers_all = gathers_all
        self._names = {module: name for name, module in model.named_modules()}
        self._drafts = drafts
        self._num_tokens = num_tokens
        self.token = token
        self._number = -1
        self._draft: Draft | None = None
        self._num_attended = 0
        self._culprit: str | None = None
        self._lengths: set[int] = set()

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks that find the innermost module that spreads NaN."""
        return [module.register_forward_hook(self._look, with_kwargs=True) for module in model.modules()]

    def enter(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Make the token NaN in the first block; in later blocks, check that no other row is NaN."""
        self._number += 1
        draft = self._drafts[self._number]
        assert draft.name == name
        self._draft = draft if draft.tokens else None
        self._num_attended = 0
        self._culprit = None
        self._lengths = {self._num_tokens}

        def change(leaf: Leaf) -> Any:
            x = leaf.value
            if not _is_float(x):
                return x
            if leaf.path not in draft.tokens:
                return self._cleaned(x)
            dim, has_others, is_made = draft.tokens[leaf.path]
            if is_made and not (self._gathers_all and len(_nan_rows(x, dim)) != 1):
                self._lengths.add(x.shape[dim])
                self._note(f"argument {leaf.path}", x, dim, "the model, before this block,")
                return x
            if has_others and self._others_first is None:  # on which side it is not known yet
                return self._cleaned(x)
            x = self._cleaned(x).clone()
            others = x.shape[dim] - self._num_tokens if self._others_first else 0
            x.select(dim, self.token + others).fill_(torch.nan)
            return x

        return {key: map_leaves(change, x, key) for key, x in arguments.items()}

    def leave(self, name: str, output: Any) -> Any:
        """Check that only the token's row of the outputs is NaN."""
        draft = self._draft
        if draft is not None:
            for path, x in flatten({"output": output}):
                if path in draft.outputs:
                    self._note(path, x, draft.outputs[path][0], self._culprit or name)
                elif _is_float(x) and x.isnan().any():
                    self._refuse(
                        f"{self._culprit or name} joins tokens: {path} of {name} depends on one of them and has "
                        f"no row for each, shape {tuple(x.shape)}"
                    )
        self._draft = None
        if draft is None or self._number in self.refused:
            return map_leaves(lambda leaf: self._cleaned(leaf.value), {"output": output})["output"]
        return output

    def attend(self, asked: SdpaCall) -> torch.Tensor:
        """Check that only the token's row of q, k and v is NaN."""
        if self._draft is not None:
            number, self._num_attended = self._num_attended, self._num_attended + 1
            q_has_others, keys_have_others = self._draft.attended[number]
            for what, x, has_others in (
                ("q", asked.query, q_has_others),
                ("k", asked.key, keys_have_others),
                ("v", asked.value, keys_have_others),
            ):
                culprit = self._culprit or f"call {number} of attention"
                if has_others is not None:
                    self._lengths.add(x.shape[-2])
                    self._note(f"{what} of call {number}", x, x.ndim - 2, culprit)
                elif x.isnan().any():
                    self._refuse(
                        f"{self._draft.name}: {what} of call {number} of attention, shape {tuple(x.shape)}, depends on "
                        f"tokens and has no row for each; {culprit} joins them, or attends within windows"
                    )
        return without_attention(asked)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def _note(self, what: str, x: torch.Tensor, dim: int, culprit: str) -> None:
        rows = _nan_rows(x, dim)
        name = self._drafts[self._number].name
        if len(rows) > 1:
            self._refuse(
                f"{culprit} joins tokens: one token reaches {len(rows)} rows of {what} in {name}, outside of "
                "scaled_dot_product_attention; only models that join tokens in attention alone can be split"
            )
        elif rows:  # an argument need not be used
            self.rows[self._number, what] = rows[0]

    def _refuse(self, message: str) -> None:
        error = UnsupportedError(message)
        if not self._gathers_all:
            raise error
        self.refused.setdefault(self._number, error)

    def _cleaned(self, x: Any) -> Any:
        """The tensor without NaN, if what happens between blocks may join tokens."""
        return x.nan_to_num(nan=0.0) if self._gathers_all and _is_float(x) and x.isnan().any() else x

    def _look(self, module: nn.Module, args: object, kwargs: object, output: Any) -> None:
        if self._draft is None or self._culprit is not None:
            return
        if self._has_spread(output) and not self._has_spread((args, kwargs)):
            self._culprit = self._names[module]

    def _has_spread(self, value: Any) -> bool:
        for _, x in flatten(value):
            if _is_float(x):
                dims = [dim for dim, size in enumerate(x.shape[:-1]) if size in self._lengths]
                if dims and len(_nan_rows(x, dims[0])) > 1:
                    return True
        return False


def _is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _nan_rows(x: torch.Tensor, dim: int) -> list[int]:
    others = [other for other in range(x.ndim) if other != dim % x.ndim]
    rows = x.isnan().any(others) if others else x.isnan()
    found: list[int] = rows.nonzero().flatten().tolist()
    return found
