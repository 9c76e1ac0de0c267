"""Hugging Face accelerate over a store: `save_state` and `load_state`, in the place of the Accelerator's own.

::

    save_state(accelerator, store, step)
    step = load_state(accelerator, store)

The Accelerator's own methods write pickles and cannot be told to write elsewhere.
"""

from __future__ import annotations

from typing import Any

from tieredckpt import SyncCheckpoint, SyncStore
from tieredckpt.integrations.torch import TrainingState

__all__ = ["load_state", "save_state"]


def save_state(accelerator: Any, store: SyncStore, step: int, **options: Any) -> SyncCheckpoint:
    """Save what ``accelerator.save_state`` saves: all that was prepared or registered, and random numbers.

    A call of all processes, which are the ranks of the store; DDP and FSDP2 included.

    Args:
        accelerator: its data loaders are saved where it was made with ``use_stateful_dataloader``; of others, the
            epoch of a seedable sampler.
        store: open.
        step: the trainer's number.
        options: ``metrics``, ``overwrite`` and ``replicated`` of `SyncStore.save`, with its errors.
    """
    return _state_of(accelerator).save(store, step, **options)


def load_state(
    accelerator: Any, store: SyncStore, step: int | None = None, *, resume: bool | None = True
) -> int | None:
    """Load a step, the newest without one, into what is prepared and registered by now; on any number of processes.

    Returns its number, or None when the store is empty. Arguments and errors are those of `TrainingState.restore`.
    """
    state = _state_of(accelerator)
    found = state.restore(store, step, resume=resume)
    if found is not None:
        accelerator.step = state["step"]
        for loader, epoch in zip(accelerator._dataloaders, state["epochs"], strict=True):
            loader.iteration = epoch
        for sampler, saved in zip(_samplers(accelerator), state["samplers"], strict=True):
            sampler.initial_seed, sampler.epoch = saved
    return found


class _Position:
    """Where a data loader is: the state that the Accelerator keeps of it, a batch behind the loader's own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)
        self._loader.base_dataloader.state_dict()  # makes its iterator now, and not after the random numbers are set


def _state_of(accelerator: Any) -> TrainingState:
    parts: dict[str, Any] = {"step": accelerator.step}
    parts["epochs"] = [getattr(loader, "iteration", 0) for loader in accelerator._dataloaders]
    parts["samplers"] = [(sampler.initial_seed, sampler.epoch) for sampler in _samplers(accelerator)]
    loaders = [each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)]
    for name, found in (
        ("model", accelerator._models),
        ("optimizer", [optimizer.optimizer for optimizer in accelerator._optimizers]),
        ("scheduler", accelerator._schedulers),
        ("position", list(map(_Position, loaders))),
        ("scaler", [] if accelerator.scaler is None else [accelerator.scaler]),
        ("custom", accelerator._custom_objects),
    ):
        parts |= {f"{name}_{i}": each for i, each in enumerate(found)}
    return TrainingState(per_rank=[name for name in parts if name.startswith("position_")], **parts)


def _samplers(accelerator: Any) -> list[Any]:
    found = [getattr(getattr(loader, "batch_sampler", None), "sampler", None) for loader in accelerator._dataloaders]
    return [sampler for sampler in found if hasattr(sampler, "initial_seed") and hasattr(sampler, "epoch")]
