"""Orbax's `AsyncCheckpointer` with JAX arrays, held by reference, in OCDBT with and without compression.

Several processes use `jax.distributed`: each array has a first axis with one row per process.
"""

from __future__ import annotations

import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tieredckpt.bench.peers.base import Peer, Setting, absent
from tieredckpt.bench.peers.tensors import jax_arrays
from tieredckpt.bench.workloads import State, of_rank

__all__ = ["PEERS"]


class _Orbax:
    def __init__(self, setting: Setting, *, compression: bool) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._ranks, self._of = setting.ranks, of_rank(setting.rank)
        if setting.ranks > 1:
            _join(setting)
        self._folder = setting.folder / "orbax"
        self._folder.mkdir(exist_ok=True)
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=compression))
        self._tree: dict[str, Any] = {}
        self._abstract: dict[str, Any] = {}
        self._last = 0

    def take(self, state: State) -> None:
        import jax

        self._tree.clear()  # else the training would hold two states
        self._tree = jax_arrays(state) if self._ranks == 1 else self._spread(state)
        self._abstract = {
            key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for key, array in self._tree.items()
        }

    def _spread(self, state: State) -> dict[str, Any]:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        rows = NamedSharding(Mesh(jax.devices(), ("ranks",)), PartitionSpec("ranks"))
        here = jax_arrays({key.removesuffix(self._of): array[None] for key, array in state.items()})
        return {
            key: jax.make_array_from_single_device_arrays((self._ranks, *array.shape[1:]), rows, [array])
            for key, array in here.items()
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
        if self._ranks == 1:
            return {key: np.asarray(array) for key, array in restored.items()}
        return {key + self._of: np.asarray(array.addressable_data(0))[0] for key, array in restored.items()}

    def forget(self, step: int) -> None:
        shutil.rmtree(self._path(step), ignore_errors=True)  # as all ranks do

    def close(self) -> None:
        self._checkpointer.close()


def _join(setting: Setting) -> None:
    """Join all ranks by `jax.distributed`, unless they are joined."""
    import jax

    if jax.distributed.is_initialized():
        return
    port = setting.shared / "port"
    if setting.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port.write_text(str(free.getsockname()[1]))
    setting.meet()
    jax.distributed.initialize(f"127.0.0.1:{port.read_text()}", setting.ranks, setting.rank)


_DURABILITY = "TensorStore syncs its files; then a rename, the folder not synced"

PEERS = tuple(
    Peer(
        name,
        f"AsyncCheckpointer, OCDBT, {how}, JAX arrays",
        _DURABILITY,
        "reference",
        ("new",),
        absent("jax", "orbax"),
        partial(_Orbax, compression=name == "orbax"),
    )
    for name, how in (("orbax", "compression (its default)"), ("orbax-raw", "use_compression=False"))
)
