"""Servers of CHFS that join while a trainer saves, or fall silent: what was acknowledged is read, and nobody waits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.chfs_servers import LookalikeServers, RealServers, Servers, why_no_real_servers
from support.limits import limit
from support.lookalike import missing
from support.scenes import SOON, Heard, assert_restored, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.chfs import choice
from tieredckpt.config import StoreConfig, to_toml
from tieredckpt.errors import NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import TierFailed, TierRecovered

Make = Callable[..., Servers]

KEEP = {"kind": "last_n", "n": 99}
REAL = pytest.param("real", marks=pytest.mark.chfs_real)

READ = """
import json, sys
from support.scenes import assert_same, tree
from tieredckpt import CheckpointStore
from tieredckpt.config import load

with CheckpointStore.open(load(sys.argv[1]), read_only=True).sync() as store:
    for step in json.loads(sys.argv[2]):
        restored = store.restore(step)
        assert_same(restored.tree, tree(step))
        print(step, *restored.sources)
"""


@pytest.fixture(params=["lookalike", REAL])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    if why := missing() or (why_no_real_servers() if request.param == "real" else ""):
        pytest.skip(why)
    made: list[Servers] = []

    def make(**settings: bool) -> Servers:
        kind = RealServers if request.param == "real" else LookalikeServers
        made.append(kind(tmp_path / f"servers-{len(made)}", **settings))
        return made[-1]

    yield make
    for servers in made:
        servers.stop()


def tell(*figures: object) -> None:
    """Say what a run measured, for whoever runs it with -s."""
    sys.stdout.write(" ".join(map(str, figures)) + "\n")


def tiers(pmem: dict[str, Any], shared_memory: Path, tmp_path: Path, **settings: Any) -> StoreConfig:
    chfs = pmem | {"retain": KEEP, "chunk_size": "16 KiB"}
    disk = folder(tmp_path / "disk", survives="site", retain=KEEP, promote={"kind": "never"})
    return config({"ram": ram(shared_memory, **settings), "pmem": chfs, "disk": disk})


def read_by_a_fresh_process(settings: StoreConfig, tmp_path: Path, steps: list[int]) -> dict[int, set[str]]:
    """The tiers that each step came from; it was bit for bit what was saved."""
    (tmp_path / "read.toml").write_text(to_toml(settings))
    command = [sys.executable, "-c", READ, str(tmp_path / "read.toml"), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    return {int(words[0]): set(words[1:]) for words in map(str.split, done.stdout.splitlines())}


async def save_until(store: CheckpointStore, ended: asyncio.Event, acknowledged: set[int], pause: float) -> int:
    """Save steps, and note those that reach CHFS; the last one."""
    step, waiting = 0, set[asyncio.Task[None]]()

    async def note(step: int, saved: Any) -> None:
        while step not in acknowledged and not ended.is_set():
            with suppress(TierUnavailable, NotFound):  # it was not acknowledged
                await saved.reached("pmem")
                acknowledged.add(step)
            await asyncio.sleep(0.05)

    while not ended.is_set():
        step += 1
        waiting.add(asyncio.ensure_future(note(step, await store.save(step, tree(step)))))
        await asyncio.sleep(pause)
    await asyncio.gather(*waiting)
    return step


@pytest.mark.parametrize("servers", [None, 3], ids=["defaults", "servers=3"])
async def test_steps_acknowledged_while_servers_join_are_read_by_a_fresh_process(
    make: Make,
    servers: int | None,
    shared_memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    real = "real" in request.node.name
    if not real:
        monkeypatch.setattr(choice, "_stable_for", lambda _: 1.5)
        limit(monkeypatch, last_retry=0.5)
    ring, ended, acknowledged = make(waiting=True), asyncio.Event(), set[int]()
    pmem = ring.defaults if servers is None else ring.defaults | {"servers": servers}
    if not real:
        pmem["rpc_timeout"] = 1.0  # for which the opening waits for the first server, which comes after it
    settings = tiers(pmem, shared_memory, tmp_path, retain=KEEP)
    begin = time.monotonic()
    async with CheckpointStore.open(settings) as store:
        saving = asyncio.ensure_future(save_until(store, ended, acknowledged, 1.0 if real else 0.2))
        for number in range(3):
            await asyncio.to_thread(ring.join, number)
            tell(f"{time.monotonic() - begin:.1f} s: server {number + 1} runs; acknowledged: {sorted(acknowledged)}")
            await asyncio.sleep(6.0 if real else 0.4)
        async with asyncio.timeout(4 * SOON):
            while len(acknowledged) < (20 if real else 5):
                await asyncio.sleep(0.05)
        ended.set()
        last = await saving
        await store.flush()
        tell(f"{time.monotonic() - begin:.1f} s: step {last} was saved; acknowledged: {sorted(acknowledged)}")
    assert acknowledged
    only_pmem = config({"pmem": settings.tiers[1]})
    tell("a fresh process read", read := read_by_a_fresh_process(only_pmem, tmp_path, sorted(acknowledged)))
    assert set(read) == acknowledged


async def test_a_ring_that_grows_later_is_noticed_and_the_tier_catches_up(
    make: Make, shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit(monkeypatch, first_retry=0.02)
    limit(monkeypatch, last_retry=0.2)
    ring = make(waiting=True)
    ring.join(0)
    settings = tiers(ring.tier, shared_memory, tmp_path)
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        for step in (1, 2):
            await (await store.save(step, tree(step))).reached("pmem")
        ring.join(1)
        ring.join(2)
        saved = await store.save(3, tree(3))
        failed = await heard.first(TierFailed)
        assert "joined it" in str(failed.error)
        await heard.first(TierRecovered)
        await store.flush()
        await saved.reached("pmem")
        assert "without steps 1, 2" in caplog.text
        in_ram = [step for step in (1, 2, 3) if "ram" in await store.where(step)]
        on_pmem = [step for step in (1, 2, 3) if "pmem" in await store.where(step)]
        assert on_pmem == in_ram, "what RAM has was promoted again, and nothing else is taken for there"
        tell(failed.error, [record.message for record in caplog.records if "without steps" in record.message])
    only_pmem = config({"pmem": settings.tiers[1]})
    assert set(read_by_a_fresh_process(only_pmem, tmp_path, on_pmem)) == set(on_pmem)


async def test_a_server_that_comes_back_empty_gives_no_wrong_bytes(shared_memory: Path, tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    ring = LookalikeServers(tmp_path / "chfs")
    settings = tiers(ring.tier, shared_memory, tmp_path)
    async with CheckpointStore.open(settings) as store:
        for step in range(1, 5):
            await (await store.save(step, tree(step))).reached("pmem")
            await store.promote(step, "disk")
    ring.switch(empty=1)
    async with CheckpointStore.open(settings) as store:
        for step in range(1, 5):
            assert_restored(await store.restore(step), tree(step))


@pytest.mark.parametrize("empty", ["1", "0 1 2"])
async def test_what_is_acknowledged_after_servers_lost_their_data_refers_to_nothing_that_is_lost(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    if why := missing():
        pytest.skip(why)
    limit(monkeypatch, last_retry=0.5)
    ring = LookalikeServers(tmp_path / "chfs")
    settings = tiers(ring.tier, shared_memory, tmp_path, retain=KEEP)
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2):  # which share all arrays, as frozen ones are
            await (await store.save(step, tree(1))).reached("pmem")
        await store.flush()
        ring.switch(empty=empty)  # no call meets a server while it is away
        heard = Heard(store)
        saved = await store.save(3, tree(1))
        async with asyncio.timeout(SOON):
            while True:
                try:
                    await saved.reached("pmem")
                    break
                except TierUnavailable:
                    await asyncio.sleep(0.05)
        only_pmem = config({"pmem": settings.tiers[1]})
        async with CheckpointStore.open(only_pmem, read_only=True) as reader:
            assert_restored(await reader.restore(3), tree(1))
        failed = await heard.first(TierFailed)
        assert "without what they held" in str(failed.error)
        await store.flush()
        for step in (1, 2, 3):
            assert "pmem" in await store.where(step)


async def test_no_save_waits_for_a_server_that_was_killed_while_ram_is_full(
    make: Make, shared_memory: Path, tmp_path: Path
) -> None:
    ring = make()
    settings = tiers(ring.defaults, shared_memory, tmp_path, capacity="448 KiB")  # for two steps
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2):
            await (await store.save(step, tree(step))).reached("pmem")
        ring.kill(1)
        waited: list[float] = []
        skipped = 0
        for step in range(3, 9):
            begin = time.monotonic()
            saved = await store.save(step, tree(step))
            waited.append(time.monotonic() - begin)
            skipped += saved.skipped != ""
        tell("saves took", ", ".join(f"{seconds:.1f}" for seconds in waited), f"s; {skipped} were skipped")
        assert max(waited) < 5.0
        assert skipped, "RAM was never full"


@pytest.mark.parametrize("known", [False, True], ids=["at once", "once it is known"])
async def test_a_restore_turns_to_the_next_tier_when_a_server_is_killed(
    make: Make, shared_memory: Path, tmp_path: Path, known: bool
) -> None:
    ring = make()
    settings = tiers(ring.defaults, shared_memory, tmp_path)
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        for step in (1, 2):
            await (await store.save(step, tree(step))).reached("pmem")
            await store.promote(step, "disk")
        await store.evict(1, "ram")
        ring.kill(1)
        if known:
            await store.save(3, tree(3))
            failed = await heard.first(TierFailed)
            tell(failed.error)
        begin = time.monotonic()
        restored = await store.restore(1)
        tell(f"restored from {set(restored.sources) if restored else None} after {time.monotonic() - begin:.1f} s")
        assert time.monotonic() - begin < 10.0
        assert_restored(restored, tree(1))
        assert "disk" in restored.sources
        failed = await heard.first(TierFailed)
        assert "server" in str(failed.error)
    begin = time.monotonic()
    async with CheckpointStore.open(settings) as store:
        restored = await store.restore(1)
        tell(f"a new opening restored it after {time.monotonic() - begin:.1f} s")
        assert time.monotonic() - begin < 10.0
        assert_restored(restored, tree(1))


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        ("1", r"server 2 of 3 at .*servers/1 does not answer"),
        ("0 1 2", r"could not connect to directory:.*; see that all servers run"),
    ],
    ids=["one", "the one that clients ask for the others"],
)
async def test_a_server_that_is_silent_is_named_by_its_address(
    shared_memory: Path, tmp_path: Path, silent: str, told: str
) -> None:
    if why := missing():
        pytest.skip(why)
    ring = LookalikeServers(tmp_path / "chfs")
    async with CheckpointStore.open(tiers(ring.defaults, shared_memory, tmp_path)) as store:
        await (await store.save(1, tree(1))).reached("pmem")
        ring.switch(hang=silent)
        with pytest.raises(TieredCkptError, match=told) as refused:
            await (await store.save(2, tree(2))).reached("pmem")
        assert "deadline" not in str(refused.value)
        ring.switch()
