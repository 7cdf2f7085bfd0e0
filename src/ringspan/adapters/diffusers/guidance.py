"""How are the two branches of guidance computed at the same time, each on half of the ranks?

A pipeline that doubles the batch gives both branches in one call: each half of the ranks takes half of the rows. A
pipeline that calls twice in a step gives the second branch only after the first has returned. But it does so in every
step, with the same latents and timestep and another prompt. So once a pair was seen, the second call is foretold at
the first one: half of the ranks compute it meanwhile, and the outputs are exchanged. The second call is answered from
that if its arguments are those foretold, to the bit, and computed as usual if not. Nothing is guessed about what is
right, only about what will be asked; and all ranks decide alike, since they agree on the arguments of every call.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ringspan.adapters.diffusers.adapter import TransformerOnRanks
from ringspan.adapters.diffusers.leaves import Leaf, copy_tensors, flatten, map_leaves
from ringspan.adapters.diffusers.run import RankOptions
from ringspan.errors import LayoutError
from ringspan.layout import contiguous
from ringspan.runtime.contract import Signature
from ringspan.training import gather

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

Arguments = dict[str, Any]


class _Pair(NamedTuple):
    """The two calls of one guidance step."""

    first: Arguments
    second: Arguments
    differing: frozenset[str]


class GuidedForward:
    """Replaces a model's forward."""

    def __init__(self, adapter: TransformerOnRanks, forward: Callable[..., Any], branches: RankOptions) -> None:
        if branches.world_size != 2:
            raise LayoutError(
                "guidance has two branches", argument="cfg", value=branches.world_size, remedy="give a group of 2 ranks"
            )
        self.num_split = 0  # calls of which each half of the ranks computed one branch, or half of the rows
        self._adapter = adapter
        self._forward = forward
        self._branches = branches
        self._previous: Arguments | None = None
        self._pair: _Pair | None = None
        self._foretold: tuple[Arguments, Any] | None = None
        self._rows_are_apart: bool | None = None  # None: not tried yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward of the model."""
        if self._adapter.wiring.run is not None:  # a call by which the model is learned
            return self._forward(*args, **kwargs)
        arguments = self._adapter.arguments(args, kwargs)
        self._adapter.agree(arguments, self._branches)
        foretold, self._foretold = self._foretold, None
        if foretold is not None and _differing(foretold[0], arguments) == frozenset():
            return foretold[1]
        if torch.is_grad_enabled():
            return self._run(arguments)
        batch = _batch_of(arguments)
        if batch and batch % 2 == 0 and self._rows_are_apart is not False:
            return self._run_rows(arguments, batch)
        second = self._foretell(arguments)
        if second is None:
            self._remember(arguments)
            return self._run(arguments)
        output = self._run(second if self._branches.rank else arguments)
        first, self._foretold = self._exchange(output, second)
        self.num_split += 1
        return first

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model runs without guidance on ranks."""
        return copy.deepcopy(self._forward, memo)

    def _run(self, arguments: Arguments) -> Any:
        try:
            self._adapter.before(arguments)
            try:
                output = self._forward(**arguments)
            except BaseException:
                self._adapter.after(None)
                raise
            self._adapter.after(output)
        except Exception as error:
            self._tell_branches(error)
            raise
        return output

    def _tell_branches(self, error: Exception) -> None:
        """Tell the other branch of an error of this one's group, because it waits for an exchange."""
        self._branches.session.call().refuse(error)

    # A call for both branches

    def _run_rows(self, arguments: Arguments, batch: int) -> Any:
        """Run half of the rows. The first such call also runs all rows, to check that rows are independent."""
        layout = contiguous(batch, 2)
        rank = self._branches.rank

        def take(leaf: Leaf) -> Any:
            return layout.shard(leaf.value, rank, 0) if _has_rows(leaf.value, batch) else leaf.value

        half = self._run({name: map_leaves(take, x, name) for name, x in arguments.items()})
        if self._rows_are_apart is None:
            whole = self._run(arguments)
            expected = [take(leaf) for leaf in flatten(whole)]
            are_alike = all(_are_close(x, y) for (_, x), y in zip(flatten(half), expected, strict=True))
            self._rows_are_apart = self._all_say(are_alike)
            return whole
        self.num_split += 1

        def join(leaf: Leaf) -> Any:
            x = leaf.value
            is_half = _has_rows(x, batch // 2)
            return gather(x.contiguous(), layout, self._branches.group, dim=0) if is_half else x

        return map_leaves(join, half)

    def _all_say(self, answer: bool) -> bool:
        for options in (self._adapter.options, self._branches):
            with options.session.call() as call:
                everyone = call.gather(Signature.of({"call": "compare a half with all rows"}), bytes([answer]))
            answer = all(map(any, everyone))
        return answer

    # Two calls

    def _foretell(self, arguments: Arguments) -> Arguments | None:
        pair = self._pair
        if pair is None:
            return None
        differing = _differing(pair.first, arguments)
        if differing is None or differing & pair.differing:
            return None
        return copy_tensors(_with_leaves(arguments, pair.second, pair.differing))

    def _remember(self, arguments: Arguments) -> None:
        arguments = copy_tensors(arguments)
        previous, self._previous = self._previous, arguments
        differing = None if previous is None else _differing(previous, arguments)
        if previous is not None and differing:
            self._pair, self._previous = _Pair(previous, arguments, differing), None

    def _exchange(self, output: Any, second: Arguments) -> tuple[Any, tuple[Arguments, Any]]:
        layout = contiguous(2, 2)

        def both(leaf: Leaf) -> Any:
            if not isinstance(leaf.value, torch.Tensor):
                return (leaf.value, leaf.value)
            return gather(leaf.value[None].contiguous(), layout, self._branches.group, dim=0)

        found = {leaf.path: both(leaf) for leaf in flatten(output)}
        first = map_leaves(lambda leaf: found[leaf.path][0], output)
        other = map_leaves(lambda leaf: found[leaf.path][1], output)
        return first, (second, other)


def _with_leaves(arguments: Arguments, others: Arguments, paths: frozenset[str]) -> Arguments:
    """The arguments of one call, with those of another call at some paths."""
    found = dict(flatten(others))

    def take(leaf: Leaf) -> Any:
        return found[leaf.path] if leaf.path in paths else leaf.value

    return {name: map_leaves(take, x, name) for name, x in arguments.items()}


def _batch_of(arguments: Arguments) -> int:
    tensors = (x for _, x in flatten(arguments) if isinstance(x, torch.Tensor) and x.ndim >= 3)
    return next((int(x.shape[0]) for x in tensors), 0)


def _has_rows(x: object, num_rows: int) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] == num_rows


def _are_close(x: Any, y: Any) -> bool:
    if not isinstance(x, torch.Tensor):
        return True
    if not isinstance(y, torch.Tensor) or x.shape != y.shape:
        return False
    return bool((x - y).abs().max() <= _TOLERANCES.get(x.dtype, 0.1) * y.abs().max())


def _differing(a: Arguments, b: Arguments) -> frozenset[str] | None:
    """The paths of leaves that differ; None if the structures of the calls differ."""
    first, second = dict(flatten(a)), dict(flatten(b))
    if first.keys() != second.keys():
        return None
    return frozenset(path for path, x in first.items() if not _is_equal(x, second[path]))


def _is_equal(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)
