"""Removes a folder of CHFS and everything below it, such as a whole store."""

from __future__ import annotations

from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link

__all__ = ["erase"]


async def erase(link: Link, path: str) -> None:
    """Remove ``path`` and everything below it; nobody may be writing there. Raises `TierUnavailable`."""
    for name, kind in await link.ask(frames.ListFolder(path)):
        below = f"{path}/{name}"
        if kind == "folder":
            await erase(link, below)
        else:
            await link.ask(frames.Remove(below))
    await link.ask(frames.RemoveFolder(path))
