"""Hugging Face accelerate over a store: `save_state` and `load_state`, in the place of the Accelerator's own.

::

    save_state(accelerator, store, step)
    step = load_state(accelerator, store)

The Accelerator's own methods write pickles and cannot be told to write elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tieredckpt import Invalid, Shard, SyncCheckpoint, SyncStore
from tieredckpt.integrations._errors import blocking
from tieredckpt.integrations.torch import TrainingState

__all__ = ["load_state", "save_state"]

_log = logging.getLogger("tieredckpt")


def save_state(accelerator: Any, store: SyncStore, step: int, **options: Any) -> SyncCheckpoint:
    """Save everything that ``accelerator.save_state`` saves: prepared and registered objects, and random number states.

    All processes, which are the ranks of the store, call it; also with DDP and FSDP2.

    Args:
        accelerator: its data loaders are saved where it was made with ``use_stateful_dataloader``; of others, the
            epoch of a seedable sampler.
        store: open.
        step: the trainer's number.
        options: ``metrics``, ``overwrite`` and ``replicated`` of `SyncStore.save`, with its errors.

    Raises `Invalid` under DeepSpeed, Megatron-LM and FSDP1, and for a store that is not blocking.
    """
    return _state_of(accelerator).save(blocking(store), step, **options)


def load_state(
    accelerator: Any, store: SyncStore, step: int | None = None, *, resume: bool | None = True
) -> int | None:
    """Load a step, by default the newest, into the prepared and registered objects; on any number of processes.

    On another number of processes than saved it, seeds and epochs of seedable samplers are those of the first process;
    positions in the data and random numbers stay as they are.

    Returns its number, or None when the store is empty. Arguments and errors are those of `TrainingState.restore`,
    and `Invalid` as of `save_state`, and where the step has another number of data loaders than are prepared.
    """
    blocking(store)
    state = _state_of(accelerator)
    if accelerator.is_main_process and any(_loses_order(each, accelerator) for each in accelerator._dataloaders):
        _log.warning(
            "a data loader shuffles by random numbers that no state has: resumed in the middle of an epoch, it gives "
            "some items again and others never; set use_seedable_sampler=True in DataLoaderConfiguration"
        )
    found = state.restore(store, step, resume=resume)
    if found is not None:
        accelerator.step = state["step"]
        every = state["samplers"]
        mine = every[accelerator.process_index if len(every) == accelerator.num_processes else 0]
        loaders, samplers = accelerator._dataloaders, _samplers(accelerator)
        for what, stored, live in (("data loaders", state["epochs"], loaders), ("seedable samplers", mine, samplers)):
            if len(stored) != len(live):
                raise Invalid(
                    f"step {found} has {len(stored)} {what}, and {len(live)} are prepared: before load_state, prepare "
                    f"the data loaders that were prepared when it was saved, with the same configuration"
                )
        for loader, epoch in zip(loaders, state["epochs"], strict=True):
            loader.iteration = epoch
        for sampler, saved in zip(samplers, mine, strict=True):
            sampler.initial_seed, sampler.epoch = saved
    return found


class _Replicas(TrainingState):
    """A state of DDP, whose wrappers the Accelerator removes."""

    _replicated = True


class _Position:
    """Position of a data loader: the state that the Accelerator keeps, one batch behind the loader's own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)
        self._loader.base_dataloader.state_dict()  # makes its iterator before the random numbers are set


class _OfFirst:
    """A registered object: saves the state of the first process, as the Accelerator does, and the shards of all."""

    def __init__(self, custom: Any, *, first: bool) -> None:
        self._custom, self._first = custom, first

    def state_dict(self) -> Any:
        state = self._custom.state_dict()  # on all processes, which may have to compute it together
        return state if self._first or not isinstance(state, Mapping) else _shards(state)

    def load_state_dict(self, state: Any) -> None:
        self._custom.load_state_dict(state)


def _shards(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The sharded values of a state; the first process saves the rest."""
    nested = {key: _shards(value) for key, value in state.items() if isinstance(value, Mapping)}
    shards = {key: value for key, value in state.items() if hasattr(value, "to_local") or isinstance(value, Shard)}
    return shards | {key: value for key, value in nested.items() if value}


def _refuse(accelerator: Any) -> None:
    """Raise `Invalid` for engines that do not give access to the state of model and optimizer."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) or (
        kind == DistributedType.FSDP and not getattr(accelerator.state, "is_fsdp2", False)
    ):
        raise Invalid(
            f"accelerate with {getattr(kind, 'value', kind)} is not saved to a store, for its engine has the states in "
            f"a form of its own: use FSDP2 (fsdp_version=2) or DDP, or accelerator.save_state to a folder"
        )


def _state_of(accelerator: Any) -> TrainingState:
    _refuse(accelerator)
    parts: dict[str, Any] = {"step": accelerator.step}
    parts["epochs"] = [getattr(loader, "iteration", 0) for loader in accelerator._dataloaders]
    # Of every process, since device-specific seeds differ. Another number of processes takes the seeds of the first.
    parts["samplers"] = gather_object([[(each.initial_seed, each.epoch) for each in _samplers(accelerator)]])
    loaders = [each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)]
    parts |= _models(accelerator)
    for name, found in (
        ("optimizer", [optimizer.optimizer for optimizer in accelerator._optimizers]),
        ("scheduler", accelerator._schedulers),
        ("position", list(map(_Position, loaders))),
        ("scaler", [] if accelerator.scaler is None else [accelerator.scaler]),
        ("custom", [_OfFirst(each, first=accelerator.is_main_process) for each in accelerator._custom_objects]),
    ):
        parts |= {f"{name}_{i}": each for i, each in enumerate(found)}
    per_rank = [name for name in parts if name.startswith("position_")]
    replicas = accelerator.distributed_type in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    return (_Replicas if replicas else TrainingState)(per_rank=per_rank, **parts)


def _models(accelerator: Any) -> dict[str, torch.nn.Module]:
    """The models by part name; one part with all models if an optimizer has parameters of several."""
    models = {f"model_{i}": model for i, model in enumerate(accelerator._models)}
    sets = [set(model.parameters()) for model in models.values()]
    for optimizer in accelerator._optimizers:
        held = {param for group in optimizer.param_groups for param in group["params"]}
        if not any(held <= each for each in sets):
            return {"models": torch.nn.ModuleDict(models)}
    return models


def _loses_order(loader: Any, accelerator: Any) -> bool:
    """Whether a data loader that tells its position shuffles in an order that neither it nor the Accelerator saves."""
    if not getattr(loader, "use_stateful_dataloader", False):
        return False
    sampler: Any = loader
    while (inner := getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))) is not None:
        sampler = inner
    # Those of torchdata have a state, which the Accelerator loses when it divides the batches among processes.
    saved = hasattr(sampler, "initial_seed") or (
        type(sampler).__module__.startswith("torchdata.") and accelerator.num_processes == 1
    )
    draws = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    return draws and not saved


def _samplers(accelerator: Any) -> list[Any]:
    found = [getattr(getattr(loader, "batch_sampler", None), "sampler", None) for loader in accelerator._dataloaders]
    return [sampler for sampler in found if hasattr(sampler, "initial_seed") and hasattr(sampler, "epoch")]
