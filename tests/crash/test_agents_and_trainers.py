"""A trainer and its agent die and come back on their own, and no step is lost or promoted twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.agents import agent_of, eventually, go_on, log_of, save_and_die, settings, until, wait_for_end
from support.chfs_servers import LookalikeServers
from support.insight import tier_of
from support.limits import limit
from support.lookalike import missing
from support.scenes import (
    SOON,
    Heard,
    assert_restored,
    assert_same,
    config,
    crash,
    files_under,
    folder,
    ram,
    ram_in,
    steps_on,
    tree,
)

from tieredckpt import CheckpointStore, StoreConfig
from tieredckpt.engine.agent import process as agent_process
from tieredckpt.engine.agent.client import AgentClient
from tieredckpt.engine.agent.messages import FromAgent, Hello, Ready
from tieredckpt.engine.agent.process import claim, lives
from tieredckpt.engine.agent.wire import SOCKET, Wire, accept, listen
from tieredckpt.errors import Conflict, TierUnavailable
from tieredckpt.events import StepPromoted, TierFailed, TierRecovered
from tieredckpt.preempt import EXIT_STATUS, preemption

TESTS = Path(__file__).parents[1]


@asynccontextmanager
async def opened_before_it_goes_on(settings: StoreConfig, ram_folder: Path) -> AsyncIterator[CheckpointStore]:
    """A store that the agent which was stopped finds listening when it goes on."""

    def listening() -> int | None:
        path = ram_in(ram_folder) / SOCKET
        return path.stat().st_ino if path.exists() else None

    def then_go_on() -> None:
        eventually(lambda: listening() not in (None, of_the_dead), "the store listens")
        go_on(ram_folder)

    of_the_dead = listening()
    going_on = asyncio.create_task(asyncio.to_thread(then_go_on))
    async with CheckpointStore.open(settings) as store:
        await going_on
        yield store


async def test_what_a_killed_trainer_had_saved_is_promoted_by_its_agent_which_ends_then(
    slow: StoreConfig, ram_folder: Path, disk: Path
) -> None:
    await asyncio.to_thread(save_and_die, slow, 1, 2)
    agent = go_on(ram_folder)
    assert os.getsid(agent) == agent
    await asyncio.to_thread(wait_for_end, agent)
    assert not list(disk.glob("leases/*"))
    async with CheckpointStore.open(config({"disk": folder(disk)}), read_only=True) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 2
        assert_same(restored.tree, tree(2))


async def test_memory_that_ends_with_the_trainer_is_promoted_by_its_agent_all_the_same(
    small_tmpfs: Path, disk: Path
) -> None:
    ram_folder = small_tmpfs / "ram"
    nearest = {"kind": "ram", "path": ram_folder, "capacity": "128 MiB"}  # more than there is: a memfd
    tiers = {"ram": nearest, "disk": folder(disk, rate_limit="500 KB/s")}
    await asyncio.to_thread(save_and_die, config(tiers, promote_in="agent"), 1, 2)
    await asyncio.to_thread(wait_for_end, go_on(ram_folder))
    async with CheckpointStore.open(config({"disk": folder(disk)}), read_only=True) as store:
        assert_restored(await store.restore(), tree(2))


FORKING = """
import json, os, signal, sys
from support.scenes import tree
from tieredckpt import CheckpointStore
store = CheckpointStore.open(json.loads(sys.argv[1])).sync().__enter__()
store.save(1, tree(1))
if os.fork() == 0:  # as a data loader's worker may, with all that the trainer has open
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""


