"""Cancels verbs that take longer than their bytes justify."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.concurrency import note, outlast
from tieredckpt.errors import TierUnavailable

__all__ = ["Deadline", "Overdue"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")


class Overdue(TierUnavailable):
    """A verb that had not ended at its deadline: the store did not answer for all that time."""


class Deadline(Forward):
    """Raises `Overdue` for a verb that has not ended after ``base + bytes / min_bandwidth`` seconds.

    The verb is cancelled then. If it does not end within another ``base`` seconds, it hangs in the device and is left
    behind, as the contract of a blob store allows. Only a `get_into` is waited for, since it may still write to the
    caller's memory. The first hang is reported, also that of a mere thread in a store that releases its caller's
    memory; later ones are counted until none hangs any more.

    Args:
        tier: the name of the tier, for messages.
        base: seconds.
        min_bandwidth: bytes a second.
        tell: called with the number of calls that hang, when there was none before.
    """

    def __init__(
        self,
        inner: BlobStore,
        tier: str,
        *,
        base: float = 30.0,
        min_bandwidth: float = 10_000_000,
        tell: Callable[[int], object] = lambda _: None,
    ) -> None:
        super().__init__(inner)
        self._tier, self._base, self._min_bandwidth = tier, base, min_bandwidth
        self._tell_of = tell
        self._told = False
        self._left_behind: set[asyncio.Future[Any]] = set()

    @property
    def hanging(self) -> int:
        return max(len(self._left_behind), super().hanging)  # a store that counts its threads counts these too

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        if self._told and not self.hanging:
            self._told = False
            _log.info("%s: no call hangs in the device any more", self._tier)
        seconds = self._base + operation.nbytes / self._min_bandwidth
        running = asyncio.ensure_future(call())
        try:
            await asyncio.wait([running], timeout=seconds)
        except asyncio.CancelledError:
            await self._end(operation, running)
            raise
        if not running.done():
            await self._end(operation, running)
        if running.done() and not running.cancelled():
            return running.result()
        raise Overdue(
            f"{self._tier}: {operation.verb} of {operation.key} ({operation.nbytes} bytes) had not ended "
            f"after {seconds:.1f} s; if the tier is only slow, raise `deadline` or lower `min_bandwidth`"
        )

    async def _end(self, operation: Operation, running: asyncio.Future[Any]) -> None:
        running.cancel()
        try:
            await asyncio.wait([running], timeout=self._base)
        finally:
            if not running.done():
                self._left_behind.add(running)
                running.add_done_callback(self._ended)
                self._tell(f"{operation.verb} of {operation.key}")
            elif self.hanging:
                asyncio.get_running_loop().call_later(self._base, self._tell, "a call")
            if operation.verb == "get_into":
                await outlast(running)
            elif running.done():
                note(running)

    def _tell(self, what: str) -> None:
        if self.hanging and not self._told:
            self._told = True
            _log.warning("%s: %s hangs in the device", self._tier, what)
            self._tell_of(self.hanging)

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._left_behind.discard(running)
        note(running)
