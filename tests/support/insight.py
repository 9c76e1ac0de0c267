"""What tests see of a store past its public face: its slab, where a chunk lies, and bytes to damage."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.scenes import SOON
from tieredckpt import CheckpointStore
from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import ArrayIndex
from tieredckpt.format.ocdbt import Extent


def tier_of(store: CheckpointStore, name: str) -> Tier:
    """A tier of an open store."""
    return store._life.engine.state.tier(name)


def slab_of(store: CheckpointStore) -> Slab:
    """The slab of an open store."""
    ram = store._life.engine.state.tiers[0].ram
    assert ram is not None
    return ram.slab


async def index_of(store: CheckpointStore, tier: str, step: int) -> dict[str, ArrayIndex]:
    """The arrays of a step as a tier has them."""

    async def load() -> dict[str, ArrayIndex]:
        state = store._life.engine.state
        return (await step_index.load(state.tier(tier), state.find(step))).arrays

    return await store._life.loop.call(load())


async def bytes_of_listed_steps(store: CheckpointStore) -> int:
    """What the steps in RAM take of the slab, each chunk once."""

    async def add_up() -> int:
        ram = store._life.engine.state.tiers[0]
        used: dict[bytes, int] = {}
        for step in ram.steps.held:
            for digest, extent in unique_extents((await step_index.load(ram, step)).arrays).items():
                used[digest] = slab_size(extent.length)
        return sum(used.values())

    return await store._life.loop.call(add_up())


async def extents(store: CheckpointStore, tier: str, step: int, key: str) -> list[tuple[Path, Extent]]:
    """The file and the extent of each chunk of an array."""
    found = (await index_of(store, tier, step))[key]
    root = Path(tier_of(store, tier).store.location.removeprefix("file://"))
    wheres = [chunk.where for chunk in found.chunks]
    return [(root / where.path, where) for where in wheres if isinstance(where, Extent)]


async def flip_chunk(store: CheckpointStore, tier: str, step: int, key: str, ordinal: int = 0) -> None:
    """Invert a bit in the middle of a chunk."""
    path, extent = (await extents(store, tier, step, key))[ordinal]
    flip(path, extent.offset + extent.length // 2)


def flip(path: Path, offset: int) -> None:
    """Invert the lowest bit of a byte of a file; from the end for a negative offset."""
    fd = os.open(path, os.O_RDWR)
    try:
        offset %= os.fstat(fd).st_size
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
    finally:
        os.close(fd)


def arrays_in(tree: Any) -> Iterator[Any]:
    """Every leaf with memory of its own."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from arrays_in(value)
    elif hasattr(tree, "flags"):
        yield tree


def opened_below(folder: Path) -> list[str]:
    """The files below a folder that this process has open, each as often as it has."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{folder}/")]


def mapped_below(folder: Path) -> list[str]:
    """The files below a folder that are mapped into this process, a line for each mapping."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line]


def hold_saves(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold every save back where the engine begins it, until the event is set."""
    may_begin, engine_save = threading.Event(), Engine.save

    async def late(*arguments: Any, **how: Any) -> Any:
        assert await asyncio.to_thread(may_begin.wait, SOON)
        return await engine_save(*arguments, **how)

    monkeypatch.setattr(Engine, "save", late)
    return may_begin
