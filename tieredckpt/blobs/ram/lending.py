"""Lends pieces of a slab to callers, in the order of their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tieredckpt.blobs.ram.slab import Slab, page_aligned
from tieredckpt.concurrency import in_thread
from tieredckpt.errors import NoSpace
from tieredckpt.units import format_size

__all__ = ["borrow"]


async def borrow(slab: Slab, nbytes: int, turn: asyncio.Lock, returned: Callable[[], Awaitable[object]]) -> int:
    """The offset of a piece of ``slab``, which grows for it while it may. Waiters are served in the order of ``turn``.

    Args:
        slab: whose pieces all come back.
        nbytes: at most its capacity.
        turn: of this slab.
        returned: waits until a piece comes back.

    Raises:
        NoSpace: the system refuses the memory, and no piece is out that could come back.
    """
    async with turn:
        if slab.spare < page_aligned(nbytes) and slab.reserved < slab.capacity:
            with suppress(NoSpace):  # then a piece that is out has to come back
                await in_thread(slab.reserve, slab.reserved + nbytes)  # new memory takes its time
        while (offset := slab.allocate(nbytes)) is None:
            if not slab.used:
                raise NoSpace(f"the system has no memory for a buffer of {format_size(nbytes)}; free some")
            await returned()
        return offset
