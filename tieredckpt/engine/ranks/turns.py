"""Turns of the saves of one rank: all ranks number their saves in the order of the calls, also those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from tieredckpt.concurrency import shielded
from tieredckpt.engine.state.branch import Branch

__all__ = ["Turns"]


class Turns:
    """Lets one save after another number itself. Lives on the engine's loop."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._guards_numbers = asyncio.Lock()
        """Held by the save under way."""
        self._due: dict[str, int] = {}
        """Attempts whose turn has not ended, in the order of the calls, and the serial that all ranks reach with each.

        0 where that is not known yet.
        """

    @asynccontextmanager
    async def mine(self, attempt: str) -> AsyncIterator[None]:
        """Make no other save in the block. A call that is cancelled before its turn is numbered all the same."""
        turn = self._line_up(attempt)
        try:
            await shielded(turn)
        except asyncio.CancelledError:
            turn.add_done_callback(partial(self._pass_on, attempt))
            raise
        try:
            yield
        finally:
            self._end(attempt)

    def skip(self, attempt: str) -> None:
        """Number a save that this rank does not make, when its turn comes."""
        self._line_up(attempt).add_done_callback(partial(self._pass_on, attempt))

    def decided(self, attempt: str, last_serial: int, *, to_come: bool) -> None:
        """Continue from ``last_serial``, which all ranks have reached with that attempt, once it has ended here.

        ``to_come``: this rank has not begun the attempt, and will not number it; all that are due are before it.
        """
        due = list(self._due)
        before = due if to_come else due[: due.index(attempt) + 1] if attempt in due else []
        if not before:
            self._reach(last_serial)
            return
        self._reach(last_serial - len(before) - to_come)  # the saves that are due and not numbered count alike, too
        self._due[before[-1]] = max(self._due[before[-1]], last_serial)

    def reached_with(self, attempt: str) -> int:
        """The serial that this rank has reached once the turn of an attempt, and of those before it, has ended."""
        due = list(self._due)
        return self._branch.last_serial + (due.index(attempt) + 1 if attempt in due else 0)

    def _reach(self, serial: int) -> None:
        self._branch.last_serial = max(self._branch.last_serial, serial)

    def _line_up(self, attempt: str) -> asyncio.Future[Any]:
        self._due[attempt] = 0
        return asyncio.ensure_future(self._guards_numbers.acquire())

    def _pass_on(self, attempt: str, turn: asyncio.Future[Any]) -> None:
        if not turn.cancelled():
            self._branch.last_serial += 1  # as on the ranks that make the save
            self._end(attempt)

    def _end(self, attempt: str) -> None:
        self._reach(self._due.pop(attempt, 0))
        self._guards_numbers.release()
