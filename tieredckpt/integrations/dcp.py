"""torch.distributed.checkpoint over a store: `TieredWriter` and `TieredReader`.

::

    dcp.save({"app": AppState(model, optimizer)}, storage_writer=TieredWriter(store, step))
    future = dcp.async_save(state_dict, storage_writer=TieredWriter(store, step))
    dcp.load(state_dict, storage_reader=TieredReader(store))

The step has the state dict as a tree, under the names that it has: ``store.restore`` reads what DCP saved, and DCP
loads what ``store.save`` saved. Nothing is pickled.
"""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import optree
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tieredckpt import (
    ArraySpec,
    Invalid,
    NoSpace,
    NotFound,
    Shard,
    Sharded,
    SyncCheckpoint,
    SyncStore,
    TieredCkptError,
    TierUnavailable,
)
from tieredckpt.integrations._durable import awaited_tier
from tieredckpt.integrations._errors import blocking

__all__ = ["TieredReader", "TieredWriter"]

_log = logging.getLogger("tieredckpt")


class _OneStep:
    """Base of writer and reader of one step: it has no checkpoint id, and plans are not changed."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            instead = f"{type(self).__name__}(store, step)"
            raise Invalid(f"leave out checkpoint_id={checkpoint_id!r}: the step is the argument of {instead}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans


# torch only accepts a stager that inherits from `AsyncStager`.
class TieredWriter(_OneStep, StorageWriter, AsyncStager):
    """Saves one step, for `dcp.save` and `dcp.async_save`, which all ranks of the store call.

    The state is copied once, into RAM: by `dcp.async_save` before it returns. `dcp.save` returns when the ranks have
    their parts there; a failure is a warning and an event, and the training goes on. The future of `dcp.async_save` is
    done when the step is durable, or raises the error that prevents it.

    Args:
        store: open; the ranks of the process group are its ranks.
        step: the trainer's number.
        reached: the tier that `dcp.async_save`'s future waits for, and `dcp.save` too if it is given; by default the
            future waits for the nearest tier that outlives the process.
        metrics, overwrite, replicated: see `SyncStore.save`.
    """

    def __init__(
        self,
        store: SyncStore,
        step: int,
        *,
        reached: str | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        replicated: Sequence[str] = (),
    ) -> None:
        self._store, self._step, self._reached = blocking(store), step, reached
        self._options: dict[str, Any] = {"metrics": metrics, "overwrite": overwrite, "replicated": replicated}
        self._saved: SyncCheckpoint | TieredCkptError | None = None
        self._staged = False

    def __reduce__(self) -> NoReturn:
        raise Invalid(
            "a TieredWriter cannot go to another process: call async_save with AsyncCheckpointerType.THREAD, its "
            "default; the store copies the state at once and does the rest behind the training"
        )

    # -- as a stager --------------------------------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into RAM. `write_data` reports errors to all ranks."""
        self._staged = True
        self._save(*flatten_state_dict(state_dict))
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...

    # -- as a writer --------------------------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None: ...

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save the state dict, unless `stage` did."""
        found = _planned(planner)
        if not self._staged:
            self._save(*found)
        if isinstance(self._saved, NoSpace | TierUnavailable) and not self._staged and self._reached is None:
            _log.warning("step %d was not saved, training goes on: %s", self._step, self._saved)
        elif isinstance(self._saved, TieredCkptError):
            raise self._saved
        return _done([WriteResult(item.index, _nbytes(item), None) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Wait until the step is on its tier; runs on rank 0, which tells the others."""
        if not isinstance(self._saved, SyncCheckpoint):  # which was told
            return
        if self._staged or self._reached is not None:
            self._saved.reached(self._reached or awaited_tier(self._store))
            return
        try:
            self._saved.reached(self._store.tiers[0])
        except TieredCkptError as error:
            _log.warning("step %d is not on %s, training goes on: %s", self._step, self._store.tiers[0], error)

    def _save(self, flat: dict[str, Any], paths: dict[str, Any]) -> None:
        try:
            for name, value in flat.items():
                if hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor):
                    raise Invalid(
                        f"{name}: DCP cannot load a {type(value).__name__}, a tensor around others, out of a store; "
                        f"save the state dict with store.save and restore it with `like`"
                    )
            self._saved = self._store.save(self._step, unflatten_state_dict(flat, paths), **self._options)
        except TieredCkptError as error:
            self._saved = error


