"""Removes the data of exclusive puts that broke off, and empty folders.

CHFS keeps the folders of removed objects, and a list asks every server about each of them.
"""

from __future__ import annotations

import time
from contextlib import suppress

from tieredckpt.blobs.base import is_key
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.blobs.chfs.names import name_of
from tieredckpt.errors import Conflict, NotFound, TierUnavailable

__all__ = ["clean"]


async def clean(link: Link, folder: str, age: float, *, root: bool) -> tuple[int, list[str]]:
    """Sweep one folder; returns how many data went, and the folders in it, which are the caller's to sweep.

    Args:
        link: to the worker.
        folder: its path, without a slash at the end.
        age: seconds since the last change of what is removed.
        root: whether the folder is the store's own, which stays.
    """
    swept, folders = 0, []
    entries = await link.ask(frames.ListFolder(folder or "/"))
    for name, kind in entries:
        if kind == "folder":
            folders += [f"{folder}/{name}"] if is_key(name) else []
        elif key := name_of(name):
            swept += await _data(link, f"{folder}/{key}", name, age)
    if not entries and not root:
        await _empty(link, folder, age)
    return swept, folders


async def _data(link: Link, key: str, name: str, age: float) -> bool:
    """Remove the data of that name if it is old, and the link at ``key`` leads elsewhere."""
    path = f"{key.rpartition('/')[0]}/{name}"
    with suppress(NotFound):
        if not await _is_old(link, path, age):
            return False
        with suppress(NotFound):
            *_, target = await link.ask(frames.Stat(key))
            if target == name:
                return False
        await link.ask(frames.Remove(path))
        return True
    return False


async def _empty(link: Link, folder: str, age: float) -> None:
    with suppress(Conflict, NotFound):  # something was put there meanwhile, or another one has swept it
        if await _is_old(link, folder, age):
            # CHFS calls any failure the same; a folder that stays is there for the next sweep.
            with suppress(TierUnavailable):
                await link.ask(frames.RemoveFolder(folder))


async def _is_old(link: Link, path: str, age: float) -> bool:
    mtime_ns: int = (await link.ask(frames.Stat(path)))[2]
    return time.time() - mtime_ns / 1e9 >= age
