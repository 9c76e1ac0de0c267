"""The gate before RAM: work that can wait pauses while a training waits for a save, and readers of RAM give way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tieredckpt.engine.notify import Notification

__all__ = ["GiveWay", "RamGate"]


class GiveWay(Protocol):
    """Releases a step that a reader keeps in RAM, for a save that needs the memory."""

    async def __call__(self, *, must: bool) -> None:
        """Release the step in RAM, if another tier has it; with ``must`` in any case."""


@dataclass
class RamGate:
    """Lets saves pass before exports. Touched on the engine's loop alone."""

    _passed: Notification = field(default_factory=Notification)
    """Notified when a save opens the gate again; `State.changed` would wake promoters beside the rest of the save."""
    _saving: int = 0
    """How many saves have closed the gate."""
    _readers: list[GiveWay] = field(default_factory=list)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Make callers of `quiet` wait during the block, which does only what a training waits for in a save."""
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1
            self._passed.notify()

    @property
    def is_closed(self) -> bool:
        """Whether a save plans, copies to RAM, or commits there."""
        return self._saving > 0

    async def quiet(self) -> None:
        """Return when no save closes the gate."""
        await self._passed.until(lambda: not self.is_closed)

    @contextmanager
    def yielding(self, give_way: GiveWay) -> Iterator[None]:
        """Call ``give_way`` when a save needs memory of RAM, while the block runs."""
        self._readers.append(give_way)
        try:
            yield
        finally:
            self._readers.remove(give_way)

    async def make_readers_yield(self, *, must: bool) -> None:
        """Ask every reader of RAM that can wait to release its step; see `GiveWay`."""
        for give_way in tuple(self._readers):
            await give_way(must=must)
