"""Replace the blob stores of tiers that are opened in a test: by faulty ones, or ones in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from tieredckpt.blobs.base import BlobStore
from tieredckpt.config import TierConfig, TierKind, kinds

__all__ = ["tiers_opened_by"]

Opening = Callable[[], Awaitable[BlobStore]]


@contextmanager
def tiers_opened_by(opened: Callable[[TierConfig, Opening], Awaitable[BlobStore]]) -> Iterator[None]:
    """Put what ``opened`` returns under every tier but RAM that is opened in the block, below all wrappers.

    It gets the tier and a function that opens the tier's own store, which it may wrap, or leave unopened::

        async def opened(tier, opening):
            return Faulty(await opening())      # of tieredckpt.testing.faulty
    """

    async def instead(kind: TierKind[Any], tier: TierConfig, *, read_only: bool = False) -> BlobStore:
        return await opened(tier, partial(kind.open, tier, read_only=read_only))

    slower = [kind for kind in map(kinds.kind_named, kinds.kinds()) if not kind.in_memory]
    with kinds.replaced(*(replace(kind, open=partial(instead, kind)) for kind in slower)):
        yield
