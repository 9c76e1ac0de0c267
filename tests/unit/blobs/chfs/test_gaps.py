"""A put that breaks off in the middle leaves nothing, though what removes an object ends at its first missing chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.scenes import SOON

from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.blobs.chfs.transfer import Transfer, piece_size
from tieredckpt.errors import NoSpace
from tieredckpt.testing.backdoor import pattern

MIB = 1 << 20
PIECE = piece_size(MIB)


@pytest.mark.parametrize("fails", [False, True], ids=["cancelled", "failed"])
@pytest.mark.parametrize("gap", [0, 1, 3])
async def test_nothing_shows_through_what_is_put_next(
    stores: Callable[..., ChfsStore], chfs: Any, monkeypatch: pytest.MonkeyPatch, gap: int, fails: bool
) -> None:
    """The piece at the gap is never sent, and all others are."""
    store = stores(grace=SOON)
    data = pattern(5 * PIECE)
    send, sent, at_gap = Transfer._send, [0], asyncio.Event()

    async def all_others(self: Transfer, link: Any, file: int, offset: int, memory: Any) -> None:
        if offset == gap * PIECE:
            await at_gap.wait()
            if fails:
                raise NoSpace("the server is full")
            await asyncio.Event().wait()
        await send(self, link, file, offset, memory)
        sent[0] += 1
        if sent[0] == 5:
            at_gap.set()

    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "_send", all_others)
        putting = asyncio.ensure_future(store.put("key", [data, b"tail"]))
        async with asyncio.timeout(SOON):
            await at_gap.wait()
        if not fails:
            putting.cancel()
        with pytest.raises(NoSpace if fails else asyncio.CancelledError):
            await putting
    left = [path.name for path in (chfs.directory / "servers").rglob("key*")]
    assert left == []
    await store.put("key", [data])  # which ends with a full chunk
    assert await store.get("key", limit=len(data)) == data
