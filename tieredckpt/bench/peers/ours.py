"""This library, with RAM and a directory: arrays of NumPy, torch and JAX, copied or captured by reference."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tieredckpt.bench.peers.base import Peer, Setting, absent
from tieredckpt.bench.peers.tensors import jax_arrays, join_process_group, tensors_of
from tieredckpt.bench.workloads import State
from tieredckpt.config import PosixTier, RamTier, StoreConfig
from tieredckpt.interchange import export_step
from tieredckpt.policy.base import Retention, parse
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncCheckpoint, SyncRestored

__all__ = ["PEERS", "Stored"]

Arrays: TypeAlias = Literal["numpy", "torch", "jax"]
"""The library of the saved arrays."""

_DISK = "disk"
_FIRST_STEPS = 3.0
"""Seconds between the opening of a store and the next save, in which its existing memory is mapped."""
_DURABILITY = "fsync of packs, index and commit, then of the folder"


class Stored:
    """A session with RAM and a directory."""

    def __init__(self, setting: Setting, *, arrays: Arrays, reference: bool = False) -> None:
        self._arrays: Arrays = arrays
        self._reference = reference
        self._ranks, self._meet = setting.ranks, setting.meet
        if setting.ranks > 1:
            join_process_group(setting)  # the store finds this group
        # Two snapshots and what their chunks lose to pages; `auto` gives as much where the machine has it.
        self.slab = setting.nbytes * 9 // 4 + (64 << 20)
        self._memory = setting.shared / f"ram-{setting.folder.name}"
        ram = RamTier(
            name="ram",
            path=self._memory,
            capacity=self.slab,
            retain=parse(Retention, {"kind": "last_n", "n": 1}),
            on_close="keep",
        )
        disk = PosixTier(name=_DISK, path=setting.folder / "store", retain=parse(Retention, {"kind": "last_n", "n": 2}))
        self._config = StoreConfig(tiers=(ram, disk))
        self._open(self._config)
        self._tree: dict[str, Any] = {}
        self._last: SyncCheckpoint | None = None

    def take(self, state: State) -> None:
        if self._reference:
            self._tree.clear()  # or the training would hold two states
            self._tree = jax_arrays(state)
        elif self._arrays == "jax":
            self._tree |= jax_arrays({key: array for key, array in state.items() if not self._has(key, array)})
        else:
            self._tree = dict(self._of(state))

    def _has(self, key: str, array: npt.NDArray[Any]) -> bool:
        """Whether an array has not changed since `take`: then the object stays the same, as in a training."""
        return key in self._tree and np.asarray(self._tree[key]).tobytes() == array.tobytes()

    def _of(self, state: State) -> Mapping[str, Any]:
        """The library's input for NumPy arrays, over the same memory where it can use that."""
        return tensors_of(state) if self._arrays == "torch" else state

    def save(self, step: int) -> None:
        self._last = self._store.save(step, self._tree, capture="reference" if self._reference else "copy")

    def wait(self) -> None:
        assert self._last is not None
        self._last.reached(_DISK)

    def freeze(self, keys: Sequence[str]) -> None:
        """Open the store again over its existing memory, with these arrays declared frozen, and train for a while."""
        self._store.close()
        self._open(self._config.model_copy(update={"frozen": tuple(keys)}))
        time.sleep(_FIRST_STEPS)

    def restart(self) -> None:
        self.close()
        self._open(self._config.model_copy(update={"tiers": self._config.tiers[1:]}))

    def _open(self, config: StoreConfig) -> None:
        self._store = CheckpointStore.open(config).sync()
        self._store.__enter__()

    def restore(self, into: State | None) -> State:
        if into is None:
            return self._restored(self._store.restore(like=self._like, resume=False))
        self._store.restore(into=self._of(into), resume=False)
        return into

    @property
    def _like(self) -> Any:
        """The ``like`` by which one of several ranks restores its own arrays; None for one rank, which restores all."""
        return self._tree if self._ranks > 1 else None

    def views(self) -> State:
        return self._restored(self._store.restore(like=self._like, copy=False, resume=False))

    def export(self, to: Path) -> None:
        """Write the newest step as a folder of Orbax."""
        export_step(self._store, f"orbax:{to}")

    def forget(self, step: int) -> None:
        """Wait until the tier's retention has deleted it; else the next measurement would share the device."""
        self._store.flush()

    def close(self) -> None:
        self._store.close()
        self._meet()  # else another rank's memory would go before it has closed
        shutil.rmtree(self._memory, ignore_errors=True)

    @staticmethod
    def _restored(found: SyncRestored | None) -> State:
        assert found is not None
        tree: State = found.tree
        return tree


def _alone() -> str:
    return "measured of one process alone"


PEERS = (
    Peer(
        "tieredckpt",
        "CheckpointStore.save, RAM and a directory",
        _DURABILITY,
        "copy",
        ("existing", "new"),
        lambda: None,
        partial(Stored, arrays="numpy"),
        ours=True,
        missing_for_ranks=absent("torch"),
    ),
    Peer(
        "tieredckpt-reference",
        "CheckpointStore.save(capture='reference') of JAX arrays",
        _DURABILITY,
        "reference",
        ("existing", "new"),
        absent("jax"),
        partial(Stored, arrays="jax", reference=True),
        ours=True,
        missing_for_ranks=absent("torch"),
    ),
    Peer(
        "tieredckpt-torch",
        "CheckpointStore.save of torch tensors, restore(into=) them",
        _DURABILITY,
        "copy",
        ("existing",),
        absent("torch"),
        partial(Stored, arrays="torch"),
        ours=True,
        only=("cold", "warm"),
        missing_for_ranks=_alone,
    ),
    Peer(
        "tieredckpt-jax",
        "CheckpointStore.save of JAX arrays, the same objects where they have not changed",
        _DURABILITY,
        "copy",
        ("existing",),
        absent("jax"),
        partial(Stored, arrays="jax"),
        ours=True,
        only=("tenth",),
        missing_for_ranks=_alone,
    ),
)
