"""A rank's part is copied into another node's RAM whole, with only the chunks that are not there yet, or not at all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.ranks import InProcess, World
from support.records import first_record
from support.scenes import CHUNK, config, ram

from tieredckpt.blobs.wrap import Pace
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.opening.connect import connect, connect_ram, make_tiers
from tieredckpt.engine.ranks.replicas import copy_part
from tieredckpt.engine.ranks.replicas.copy_part import Refused, Transfer, receive_part, send_part
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NoSpace, NotFound, RanksUnavailable, TierUnavailable
from tieredckpt.events import Events
from tieredckpt.format import grid
from tieredckpt.format.digest import digest, digest_array
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepId
from tieredckpt.format.marker import StoreMarker
from tieredckpt.format.ocdbt import Extent
from tieredckpt.tree.flatten import flatten

SOON = 20.0
STORE = "12345678-1234-1234-1234-123456789abc"


@dataclass
class Node:
    """A rank with one RAM tier, and what it needs to send_part and receive_part."""

    communicator: InProcess
    state: State
    collector: Collector

    @property
    def tier(self) -> Tier:
        return self.state.tiers[0]

    async def save(self, step: int, tree: dict[str, Any]) -> StepId:
        """Put a part of rank 0 of 2 in RAM, as a save of that rank leaves it."""
        tier = self.tier
        assert tier.ram is not None
        assert tier.ram.index is not None
        flat = flatten(tree)
        arrays = {}
        for key, array in tree.items():
            cells = grid.plan(array.shape, array.dtype.itemsize, CHUNK)
            chunks = []
            for cell in grid.cells(cells):
                data = array.reshape(-1).view(np.uint8)[cell.start : cell.start + cells.cell_nbytes]
                if data.size <= 4096:
                    chunks.append(Chunk(digest(data), data.tobytes()))
                    continue
                found = tier.ram.index.allocate(data.size)
                assert found is not None
                found[1][:] = data
                offset = tier.ram.index.add(digest(data), found[0], data.size)
                chunks.append(Chunk(digest(data), Extent(tier.ram.store.slab_key, offset, data.size)))
            arrays[key] = ArrayIndex(cells, array.dtype, chunks)
        record = first_record(
            flat.structure,
            store=STORE,
            step=step,
            serial=step,
            line=((1, step),),
            saved_at=time.time(),
            nbytes=sum(array.nbytes for array in tree.values()),
            rank=0,
            ranks=2,
        )
        await commit_file.commit(tier, record, arrays)
        return record.id

    async def read(self, step: StepId, key: str) -> bytes:
        """An array of a part in RAM, from the bytes that its index names."""
        tier = self.tier
        assert tier.ram is not None
        tier.steps.indexes.clear()  # so that it is read from the folder
        index = await step_index.load(tier, step)
        found = b""
        for chunk in index.arrays[key].chunks:
            where = chunk.where
            if isinstance(where, bytes):
                found += where
            else:
                found += tier.ram.slab.bytes_at(where.offset, where.length).tobytes()
        return found

    @property
    def used(self) -> int:
        assert self.tier.ram is not None
        return self.tier.ram.slab.used


@asynccontextmanager
async def nodes(shared_memory: Path, world: World, capacity: str = "1 MiB") -> AsyncIterator[tuple[Node, Node]]:
    """Two ranks that have met, each with RAM of its own."""
    made = []
    with ThreadPoolExecutor(2) as pool:
        for communicator in world.communicators():
            settings = config(
                {"ram": ram(shared_memory, path=shared_memory / f"node-{communicator.rank}", capacity=capacity)},
                name="test",
            )
            events = Events()
            tiers, _ = make_tiers(settings, read_only=False, events=events)
            state = State(settings, tiers, events, pool, Scratch(1 << 20), read_only=False)
            state.identity.marker = StoreMarker(store=STORE)
            connect_ram(state, sharers=1)
            await connect(state, state.tiers[0])
            made.append(Node(communicator, state, Collector(state)))
        await asyncio.gather(*(node.communicator.open(timeout=SOON) for node in made))
        yield made[0], made[1]
        for node in made:
            await node.communicator.close()
            await node.tier.disconnect()
            node.state.scratch.close()


def tree(seed: int, changed: int = 12) -> dict[str, Any]:
    """Twelve chunks, of which so many differ with the seed, and a small array."""
    rng = np.random.default_rng(99)
    items = rng.integers(0, 256, 12 * CHUNK, dtype=np.uint8)
    items[: changed * CHUNK] = np.random.default_rng(seed).integers(0, 256, changed * CHUNK, dtype=np.uint8)
    return {"w": items, "small": np.arange(seed, seed + 10)}


async def no_room(tier: Tier, enough: Callable[[], bool]) -> None:
    """Nothing may go."""


async def copy(
    source: Node, holder: Node, step: StepId, number: int, *, pace: Pace | None = None, timeout: float = SOON
) -> tuple[int | BaseException, StepId | BaseException]:
    """What both sides of one transfer return or raise."""
    given = send_part(
        source.state, Transfer(source.communicator, number, timeout), source.tier, step, 1, pace or Pace(None)
    )
    kept = receive_part(holder.state, Transfer(holder.communicator, number, timeout), holder.tier, 0, no_room)
    async with asyncio.timeout(SOON):
        sent, got = await asyncio.gather(given, kept, return_exceptions=True)
    return sent, got


async def test_a_replica_has_every_byte_of_the_part(shared_memory: Path) -> None:
    async with nodes(shared_memory, World(2)) as (source, holder):
        step = await source.save(1, tree(1))
        assert await copy(source, holder, step, 1) == (12 * CHUNK, step)
        assert await holder.read(step, "w") == tree(1)["w"].tobytes()
        assert await holder.read(step, "small") == tree(1)["small"].tobytes()
        assert (await step_index.load(holder.tier, step)).record == (await step_index.load(source.tier, step)).record


async def test_only_chunks_that_the_keeper_lacks_are_sent(shared_memory: Path) -> None:
    async with nodes(shared_memory, World(2)) as (source, holder):
        await copy(source, holder, await source.save(1, tree(1)), 1)
        second = await source.save(2, tree(2, changed=3))
        third = await source.save(3, tree(2, changed=3))
        assert await copy(source, holder, second, 2) == (12 * CHUNK, second)
        assert await copy(source, holder, third, 3) == (0, third)
        fourth = await source.save(4, tree(4, changed=3))
        assert await copy(source, holder, fourth, 4) == (3 * CHUNK, fourth)
        assert await holder.read(fourth, "w") == tree(4, changed=3)["w"].tobytes()
        assert await copy(source, holder, fourth, 5) == (0, fourth)


async def test_what_does_not_fit_is_refused_with_the_numbers_on_both_sides(shared_memory: Path) -> None:
    async with nodes(shared_memory, World(2), capacity="400 KiB") as (source, holder):
        first = await source.save(1, tree(1, changed=12))
        await copy(source, holder, first, 1)
        used = holder.used
        await source.collector.evictor.drop_part(first, source.tier)
        second = await source.save(2, tree(2, changed=12))
        given, kept = await copy(source, holder, second, 2)
        assert isinstance(given, Refused)
        assert given.rank == 1
        assert isinstance(kept, NoSpace)
        for end in (given, kept):
            assert "a copy of step 2 (serial 2) needs 240 KiB" in str(end)
        assert holder.used == used
        assert second not in {*holder.tier.steps.parts, *holder.tier.steps.held}
        assert await holder.read(first, "w") == tree(1)["w"].tobytes()


async def test_a_part_that_rots_on_the_way_is_not_kept(shared_memory: Path) -> None:
    async with nodes(shared_memory, World(2)) as (source, holder):
        step = await source.save(1, tree(1))
        extents = [*unique_extents((await step_index.load(source.tier, step)).arrays).values()]
        assert source.tier.ram is not None
        source.tier.ram.slab.array[extents[5].offset] ^= 1
        given, kept = await copy(source, holder, step, 1)
        assert isinstance(given, Refused)
        assert isinstance(kept, Corrupt)
        assert not {*holder.tier.steps.parts, *holder.tier.steps.held}
        assert holder.used == 0


@pytest.mark.parametrize("verb", ["send", "recv", "send_bulk"])
async def test_a_giver_that_dies_leaves_the_keeper_as_it_was(shared_memory: Path, verb: str) -> None:
    world = World(2)
    async with nodes(shared_memory, world) as (source, holder):
        step = await source.save(1, tree(1))
        world.kill(0, verb)
        transfer = Transfer(source.communicator, 1, 0.2)
        dead = asyncio.create_task(send_part(source.state, transfer, source.tier, step, 1, Pace(None)))
        with pytest.raises(RanksUnavailable):
            await receive_part(holder.state, Transfer(holder.communicator, 1, 0.2), holder.tier, 0, no_room)
        assert holder.used == 0
        dead.cancel()
        await asyncio.wait([dead])
        assert not source.tier.steps.readers


@pytest.mark.parametrize("verb", ["send", "recv", "recv_bulk"])
async def test_a_keeper_that_dies_lets_the_giver_go_on(shared_memory: Path, verb: str) -> None:
    world = World(2)
    async with nodes(shared_memory, world) as (source, holder):
        step = await source.save(1, tree(1))
        world.kill(1, verb)
        dead = asyncio.create_task(
            receive_part(holder.state, Transfer(holder.communicator, 1, 0.2), holder.tier, 0, no_room)
        )
        with pytest.raises(RanksUnavailable):
            await send_part(source.state, Transfer(source.communicator, 1, 0.2), source.tier, step, 1, Pace(None))
        assert not source.tier.steps.readers
        dead.cancel()
        await asyncio.wait([dead])


async def test_a_part_that_was_let_go_is_not_waited_for(shared_memory: Path) -> None:
    async with nodes(shared_memory, World(2)) as (source, holder):
        for end in await copy(source, holder, StepId(7, 7), 1):
            assert isinstance(end, NotFound)


async def test_a_copy_that_is_cancelled_while_chunks_are_verified_ends_when_they_are(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Barrier(3), threading.Event()

    def slow_digest(memory: Any) -> bytes:
        begun.wait(SOON)
        go_on.wait(SOON)
        return digest_array(memory)

    monkeypatch.setattr(copy_part, "digest_array", slow_digest)
    async with nodes(shared_memory, World(2)) as (source, holder):
        step = await source.save(1, {"w": tree(1)["w"][: 2 * CHUNK]})
        copying = asyncio.create_task(copy(source, holder, step, 1))
        await asyncio.to_thread(begun.wait, SOON)
        copying.cancel()
        done, _ = await asyncio.wait([copying], timeout=0.1)
        assert not done
        go_on.set()
        await asyncio.gather(copying, return_exceptions=True)
        assert holder.used == 0


async def test_a_giver_whose_ram_is_gone_says_so(shared_memory: Path) -> None:
    async with nodes(shared_memory, World(2)) as (source, holder):
        step = await source.save(1, tree(1))
        await source.tier.disconnect()
        for end in await copy(source, holder, step, 1):
            assert isinstance(end, NotFound)


async def test_a_giver_whose_ram_goes_while_it_reads_the_part_says_so(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper waited for it until its deadline."""
    read = step_index.read

    async def disconnect(tier: Tier, step: StepId) -> Any:
        found = await read(tier, step)
        await tier.disconnect()
        return found

    async with nodes(shared_memory, World(2)) as (source, holder):
        step = await source.save(1, tree(1))
        source.tier.steps.indexes.clear()
        monkeypatch.setattr(step_index, "read", disconnect)
        for end in await copy(source, holder, step, 1):
            assert isinstance(end, NotFound)


async def test_a_keeper_whose_ram_is_gone_says_so(shared_memory: Path) -> None:
    async with nodes(shared_memory, World(2)) as (source, holder):
        step = await source.save(1, tree(1))
        await holder.tier.disconnect()
        given, kept = await copy(source, holder, step, 1)
        assert isinstance(given, Refused)
        assert given.rank == 1
        assert isinstance(kept, TierUnavailable)
        assert "tier 'ram' has no RAM" in str(given)
        assert not source.tier.steps.readers


async def test_copies_keep_to_their_rate() -> None:
    now = 0.0
    slept = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    pace = Pace(100.0, clock=lambda: now, sleep=sleep)
    for _ in range(5):
        await pace.take(50)
    assert slept == [0.0, 0.5, 0.5, 0.5, 0.5]
