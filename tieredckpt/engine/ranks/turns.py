"""Turns of the saves of one rank: all ranks number their saves in the order of the calls, also those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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

    @asynccontextmanager
    async def mine(self) -> AsyncIterator[None]:
        """Make no other save in the block. A call that is cancelled before its turn is numbered all the same."""
        turn = asyncio.ensure_future(self._guards_numbers.acquire())
        try:
            await shielded(turn)
        except asyncio.CancelledError:
            turn.add_done_callback(self._pass_on)
            raise
        try:
            yield
        finally:
            self._guards_numbers.release()

    def skip(self) -> None:
        """Number a save that this rank does not make, when its turn comes."""
        asyncio.ensure_future(self._guards_numbers.acquire()).add_done_callback(self._pass_on)

    def _pass_on(self, turn: asyncio.Future[Any]) -> None:
        if not turn.cancelled():
            self._branch.last_serial += 1  # as on the ranks that make the save
            self._guards_numbers.release()
