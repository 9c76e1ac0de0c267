"""Reads and writes the marker of a tier, the small file that names the store that the tier belongs to."""

from __future__ import annotations

from tieredckpt.blobs.base import BlobStore
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.marker import StoreMarker, decode_marker, encode_marker

__all__ = ["check", "is_still", "read", "read_unless_empty", "write"]


async def read(store: BlobStore) -> StoreMarker:
    """The marker as it lies there. Raises as the blob store does, `NotFound` where there is none, and `Corrupt`."""
    return decode_marker(await store.get(layout.MARKER, limit=layout.MARKER_MAX), store.location)


async def read_unless_empty(store: BlobStore) -> StoreMarker | None:
    """The marker, None where nothing was ever put. Raises as `read`."""
    try:
        return await read(store)
    except NotFound:
        return None
    except Corrupt:
        if await _never_used(store):
            return None  # a crash has torn the very first put
        raise


async def write(store: BlobStore, marker: StoreMarker) -> None:
    """Write the marker of a tier. Raises as the blob store does."""
    await store.put(layout.MARKER, [encode_marker(marker)])


async def is_still(store: BlobStore, marker: StoreMarker | None) -> bool:
    """Whether the tier answers and still is what it was, by its marker. Raises as the blob store does."""
    try:
        return await read(store) == marker
    except (Corrupt, NotFound):
        return False


async def check(store: BlobStore, marker: StoreMarker | None, tier: str, lost: str) -> None:
    """Raise `TierUnavailable` for a tier whose marker is gone, too, beside what it has ``lost``: it is another now."""
    if not await is_still(store, marker):
        raise TierUnavailable(f"tier {tier!r} has lost its marker and {lost}; is it mounted?")


async def _never_used(store: BlobStore) -> bool:
    """Whether the marker may be there in part only: puts are not atomic, and nothing was put after it."""
    if store.traits.atomic_put:
        return False
    for prefix in (layout.PACKS, layout.STEPS):
        async for _ in store.list(prefix):
            return False
    return True
