"""`TieredCheckpointManager`: the calls of ``torch_checkpointing.CheckpointManager``, over a store.

::

    manager = TieredCheckpointManager("ckpt.toml")
    manager.save("step_1000", {"model": model.state_dict(), "step": 1000})
    manager.load("step_1000", into={"model": model.state_dict()})

It replaces the manager, not the `Storage` behind it. A `Storage` gets files that ``torch.save`` pickled, and reading
unpickles them as code; only the one of rank 0 learns that a checkpoint is complete; and it works in a process that dies
with the training.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tieredckpt import (
    AS_SAVED,
    ArraySpec,
    CheckpointStore,
    Invalid,
    NoSpace,
    NotFound,
    StoreConfig,
    SyncCheckpoint,
    SyncStore,
    TieredCkptError,
    TierUnavailable,
)
from tieredckpt.integrations._durable import awaited_tier

__all__ = ["TieredCheckpointManager"]

_log = logging.getLogger("tieredckpt")


class TieredCheckpointManager:
    """Saves and loads ``{name: value}``, as ``torch_checkpointing.CheckpointManager`` does.

    The last number in a checkpoint's id is its step: ``"/ckpt/step_1000"`` is step 1000. DTensors are saved by all
    ranks and loaded on any number of them, without a resharder. Other values must be the same on all ranks, except
    those named in ``per_rank``.

    Args:
        source: any argument of `CheckpointStore.open`, or an open store.
        per_rank: names of items that every rank has of its own, such as a data loader's state. A rank loads what the
            rank of the same number saved.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Mapping[str, Any] | StoreConfig | SyncStore,
        *,
        per_rank: Sequence[str] = (),
    ) -> None:
        self._opened = not isinstance(source, SyncStore)
        self.store = source if isinstance(source, SyncStore) else CheckpointStore.open_sync(source)
        """The store: ``store.latest_step()`` is the step to load after a restart."""
        self._per_rank = per_rank
        self._last: Future[None] | None = None

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> Future[None]:
        """Copy the state into RAM; afterwards it may be changed.

        Returns a future that is done when the step is on the nearest tier that outlives the process, or raises the
        error that prevents it. The training goes on in either case.

        Raises:
            Invalid: a value cannot be stored, which is named, or the id has no number.
            Conflict: the step was saved before.
        """
        step, tree = _step_of(checkpoint_id), self._tree(checkpoint)
        outcome: Future[None] = Future()
        self._last = outcome
        try:
            saved = self.store.save(step, tree)
        except (NoSpace, TierUnavailable) as error:
            _log.warning("step %d was not saved, training goes on: %s", step, error)
            outcome.set_exception(error)
            return outcome
        waiting = (saved, awaited_tier(self.store), outcome)
        threading.Thread(target=_await, args=waiting, name=f"step {step}", daemon=True).start()
        return outcome

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        metadata_format: Any = None,
    ) -> Mapping[str, Any]:
        """Load a step: the values in ``into``, into its tensors, lists and dicts; without ``into``, everything.

        A value None in ``into`` is loaded as it was saved, tensors to ``map_location``. A value that the step lacks
        stays as it is, with a warning; with ``strict`` that is an error. The next save continues the loaded step.

        Raises:
            NotFound: there is no such step, or ``strict`` and something is missing.
            Invalid: an array does not fit, and is named; or an argument for files of ``torch_checkpointing``.
        """
        if metadata_format is not None:
            raise Invalid("metadata_format is of checkpoints that are files; load those with torch_checkpointing")
        if not isinstance(map_location, str | torch.device | None):
            raise Invalid(f"map_location is a device here, not a {type(map_location).__name__}")
        step = _step_of(os.fspath(checkpoint_id))
        specs = self.store.restore(step, as_="specs", resume=False)
        if specs is None:
            raise NotFound(f"the store has no step {step}; store.latest_step() tells the newest")
        missing: list[str] = []
        wanted = AS_SAVED if into is None else _wanted(specs.tree, self._tree(into), "", missing)
        found = self.store.restore(step, like=wanted, resume=True)  # also if this rank raises: others wait for it
        assert found is not None
        if missing and strict:
            raise NotFound(f"step {step} lacks {', '.join(missing)}")
        if missing:
            _log.warning("step %d lacks %s, which stay as they are", step, ", ".join(missing[:10]))
        for name in self._per_rank:
            of_ranks = found.tree.pop(name, {})
            if (rank := _rank()) in of_ranks:
                found.tree[name] = of_ranks[rank]
        targets = dict.fromkeys(found.tree) if into is None else into
        return {
            name: _filled(target, found.tree[name], map_location)
            for name, target in targets.items()
            if name in found.tree
        }

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Reserve memory for saves of such a state, so that the first save does not wait for it."""
        self.store.prepare(self._tree(checkpoint))

    def lock(self) -> AbstractContextManager[None]:
        """Does nothing: the state is copied when `save` returns."""
        return nullcontext()

    def close(self) -> None:
        """Wait for the last save, and close the store if it was opened here."""
        if self._last is not None:
            wait([self._last])
        if self._opened:
            self.store.close()

    def _tree(self, items: Mapping[str, Any]) -> dict[str, Any]:
        rank = _rank()
        return {name: {rank: value} if name in self._per_rank else value for name, value in items.items()}


def _await(saved: SyncCheckpoint, tier: str, outcome: Future[None]) -> None:
    try:
        saved.reached(tier)
    except TieredCkptError as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(None)


def _step_of(checkpoint_id: str) -> int:
    numbers = re.findall(r"\d+", checkpoint_id)
    if not numbers:
        raise Invalid(f"checkpoint {checkpoint_id!r} has no number, which would be its step; call it 'step_1000', say")
    return int(numbers[-1])


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _wanted(stored: Any, target: Any, path: str, missing: list[str]) -> Any:
    """The tree to ask the store for, to fill ``target``; paths that only ``target`` has are ``missing``."""
    if isinstance(stored, dict) and isinstance(target, dict):
        missing += [repr(f"{path}{key}") for key in target if key not in stored]
        return {
            key: _wanted(value, target[key], f"{path}{key}/", missing) if key in target else AS_SAVED
            for key, value in stored.items()
        }
    if type(stored) is type(target) and isinstance(target, list | tuple) and len(stored) == len(target):
        pairs = enumerate(zip(stored, target, strict=True))
        return _like(target, [_wanted(one, other, f"{path}{at}/", missing) for at, (one, other) in pairs])
    if isinstance(stored, ArraySpec) and isinstance(target, torch.Tensor):
        if str(target.dtype) == f"torch.{stored.dtype.name}":
            return target
        if hasattr(target, "to_local"):
            raise Invalid(
                f"{path.rstrip('/')!r} is a DTensor of {target.dtype}, and was saved as {stored.dtype.name}; load it "
                f"into one of that dtype"
            )
    return AS_SAVED


def _filled(target: Any, value: Any, device: Any) -> Any:
    """``target`` with the values of ``value``, filled in place where possible."""
    if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor):
        with torch.no_grad():
            return target.copy_(value)
    if isinstance(target, dict) and isinstance(value, dict):
        target.update({key: _filled(target[key], value[key], device) for key in target if key in value})
        return target
    if isinstance(target, list | tuple) and isinstance(value, list | tuple) and len(target) == len(value):
        filled = [_filled(one, other, device) for one, other in zip(target, value, strict=True)]
        if isinstance(target, tuple):
            return _like(target, filled)
        target[:] = filled
        return target
    return _moved(value, device)


def _like(sequence: Any, values: list[Any]) -> Any:
    """A list, tuple or named tuple, as ``sequence`` is one, of other values."""
    return sequence._make(values) if hasattr(sequence, "_make") else type(sequence)(values)


def _moved(value: Any, device: Any) -> Any:
    if device is None:
        return value
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [_moved(each, device) for each in value])
    return value.to(device) if isinstance(value, torch.Tensor) else value
