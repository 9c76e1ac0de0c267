"""An exchange brings every chunk whole, or leaves it to be read; it never locks up, and gives its memory back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reliability.ranks import InProcess, World

from tieredckpt.engine.ranks.restore.plan import Stock
from tieredckpt.engine.ranks.restore.transfer import PEERS, ChunkTransfer, Terms, agree_on_tasks
from tieredckpt.engine.scratch import Scratch
from tieredckpt.errors import TierUnavailable
from tieredckpt.format.digest import digest

Bytes = npt.NDArray[np.uint8]

SOON = 20.0
MISSED = 1.0
"""Seconds after which a rank that does not answer is missed; those that do are faster."""

VERBS = ["send", "recv", "send_bulk", "recv_bulk"]


def chunks(count: int, seed: int = 0, largest: int = 20_000) -> dict[bytes, Bytes]:
    """Random chunks by digest."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(0, 256, int(rng.integers(1, largest)), dtype=np.uint8) for _ in range(count)]
    return {digest(chunk): chunk for chunk in made}


@dataclass
class Rank:
    """One rank of an exchange, and what it got."""

    communicator: InProcess
    needs: Mapping[bytes, int]
    ram: Mapping[bytes, Bytes]
    saved: Mapping[bytes, Bytes]
    """What the slower tier has."""
    scratch: Scratch
    pool: ThreadPoolExecutor
    got: dict[bytes, bytes] = field(default_factory=dict)
    reads: Counter[bytes] = field(default_factory=Counter)
    came: dict[bytes, str] = field(default_factory=dict)

    async def read(self, name: bytes, memory: Bytes) -> str:
        self.reads[name] += 1
        await asyncio.sleep(0)
        if name not in self.saved:
            raise TierUnavailable("the tier 'disk' has it not, by script")
        memory[: self.saved[name].size] = self.saved[name]
        return "disk"

    def place(self, name: bytes, memory: Bytes) -> None:
        assert name in self.needs
        assert name not in self.got
        self.got[name] = memory.tobytes()

    async def run(self, number: int = 1, group: int | None = None, timeout: float = SOON) -> None:
        stock = Stock(self.needs, list(self.ram))
        tasks = await agree_on_tasks(self.communicator, number, stock, Terms(group), timeout=timeout) or []
        passing = ChunkTransfer(
            self.communicator.rank,
            self.communicator,
            number,
            timeout,
            self.scratch,
            self.pool,
            self.ram.get,
            self.read,
            self.place,
            self.came,
        )
        await passing.run(tasks)

    def is_right(self) -> bool:
        return all(digest(got) == name for name, got in self.got.items()) and self.came.keys() == self.got.keys()


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@asynccontextmanager
async def ranks(
    world: World,
    pool: ThreadPoolExecutor,
    saved: Mapping[bytes, Bytes],
    needs: Mapping[int, list[bytes]],
    has: Mapping[int, list[bytes]],
    *,
    scratch: int = 1 << 20,
) -> AsyncIterator[list[Rank]]:
    """All ranks of a world, that have met."""
    made = [
        Rank(
            communicator,
            {name: saved[name].size for name in needs.get(communicator.rank, [])},
            {name: saved[name] for name in has.get(communicator.rank, [])},
            saved,
            Scratch(scratch),
            pool,
        )
        for communicator in world.communicators()
    ]
    await asyncio.gather(*(rank.communicator.open(timeout=SOON) for rank in made))
    try:
        yield made
        assert [rank.scratch.slab.used for rank in made] == [0] * world.size, "memory was not given back"
    finally:
        for rank in made:
            await rank.communicator.close()
            rank.scratch.close()


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(0, 2**32), st.none() | st.integers(1, 3), st.sampled_from([8 << 12, 1 << 20]))
async def test_everybody_gets_every_chunk_through_little_memory(
    pool: ThreadPoolExecutor, size: int, seed: int, group: int | None, scratch: int
) -> None:
    rng = random.Random(seed)
    saved = chunks(60, seed % 7)
    names = list(saved)
    has = {rank: rng.sample(names, rng.choice([0, 0, 10])) for rank in range(size)}
    lacks = {rank: [name for name in names if name not in has[rank]] for rank in range(size)}
    needs = {rank: rng.sample(lacks[rank], rng.choice([0, 20, len(lacks[rank])])) for rank in range(size)}
    async with ranks(World(size), pool, saved, needs, has, scratch=scratch) as all_ranks:
        async with asyncio.timeout(SOON):
            await asyncio.gather(*(rank.run(group=group) for rank in all_ranks))
        in_ram = {name for rank in all_ranks for name in rank.ram}
        for rank in all_ranks:
            needed_near = Counter(
                name
                for other in all_ranks
                if group is None or other.communicator.rank // group == rank.communicator.rank // group
                for name in other.needs
            )
            alone = {name for name in rank.needs if name not in in_ram and needed_near[name] == 1}
            assert rank.got.keys() == rank.needs.keys() - alone
            assert rank.is_right()


