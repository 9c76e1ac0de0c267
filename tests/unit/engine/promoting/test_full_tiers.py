"""Promise 5: a tier may be full, training goes on; and what the tier missed it gets when it has room again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from reliability.tiers import FaultyTiers
from support.scenes import CHUNK, Heard, assert_restored, config, files_under, folder, ram, save_steps, tree

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import NoSpace
from tieredckpt.events import StepEvicted, TierFailed, TierRecovered


async def test_a_full_tier_is_reported_and_caught_up(two_tiers: StoreConfig, faults: FaultyTiers) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        faults["disk"].full_after(CHUNK)
        checkpoint = await store.save(1, tree(1))
        with pytest.raises(NoSpace, match=r"step 1 .*'disk'"):
            await checkpoint.reached("disk")
        assert isinstance((await heard.first(TierFailed)).error, NoSpace)
        faults["disk"].full_after(None)
        await heard.first(TierRecovered)
        await checkpoint.reached("disk")


async def test_a_tier_at_its_capacity_makes_room_and_goes_on(shared_memory: Path, disk: Path) -> None:
    capacity = 10 * 4 * CHUNK
    settings = config(
        {
            "ram": ram(shared_memory),
            "disk": folder(disk, capacity=capacity, retain={"kind": "last_n", "n": 1}),
        }
    )
    async with CheckpointStore.open(settings) as store:
        await save_steps(store, *range(12), to="disk")
        await store.flush()
        assert sum(files_under(disk).values()) <= capacity + CHUNK
        assert "disk" in await store.where(11)


async def test_a_full_tier_that_comes_back_gives_up_no_more_steps_than_a_newer_one_needs(
    shared_memory: Path, disk: Path, faults: FaultyTiers
) -> None:
    far = folder(disk, capacity=14 * 4 * CHUNK, retain={"kind": "last_n", "n": 1})
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": far})) as store:
        heard = Heard(store)
        await save_steps(store, 1, 2, 3, to="disk")
        faults.kill("disk")
        await store.save(4, tree(4))
        await heard.first(TierFailed)
        faults.revive("disk")
        await heard.first(TierRecovered)
        assert await store.where(4) == ("ram", "disk")
        assert not any(isinstance(event.error, NoSpace) for event in heard.of(TierFailed))
        assert [event.step for event in heard.of(StepEvicted)] == [1]


async def test_a_tier_too_small_for_two_steps_says_so_and_keeps_the_one(
    shared_memory: Path, disk: Path, faults: FaultyTiers
) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(disk, capacity=6 * 4 * CHUNK)})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("disk")
        for step in (2, 3):
            with pytest.raises(NoSpace, match=r"raise its capacity, or retain fewer steps"):
                await (await store.save(step, tree(step))).reached("disk")
        assert await store.where(1) == ("ram", "disk")
        assert (await store.verify(1, "disk"))[0].damaged == ()


async def test_a_tier_that_was_full_lets_steps_go_once_a_reader_has_left(
    shared_memory: Path, disk: Path, faults: FaultyTiers
) -> None:
    settings = config(
        {
            "ram": ram(shared_memory),
            "disk": folder(disk, capacity=10 * 4 * CHUNK, retain={"kind": "last_n", "n": 1}),
        }
    )
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        await store.evict(1, "ram")
        held = faults["disk"].hold("get_into", key="packs/*")
        reading = asyncio.create_task(store.restore(1, resume=False))
        await held.reached()
        await (await store.save(2, tree(2))).reached("disk")
        checkpoint = await store.save(3, tree(3))
        with pytest.raises(NoSpace):
            await checkpoint.reached("disk")
        held.release()
        assert_restored(await reading, tree(1))
        await heard.first(TierRecovered)
        await checkpoint.reached("disk")
