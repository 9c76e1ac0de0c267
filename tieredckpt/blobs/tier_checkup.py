"""Check a configured tier for `doctor`: by the checks of its kind, or else by trying every verb."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.checkup import Check, Facts, check_up, within
from tieredckpt.concurrency import on_own_thread_within
from tieredckpt.config.kinds import kind_of
from tieredckpt.config.tiers import TierConfig
from tieredckpt.errors import NotFound, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.marker import decode_marker

__all__ = ["check_tier", "missing_folders", "remove_empty", "try_tier"]

_AFTER_ITS_OWN = 5.0
"""Extra seconds for a tier to report by itself that it does not answer, and to be closed."""


def check_tier(tier: TierConfig, nbytes: int) -> AsyncIterator[Check]:
    """Run the checks of a tier's kind, with an object of ``nbytes``."""
    return (kind_of(tier).checkup or try_tier)(tier, nbytes)


async def try_tier(tier: TierConfig, nbytes: int, *, opens_within: float | None = None) -> AsyncIterator[Check]:
    """Open a tier, tell what it is, and try every verb.

    Args:
        tier: to be tried.
        nbytes: of the large object that is written and read.
        opens_within: seconds after which its kind gives up opening it; None for its deadline.
    """
    opened: list[BlobStore] = []
    missing: list[Path] = []

    async def opening() -> str:
        missing.extend(await missing_folders(tier))
        opened.append(await kind_of(tier).open(tier))
        return opened[0].location

    yield (check := await within("open", opening(), (opens_within or tier.deadline) + _AFTER_ITS_OWN))
    if not check.ok:
        return
    store, answers = opened[0], True
    try:
        if isinstance(store, Facts):
            for name, told in store.facts().items():
                yield Check(name, True, told)
        yield Check("survives", store.traits.survives > Survives.NOTHING, _SURVIVES[store.traits.survives])
        async for check in check_up(store, nbytes, deadline=tier.deadline, min_bandwidth=tier.min_bandwidth):
            yield check
            answers = answers and check.ok
        if answers:
            root = layout.DERIVED if tier.lossy else ""
            marker = await within("marker", _marker(store, root), tier.deadline)
            if marker.detail:
                yield marker
            folders = await within("folders", _folders(tier, root), tier.deadline + _AFTER_ITS_OWN)
            if folders.detail:
                yield folders
    finally:
        closed = await within("close", _close(store, tier, missing), _AFTER_ITS_OWN)
    if not closed.ok:
        yield closed


async def _marker(store: BlobStore, root: str) -> str:
    """The store that lies there; empty if there is none."""
    try:
        marker = decode_marker(await store.get(root + layout.MARKER, limit=layout.MARKER_MAX), store.location)
    except NotFound:
        return ""
    return f"store {marker.store}, format {marker.format_version}"


async def _folders(tier: TierConfig, root: str) -> str:
    """The folders of the store that lies there; empty if there are none. Raises `TierUnavailable`."""

    def look() -> str:
        where = kind_of(tier).location(tier)
        own = [Path(where, root, name) for name in layout.FOLDERS] if isinstance(where, Path) else []
        own = [folder for folder in own if os.path.lexists(folder)]
        closed = [str(folder) for folder in own if not os.access(folder, os.R_OK | os.W_OK | os.X_OK)]
        if closed:
            raise TierUnavailable(f"let this user read, write and enter {', '.join(closed)}, and what is in there")
        return ", ".join(folder.name for folder in own)

    return await on_own_thread_within(tier.deadline, tier.name, f"looking at {tier.location}", look)


async def _close(store: BlobStore, tier: TierConfig, missing: Sequence[Path]) -> str:
    await store.close()
    await remove_empty(tier, missing)
    return ""


async def missing_folders(tier: TierConfig) -> list[Path]:
    """The folders that are made when the tier is opened, the innermost first. Raises `TierUnavailable`."""

    def look() -> list[Path]:
        where = kind_of(tier).location(tier)
        folders = (where, *where.parents) if isinstance(where, Path) else ()
        return [folder for folder in folders if not os.path.lexists(folder)]

    return await on_own_thread_within(tier.deadline, tier.name, f"looking for {tier.location}", look)


async def remove_empty(tier: TierConfig, folders: Sequence[Path]) -> None:
    """Remove ``folders`` of a tier, as `missing_folders` gave them, until one is not empty."""

    def remove() -> None:
        with suppress(OSError):
            for folder in folders:
                folder.rmdir()

    await on_own_thread_within(tier.deadline, tier.name, f"removing {tier.location}", remove)


_SURVIVES = {
    Survives.NOTHING: "nothing: what is there ends with this process",
    Survives.PROCESS: "the end of the training process, not the loss of a node",
    Survives.NODE: "the loss of this node's memory, not of the medium",
    Survives.SITE: "the loss of this node",
}