async def test_a_broadcast_reads_every_chunk_once(pool: ThreadPoolExecutor) -> None:
    saved = chunks(80)
    async with ranks(World(4), pool, saved, {rank: list(saved) for rank in range(4)}, {}) as all_ranks:
        await asyncio.gather(*(rank.run() for rank in all_ranks))
        reads = sum((rank.reads for rank in all_ranks), Counter())
        assert reads == Counter(list(saved))
        for rank in all_ranks:
            assert Counter(rank.came.values())["disk"] == sum(rank.reads.values())
            assert Counter(rank.came.values())[PEERS] == len(saved) - sum(rank.reads.values())
            assert rank.is_right()


async def test_what_a_rank_has_in_ram_is_read_by_nobody(pool: ThreadPoolExecutor) -> None:
    saved = chunks(40)
    names = list(saved)
    async with ranks(World(3), pool, {}, {}, {}) as all_ranks:
        for rank, one in enumerate(all_ranks):
            one.ram = {name: saved[name] for name in names[rank::3]}
            one.needs = {name: saved[name].size for name in names if name not in one.ram}
        await asyncio.gather(*(rank.run() for rank in all_ranks))
        for one in all_ranks:
            assert set(one.came.values()) == {PEERS}
            assert one.got.keys() == one.needs.keys()
            assert not one.reads


async def test_wrong_bytes_are_never_placed(pool: ThreadPoolExecutor) -> None:
    saved = chunks(30)
    names = list(saved)
    async with ranks(World(2), pool, saved, {1: names}, {0: names}) as (giver, taker):
        wrong, gone = names[3], names[7]
        giver.ram = {name: saved[name] ^ np.uint8(name == wrong) for name in names}
        there = giver.ram.copy()
        tasks = asyncio.gather(giver.run(), taker.run())
        del there[gone]
        giver.ram = there
        await tasks
        assert names[3] not in taker.got
        assert set(names) - taker.got.keys() <= {wrong, gone}
        assert taker.is_right()


async def test_a_chunk_that_cannot_be_read_is_left_to_everybody(pool: ThreadPoolExecutor) -> None:
    saved = chunks(20)
    lost = list(saved)[5]
    async with ranks(World(3), pool, saved, {rank: list(saved) for rank in range(3)}, {}) as all_ranks:
        there = {name: chunk for name, chunk in saved.items() if name != lost}
        for rank in all_ranks:
            rank.saved = there
        await asyncio.gather(*(rank.run() for rank in all_ranks))
        assert all(rank.got.keys() == there.keys() and rank.is_right() for rank in all_ranks)


@pytest.mark.parametrize("verb", ["send_bulk", "recv_bulk"])
@pytest.mark.parametrize("nth", [1, 9])
async def test_a_rank_that_dies_costs_the_others_what_they_read_themselves(
    pool: ThreadPoolExecutor, verb: str, nth: int
) -> None:
    saved = chunks(80)
    world = World(4)
    async with ranks(world, pool, saved, {rank: list(saved) for rank in range(4)}, {}) as all_ranks:
        world.kill(2, verb, nth=nth)
        dead = asyncio.create_task(all_ranks[2].run(timeout=MISSED))
        alive = [rank for rank in all_ranks if rank.communicator.rank != 2]
        async with asyncio.timeout(SOON):
            await asyncio.gather(*(rank.run(timeout=MISSED) for rank in alive))
        for rank in alive:
            assert rank.is_right()
            assert rank.got
        assert any(len(rank.got) < len(saved) for rank in alive)
        dead.cancel()
        await asyncio.wait([dead])


