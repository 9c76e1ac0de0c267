"""Results of a save and of a restore: `Checkpoint` and `Restored`, and their blocking forms."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tieredckpt.concurrency import shielded
from tieredckpt.engine.restoring.restored import Restored
from tieredckpt.errors import NotFound

if TYPE_CHECKING:
    from tieredckpt.engine.engine import Engine
    from tieredckpt.engine.loop import EngineLoop
    from tieredckpt.engine.saving.lazy import LazyCapture
    from tieredckpt.engine.saving.save import Saved

__all__ = ["Checkpoint", "Restored", "SyncCheckpoint", "SyncRestored"]


class Checkpoint:
    """A save. It is in RAM when `CheckpointStore.save` returns it; `reached` tells how far down it has got."""

    def __init__(
        self,
        step: int,
        engine: Engine,
        loop: EngineLoop,
        saving: asyncio.Task[Saved] | Saved,
        lazy: LazyCapture | None = None,
    ) -> None:
        self.step = step
        """The trainer's number."""
        self._engine = engine
        self._loop = loop
        """The loop that runs the store's work."""
        self._saving = saving
        self._lazy = lazy

    def __repr__(self) -> str:
        saved = self.saved
        return f"Checkpoint(step={self.step}, {'pending' if saved is None else saved.skipped or saved.tier})"

    @property
    def saved(self) -> Saved | None:
        """Result of the save: bytes, new bytes, seconds; None while the save goes on behind the training."""
        if not isinstance(self._saving, asyncio.Task):
            return self._saving
        if self._saving.done() and not self._saving.cancelled() and self._saving.exception() is None:
            return self._saving.result()
        return None

    @property
    def skipped(self) -> str:
        """Why the save was not made, because RAM was full and what ``when_full`` says did not help; else empty."""
        saved = self.saved
        return saved.skipped if saved is not None else ""

    async def captured(self) -> None:
        """Return when the tree may be changed: when the copy of ``capture="lazy"`` or ``"reference"`` has ended.

        Nothing changes the tree while this is called. A lazy save is committed after it, or after the next call of the
        store. The step of a torch optimizer calls it first, and does not raise.

        Raises:
            Invalid: an array, which is named, was changed, donated or deleted before; nothing was saved.
            TieredCkptError: the save failed otherwise, so that nothing needs to wait for it.
        """
        if self._lazy is not None:
            await self._lazy.captured()
        elif isinstance(self._saving, asyncio.Task):
            await self._loop.call(self._saved())

    async def reached(self, tier: str) -> None:
        """Return when ``tier`` holds this step as durably as it can; `captured` is called first for a lazy save.

        And for a later lazy save that is larger than RAM: this one would wait for it.

        Raises:
            NotFound: it will not get there: it is not due on that tier, was skipped or evicted; or no such tier.
            TieredCkptError: the error that keeps the tier from it; the store goes on trying.
            Invalid: a captured array was changed, donated or deleted before it was copied.
        """
        if self._lazy is not None:
            await self._lazy.captured()
        async with self._engine.pending.confirming(only_past_ram=True):
            await self._loop.call(self._reached(tier))

    async def _reached(self, tier: str) -> None:
        self._engine.state.tier(tier)  # what it can never reach is told at once
        saved = await self._saved()
        if saved.skipped:
            raise NotFound(saved.skipped)
        await self._engine.reached(saved.step, tier)

    async def _saved(self) -> Saved:
        return await shielded(self._saving) if isinstance(self._saving, asyncio.Task) else self._saving


class SyncCheckpoint:
    """A save, with calls that block; see `Checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, loop: EngineLoop) -> None:
        self._checkpoint = checkpoint
        self._loop = loop

    def __repr__(self) -> str:
        return f"Sync{self._checkpoint!r}"

    @property
    def step(self) -> int:
        """The trainer's number."""
        return self._checkpoint.step

    @property
    def saved(self) -> Saved | None:
        """Result of the save: bytes, new bytes, seconds; None while the save goes on behind the training."""
        return self._checkpoint.saved

    @property
    def skipped(self) -> str:
        """Why the save was not made, because RAM was full and what ``when_full`` says did not help; else empty."""
        return self._checkpoint.skipped

    def captured(self) -> None:
        """Return when the tree may be changed: when the copy of ``capture="lazy"`` or ``"reference"`` has ended.

        Nothing changes the tree while this is called. A lazy save is committed after it, or after the next call of the
        store. The step of a torch optimizer calls it first, and does not raise.

        Raises:
            Invalid: an array, which is named, was changed, donated or deleted before; nothing was saved.
            TieredCkptError: the save failed otherwise, so that nothing needs to wait for it.
        """
        if self._checkpoint._lazy is not None:
            self._checkpoint._lazy.captured_blocking()
        else:
            self._loop.call_blocking(self._checkpoint.captured())

    def reached(self, tier: str) -> None:
        """Return when ``tier`` holds this step as durably as it can; `captured` is called first for a lazy save.

        Raises:
            NotFound: it will not get there: it is not due on that tier, was skipped or evicted; or no such tier.
            TieredCkptError: the error that keeps the tier from it; the store goes on trying.
            Invalid: a captured array was changed, donated or deleted before it was copied.
        """
        self._loop.call_blocking(self._checkpoint.reached(tier))


@dataclass(frozen=True, slots=True)
class SyncRestored:
    """A restored step, with calls that block; see `Restored`."""

    step: int
    serial: int
    tree: Any
    metrics: Mapping[str, float]
    sources: Mapping[str, int]
    """Bytes read from each tier; under ``peers``, those that other ranks sent."""
    lossy: bool
    """Whether it is a lossy copy, whose values are not all as they were saved; see ``restore(lossy=True)``."""
    _restored: Restored = field(repr=False, compare=False)
    _loop: EngineLoop | None = field(repr=False, compare=False)
    """Only with views; None with copies, which need the store no more and do not keep it open."""

    @property
    def views(self) -> bool:
        """Whether some arrays are views of RAM, for `verified` to check."""
        return self._restored.views

    def verified(self) -> None:
        """Return when every digest was checked; `Corrupt` names the arrays that are damaged.

        Copies are verified before `CheckpointStore.restore` returns, and this returns at once. Views
        (``copy=False``) are handed out first and checked when this is called.
        """
        if self._loop is not None:
            self._loop.call_blocking(self._restored.verified())
