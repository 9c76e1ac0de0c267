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
        self._due: dict[str, None] = {}
        """Attempts whose turn has not ended, in the order of the calls."""

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

    def decided(self, attempt: str, last_serial: int) -> None:
        """Continue from ``last_serial``, which all ranks have reached with that attempt; less what is due here yet."""
        due = list(self._due)
        left = due.index(attempt) + 1 if attempt in due else 0
        self._branch.last_serial = max(self._branch.last_serial, last_serial - left)

    def _line_up(self, attempt: str) -> asyncio.Future[Any]:
        self._due[attempt] = None
        return asyncio.ensure_future(self._guards_numbers.acquire())

    def _pass_on(self, attempt: str, turn: asyncio.Future[Any]) -> None:
        if not turn.cancelled():
            self._branch.last_serial += 1  # as on the ranks that make the save
            self._end(attempt)

    def _end(self, attempt: str) -> None:
        self._due.pop(attempt, None)
        self._guards_numbers.release()