async def test_a_rank_that_never_comes_takes_no_part(pool: ThreadPoolExecutor) -> None:
    saved = chunks(40)
    world = World(3)
    async with ranks(world, pool, saved, {rank: list(saved) for rank in range(3)}, {}) as all_ranks:
        world.kill_now(1)
        async with asyncio.timeout(SOON):
            await asyncio.gather(all_ranks[0].run(timeout=MISSED), all_ranks[2].run(timeout=MISSED))
        for rank in (all_ranks[0], all_ranks[2]):
            assert rank.got.keys() == saved.keys()
            assert rank.is_right()


async def test_without_the_leader_everybody_is_left_to_read(pool: ThreadPoolExecutor) -> None:
    saved = chunks(10)
    world = World(2)
    async with ranks(world, pool, saved, {rank: list(saved) for rank in range(2)}, {}) as (_, follower):
        world.kill_now(0)
        async with asyncio.timeout(SOON):
            await follower.run(timeout=0.1)
        assert not follower.came


@contextmanager
def never_read(rank: Rank) -> Iterator[asyncio.Event]:
    reading = asyncio.Event()

    async def read(name: bytes, memory: Bytes) -> str:
        reading.set()
        await asyncio.Event().wait()
        return "disk"

    rank.read = read
    yield reading


async def test_a_cancelled_exchange_gives_its_memory_back(pool: ThreadPoolExecutor) -> None:
    saved = chunks(80)
    async with ranks(World(2), pool, saved, {rank: list(saved) for rank in range(2)}, {}) as all_ranks:
        with never_read(all_ranks[0]) as reading:
            running = [asyncio.create_task(rank.run()) for rank in all_ranks]
            await reading.wait()
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            assert all(task.cancelled() for task in running)


async def test_what_goes_wrong_in_placing_is_raised_as_it_is(pool: ThreadPoolExecutor) -> None:
    saved = chunks(20)
    async with ranks(World(2), pool, saved, {1: list(saved)}, {0: list(saved)}) as (giver, taker):

        def place(name: bytes, memory: Bytes) -> None:
            raise MemoryError("no room for the array")

        taker.place = place
        given = asyncio.create_task(giver.run(timeout=MISSED))
        with pytest.raises(MemoryError, match="no room for the array"):
            await taker.run()
        await given


@settings(max_examples=20)
@given(
    st.integers(2, 5),
    st.integers(0, 99),
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["send_bulk", "recv_bulk", "send", "recv"]), st.integers(1, 12))
    ),
)
async def test_whatever_dies_the_others_end_with_nothing_wrong(
    pool: ThreadPoolExecutor, size: int, seed: int, deaths: list[tuple[int, str, int]]
) -> None:
    rng = random.Random(seed)
    saved = chunks(24, seed, largest=4000)
    names = list(saved)
    has = {rank: rng.sample(names, rng.choice([0, 8])) for rank in range(size)}
    needs = {rank: [name for name in names if name not in has[rank]] for rank in range(size)}
    world = World(size)
    async with ranks(world, pool, saved, needs, has, scratch=4 << 12) as all_ranks:
        dying = {rank % size for rank, _, _ in deaths[:2]}
        for rank, verb, nth in deaths[:2]:
            world.kill(rank % size, verb, nth=nth)
        running = [asyncio.create_task(rank.run(timeout=0.05)) for rank in all_ranks]
        alive = [task for rank, task in enumerate(running) if rank not in dying]
        if alive:
            async with asyncio.timeout(SOON):
                await asyncio.gather(*alive)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert all(rank.is_right() for number, rank in enumerate(all_ranks) if number not in dying)
        assert all(digest(got) == name for rank in all_ranks for name, got in rank.got.items())