class TieredReader(_OneStep, StorageReader):
    """Loads one step, for `dcp.load`, which all ranks of the store call; any number of ranks may have saved the step.

    Each rank reads its own parts of tensors; each chunk is verified. Contiguous CPU tensors of the saved dtype are
    filled in place. Other values are restored as by `SyncStore.restore` without ``like``: the member of an enum as its
    value.

    Args:
        store: open; the ranks of the process group are its ranks.
        step: which; None for the newest.
        resume: see `SyncStore.restore`; True, to train on.
    """

    def __init__(self, store: SyncStore, step: int | None = None, *, resume: bool | None = True) -> None:
        self._store, self._step, self._resume = blocking(store), step, resume
        self._tree: Any = None
        self._keys: dict[str, ArraySpec] = {}

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Metadata of the step: one chunk for each tensor. Raises `NotFound`."""
        found = self._store.restore(self._step, as_="specs", resume=False)
        if found is None:
            raise NotFound("the store has no step to load; begin anew, or check that it is the store that was saved to")
        self._step, self._tree = found.step, found.tree
        specs: dict[int, ArraySpec] = {}

        def stand_in(spec: ArraySpec) -> object:
            dtype = _torch_dtype(spec)
            if dtype is None:
                return spec
            tensor = torch.empty(spec.shape, dtype=dtype, device="meta")
            specs[id(tensor)] = spec
            return tensor

        flat, self._paths = flatten_state_dict(_mapped(self._tree, stand_in))
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, value in flat.items():
            if isinstance(value, torch.Tensor):
                self._keys[name] = specs[id(value)]
                chunk = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
                entries[name] = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, [chunk])
            else:
                entries[name] = BytesStorageMetadata()
        return Metadata(entries, planner_data=self._paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None: ...

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Restore everything in the plan, in one call of the store."""
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        targets = {id(item): planner.resolve_tensor(item).detach() for item in tensors}
        wanted: dict[str, list[Shard]] = {}
        buffers: dict[int, torch.Tensor] = {}
        for item in tensors:
            spec = self._keys[item.storage_index.fqn]
            buffer = buffers[id(item)] = _buffer(spec, item, targets[id(item)])
            wanted.setdefault(spec.key, []).append(Shard(buffer, spec.shape, tuple(item.storage_offsets)))
        whole = {spec.key for item in objects for spec in _specs(_at(self._tree, self._paths[item.storage_index.fqn]))}
        scalars: set[int] = set()

        def request(spec: ArraySpec) -> object:
            if spec.key in wanted:
                return Sharded(wanted[spec.key])
            if spec.key in whole or not spec.shape:
                array = _empty(spec, spec.shape)
                if spec.kind == "numpy-scalar":
                    scalars.add(id(array))
                return array
            return Shard(_empty(spec, (0, *spec.shape[1:])), spec.shape, (0,) * len(spec.shape))

        into = _mapped(self._tree, request)
        self._store.restore(self._step, into=into, resume=self._resume)
        for item in tensors:
            if buffers[id(item)] is not targets[id(item)]:
                targets[id(item)].copy_(buffers[id(item)])
            planner.commit_tensor(item, targets[id(item)])
        for item in objects:
            value = _at(into, self._paths[item.storage_index.fqn])
            value = _mapped(value, lambda leaf: leaf[()] if id(leaf) in scalars else leaf, np.ndarray)
            # The planner unpickles these bytes, which are pickled here from values that were read without a pickle.
            data = io.BytesIO()
            torch.save(value, data)
            data.seek(0)
            planner.load_bytes(item, data)
        return _done(None)


def _planned(planner: SavePlanner) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict that ``planner`` plans, flat, and the paths of its names."""
    cls = type(planner)
    for method in ("resolve_data", "lookup_object", "transform_object"):
        if getattr(cls, method, None) is not getattr(DefaultSavePlanner, method):
            raise Invalid(
                f"the planner {cls.__name__} changes what is saved ({method}), and a store saves the state dict as it "
                f"is: change the state dict before the save, and use a DefaultSavePlanner"
            )
    assert isinstance(planner, DefaultSavePlanner)
    return planner.state_dict, planner.mappings or {name: (name,) for name in planner.state_dict}


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    sizes: Sequence[int] = item.tensor_data.chunk.sizes
    return math.prod(sizes) * int(item.tensor_data.properties.dtype.itemsize)


def _torch_dtype(spec: ArraySpec) -> torch.dtype | None:
    """The torch dtype of a stored tensor; None for other arrays, which DCP treats as objects."""
    dtype = getattr(torch, spec.dtype.name, None) if spec.kind == "torch" else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _empty(spec: ArraySpec, shape: Sequence[int]) -> Any:
    """An array to be filled, of the kind that was saved."""
    dtype = _torch_dtype(spec)
    return np.empty(shape, spec.dtype) if dtype is None else torch.empty(tuple(shape), dtype=dtype)


def _buffer(spec: ArraySpec, item: ReadItem, target: torch.Tensor) -> torch.Tensor:
    """``target`` itself where the store can fill it."""
    if target.device.type == "cpu" and target.dtype is _torch_dtype(spec) and target.is_contiguous():
        return target
    found: torch.Tensor = _empty(spec, item.lengths)
    return found


def _mapped(tree: Any, change: Callable[[Any], object], kind: type = ArraySpec) -> Any:
    """``tree`` with ``change`` applied to every leaf of a kind."""
    return optree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, kind) else leaf, tree, none_is_leaf=True)


def _specs(tree: Any) -> list[ArraySpec]:
    found: list[ArraySpec] = []
    _mapped(tree, found.append)
    return found


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    """The value at a path of DCP, which has the keys of dicts as text."""
    for name in path:
        if not isinstance(tree, dict) or name in tree:
            tree = tree[name]
        else:
            tree = next(value for key, value in tree.items() if str(key) == name)
    return tree


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
