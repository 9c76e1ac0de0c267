"""A trainer and its agent read and free the same memory and steps, and none is taken away under the other."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from support.agents import agent_of, eventually, settings
from support.insight import bytes_of_listed_steps, slab_of, tier_of
from support.scenes import SOON, Heard, assert_restored, config, folder, ram, ram_in, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.engine.agent.client import AgentClient
from tieredckpt.engine.agent.messages import FromAgent, Response
from tieredckpt.engine.agent.wire import Wire
from tieredckpt.engine.mode.beside_agent import BesideAgent
from tieredckpt.engine.restoring.source import StepSource, being_read
from tieredckpt.errors import Conflict, NoSpace
from tieredckpt.events import TierRecovered


def is_read(manifest: Path) -> bool:
    """Whether somebody holds a lock on a step of RAM."""
    with manifest.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stop_when_it_reads(agent: int, manifest: Path, disk: Path) -> None:
    """Stop an agent that reads a step, of which it knows by then where it lies, for as long as the test needs that."""
    eventually(lambda: is_read(manifest) and any(disk.glob("packs/*/*")), "the agent reads the step")
    os.kill(agent, signal.SIGSTOP)


async def test_memory_that_an_agent_reads_is_not_overwritten(shared_memory: Path, ram_folder: Path, disk: Path) -> None:
    tiers = {
        "ram": ram(shared_memory, capacity="1 MiB", on_close="keep"),  # for five steps
        "disk": folder(disk, rate_limit="300 KB/s", retain="all"),
    }
    async with CheckpointStore.open(config(tiers, promote_in="agent", when_full="replace")) as store:
        await store.save(1, tree(1))
        (manifest,) = ram_in(ram_folder).glob("steps/*/manifest.ocdbt")
        agent = agent_of(ram_folder)
        await asyncio.to_thread(stop_when_it_reads, agent, manifest, disk)
        try:
            await store.save(2, tree(2))
            await store.evict(1, "ram")
            assert slab_of(store).used > await bytes_of_listed_steps(store)
        finally:
            os.kill(agent, signal.SIGCONT)
        for step in range(3, 13):
            assert not (await store.save(step, tree(step))).skipped
        await store.flush()
        assert await store.where(1) == ("disk",)
        for info in await store.steps():
            assert all(each.intact for each in await store.verify(info.step))
        await store.collect()
        assert slab_of(store).used == await bytes_of_listed_steps(store)


async def test_a_step_that_the_trainer_reads_stays_on_the_agents_tier(
    shared_memory: Path, ram_folder: Path, disk: Path
) -> None:
    async with CheckpointStore.open(settings(shared_memory, folder(disk, retain={"kind": "last_n", "n": 1}))) as store:
        await (await store.save(1, tree(1))).reached("disk")
        state = store._life.engine.state
        reading = AsyncExitStack()
        source = StepSource.open(state, state.find(1), only=state.tier("disk"))
        await store._life.loop.call(reading.enter_async_context(source))
        await (await store.save(2, tree(2))).reached("disk")
        await store.flush()
        assert "disk" in await store.where(1)
        with pytest.raises(Conflict, match="is being read from tier 'disk'"):
            await store.evict(1, "disk")
        await store._life.loop.call(reading.aclose())
        await (await store.save(3, tree(3))).reached("disk")
        await store.flush()
        assert "disk" not in await store.where(1)


async def test_a_read_that_is_cancelled_before_the_agent_has_answered_keeps_no_step_on_its_tier(
    shared_memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear, answers = AgentClient._apply, list[Response]()
    came = asyncio.Event()

    def answers_come_late(self: AgentClient, message: FromAgent, wire: Wire) -> None:
        if reads and isinstance(message, Response) and message.number in self._asked:
            answers.append(message)
            came.set()
        else:
            hear(self, message, wire)

    reads = False
    monkeypatch.setattr(AgentClient, "_apply", answers_come_late)
    async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store:
        await (await store.save(1, tree(1))).reached("disk")
        await (await store.save(2, tree(2))).reached("disk")
        await store.flush()

        async def read_and_be_cancelled() -> None:
            nonlocal reads
            reads = True
            reading = asyncio.create_task(read())
            async with asyncio.timeout(SOON):
                await came.wait()  # the agent keeps the step now
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            reads = False
            mode = store._life.engine.mode
            assert isinstance(mode, BesideAgent)
            assert mode.link._wire is not None
            hear(mode.link, answers.pop(), mode.link._wire)

        async def read() -> None:
            async with being_read(tier_of(store, "disk"), store._life.engine.state.find(1)):
                raise AssertionError("it is cancelled before")

        await store._life.loop.call(read_and_be_cancelled())
        await store.evict(1, "disk")
        assert await store.where(1) == ("ram",)


async def test_memory_that_was_taken_away_is_made_anew_and_the_agent_finds_it(
    shared_memory: Path, ram_folder: Path, disk: Path
) -> None:
    async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        shutil.rmtree(ram_folder)
        assert not (await store.save(2, tree(2))).skipped
        assert await store.where(2) == ("disk",)
        await heard.first(TierRecovered, lambda event: event.tier == "ram")
        await (await store.save(3, tree(3))).reached("disk")
        assert await store.where(3) == ("ram", "disk")
        assert await store.where(1) == ("disk",)


async def test_a_store_opens_without_the_memory_that_it_lacks_and_restores(
    shared_memory: Path, ram_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store:
        await store.save(1, tree(1))
    shutil.rmtree(ram_folder)

    def lacks(*_: Any, **__: Any) -> RamStore:
        raise NoSpace("shared memory is full")

    with monkeypatch.context() as full:
        full.setattr(RamStore, "open", lacks)
        store = await CheckpointStore.open(settings(shared_memory, folder(disk)))
        heard = Heard(store)
        assert_restored(await store.restore(), tree(1))
    await heard.first(TierRecovered, lambda event: event.tier == "disk")
    await (await store.save(2, tree(2))).reached("disk")
    await store.close()
