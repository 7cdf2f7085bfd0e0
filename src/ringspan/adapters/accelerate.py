"""How do a training loop of accelerate and the Trainer of transformers or TRL run on ranks?

    parallelize_trainer(trainer)            # then trainer.train() as on one process
    parallelize(accelerator, model)         # then accelerator.prepare and the loop, as on one process

Accelerate takes processes for replicas of the data: it would give each rank another batch, average gradients, and add
up token counts and losses over ranks. So it is told that there is one process, which is what the ranks of a sequence
are together. Every rank then draws the same batches. A model that is called with a whole batch computes this rank's
part of it, and its loss is that of the batch. `accelerator.backward` sums the gradients over the ranks. The first rank
is still the main process, which alone writes files.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer

from ringspan.adapters.transformers import Handle
from ringspan.adapters.transformers import parallelize as parallelize_model
from ringspan.arguments import check_arguments, instance_of
from ringspan.errors import UnsupportedError
from ringspan.runtime.contract import Signature
from ringspan.runtime.session import session_of

__all__ = ["parallelize", "parallelize_trainer"]

_KEEPS_WEIGHTS_WHOLE = {
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_XPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_MUSA",
    "MULTI_HPU",
}


def parallelize(accelerator: Accelerator, model: nn.Module, group: Any = None, **options: Any) -> Handle:
    """Make a model and a training loop of accelerate run on ranks; call it before `accelerator.prepare`.

    Args:
        accelerator: All its processes become the ranks of every sequence. FSDP and DeepSpeed are refused.
        model: A model of transformers, or one of peft around it.
        group: All processes, as in `rs.attention`.
        **options: Those of `rs.adapters.transformers.parallelize`.

    Returns:
        The handle of the model; `restore()` also undoes the changes to the accelerator.

    Use `accelerator.backward(loss)`, which sums the gradients over the ranks where they are synchronised. Ranks that
    are given different batches are refused at the forward.
    """
    session = session_of(group)
    with session.call():
        _check(accelerator, session.transport.world_size)
    handle = parallelize_model(_without_peft(model), group, **options)
    handle.take_whole_batches()
    handle.on_restore(_OneProcess(accelerator, handle, partial(_wait, group)))
    return handle


def parallelize_trainer(trainer: Trainer, group: Any = None, **options: Any) -> Handle:
    """Make a Trainer of transformers or TRL run on ranks; call it once, before `trainer.train()`.

    Batches, losses, gradient norms, evaluation, logs and checkpoints are those of one process with the same arguments:
    `per_device_train_batch_size` counts whole sequences, which all ranks share.

    Args:
        trainer: Built as usual, on every rank.
        group: All processes, as in `rs.attention`.
        **options: Those of `rs.adapters.transformers.parallelize`.

    Returns:
        The handle of the model.
    """
    session = session_of(group)
    with session.call():
        check_arguments(trainer=(instance_of(Trainer, "transformers.Trainer(model, …)"), trainer))
        if trainer.neftune_noise_alpha is not None:
            raise UnsupportedError(
                "ranks would add other noise than one process",
                argument="neftune_noise_alpha",
                value=trainer.neftune_noise_alpha,
                remedy="leave it out",
            )
    assert trainer.model is not None
    handle = parallelize(trainer.accelerator, trainer.model, group, **options)
    handle.on_restore(_FilesOfOneProcess(trainer, partial(_wait, group)))
    return handle


def _check(accelerator: Accelerator, world_size: int) -> None:
    check_arguments(accelerator=(instance_of(Accelerator, "accelerate.Accelerator()"), accelerator))
    kind = accelerator.distributed_type
    if kind.value not in _KEEPS_WEIGHTS_WHOLE:
        raise UnsupportedError(
            "it would shard weights and reduce gradients over the ranks of a sequence in its own way",
            argument="accelerator.distributed_type",
            value=kind.value,
            remedy="write the loop yourself with handle.shard(batch) and FSDP2, as examples/train_long_context.py does",
        )
    if accelerator.num_processes != world_size:
        raise UnsupportedError(
            f"all {accelerator.num_processes} processes of the accelerator share each sequence, and the group has "
            f"{world_size}",
            argument="group",
            remedy="leave it out; replicas of the data need a loop of your own",
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise UnsupportedError(
            "accelerate would cut sequences a second time", argument="parallelism_config", remedy="leave it out"
        )
    if accelerator._models or accelerator._dataloaders:
        raise UnsupportedError(
            "it has prepared a model or a data loader for ranks with different batches",
            argument="accelerator",
            remedy="call parallelize before accelerator.prepare and trainer.train",
        )


def _without_peft(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _wait(group: Any) -> None:
    with session_of(group).call() as call:
        call.agree(Signature.of({"call": "wait for all ranks"}), once=True)


class _OneProcess:
    """Makes accelerate see a single process until it is removed."""

    def __init__(self, accelerator: Accelerator, handle: Handle, wait: Callable[[], None]) -> None:
        self._accelerator = accelerator
        self._states = [PartialState(), accelerator.state]
        self._before = [(state.num_processes, state.distributed_type) for state in self._states]
        self._dispatches = accelerator.dataloader_config.dispatch_batches
        self._tell([(1, DistributedType.NO)] * len(self._states))
        # Rank 0 would read the batches of an iterable dataset for all others.
        accelerator.dataloader_config.dispatch_batches = False
        accelerator.backward = partial(_backward, accelerator.backward, accelerator, handle)
        accelerator.wait_for_everyone = wait

    def _tell(self, said: list[tuple[int, DistributedType]]) -> None:
        for state, (num_processes, distributed_type) in zip(self._states, said, strict=True):
            state.num_processes, state.distributed_type = num_processes, distributed_type

    def remove(self) -> None:
        self._tell(self._before)
        self._accelerator.dataloader_config.dispatch_batches = self._dispatches
        del self._accelerator.backward, self._accelerator.wait_for_everyone


def _backward(
    backward: Callable[..., None], accelerator: Accelerator, handle: Handle, loss: Any, **options: Any
) -> None:
    backward(loss, **options)
    if accelerator.sync_gradients:
        handle.reduce_gradients()


class _FilesOfOneProcess:
    """Lets other ranks wait for a checkpoint that the first one writes, until it is removed."""

    def __init__(self, trainer: Trainer, wait: Callable[[], None]) -> None:
        self._trainer = trainer
        own = {"save_model": partial(_save_model, trainer.save_model, wait)}
        if trainer.args.process_index > 0:
            own["_save_rng_state"] = partial(_save_nothing)  # all ranks would write the same file
        trainer.__dict__.update(own)

    def remove(self) -> None:
        for name in ("save_model", "_save_rng_state"):
            self._trainer.__dict__.pop(name, None)


def _save_model(
    save: Callable[..., None],
    wait: Callable[[], None],
    output_dir: str | None = None,
    _internal_call: bool = False,
) -> None:
    save(output_dir, _internal_call=_internal_call)
    if _internal_call:  # of a checkpoint, which all ranks save; a user's own call may be on one rank
        wait()


def _save_nothing(output_dir: str) -> None:
    del output_dir