async def test_a_worker_that_outlives_its_trainer_keeps_no_agent_waiting(
    slow: StoreConfig, ram_folder: Path, disk: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, json.dumps(slow.model_dump(mode="json"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(TESTS)}
    ) as trainer:
        try:
            assert trainer.stdout is not None
            assert await asyncio.to_thread(trainer.stdout.readline) == b"forked\n"
            agent = agent_of(ram_folder)
            trainer.kill()
            await asyncio.to_thread(wait_for_end, agent)
            assert len(list(disk.glob("steps/*/manifest.ocdbt"))) == 1
        finally:
            trainer.kill()


async def test_a_trainer_that_comes_back_finds_the_agent_that_lives(slow: StoreConfig, ram_folder: Path) -> None:
    await asyncio.to_thread(save_and_die, slow, 1)
    agent = agent_of(ram_folder)
    async with opened_before_it_goes_on(slow, ram_folder) as store:
        assert agent_of(ram_folder) == agent
        assert_restored(await store.restore(), tree(1))
        await (await store.save(2, tree(2))).reached("disk")
        await store.flush()
        assert {info.tiers for info in await store.steps()} == {("ram", "disk")}
        assert store.observed().failures == 1
    wait_for_end(agent)


async def test_in_place_of_a_killed_agent_another_brings_the_step_once(
    slow: StoreConfig, ram_folder: Path, disk: Path
) -> None:
    async with CheckpointStore.open(slow) as store:
        heard = Heard(store)
        first = agent_of(ram_folder)
        ckpt = await store.save(1, tree(1))
        await until(store, lambda: tier_of(store, "disk").steps.promotions > 0)
        os.kill(first, signal.SIGKILL)
        await ckpt.reached("disk")
        second = await asyncio.to_thread(agent_of, ram_folder, after=first)
        assert [event.step for event in heard.of(StepPromoted)] == [1]
        assert not heard.of(TierFailed)
        await store.collect()
        assert len(list(disk.glob("steps/*/manifest.ocdbt"))) == 1
        assert len([name for name in files_under(disk) if name.startswith("packs/")]) >= 1
        await (await store.save(2, tree(2))).reached("disk")
    assert not lives(ram_in(ram_folder))
    wait_for_end(second)


async def test_an_agent_that_cannot_be_had_is_told_and_holds_up_no_save(
    shared_memory: Path, ram_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/bin/false")
            os.kill(agent_of(ram_folder), signal.SIGKILL)
            failed = await heard.first(TierFailed)
            assert "ended with exit status 1; its log is" in str(failed.error)
            for step in range(2, 12):
                assert not (await store.save(step, tree(step))).skipped
            with pytest.raises(TierUnavailable, match="its log is"):
                await store.flush()
        await heard.first(TierRecovered)
        await store.flush()
        assert await store.where(11) == ("ram", "disk")


async def test_what_ends_every_agent_that_is_asked_is_told_and_loses_nothing(
    shared_memory: Path, ram_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for want of memory. Promise 5."""
    limit(monkeypatch, agents_asked=2)
    ask, asked = AgentClient._ask, []

    async def ask_and_kill(client: AgentClient, wire: Wire, *request: Any) -> bytes:
        os.kill(wire.peer, signal.SIGKILL)
        asked.append(wire.peer)
        return await ask(client, wire, *request)

    async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store, asyncio.timeout(SOON):
        ckpt = await store.save(1, tree(1))
        with monkeypatch.context() as deadly:
            deadly.setattr(AgentClient, "_ask", ask_and_kill)
            with pytest.raises(TierUnavailable, match="2 agents, one after the other, ended while asked to collect"):
                await store.collect()
        assert len(set(asked)) == 2
        await ckpt.reached("disk")


async def test_agents_that_die_one_after_the_other_are_told_and_started_ever_more_rarely(
    shared_memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for want of memory, each soon after it was ready. Promise 5."""
    apply, killed = AgentClient._apply, []

    def apply_and_kill(client: AgentClient, message: FromAgent, wire: Wire) -> None:
        apply(client, message, wire)
        if isinstance(message, Ready):
            os.kill(wire.peer, signal.SIGKILL)
            killed.append(wire.peer)

    with monkeypatch.context() as deadly:
        deadly.setattr(AgentClient, "_apply", apply_and_kill)
        store = await CheckpointStore.open(settings(shared_memory, folder(disk)))
        heard = Heard(store)
        await store.save(1, tree(1))
        assert "was ended by signal 9; its log is" in str((await heard.first(TierFailed)).error)
        assert len(killed) == 3
        with pytest.raises(TierUnavailable, match="signal 9"):
            await store.flush()
    await heard.first(TierRecovered)
    await store.flush()
    assert await store.where(1) == ("ram", "disk")
    await store.close()


async def test_a_worker_that_is_forked_while_an_agent_starts_does_not_keep_it_from_its_work(
    shared_memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forked(subprocess.Popen[bytes]):
        """What a worker has that was forked after the pipe was made, and lives on: the agent hears of no end."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            assert self.stdin is not None
            inherited.append(os.dup(self.stdin.fileno()))

    inherited: list[int] = []
    monkeypatch.setattr(agent_process.subprocess, "Popen", Forked)
    try:
        async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store:
            assert inherited
            await (await store.save(1, tree(1))).reached("disk")
    finally:
        for fd in inherited:
            os.close(fd)


@pytest.mark.slow
async def test_an_agent_that_hangs_is_told_and_taken_back_when_it_goes_on(
    shared_memory: Path, ram_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, agent_silence=8.0)  # more than an agent is ever silent
    async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        agent = agent_of(ram_folder)
        os.kill(agent, signal.SIGSTOP)
        try:
            ckpt = await store.save(2, tree(2))
            assert f"the agent, process {agent}, does not answer" in str((await heard.first(TierFailed)).error)
            with pytest.raises(TierUnavailable, match="does not answer"):
                await ckpt.reached("disk")
        finally:
            os.kill(agent, signal.SIGCONT)
        await heard.first(TierRecovered)
        await ckpt.reached("disk")
        assert agent_of(ram_folder) == agent


async def test_what_a_trainer_saves_after_it_gave_up_its_agent_is_promoted_by_that_agent(
    slow: StoreConfig, ram_folder: Path, disk: Path
) -> None:
    """As of a trainer that was stopped itself: when it goes on, it takes its agent for silent, saves and ends."""
    store = await CheckpointStore.open(slow)
    link = store._life.engine.mode.link
    await store.save(1, tree(1))
    agent = agent_of(ram_folder)

    async def give_up() -> None:
        await link._hang_up()
        await link._end_talk()

    await store._life.loop.call(give_up())
    await store.save(2, tree(2))
    await crash(store)
    wait_for_end(agent)
    async with CheckpointStore.open(disk, read_only=True) as reader:
        assert [each.step for each in await reader.steps()] == [1, 2]
        restored = await reader.restore()
        assert restored is not None
        assert_same(restored.tree, tree(2))


async def test_of_two_agents_one_promotes(slow: StoreConfig, ram_folder: Path) -> None:
    async with CheckpointStore.open(slow) as store:
        await store.save(1, tree(1))
        with pytest.raises(Conflict, match=f"has an agent already, process {agent_of(ram_folder)} on"):
            claim(ram_in(ram_folder))


async def test_a_store_whose_tiers_another_agent_writes_to_is_refused_with_who_that_is(
    shared_memory: Path, ram_folder: Path, disk: Path
) -> None:
    async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store:
        await store.save(1, tree(1))
        agent = agent_of(ram_folder)
        for mode in ("trainer", "agent"):
            mine = {"ram": ram(shared_memory, path=shared_memory / "of-test" / mode), "disk": folder(disk)}
            with pytest.raises(Conflict, match=f"is being written to by process {agent} on"):
                await CheckpointStore.open(config(mine, promote_in=mode))
        await store.flush()


async def test_an_agent_with_another_configuration_makes_room_for_one_that_has_the_trainers(
    slow: StoreConfig, shared_memory: Path, ram_folder: Path, disk: Path
) -> None:
    await asyncio.to_thread(save_and_die, slow, 1)
    before = agent_of(ram_folder)
    other = settings(shared_memory, folder(disk, retain="all"))
    async with opened_before_it_goes_on(other, ram_folder) as store:
        await asyncio.to_thread(wait_for_end, before)
        assert agent_of(ram_folder) != before
        for step in range(2, 9):
            await store.save(step, tree(step))
        await store.flush()
        assert await steps_on(store, "disk") == [*range(1, 9)]


async def test_an_agent_makes_room_for_a_trainer_of_another_version_that_it_cannot_understand(
    slow: StoreConfig, ram_folder: Path
) -> None:
    """Promise 5: or nothing would be promoted until somebody ends it, for it holds the folder's lock."""
    await asyncio.to_thread(save_and_die, slow, 1)
    agent = agent_of(ram_folder)
    with contextlib.closing(listen(ram_in(ram_folder))) as sock:

        async def greet() -> None:
            while True:  # it may call again
                wire = await accept(sock)
                wire.send(Hello("999.0", "", "", made_up=False, slab="", capacity=0))
                wire.send({"type": "of a later version"})
                await asyncio.sleep(0.1)
                await wire.close()

        greeting = asyncio.create_task(greet())
        go_on(ram_folder)
        await asyncio.to_thread(wait_for_end, agent)
        greeting.cancel()
    assert "another configuration or version" in log_of(ram_folder)


def test_a_warned_trainer_ends_when_its_agent_has_made_the_newest_step_durable(
    shared_memory: Path, ram_folder: Path, disk: Path
) -> None:
    slowly = folder(disk, rate_limit="200 KB/s", promote={"kind": "every_n_steps", "n": 10})
    with CheckpointStore.open(settings(shared_memory, slowly)).sync() as store:
        store.save(10, tree(10))
        store.save(11, tree(11))
        with pytest.raises(SystemExit) as ended, preemption(store, seconds=SOON):
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == EXIT_STATUS
        assert "disk" in store.where(11)


@pytest.mark.skipif(bool(missing()), reason=missing())
async def test_libchfs_that_ends_its_process_ends_neither_agent_nor_trainer(
    shared_memory: Path, ram_folder: Path, tmp_path: Path
) -> None:
    servers = LookalikeServers(tmp_path / "servers")
    tiers = {"ram": ram(shared_memory), "pmem": servers.tier, "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers, promote_in="agent")) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("pmem")
        agent = agent_of(ram_folder)
        servers.switch(exit_pwrite="*")
        await (await store.save(2, tree(2))).reached("disk")
        assert (await heard.first(TierFailed)).tier == "pmem"
        servers.switch()
        await heard.first(TierRecovered)
        await store.flush()
        assert await store.where(2) == ("ram", "pmem", "disk")
        assert agent_of(ram_folder) == agent
        for step in (1, 2):
            await store.evict(step, "ram")
            restored = await store.restore(step, resume=False)
            assert restored is not None
            assert set(restored.sources) == {"pmem"}
            assert_same(restored.tree, tree(step))
