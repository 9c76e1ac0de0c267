"""Checks in the background that arrays declared frozen still have the bytes that saves recorded for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tieredckpt.concurrency import in_thread
from tieredckpt.engine import limits
from tieredckpt.engine.saving.cells import Cell, cells_of
from tieredckpt.engine.saving.last_save import LastSave
from tieredckpt.engine.saving.outlet import Outlet
from tieredckpt.engine.saving.snapshot import Snapshot
from tieredckpt.engine.state.state import State
from tieredckpt.events import FrozenChanged
from tieredckpt.format.grid import Grid
from tieredckpt.format.manifest import StepId
from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["FrozenCheck"]

_log = logging.getLogger("tieredckpt")


class _Unread(NamedTuple):
    """The frozen arrays that a save took unread, and nothing else of its tree."""

    step: StepId
    outlet: Outlet
    arrays: list[tuple[int, ArrayLeaf, Grid, Sequence[bytes]]]
    """Index, grid, and the digests that the step has."""


class FrozenCheck:
    """Reads frozen arrays again, one after the other at a bounded rate and beside no save. Lives on the engine's loop.

    Saves that come while it reads are covered by the next save's check, or by `drained`. The arrays that it is to read
    live on until they are read.
    """

    def __init__(self, state: State, last: LastSave) -> None:
        self._state = state
        self._last = last
        self._task: asyncio.Task[None] | None = None
        self._later: _Unread | None = None
        """Arrays of the newest save, while those of an older one are checked."""
        self._hurry = asyncio.Event()
        self._waiters = 0
        """Callers of `drained`."""
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._checked: dict[str, int] = {}
        """The newest step for which an array had the bytes that are stored, by storage key."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause reading while the block makes a save, for which the training waits; one save at a time."""
        self._may_read.clear()
        try:
            yield
        finally:
            self._may_read.set()

    def begin(self, step: StepId, snapshot: Snapshot, digests: Mapping[str, Sequence[bytes]], frozen: set[str]) -> None:
        """Check the arrays that ``step`` took unread: now, or if a check is under way, when `drained` is called."""
        unread = snapshot.unread & frozen
        self._checked.update(dict.fromkeys(frozen - unread, step.step))
        arrays = [
            (i, leaf, snapshot.grids[i], digests[leaf.key])
            for i in snapshot.plan.paged
            if (leaf := snapshot.leaves[i]).key in unread
        ]
        self._later = _Unread(step, snapshot.outlet, arrays) if arrays else None
        if self._task is None or self._task.done():
            self._begin_later()

    def _begin_later(self) -> None:
        if (unread := self._later) is not None:
            self._later = None
            work = self._check(unread)
            self._task = asyncio.create_task(work, name=f"tieredckpt check of frozen arrays of {unread.step}")

    async def _check(self, unread: _Unread) -> None:
        step, outlet = unread.step, unread.outlet
        for i, leaf, grid, digests in unread.arrays:
            try:
                same = True
                await self._may_read.wait()
                cells = await in_thread(lambda *of: list(cells_of(*of)), i, leaf, grid, pool=self._state.pool)
                for cell, digest in zip(cells, digests, strict=True):
                    await self._may_read.wait()
                    begin = time.monotonic()
                    same = same and await in_thread(_digest, cell, outlet, pool=self._state.pool) == digest
                    await self._wait(cell.nbytes / limits.in_force.frozen_rate - (time.monotonic() - begin))
            except Exception as error:  # of its framework: its device is gone, or its memory
                _log.warning("frozen array %r could not be read again: %s", leaf.array, error)
                continue
            if same:
                self._checked[leaf.key] = step.step
                continue
            self._last.forget(leaf.key)
            event = FrozenChanged(step.step, leaf.array, self._checked.get(leaf.key))
            _log.error("%s", event.advice)
            self._state.events.emit(event)

    async def _wait(self, seconds: float) -> None:
        if seconds > 0 and not self._hurry.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()
            except TimeoutError:
                pass

    async def drained(self) -> None:
        """Wait until all checks have ended; they are not slowed down meanwhile."""
        self._waiters += 1
        self._hurry.set()
        try:
            while self._task is not None:
                await asyncio.wait([self._task])
                if self._task.done():  # else another caller has begun the next one
                    if self._later is None:
                        break
                    self._begin_later()
        finally:
            self._waiters -= 1
            if not self._waiters:
                self._hurry.clear()

    async def stop(self) -> None:
        """Cancel the check under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _digest(cell: Cell, outlet: Outlet) -> bytes:
    with outlet.link(cell.nbytes) as link:
        return cell.digest_by(link)
