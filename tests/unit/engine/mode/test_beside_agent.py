"""A trainer beside its agent: RAM is the trainer's, and all slower tiers are the agent's."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.agents import agent_of, eventually
from support.insight import tier_of
from support.limits import limit
from support.scenes import CHUNK, SOON, assert_restored, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobStore
from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.errors import TierUnavailable


@pytest.fixture
async def store(ram_folder: Path, shared_memory: Path, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
    tiers = {"ram": ram(shared_memory, capacity=5 * slab_size(CHUNK)), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers, promote_in="agent")) as store:
        yield store


async def test_the_trainer_holds_no_lease_and_promotes_nothing_itself(store: CheckpointStore) -> None:
    await (await store.save(1, {"epoch": 1})).reached("disk")
    assert tier_of(store, "disk").lease is None
    assert list(store._life.engine.promoters) == ["ram"]
    assert await store.where(1) == ("ram", "disk")


async def test_a_step_that_ram_cannot_hold_is_written_by_the_trainer_and_committed_by_the_agent(
    store: CheckpointStore,
) -> None:
    disk = tier_of(store, "disk")
    ckpt = await store.save(1, tree(1))
    assert ckpt.saved is not None
    assert ckpt.saved.tier == "disk"
    assert not disk.packs.sizes  # what the tier has is the agent's to know
    assert disk.used > 0
    assert_restored(await store.restore(), tree(1))


async def test_chunks_that_the_agents_tier_has_are_not_written_again(store: CheckpointStore) -> None:
    first = await store.save(1, tree(1))
    second = await store.save(2, tree(1))
    assert first.saved is not None
    assert second.saved is not None
    assert (second.saved.tier, second.saved.new_bytes) == ("disk", 0)
    assert first.saved.new_bytes > 0


async def test_orders_for_ram_are_the_trainers_and_others_the_agents(store: CheckpointStore) -> None:
    await (await store.save(1, {"epoch": 1})).reached("disk")
    await store.evict(1, "ram")
    assert await store.where(1) == ("disk",)
    await (await store.save(2, {"epoch": 2})).reached("disk")
    await store.evict(1, "disk")
    assert await store.all_steps() == (2,)


async def test_a_tier_that_the_agent_alone_can_open_is_told_once_and_connected_to_once(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at every word of the agent: a connection takes descriptors and threads."""
    limit(monkeypatch, first_retry=0.01)
    disk = tier_of(store, "disk")
    connect, tries, works = disk.connect, 0, asyncio.Event()

    async def connect_late() -> BlobStore:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise TierUnavailable("it is not mounted here")
        await works.wait()
        return await connect()

    async def lose() -> None:
        assert disk.blobs is not None
        await disk.blobs.close()
        disk.blobs, disk.connect = None, connect_late

    await store._life.loop.call(lose())
    for step in range(1, 4):
        await (await store.save(step, {"epoch": step})).reached("disk")
    await asyncio.to_thread(eventually, lambda: tries >= 3, "it is tried again")
    for step in range(4, 7):
        await (await store.save(step, {"epoch": step})).reached("disk")

    async def go_on() -> None:
        works.set()

    await store._life.loop.call(go_on())
    await asyncio.to_thread(eventually, lambda: disk.blobs is not None, "the tier is open here, too")
    assert tries == 3
    told = [record for record in caplog.records if "cannot be read here" in record.getMessage()]
    assert [record.levelname for record in told if record.levelno >= logging.WARNING] == ["WARNING"]


async def test_a_progress_function_that_raises_ends_its_call_and_no_connection(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """As it does without an agent."""

    def fail(nbytes: int) -> None:
        raise ValueError("by the caller")

    await (await store.save(1, {"w": np.arange(CHUNK // 4, dtype=np.int32)})).reached("disk")
    for tier in ("ram", "disk"):
        with pytest.raises(ValueError, match="by the caller"):
            await store.verify(1, tier, progress=fail)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [each.intact for each in await store.verify(1, "disk")] == [True]


async def test_a_save_that_is_cancelled_twice_gives_the_agents_tier_back(
    faults: FaultyTiers, store: CheckpointStore, ram_folder: Path
) -> None:
    """As of a training that is ended, and given up while it ends: the agent kept its tier for that save."""
    hold = faults["disk"].hold("put", key="packs/*")
    saving = asyncio.create_task(store.save(1, tree(1)))
    await hold.reached()
    agent = agent_of(ram_folder)
    os.kill(agent, signal.SIGSTOP)  # both messages come at once
    try:
        for _ in range(2):
            saving.cancel()
            await asyncio.sleep(0.2)
    finally:
        os.kill(agent, signal.SIGCONT)
    await asyncio.gather(saving, return_exceptions=True)
    hold.release()
    async with asyncio.timeout(SOON):
        await (await store.save(2, tree(2))).reached("disk")
