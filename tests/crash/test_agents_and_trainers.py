"""A trainer and its agent die and come back on their own, and no step is lost or promoted twice."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.agents import agent_of, eventually, log_of, until, wait_for_end
from support.chfs_servers import LookalikeServers
from support.insight import bytes_of_listed_steps, slab_of, tier_of
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
    tree,
)

from tieredckpt import CheckpointStore, StoreConfig
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.config import to_toml
from tieredckpt.engine.agent import process as agent_process
from tieredckpt.engine.agent.client import AgentClient
from tieredckpt.engine.agent.messages import FromAgent, Hello, Ready, Response
from tieredckpt.engine.agent.process import claim, lives
from tieredckpt.engine.agent.wire import SOCKET, Wire, accept, listen
from tieredckpt.engine.mode.beside_agent import BesideAgent
from tieredckpt.engine.restoring.source import StepSource, pinned
from tieredckpt.errors import Conflict, Invalid, NoSpace, TierUnavailable
from tieredckpt.events import StepPromoted, TierFailed, TierRecovered
from tieredckpt.preempt import EXIT_STATUS, preemption

DYING = """
import json, os, signal, sys
from support.agents import agent_of
from support.scenes import tree
from tieredckpt import CheckpointStore
store = CheckpointStore.open(json.loads(sys.argv[1])).sync().__enter__()
for step in map(int, sys.argv[2:]):
    store.save(step, tree(step))
if store.config.promote_in == "agent":
    os.kill(agent_of(store.config.tiers[0].path), signal.SIGSTOP)  # or it might have ended before the test looks
os.kill(os.getpid(), signal.SIGKILL)
"""
TESTS = Path(__file__).parents[1]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def slow(ram_folder: Path, shared_memory: Path, disk: Path) -> StoreConfig:
    """A store whose promotions take a moment."""
    return settings(shared_memory, folder(disk, rate_limit="500 KB/s"))


def settings(shared_memory: Path, disk: dict[str, Any], **more: Any) -> StoreConfig:
    return config({"ram": ram(shared_memory, on_close="keep"), "disk": disk}, promote_in="agent", **more)


def save_and_die(settings: StoreConfig, *steps: int) -> None:
    """A trainer that is killed as soon as the last save has returned; if it has an agent, that is stopped."""
    done = subprocess.run(
        [sys.executable, "-c", DYING, json.dumps(settings.model_dump(mode="json")), *map(str, steps)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def go_on(ram_folder: Path) -> int:
    """Let the agent go on that was stopped when its trainer died; its process."""
    agent = agent_of(ram_folder)
    os.kill(agent, signal.SIGCONT)
    return agent


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
            async with pinned(tier_of(store, "disk"), store._life.engine.state.find(1)):
                raise AssertionError("it is cancelled before")

        await store._life.loop.call(read_and_be_cancelled())
        await store.evict(1, "disk")
        assert await store.where(1) == ("ram",)


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
        assert [info.step for info in await store.steps() if "disk" in info.tiers] == [*range(1, 9)]


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


@pytest.fixture
def admin(shared_memory: Path, disk: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts agents by the command line."""
    path = tmp_path / "ckpt.toml"
    path.write_text(to_toml(settings(shared_memory, folder(disk))))
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tieredckpt", "agent", str(path), *options]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
async def test_an_agent_of_the_user_serves_one_trainer_after_the_other_and_ends_in_order(
    admin: Callable[..., subprocess.Popen[str]],
    shared_memory: Path,
    ram_folder: Path,
    disk: Path,
    ending: signal.Signals,
) -> None:
    agent = admin()  # before there is any trainer
    assert agent.stderr is not None
    assert await asyncio.to_thread(agent.stderr.readline) == "promoting from tier ram to disk\n"
    for capacity, step in (("16 MiB", 1), ("32 MiB", 2)):  # RAM is given back, and made anew
        tiers = {"ram": ram(shared_memory, capacity=capacity), "disk": folder(disk)}
        async with CheckpointStore.open(config(tiers, promote_in="agent")) as store:
            big = {"w": tree(step, arrays=1, nbytes=step * (10 << 20))["params"]["w0"]}
            await (await store.save(step, big)).reached("disk")
            assert agent_of(ram_folder) == agent.pid
            second = admin()
            out, err = await asyncio.to_thread(second.communicate)
            assert second.returncode == 1
            assert f"has an agent already, process {agent.pid} on" in err
        assert ram_in(ram_folder) == ram_folder
    agent.send_signal(ending)
    out, err = await asyncio.to_thread(agent.communicate)
    assert agent.returncode == 0, err
    assert [line[: line.index(":")] for line in out.splitlines()] == [f"step {step} is on tier disk" for step in (1, 2)]
    assert not list(disk.glob("leases/*"))


