"""Orbax's `AsyncCheckpointer` with JAX arrays, which it holds by reference; OCDBT, with and without compression."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tieredckpt.bench.peers.base import Peer, Setting, absent
from tieredckpt.bench.peers.tensors import jax_arrays
from tieredckpt.bench.workloads import State

__all__ = ["PEERS"]


class _Orbax:
    def __init__(self, setting: Setting, *, compression: bool) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._folder = setting.folder / "orbax"
        self._folder.mkdir()
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=compression))
        self._tree: dict[str, Any] = {}
        self._abstract: dict[str, Any] = {}
        self._last = 0

    def take(self, state: State) -> None:
        import jax

        self._tree.clear()  # or the training would hold two states
        self._tree = jax_arrays(state)
        self._abstract = {
            key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for key, array in self._tree.items()
        }

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def save(self, step: int) -> None:
        self._last = step
        self._checkpointer.save(self._path(step), args=self._ocp.args.PyTreeSave(self._tree))

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()

    def restart(self) -> None:
        self._tree = {}

    def restore(self, into: State | None) -> State:
        ocp = self._ocp
        restored = self._checkpointer.restore(
            self._path(self._last),
            args=ocp.args.PyTreeRestore(
                item=self._abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(self._abstract)
            ),
        )
        return {key: np.asarray(array) for key, array in restored.items()}

    def forget(self, step: int) -> None:
        shutil.rmtree(self._path(step))

    def close(self) -> None:
        self._checkpointer.close()


_DURABILITY = "TensorStore syncs its files; then a rename, the folder not synced"

PEERS = (
    Peer(
        "orbax",
        "AsyncCheckpointer, OCDBT, compression (its default), JAX arrays",
        _DURABILITY,
        "reference",
        ("new",),
        absent("jax", "orbax"),
        partial(_Orbax, compression=True),
    ),
    Peer(
        "orbax-raw",
        "AsyncCheckpointer, OCDBT, use_compression=False, JAX arrays",
        _DURABILITY,
        "reference",
        ("new",),
        absent("jax", "orbax"),
        partial(_Orbax, compression=False),
    ),
)
