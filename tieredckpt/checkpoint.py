"""What a save and a restore hand to the trainer: `Checkpoint` and `Restored`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tieredckpt.engine.engine import Engine
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.saving.save import Saved
from tieredckpt.errors import NotFound

__all__ = ["Checkpoint", "Restored"]


class Checkpoint:
    """A save. It is in RAM when `CheckpointStore.save` returns it; `reached` tells how far down it has got."""

    def __init__(self, step: int, engine: Engine, loop: EngineLoop, saving: asyncio.Task[Saved] | Saved) -> None:
        self.step = step
        """The trainer's number."""
        self._engine = engine
        self.engine_loop = loop
        """Where the store's work runs."""
        self._saving = saving

    def __repr__(self) -> str:
        saved = self.saved
        return f"Checkpoint(step={self.step}, {'pending' if saved is None else saved.skipped or saved.tier})"

    @property
    def saved(self) -> Saved | None:
        """What the save did: bytes, new bytes, seconds; None while a capture by reference is under way."""
        if isinstance(self._saving, Saved):
            return self._saving
        if self._saving.done() and not self._saving.cancelled() and self._saving.exception() is None:
            return self._saving.result()
        return None

    @property
    def skipped(self) -> str:
        """Why the save was not made, because RAM was full and what ``when_full`` says did not help; else empty."""
        saved = self.saved
        return saved.skipped if saved is not None else ""

    async def reached(self, tier: str) -> None:
        """Return when ``tier`` holds this step as durably as the tier can.

        Raises:
            NotFound: it will not get there: it is not due on that tier, was skipped or evicted; or no such tier.
            TieredCkptError: the error that keeps the tier from it; the store goes on trying.
            Invalid: a captured array was donated or deleted before it was copied.
        """
        await self.engine_loop.call(self._reached(tier))

    async def _reached(self, tier: str) -> None:
        saved = self._saving if isinstance(self._saving, Saved) else await asyncio.shield(self._saving)
        if saved.skipped:
            raise NotFound(saved.skipped)
        await self._engine.reached(saved.step, tier)


@dataclass(frozen=True, slots=True)
class Restored:
    """A step brought back."""

    step: int
    serial: int
    tree: Any
    metrics: Mapping[str, float]
    sources: Mapping[str, int]
    """Bytes that came from each tier, and as ``peers`` those that other ranks gave."""
    _check: Callable[[], Awaitable[None]] | None = field(default=None, repr=False, compare=False)

    @property
    def views(self) -> bool:
        """Whether some arrays are views of RAM, for `verified` to check."""
        return self._check is not None

    async def verified(self) -> None:
        """Return when every digest was checked; `Corrupt` names the arrays that are damaged.

        Copies are verified before `CheckpointStore.restore` returns, and this returns at once. Views
        (``copy=False``) are handed out first and checked when this is called.
        """
        if self._check is not None:
            await self._check()