async def test_once_promotes_what_a_dead_trainer_left_and_ends(
    admin: Callable[..., subprocess.Popen[str]], shared_memory: Path, ram_folder: Path, disk: Path
) -> None:
    alone = config({"ram": ram(shared_memory, on_close="keep"), "disk": folder(disk, rate_limit="1 KB/s")})
    await asyncio.to_thread(save_and_die, alone, 1)
    agent = admin("--once")
    out, err = await asyncio.to_thread(agent.communicate)
    assert agent.returncode == 0, err
    assert out.startswith("step 1 is on tier disk: ")
    end_ram = ram_folder.rename(ram_folder.with_name("elsewhere"))
    gone = admin("--once")
    out, err = await asyncio.to_thread(gone.communicate)
    assert gone.returncode == 0, err  # as after a training that ended in order
    assert "nothing is left to promote" in err
    assert end_ram.exists()


IMPATIENT = """
import json, sys
from dataclasses import replace
from tieredckpt.agent.agent import run_agent
from tieredckpt.config import load
from tieredckpt.engine import limits
from tieredckpt.events import Events
limits.in_force = replace(limits.in_force, agent_gives_up=8.0, longest_pause=0.5, last_retry=0.5)
events = Events()
events.subscribe(lambda event: print(type(event).__name__, flush=True))
run_agent(load(json.loads(sys.argv[1])), events, "once")
"""


async def test_an_agent_that_is_stopped_for_longer_than_it_waits_for_a_tier_waits_for_it_all_the_same(
    shared_memory: Path, disk: Path
) -> None:
    alone = config({"ram": ram(shared_memory, on_close="keep"), "disk": folder(disk, rate_limit="1 KB/s")})
    await asyncio.to_thread(save_and_die, alone, 1)
    shutil.rmtree(disk / "packs", ignore_errors=True)
    (disk / "packs").write_text("no folder")
    alone = config({"ram": ram(shared_memory, on_close="keep"), "disk": folder(disk)})
    agent = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, json.dumps(alone.model_dump(mode="json"))],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert agent.stdout is not None
        for _ in range(3):
            assert await asyncio.to_thread(agent.stdout.readline) == "TierFailed\n"
        agent.send_signal(signal.SIGSTOP)
        await asyncio.sleep(9)
        agent.send_signal(signal.SIGCONT)
        await asyncio.sleep(2)
        (disk / "packs").unlink()
        out, _ = await asyncio.to_thread(agent.communicate)
        assert "StepPromoted" in out
    finally:
        agent.kill()
        agent.wait()


async def test_a_training_that_ends_by_an_exception_leaves_the_rest_to_its_agent(
    slow: StoreConfig, ram_folder: Path, disk: Path
) -> None:
    store = await CheckpointStore.open(slow)
    await store.save(1, tree(1))
    agent = agent_of(ram_folder)
    await crash(store)
    wait_for_end(agent)
    assert len(list(disk.glob("steps/*/manifest.ocdbt"))) == 1


async def test_a_stopped_agent_gives_its_leases_back_and_another_follows(slow: StoreConfig, ram_folder: Path) -> None:
    async with CheckpointStore.open(slow) as store:
        ckpt = await store.save(1, tree(1))
        await until(store, lambda: tier_of(store, "disk").steps.promotions > 0)
        first = agent_of(ram_folder)
        os.kill(first, signal.SIGTERM)
        wait_for_end(first)
        assert "ended by a signal" in log_of(ram_folder)
        await ckpt.reached("disk")
        assert store.observed().failures == 0


async def test_the_socket_is_this_users_alone_and_nonsense_on_it_costs_nothing(
    shared_memory: Path, ram_folder: Path, disk: Path
) -> None:
    async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store:
        await store.save(1, tree(1))
        await store.flush()
        assert (ram_in(ram_folder) / SOCKET).stat().st_mode & 0o777 == 0o600
        for nonsense in (b"\xff" * 64, (1 << 31).to_bytes(4, "little"), b"\x03\x00\x00\x00abc"):
            async with asyncio.timeout(SOON):
                reader, writer = await asyncio.open_unix_connection(ram_in(ram_folder) / SOCKET)
                writer.write(nonsense)
                while await reader.read(1 << 16):  # until it hangs up
                    pass
                writer.close()
        await (await store.save(2, tree(2))).reached("disk")


def test_an_agent_needs_ram_and_a_slower_tier(disk: Path, shared_memory: Path) -> None:
    for tiers in ({"disk": folder(disk)}, {"ram": ram(shared_memory)}):
        with pytest.raises(Invalid, match="promotes from a ram tier to slower ones"):
            config(tiers, promote_in="agent", name="alone")


def test_nothing_of_the_configuration_is_seen_in_the_list_of_processes(
    shared_memory: Path, ram_folder: Path, disk: Path
) -> None:
    with CheckpointStore.open(settings(shared_memory, folder(disk))).sync():
        line = Path(f"/proc/{agent_of(ram_folder)}/cmdline").read_text()
        assert str(disk) not in line
        assert os.readlink(f"/proc/{agent_of(ram_folder)}/fd/0") == os.devnull
    eventually(lambda: not lives(ram_in(ram_folder)), "the agent has ended with its store")
