"""A life of a training of several ranks, recorded change by change: of the RAM of each node, and of what they share.

Two ranks are on one node and one on another, so the memory of a node is one medium. They save parts of the same
arrays, arrays of their own and what all have alike, promote, evict, die together with work undone, go on, are rolled
back and collect; rank 0 is heard, for what it is told holds for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.scenes import crash

from reliability.journal import Acknowledged, Entry, Journal, Medium
from reliability.life import CHUNK, KINDS, SLOW, Tree, dead_when_it_is_read, files_in, slow_store, slow_stores
from reliability.memory import Objects
from reliability.ranks import World
from reliability.recorder import recording
from tieredckpt.config import StoreConfig, load
from tieredckpt.events import Event, StepCommitted, StepPromoted
from tieredckpt.store import CheckpointStore
from tieredckpt.tree.shards import Shard

__all__ = ["NODES", "RanksLife", "live_together", "opened_together", "part", "ranks_config", "whole"]

NODES = ("a", "a", "b")
"""Of each rank."""

_ROWS = 6
_DEADLINE = 20.0


@dataclass(frozen=True)
class RanksLife:
    """What was done and what came of it."""

    kind: str
    entries: tuple[Entry, ...]
    trees: Mapping[int, int]
    """By serial, which save it was: all that its tree depends on."""
    left: Mapping[str, Mapping[str, bytes]]
    """The files of each medium at its end, read from where they lie."""

    @property
    def media(self) -> Mapping[str, Medium]:
        return dict.fromkeys(memories(), Medium.SHARED_MEMORY) | {SLOW: KINDS[self.kind]}


def memories() -> tuple[str, ...]:
    """The media that are the memory of a node, by name."""
    return tuple(f"ram-{node}" for node in dict.fromkeys(NODES))


def ranks_config(kind: str, place: Path, node: str) -> StoreConfig:
    """The store below ``place`` as a rank on that node sees it."""
    policy: dict[str, Any] = {"name": SLOW, "retain": {"kind": "last_n", "n": 2}, "retries": 0}
    slow: dict[str, Any] = {"kind": "posix", "path": place / SLOW, "direct": False}
    if kind != "posix":
        slow = {"kind": "kvstore", "spec": "memory://", "survives": "node"}
    nearest = {"name": "ram", "kind": "ram", "path": place / f"ram-{node}", "capacity": "192 KiB", "on_close": "keep"}
    store = {"name": "ranks", "chunk_size": CHUNK, "threads": 1, "repack_below": 0.8, "rank_deadline": _DEADLINE}
    return load({"store": store, "tiers": [nearest, slow | policy]})


def whole(count: int, size: int) -> Tree:
    """What so many ranks saved together as their save of that number."""
    # Two thirds of the rows, and what all have alike, change by turns.
    w = np.stack([np.full(CHUNK, (7 * (count - (count + row) % 3) + row) % 251, np.uint8) for row in range(_ROWS)])
    own = {f"r{rank}": np.full(CHUNK, (count + rank) % 256, np.uint8) for rank in range(size)}
    return {"w": w, "same": np.full(2 * CHUNK, count // 2 % 256, np.uint8), "count": count} | own


def part(count: int, rank: int, size: int) -> Tree:
    """What one of them has of that."""
    tree = whole(count, size)
    first, last = _ROWS * rank // size, _ROWS * (rank + 1) // size
    mine = {name: value for name, value in tree.items() if not name.startswith("r") or name == f"r{rank}"}
    return mine | {"w": Shard(tree["w"][first:last].copy(), shape=tree["w"].shape, offset=(first, 0))}


@contextlib.asynccontextmanager
async def opened_together(
    kind: str, place: Path, nodes: Sequence[str], hear: Callable[[Event], None], *, dies: bool = False
) -> AsyncIterator[list[CheckpointStore]]:
    """The stores of new processes on these nodes, closed in the end, or left with everything undone.

    ``hear`` is told every event of rank 0 from the start.
    """
    world = World(len(nodes), nodes=nodes)
    stores = [
        CheckpointStore.open(ranks_config(kind, place, node), ranks=world.communicator(rank))
        for rank, node in enumerate(nodes)
    ]
    stores[0].subscribe(hear)
    try:
        await asyncio.gather(*stores)
        yield stores
    except BaseException:
        await asyncio.gather(*map(crash, stores))
        raise
    await asyncio.gather(*(map(crash, stores) if dies else (store.close() for store in stores)))


async def live_together(kind: str, place: Path) -> RanksLife:
    """Live below ``place``, a folder in memory."""
    journal = Journal()
    objects = Objects()
    folders = {name: place / name for name in memories()} | ({SLOW: place / SLOW} if kind == "posix" else {})
    with (
        recording(journal, folders) as recorder,
        slow_stores(lambda: slow_store(kind, objects, journal)),
        dead_when_it_is_read(recorder),
    ):
        life = _Living(kind, place, journal)
        await life.follow_the_script()
        recorder.look()
        left = {name: files_in(folder) for name, folder in folders.items()}
    if kind != "posix":
        left[SLOW] = {key: bytes(data) for key, data in objects.data.items()}
    return RanksLife(kind, journal.entries, life.trees, left)


class _Living:
    def __init__(self, kind: str, place: Path, journal: Journal) -> None:
        self._kind, self._place, self._journal = kind, place, journal
        self.trees: dict[int, int] = {}

    async def follow_the_script(self) -> None:
        async with self._opened() as stores:
            await self._save(stores, 1)
            await self._settle(stores)
            await self._save(stores, 2)
            await self._save(stores, 3)  # beside the promotion of the one before
            await self._settle(stores)
            await stores[0].evict(2, SLOW)
        async with self._opened(dies=True) as stores:
            await asyncio.gather(*(store.restore() for store in stores))
            await self._save(stores, 4)
            await self._settle(stores)
            await asyncio.gather(*(store.restore(3) for store in stores))
            await self._save(stores, 4)  # on a branch of its own
            await self._settle(stores)
            await stores[0].collect()
            await self._save(stores, 5)
        async with self._opened() as stores:
            await asyncio.gather(*(store.restore() for store in stores))
            await self._save(stores, 6)
            await self._settle(stores)
            await stores[0].collect()

    @contextlib.asynccontextmanager
    async def _opened(self, *, dies: bool = False) -> AsyncIterator[list[CheckpointStore]]:
        async with opened_together(self._kind, self._place, NODES, self._hear, dies=dies) as stores:
            yield stores

    def _hear(self, event: Event) -> None:
        match event:
            case StepCommitted(serial=serial):
                for name in memories():
                    self._journal.add(Acknowledged(name, serial))
            case StepPromoted(serial=serial, tier=tier):
                self._journal.add(Acknowledged(tier, serial))

    async def _save(self, stores: Sequence[CheckpointStore], step: int) -> None:
        # It is known before it can be found, as a save that is under way at the crash may be.
        serial = stores[0]._life.engine.state.branch.last_serial + 1
        count = self.trees[serial] = len(self.trees) + 1
        saving = (store.save(step, part(count, rank, len(stores))) for rank, store in enumerate(stores))
        for checkpoint in await asyncio.gather(*saving):
            assert checkpoint.saved is not None
            assert checkpoint.saved.step.serial == serial

    async def _settle(self, stores: Sequence[CheckpointStore]) -> None:
        await asyncio.gather(*(store.flush() for store in stores))
