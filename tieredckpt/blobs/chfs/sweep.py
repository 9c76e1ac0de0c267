"""Removes empty folders: CHFS keeps those of removed objects, and a list asks every server about each of them."""

from __future__ import annotations

import time
from contextlib import suppress

from tieredckpt.blobs.base import is_key
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.errors import Conflict, NotFound, TierUnavailable

__all__ = ["clean"]


async def clean(link: Link, folder: str, age: float, *, root: bool) -> list[str]:
    """Remove a folder if it is empty; returns the folders in it, which are the caller's to sweep.

    Args:
        link: to the worker.
        folder: its path, without a slash at the end.
        age: seconds since the last change of what is removed.
        root: whether the folder is the store's own, which stays.
    """
    entries = await link.ask(frames.ListFolder(folder or "/"))
    if not entries and not root:
        await _remove(link, folder, age)
    return [f"{folder}/{name}" for name, kind in entries if kind == "folder" and is_key(name)]


async def _remove(link: Link, folder: str, age: float) -> None:
    with suppress(Conflict, NotFound):  # something was put there meanwhile, or another one has swept it
        mtime_ns: int = (await link.ask(frames.Stat(folder)))[2]
        if time.time() - mtime_ns / 1e9 >= age:
            # CHFS calls any failure the same; a folder that stays is there for the next sweep.
            with suppress(TierUnavailable):
                await link.ask(frames.RemoveFolder(folder))
