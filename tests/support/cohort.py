"""What tests of several ranks share: stores of one training in one process, on simulated nodes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from reliability.ranks import World

from support.rank_insight import early, mode_of
from support.scenes import SOON, Heard, config, crash, folder, ram
from tieredckpt import CheckpointStore, Shard
from tieredckpt.blobs.wrap import Metered
from tieredckpt.checkpoint import Checkpoint, Restored
from tieredckpt.events import CommitFailed, StepReplicated
from tieredckpt.testing.faulty import Faulty

T = TypeVar("T")

DEADLINE = 1.0
"""Seconds that the ranks of a test wait for each other, while one is to be missed; `SOON` otherwise."""

ROWS, COLUMNS = 96, 1024
"""Of the array that the ranks share; 96 rows can be cut by 1, 2, 3, 4, 6 and 8 ranks."""


class Cohort:
    """The stores of all ranks, and what each was heard to say."""

    def __init__(self, world: World, stores: Sequence[CheckpointStore]) -> None:
        self.world = world
        self.stores = list(stores)
        self.heard = [Heard(store) for store in stores]

    def __getitem__(self, rank: int) -> CheckpointStore:
        return self.stores[rank]

    @property
    def size(self) -> int:
        return len(self.stores)

    def let_wait(self, seconds: float) -> None:
        """From now on, the ranks wait so long for each other.

        Only where one is to be missed is a short time right: what goes well may take long on a busy machine.
        """
        for store in self.stores:
            mode_of(store).ranked.group.deadline = seconds

    async def all(self, work: Callable[[CheckpointStore, int], Awaitable[T]], ranks: Iterable[int] = ()) -> list[T]:
        """What every rank does, or some do, at once."""
        chosen = list(ranks) or range(self.size)
        return list(await asyncio.gather(*(work(self.stores[rank], rank) for rank in chosen)))

    async def save(
        self, step: int, seed: int | None = None, *, ranks: Iterable[int] = (), **kwargs: Any
    ) -> list[Checkpoint]:
        """Every rank, or some, save their parts of the state."""
        seed = step if seed is None else seed
        return await self.all(lambda store, rank: store.save(step, part(seed, rank, self.size), **kwargs), ranks)

    async def reached(self, checkpoints: Iterable[Checkpoint], tier: str) -> None:
        await asyncio.gather(*(checkpoint.reached(tier) for checkpoint in checkpoints))

    async def flush(self) -> None:
        await self.all(lambda store, rank: store.flush())

    async def restored(self, step: int | None = None, **kwargs: Any) -> list[Restored | None]:
        return await self.all(lambda store, rank: store.restore(step, **kwargs))

    async def restore_into(self, seed: int) -> list[dict[str, int]]:
        """Every rank restores its rows and what all have, as saved; the bytes by where they came from."""
        trees = [blank(rank, self.size) for rank in range(self.size)]
        restored = await self.all(lambda store, rank: store.restore(into=trees[rank]))
        for rank, tree in enumerate(trees):
            expected = part(seed, rank, self.size)
            np.testing.assert_array_equal(tree["w"].array, expected["w"].array)
            np.testing.assert_array_equal(tree["common"], expected["common"])
        return [dict(each.sources) for each in restored if each is not None]

    async def replicated(self, step: int) -> list[StepReplicated]:
        """The event with which every rank heard of the copies of a step."""
        return [await heard.first(StepReplicated, lambda event: event.step == step) for heard in self.heard]

    async def copied(self, step: int) -> None:
        """Wait until every rank knows of the copies of a step, which may have been made before anybody could listen."""

        async def known(store: CheckpointStore) -> None:
            state = store._life.engine.state
            await state.changed.until(lambda: any(found.step == step for found in state.membership.replicated))

        async with asyncio.timeout(SOON):
            await self.all(lambda store, rank: store._life.loop.call(known(store)))

    def unreceived(self, rank: int) -> set[str]:
        """Topics of the messages that have come to a rank, and that no call of it has received."""
        return set(early(self.stores[rank]))

    def read(self, rank: int) -> int:
        """Bytes that a rank has read of packs on the shared tier since it was opened."""
        blobs = self.stores[rank]._life.engine.state.tier("disk").blobs
        assert isinstance(blobs, Metered)
        return blobs.usage().verbs["get_into"].nbytes

    async def failed(
        self, ranks: Iterable[int] = (), *, tier: str | None = None, step: int | None = None
    ) -> list[CommitFailed]:
        """The event with which every rank, or some, heard that something was not committed."""

        def fits(event: CommitFailed) -> bool:
            return event.tier == tier and step in (None, event.step)

        chosen = list(ranks) or range(self.size)
        return list(await asyncio.gather(*(self.heard[rank].first(CommitFailed, fits) for rank in chosen)))

    def faulty(self, rank: int, tier: str = "disk") -> Faulty:
        """Put a script of faults over a tier, as one rank sees it."""
        found = self.stores[rank]._life.engine.state.tier(tier)
        found.blobs = Faulty(found.store)
        return found.blobs


def stores_of(
    world: World,
    shared_memory: Path,
    disk: Path,
    *,
    tiers: dict[str, Any] | None = None,
    ram_settings: dict[str, Any] | None = None,
    disk_settings: dict[str, Any] | None = None,
    slower: dict[str, Any] | None = None,
    racks: dict[str, str] | None = None,
    **settings: Any,
) -> list[CheckpointStore]:
    """The stores of all ranks, which are yet to be opened; ``racks`` tells where nodes stand."""

    def new(rank: int) -> CheckpointStore:
        node = world.nodes[rank]
        made = tiers or {
            "ram": ram(shared_memory / node, **({"on_close": "keep"} | (ram_settings or {}))),
            "disk": folder(disk, **(disk_settings or {})),
            **(slower or {}),
        }
        chosen = config(made, rack=(racks or {}).get(node), **({"name": "test", "rank_deadline": SOON} | settings))
        return CheckpointStore.open(chosen, ranks=world.communicator(rank))

    return [new(rank) for rank in range(world.size)]


@asynccontextmanager
async def cohort(
    size: int,
    shared_memory: Path,
    disk: Path,
    *,
    nodes: Sequence[str] | None = None,
    bulk: bool = True,
    crashing: bool = False,
    **settings: Any,
) -> AsyncIterator[Cohort]:
    """Open the store on every rank; they end in order, or as if all processes died."""
    world = World(size, nodes=nodes or ["a"] * size, bulk=bulk)
    stores = stores_of(world, shared_memory, disk, **settings)
    opened = await asyncio.gather(*stores, return_exceptions=True)
    for problem in opened:
        if isinstance(problem, BaseException):
            await asyncio.gather(*map(crash, stores))
            raise problem
    try:
        yield Cohort(world, stores)
    except BaseException:
        await asyncio.gather(*map(crash, stores))
        raise
    await asyncio.gather(*(map(crash, stores) if crashing else (store.close() for store in stores)))


@dataclass(frozen=True)
class RanksPlace:
    """Where cohorts, one after the other, keep their store; how many ranks and which settings they have by default."""

    shared_memory: Path
    disk: Path
    size: int = 3
    settings: dict[str, Any] = field(default_factory=dict)

    @asynccontextmanager
    async def open(self, size: int | None = None, **settings: Any) -> AsyncIterator[Cohort]:
        async with cohort(size or self.size, self.shared_memory, self.disk, **(self.settings | settings)) as ranks:
            yield ranks

    def lose_ram(self, node: str = "*") -> None:
        """Everything in the RAM of a node is gone, or of all nodes."""
        for found in self.shared_memory.glob(node):
            shutil.rmtree(found)


def whole(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The array of which each rank has some rows."""
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def common(seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The array that all ranks have alike."""
    return np.random.default_rng(1000 + seed).standard_normal((64, 512))


def part(seed: int, rank: int, size: int) -> dict[str, Any]:
    """The state of one rank: rows of a large array, an array that all have, one of its own, and scalars."""
    rows = ROWS // size
    return {
        "w": Shard(whole(seed)[rank * rows : (rank + 1) * rows], shape=(ROWS, COLUMNS), offset=(rank * rows, 0)),
        "common": common(seed),
        "own": {f"rank{rank}": np.arange(5) + rank},
        "epoch": seed,
    }


def blank(rank: int, size: int) -> dict[str, Any]:
    """Arrays to restore a rank's part into."""
    rows = ROWS // size
    mine = np.zeros((rows, COLUMNS), np.float32)
    return {"w": Shard(mine, shape=(ROWS, COLUMNS), offset=(rank * rows, 0)), "common": np.zeros((64, 512))}


def assert_whole(restored: Restored | None, seed: int) -> None:
    """All arrays are as they were saved, bit for bit."""
    assert restored is not None
    np.testing.assert_array_equal(restored.tree["w"], whole(seed))
    np.testing.assert_array_equal(restored.tree["common"], common(seed))
    for name, array in restored.tree["own"].items():
        np.testing.assert_array_equal(array, np.arange(5) + int(name.removeprefix("rank")))
    assert restored.tree["epoch"] == seed
