"""An agent that a user starts, asks or stops; and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agents import agent_of, eventually, log_of, save_and_die, settings, until, wait_for_end
from support.insight import tier_of
from support.scenes import SOON, config, crash, folder, ram, ram_in, tree

from tieredckpt import CheckpointStore, StoreConfig
from tieredckpt.config import to_toml
from tieredckpt.engine.agent.process import lives
from tieredckpt.engine.agent.wire import SOCKET
from tieredckpt.errors import Conflict, Invalid


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
    assert "waiting for its trainer" in await asyncio.to_thread(agent.stderr.readline)
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


async def test_an_agent_of_the_user_refuses_a_trainer_of_another_configuration_and_waits_for_the_next(
    admin: Callable[..., subprocess.Popen[str]], shared_memory: Path, ram_folder: Path, disk: Path
) -> None:
    agent = admin()
    assert agent.stderr is not None
    await asyncio.to_thread(agent.stderr.readline)  # it listens
    other = config({"ram": ram(shared_memory), "disk": folder(disk, retain="all")}, promote_in="agent")
    with pytest.raises(Conflict, match=f"process {agent.pid}, has another configuration than the trainer; end it, or"):
        await CheckpointStore.open(other).__aenter__()
    async with CheckpointStore.open(settings(shared_memory, folder(disk))) as store:
        await (await store.save(1, tree(1))).reached("disk")
        assert agent_of(ram_folder) == agent.pid


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
