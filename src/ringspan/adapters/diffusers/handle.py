"""Transformers and pipelines of diffusers on ranks, as they are: tokens are split, attention goes round the ring.

    handle = parallelize(pipe)                    # on every rank, with the same pipeline
    video = pipe(prompt, generator=generator)     # one seed for all ranks: the video of one process, on every rank
    handle.restore()

Nothing of the model is replaced, and none is known by name. Its blocks are hooked, and torch's attention is watched
(`wiring.py`). Which arguments of the blocks follow the tokens is learned from small copies of the first call
(`sizes.py`, `trace.py`, `learn.py`), proved by a token that is NaN (`probe.py`) and compared on two ranks in threads
(`compare.py`); then the call runs on all ranks (`run.py`). What cannot be computed exactly is refused, with the module.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ringspan.adapters.diffusers.adapter import TransformerOnRanks
from ringspan.adapters.diffusers.guidance import GuidedForward
from ringspan.adapters.diffusers.run import RankOptions
from ringspan.adapters.gradients import digest_weights, reduce_gradients
from ringspan.algorithms import ALGORITHMS, check_algorithm
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.runtime.contract import Signature

__all__ = ["DiffusersHandle", "parallelize"]

_PARALLELIZED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models with a handle that was not restored


class DiffusersHandle:
    """A parallelized transformer or pipeline. As a context manager it restores it at the end."""

    def __init__(self, adapters: dict[str, TransformerOnRanks], branches: RankOptions | None) -> None:
        self.adapters = adapters
        self._hooks: list[RemovableHandle | _ForwardInPlace] = []
        for adapter in adapters.values():
            self._hooks += _hooks(adapter) if branches is None else [_ForwardInPlace(adapter, branches)]
            _PARALLELIZED.add(adapter.model)

    @property
    def plans(self) -> dict[str, list[str]]:
        """The plans learned so far, one per transformer: its blocks, and how they attend."""
        return {name: [plan.describe() for _, plan in x.plans] for name, x in self.adapters.items()}

    def reduce_gradients(self) -> None:
        """Make the parameters' gradients those of one process, on every rank.

        The output is whole on every rank, so each rank calls `backward()` of the same loss, and then this. The mean
        over the ranks is the gradient of that loss, which DDP would also take.
        """
        for adapter in self.adapters.values():
            reduce_gradients(adapter.model, adapter.options.group)
            for x in adapter.model.parameters():
                if x.grad is not None:
                    x.grad /= adapter.options.world_size

    def restore(self) -> None:
        """Restore the model; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            _PARALLELIZED.difference_update(x.model for x in self.adapters.values())
        self._hooks = []
        for adapter in self.adapters.values():
            adapter.close()

    def __repr__(self) -> str:
        options = next(iter(self.adapters.values())).options
        models = ", ".join(f"{name}: {type(x.model).__name__}" for name, x in self.adapters.items())
        closed = "" if self._hooks else ", restored"
        ranks = f"rank {options.rank} of {options.world_size}"
        return f"DiffusersHandle({models}, {ranks}, algorithm={options.algorithm!r}{closed})"

    def __enter__(self) -> "DiffusersHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def parallelize(
    model: Any,
    group: Any = None,
    *,
    algorithm: str = "auto",
    mesh: tuple[int, int] | None = None,
    cfg: Any = None,
    example: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> DiffusersHandle:
    """Let a transformer or a pipeline of diffusers run on the ranks of a group; every rank must call this alike.

    A transformer is learned at its first call, and whenever one comes that differs in more than the numbers of tokens:
    some dozens of dry calls of smaller copies without attention, then two small calls in one process and on two ranks
    in threads. That takes the time of these small calls and the memory of one copy of the weights.

    Args:
        model: A transformer of diffusers with its weights, or a pipeline: all of its transformers.
        group: As in `rs.attention`.
        algorithm: As in `rs.attention`.
        mesh: As in `rs.attention`.
        cfg: A group of two ranks that compute the branches of guidance at the same time, each together with the other
            ranks of its `group`: of a DeviceMesh of two dimensions, `group=mesh["cp"], cfg=mesh["cfg"]`.
        example: The arguments of a small call of the transformer, from which it is learned at once.
        verify: Run small calls on two ranks in threads, and refuse the model if the numbers differ.

    Raises:
        UnsupportedError: The model cannot run on ranks exactly; the message names the module, and says why. Unless
            there is an example it comes at the first call.
        TransportError: The ranks do not have the same model, or the same weights.
    """
    options = RankOptions(group, algorithm, mesh)
    branches = None if cfg is None else RankOptions(cfg, algorithm, mesh)
    with options.session.call():
        check_algorithm(algorithm, ["auto", *ALGORITHMS])
        models = _transformers(model)
        for name, found in models.items():
            _check_model(name, found)
        if example is not None and len(models) > 1:
            raise ShapeError(f"the pipeline has {len(models)} transformers", argument="example", remedy="leave it out")
    adapters = {name: TransformerOnRanks(found, options, verify) for name, found in models.items()}
    handle = DiffusersHandle(adapters, branches)
    try:
        fields = {
            "call": "parallelize",
            "models": {name: type(found).__name__ for name, found in models.items()},
            "options": options[1:],
            "weights": [digest_weights(found) for found in models.values()],
        }
        for session in [x.session for x in (options, branches) if x is not None]:
            with session.call() as call:
                call.agree(Signature.of(fields), once=True)
        if example is not None:
            (adapter,) = adapters.values()
            with torch.no_grad():
                adapter.find_plan(dict(example))
    except BaseException:
        handle.restore()
        raise
    return handle


