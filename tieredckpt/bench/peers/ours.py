"""This library: RAM and a directory; arrays that are copied, and JAX arrays that are captured by reference."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from tieredckpt.bench.peers.base import Peer, Setting, absent
from tieredckpt.bench.peers.tensors import jax_arrays
from tieredckpt.bench.workloads import State
from tieredckpt.config import PosixTier, RamTier, StoreConfig
from tieredckpt.policy.base import Retention, parse
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncCheckpoint, SyncRestored

__all__ = ["PEERS", "Stored"]

_DISK = "disk"
_DURABILITY = "fsync of packs, index and commit, then of the folder"


class Stored:
    """A session with RAM and a directory."""

    def __init__(self, setting: Setting, *, reference: bool) -> None:
        self._reference = reference
        # Two snapshots and what their chunks lose to pages; `auto` gives as much where the machine has it.
        self.slab = setting.nbytes * 9 // 4 + (64 << 20)
        ram = RamTier(
            name="ram",
            path=setting.shared / f"ram-{secrets.token_hex(4)}",
            capacity=self.slab,
            retain=parse(Retention, {"kind": "last_n", "n": 1}),
            on_close="release",
        )
        disk = PosixTier(name=_DISK, path=setting.folder / "store", retain=parse(Retention, {"kind": "last_n", "n": 2}))
        self._config = StoreConfig(tiers=(ram, disk))
        self._store = CheckpointStore.open(self._config).sync()
        self._store.__enter__()
        self._tree: dict[str, Any] = {}
        self._last: SyncCheckpoint | None = None

    def take(self, state: State) -> None:
        if self._reference:
            self._tree.clear()  # or the training would hold two states
            self._tree = jax_arrays(state)
        else:
            self._tree = dict(state)

    def save(self, step: int) -> None:
        self._last = self._store.save(step, self._tree, capture="reference" if self._reference else "copy")

    def wait(self) -> None:
        assert self._last is not None
        self._last.reached(_DISK)

    def restart(self) -> None:
        self.close()
        self._store = CheckpointStore.open(self._config.model_copy(update={"tiers": self._config.tiers[1:]})).sync()
        self._store.__enter__()

    def restore(self, into: State | None) -> State:
        return self._restored(self._store.restore(into=into, resume=False))

    def restore_from_memory(self, into: State) -> None:
        self._store.restore(into=into, resume=False)

    def views(self) -> State:
        return self._restored(self._store.restore(copy=False, resume=False))

    def forget(self, step: int) -> None:
        """The tier's retention does; wait until it has, or what is measured next would share the device with it."""
        self._store.flush()

    def close(self) -> None:
        self._store.close()

    @staticmethod
    def _restored(found: SyncRestored | None) -> State:
        assert found is not None
        tree: State = found.tree
        return tree


PEERS = (
    Peer(
        "tieredckpt",
        "CheckpointStore.save, RAM and a directory",
        _DURABILITY,
        "copy",
        ("existing", "new"),
        lambda: None,
        partial(Stored, reference=False),
        ours=True,
    ),
    Peer(
        "tieredckpt-reference",
        "CheckpointStore.save(capture='reference') of JAX arrays",
        _DURABILITY,
        "reference",
        ("existing", "new"),
        absent("jax"),
        partial(Stored, reference=True),
        ours=True,
    ),
)
