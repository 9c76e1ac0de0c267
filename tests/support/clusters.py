"""Ranks on simulated nodes, for tests of what they do for each other: stores, what they save, and what they read."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from reliability.ranks import World

from support.scenes import SOON, Heard, assert_same, config, crash, folder, ram, ram_in
from tieredckpt import CheckpointStore, Shard
from tieredckpt.blobs.wrap import Metered
from tieredckpt.events import StepReplicated

ROWS, COLUMNS = 512, 64
STATE_BYTES = ROWS * COLUMNS * 8


class Cluster:
    """Ranks on simulated nodes, each with shared memory of its own, and one folder that all share."""

    def __init__(
        self, nodes: Sequence[str], shared_memory: Path, shared: Path, *, bulk: bool = True, **settings: Any
    ) -> None:
        self.world = World(len(nodes), nodes=nodes, bulk=bulk)
        self._shared_memory = shared_memory
        self._shared = shared
        self._settings = settings

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.world.nodes

    def ram_of(self, node: str) -> Path:
        """The store's folder in a node's RAM."""
        return ram_in(self._root(node))

    def _root(self, node: str) -> Path:
        return self._shared_memory / node / "ram"

    def lose(self, node: str) -> None:
        """Everything in the RAM of a node is gone."""
        shutil.rmtree(self._root(node))

    def new(self, rank: int) -> CheckpointStore:
        tiers = {
            "ram": ram(self._shared_memory, path=self._root(self.nodes[rank]), **self._settings.get("ram", {})),
            "disk": folder(self._shared, **self._settings.get("disk", {})),
        }
        standing = self._settings.get("racks", {}).get(self.nodes[rank])
        settings = config(
            tiers, rack=standing, **({"name": "test", "rank_deadline": SOON} | self._settings.get("store", {}))
        )
        return CheckpointStore.open(settings, ranks=self.world.communicator(rank))

    @asynccontextmanager
    async def open(self, *, crashing: bool = False) -> AsyncIterator[list[CheckpointStore]]:
        """All ranks, that end in order or as if their processes died."""
        stores = [self.new(rank) for rank in range(self.world.size)]
        await asyncio.gather(*stores)
        try:
            yield stores
        finally:
            if crashing:
                await asyncio.gather(*map(crash, stores))
                self.world.restart()
            else:
                await asyncio.gather(*(store.close() for store in stores))


def whole(seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS))


def part(seed: int, rank: int, size: int) -> dict[str, Any]:
    """The rows of one rank, and something that all have."""
    first, last = ROWS * rank // size, ROWS * (rank + 1) // size
    return {
        "w": Shard(whole(seed)[first:last].copy(), shape=(ROWS, COLUMNS), offset=(first, 0)),
        "bias": np.full(COLUMNS, float(seed)),
    }


def blank(rank: int, size: int) -> dict[str, Any]:
    tree = part(0, rank, size)
    tree["w"].array[:] = 0
    tree["bias"][:] = 0
    return tree


async def save(stores: Sequence[CheckpointStore], step: int, seed: int | None = None) -> None:
    size = len(stores)
    seed = step if seed is None else seed
    await asyncio.gather(*(store.save(step, part(seed, rank, size)) for rank, store in enumerate(stores)))


async def restore(stores: Sequence[CheckpointStore], seed: int) -> list[dict[str, int]]:
    """What came from where, by rank; everything is what was saved."""
    size = len(stores)
    trees = [blank(rank, size) for rank in range(size)]
    restored = await asyncio.gather(*(store.restore(into=tree) for store, tree in zip(stores, trees, strict=True)))
    for rank, tree in enumerate(trees):
        expected = part(seed, rank, size)
        assert_same(tree["w"].array, expected["w"].array)
        assert_same(tree["bias"], expected["bias"])
    return [dict(each.sources) for each in restored if each is not None]


async def replicated(heard: Sequence[Heard], step: int) -> list[StepReplicated]:
    return list(await asyncio.gather(*(one.first(StepReplicated, lambda event: event.step == step) for one in heard)))


async def copied(stores: Sequence[CheckpointStore], step: int) -> None:
    """Wait until every rank knows of the copies of a step, which may have been made before anybody could listen."""

    async def known(store: CheckpointStore) -> None:
        state = store._life.engine.state
        await state.changed.until(lambda: any(found.step == step for found in state.membership.replicated))

    async with asyncio.timeout(SOON):
        await asyncio.gather(*(store._life.loop.call(known(store)) for store in stores))


def read(store: CheckpointStore) -> int:
    """Bytes that a rank has read of packs on the shared tier since it was opened."""
    blobs = store._life.engine.state.tier("disk").blobs
    assert isinstance(blobs, Metered)
    return blobs.usage().verbs["get_into"].nbytes