def _transformers(model: Any) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"transformer": model}
    components = getattr(model, "components", None)
    if not isinstance(components, Mapping):
        raise UnsupportedError(f"model is a {type(model).__name__}: give a transformer or a pipeline of diffusers")
    found = {name: x for name, x in components.items() if name.startswith("transformer") and isinstance(x, nn.Module)}
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no transformer among its components ({', '.join(components)})",
            remedy="give the model itself",
        )
    names = {id(x): name for name, x in reversed(found.items())}  # one transformer may stand in two places
    return {name: x for name, x in found.items() if names[id(x)] == name}


def _check_model(name: str, model: nn.Module) -> None:
    if any(module in _PARALLELIZED for module in model.modules()):
        raise UnsupportedError(f"{name} is parallelized already; call restore() of the other handle first")
    if any(x.is_meta for x in model.parameters()):
        raise UnsupportedError(f"{name} has weights on the meta device; load them first")
    is_compiled = ("_compiled_call_impl", "_orig_mod")
    if any(getattr(module, x, None) is not None for module in model.modules() for x in is_compiled):
        raise UnsupportedError(f"{name} is compiled already: parallelize the model as it was before torch.compile")


def _hooks(adapter: TransformerOnRanks) -> list[RemovableHandle]:
    """Add hooks around a model's forwards."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if adapter.wiring.run is None:  # else it is a call by which the model is learned
            adapter.before(adapter.arguments(args, kwargs))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(*ended: Any) -> None:
        if adapter.is_under_way:
            adapter.after(ended[-1])

    return [
        adapter.model.register_forward_pre_hook(before, with_kwargs=True),
        adapter.model.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


class _ForwardInPlace:
    """A model whose forward is made by `GuidedForward` until it is removed."""

    def __init__(self, adapter: TransformerOnRanks, branches: RankOptions) -> None:
        self._model = adapter.model
        self._own = self._model.__dict__.get("forward")  # such as that of a hook of diffusers or accelerate
        self._model.forward = GuidedForward(adapter, self._model.forward, branches)

    def remove(self) -> None:
        if self._own is None:
            del self._model.forward
        else:
            self._model.forward = self._own
