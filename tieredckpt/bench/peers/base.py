"""The interface of a peer: its name, its description, and a session of saves and restores."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from tieredckpt.bench.workloads import State

__all__ = ["Into", "Peer", "Session", "Setting", "absent", "sync_files"]

Into = Literal["new", "existing"]
"""Target of a restore: new arrays, or the caller's."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Folders, size and ranks of a session."""

    folder: Path
    """Empty, on the device that is measured; of all ranks."""
    shared: Path
    """Where a folder of shared memory may be made."""
    nbytes: int
    """Bytes of the state, or of this rank's share of it."""
    rank: int = 0
    ranks: int = 1
    meet: Callable[[], None] = lambda: None
    """Returns when every rank has called it as often."""

    def own(self, name: str) -> Path:
        """A new folder of this rank alone, for a peer whose ranks do not save together."""
        path = self.folder / f"{name}-{self.rank}"
        path.mkdir()
        return path


class Session(Protocol):
    """A training, or one rank of it, that saves with one peer. Only `save`, `wait` and `restore` are timed.

    Each rank has arrays of its own, under names of its own, and all ranks make the same calls in the same order.
    """

    def take(self, state: State) -> None:
        """Make the argument of `save`: the peer's own arrays, over the memory of ``state`` if the peer uses it.

        ``state`` has the same arrays at every call, with other values.
        """

    def save(self, step: int) -> None:
        """Save; return when the peer says that the state may change. Each step is given once, in ascending order."""

    def wait(self) -> None:
        """Wait until the last saved step is as durable as the peer makes it."""

    def restart(self) -> None:
        """Drop everything in memory, as a new process does, to restore the last saved step."""

    def restore(self, into: State | None) -> State:
        """Restore the last saved step: into ``into``, where the peer can, else into new arrays."""

    def forget(self, step: int) -> None:
        """Delete a step that is not the last one, if the peer does not do so itself."""

    def close(self) -> None:
        """End the background work."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to store the state of a training."""

    name: str
    way: str
    """The calls, in the terms of the peer's documentation."""
    durability: str
    """Durability when `Session.wait` returns."""
    capture: Literal["copy", "reference", "blocking"]
    """Whether a save copies the state, holds immutable arrays, or returns when everything is written."""
    restores: tuple[Into, ...]
    """Its ways to restore."""
    missing: Callable[[], str | None]
    """Why it cannot run here; None when it can."""
    open: Callable[[Setting], Session]
    ours: bool = False
    """Whether it is this library."""
    only: tuple[str, ...] | None = None
    """The parts of a turn that it takes part in, with the first workload only; None for all."""
    missing_for_ranks: Callable[[], str | None] = lambda: None
    """Why several ranks cannot save with it here; None when they can."""


def absent(*modules: str) -> Callable[[], str | None]:
    """A function that tells which of ``modules`` are not installed, without importing them."""

    def missing() -> str | None:
        lacking = [name for name in modules if find_spec(name) is None]
        return f"not installed: {', '.join(lacking)}" if lacking else None

    return missing


def sync_files(folder: Path) -> None:
    """Sync every file and folder, for a peer that does not."""
    for where, _, names in os.walk(folder):
        for path in [where, *(os.path.join(where, name) for name in names)]:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
