"""What the loss of CHFS servers, of the worker, or of the trainer costs: no step, and nothing of the training."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.chfs_servers import LookalikeServers, Servers, serving
from support.limits import limit
from support.lookalike import hangs, missing
from support.scenes import Heard, assert_restored, assert_same, config, crash, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import Conflict, NoSpace, NotFound, TierUnavailable
from tieredckpt.events import TierFailed, TierRecovered
from tieredckpt.policy import Retention, parse


@pytest.fixture(autouse=True)
def _tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := missing():
        pytest.skip(why)
    limit(monkeypatch, first_retry=0.02)
    limit(monkeypatch, last_retry=0.2)


@pytest.fixture
def lookalike(tmp_path: Path) -> LookalikeServers:
    return LookalikeServers(tmp_path / "chfs")


@pytest.fixture(params=["lookalike", pytest.param("real", marks=pytest.mark.chfs_real)])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    with serving(request.param, tmp_path / "servers") as servers:
        yield servers


def tiers(servers: Servers, shared_memory: Path, tmp_path: Path, **settings: Any) -> StoreConfig:
    keep = {"kind": "last_n", "n": 9}
    pmem = servers.tier | {"retain": keep, "chunk_size": "16 KiB"} | settings  # each server has a part of each pack
    disk = folder(tmp_path / "disk", survives="site", retain=keep)
    return config({"ram": ram(shared_memory), "pmem": pmem, "disk": disk})


def worker() -> psutil.Process:
    """The one worker process of this test."""
    (found,) = (child for child in psutil.Process().children() if "chfs.worker" in " ".join(child.cmdline()))
    return found


async def assert_restores(store: CheckpointStore, step: int, source: str) -> None:
    """The step is restored, and all of it from that tier; RAM is made to forget it for slower ones."""
    if source != "ram" and "ram" in await store.where(step):
        await store.evict(step, "ram")
    restored = await store.restore(step)
    assert_restored(restored, tree(step))
    assert set(restored.sources) == {source}


async def assert_intact(store: CheckpointStore, *steps: int) -> None:
    """Every chunk of the steps on CHFS has its digest."""
    for step in steps:
        assert [verified.intact for verified in await store.verify(step, "pmem")] == [True]


async def test_a_step_goes_through_chfs_and_back(servers: Servers, shared_memory: Path, tmp_path: Path) -> None:
    async with CheckpointStore.open(tiers(servers, shared_memory, tmp_path)) as store:
        for step in (1, 2):
            await (await store.save(step, tree(step))).reached("pmem")
        await store.flush()
        await assert_intact(store, 1, 2)
        await assert_restores(store, 2, "pmem")
        await assert_restores(store, 1, "pmem")


async def test_a_server_lost_while_saving_costs_the_training_nothing(
    servers: Servers, shared_memory: Path, tmp_path: Path
) -> None:
    async with CheckpointStore.open(tiers(servers, shared_memory, tmp_path)) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("pmem")
        servers.kill(1)
        for step in (2, 3):
            saved = await store.save(step, tree(step))
            await saved.reached("disk")  # past the tier that is down
        failed = await heard.first(TierFailed)
        assert failed.tier == "pmem"
        with pytest.raises(TierUnavailable):
            await saved.reached("pmem")
        servers.restart(1)
        await heard.first(TierRecovered)
        await store.flush()
        assert {step: await store.where(step) for step in (1, 2, 3)}[3] == ("ram", "pmem", "disk")
        await assert_restores(store, 3, "pmem")
        await assert_intact(store, 1, 3)


async def test_a_server_lost_while_restoring_sends_the_reader_to_the_next_tier(
    servers: Servers, shared_memory: Path, tmp_path: Path
) -> None:
    async with CheckpointStore.open(tiers(servers, shared_memory, tmp_path)) as store:
        await store.save(1, tree(1))
        await store.save(2, tree(2))
        await store.flush()
        await assert_restores(store, 1, "pmem")
        await store.evict(2, "ram")
        servers.kill(1)
        restored = await store.restore(2)
        assert_restored(restored, tree(2))
        assert "disk" in restored.sources
        assert await store.where(2) == ("pmem", "disk"), "a server that is down has lost nothing"


async def test_a_store_opened_while_a_server_is_gone_takes_nothing_for_lost(
    servers: Servers, shared_memory: Path, tmp_path: Path
) -> None:
    settings = tiers(servers, shared_memory, tmp_path)
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
        await store.flush()
    servers.kill(1)
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        await assert_restores(store, 1, "disk")
        assert [info.healthy for info in await store.tier_infos() if info.name == "pmem"] == [False]
        servers.restart(1)
        await heard.first(TierRecovered)
        await store.flush()
        assert "pmem" in await store.where(1)
        await assert_intact(store, 1)


async def test_steps_outlive_a_restart_of_all_servers(servers: Servers, shared_memory: Path, tmp_path: Path) -> None:
    async with CheckpointStore.open(tiers(servers, shared_memory, tmp_path)) as store:
        for step in (1, 2):
            await store.save(step, tree(step))
        await store.flush()
    servers.restart_all()
    async with CheckpointStore.open(tiers(servers, shared_memory, tmp_path)) as store:
        for step in (1, 2):
            assert await store.where(step) == ("pmem", "disk")
            await assert_restores(store, step, "pmem")


async def test_a_worker_killed_in_a_write_is_replaced_and_the_step_arrives(
    lookalike: LookalikeServers, shared_memory: Path, tmp_path: Path
) -> None:
    async with CheckpointStore.open(tiers(lookalike, shared_memory, tmp_path)) as store:
        heard = Heard(store)
        await store.flush()
        lookalike.switch(hang_pwrite="1+")
        saved = await store.save(1, tree(1))
        await saved.reached("disk")
        first = worker()
        os.kill(first.pid, signal.SIGKILL)
        assert "SIGKILL" in str((await heard.first(TierFailed)).error)
        lookalike.switch()
        await heard.first(TierRecovered)
        await store.flush()
        assert worker().pid != first.pid
        await assert_restores(store, 1, "pmem")


async def test_a_trainer_that_dies_while_promoting_leaves_no_half_step(
    lookalike: LookalikeServers, shared_memory: Path, tmp_path: Path
) -> None:
    settings = tiers(lookalike, shared_memory, tmp_path)
    store = CheckpointStore.open(settings)
    await store.__aenter__()
    await (await store.save(1, tree(1))).reached("pmem")
    lookalike.switch(hang_pwrite="2+")
    await (await store.save(2, tree(2))).reached("disk")
    await crash(store)
    lookalike.switch()
    async with CheckpointStore.open(settings) as store:
        await assert_restores(store, 2, "ram")
        await store.flush()
        assert await store.where(2) == ("ram", "pmem", "disk")
        await assert_intact(store, 1, 2)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
async def test_a_torn_commit_is_no_step(
    lookalike: LookalikeServers, shared_memory: Path, tmp_path: Path, share: float
) -> None:
    settings = tiers(lookalike, shared_memory, tmp_path)
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2):
            await store.save(step, tree(step))
        await store.flush()
    (manifest,) = lookalike.directory.glob("servers/*/of/test/steps/0000000002-*/manifest.ocdbt")
    header = 64
    os.truncate(manifest, header + int((manifest.stat().st_size - header) * share))
    only_pmem = config({"pmem": settings.tiers[1]})
    async with CheckpointStore.open(only_pmem, read_only=True) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 1
        assert_same(restored.tree, tree(1))


async def test_a_full_chfs_is_told_and_passed_by(
    lookalike: LookalikeServers, shared_memory: Path, tmp_path: Path
) -> None:
    async with CheckpointStore.open(tiers(lookalike, shared_memory, tmp_path)) as store:
        heard = Heard(store)
        await store.flush()
        lookalike.switch(capacity="64KiB")
        saved = await store.save(1, tree(1))
        await saved.reached("disk")
        assert isinstance((await heard.first(TierFailed)).error, NoSpace)
        lookalike.switch()
        await heard.first(TierRecovered)
        await store.flush()
        assert "pmem" in await store.where(1)


@pytest.mark.parametrize("version", [2, 3], ids=["told as any failure", "told"])
async def test_full_devices_of_chfs_hold_the_newest_steps(
    lookalike: LookalikeServers, shared_memory: Path, tmp_path: Path, version: int
) -> None:
    lookalike.switch(capacity="256KiB", version=version)
    async with CheckpointStore.open(tiers(lookalike, shared_memory, tmp_path)) as store:
        for step in range(1, 7):
            await store.save(step, tree(step))
            await store.flush()
            assert "pmem" in await store.where(step)
        assert "pmem" not in await store.where(1)


async def test_a_step_only_on_chfs_is_no_safe_copy_against_the_loss_of_a_node(
    lookalike: LookalikeServers, shared_memory: Path, tmp_path: Path
) -> None:
    async with CheckpointStore.open(tiers(lookalike, shared_memory, tmp_path)) as store:
        await store.save(1, tree(1))
        await store.flush()
        told = {info.name: info.survives for info in await store.tier_infos()}
        assert told == {"ram": "process", "pmem": "process", "disk": "site"}
        with pytest.raises(Conflict):
            await store.evict(1, "disk")


@pytest.mark.parametrize(
    ("keep", "why"),
    [(9, "it left 'ram' before that tier, which is slower"), (1, "newer steps came to that tier first")],
    ids=["left RAM", "newer ones came first"],
)
async def test_a_step_that_a_slow_tier_passed_over_is_told_so_and_not_that_its_policy_said_no(
    lookalike: LookalikeServers, shared_memory: Path, tmp_path: Path, keep: int, why: str
) -> None:
    settings = tiers(
        lookalike, shared_memory, tmp_path, retain={"kind": "last_n", "n": keep}, rpc_timeout=30.0, deadline="600 s"
    )
    ram_keeps = settings.tiers[0].model_copy(update={"retain": parse(Retention, {"kind": "last_n", "n": 9})})
    settings = settings.model_copy(update={"tiers": (ram_keeps, *settings.tiers[1:])})
    async with CheckpointStore.open(settings) as store:
        await store.flush()
        lookalike.switch(hang_pwrite="1+")  # so slow is the tier
        await store.save(1, tree(1))
        await hangs(lookalike.directory, "pwrite")
        passed = await store.save(2, tree(2))
        for step in (3, 4):
            await (await store.save(step, tree(step))).reached("disk")
        if keep == 9:
            await store.evict(2, "ram")
        lookalike.switch()
        await store.flush()
        assert "pmem" in await store.where(4)
        assert "pmem" not in await store.where(2)
        with pytest.raises(NotFound, match=why):
            await passed.reached("pmem")


async def test_an_eviction_that_a_kill_cuts_off_leaves_the_step_or_none(
    lookalike: LookalikeServers, shared_memory: Path, tmp_path: Path
) -> None:
    settings = tiers(lookalike, shared_memory, tmp_path, deadline="1 s")
    store = CheckpointStore.open(settings)
    await store.__aenter__()
    for step in (1, 2):
        await (await store.save(step, tree(step))).reached("disk")
    await store.flush()
    lookalike.switch(hang_unlink="1+")
    evicting = asyncio.ensure_future(store.evict(1, "pmem"))
    await hangs(lookalike.directory, "unlink")
    evicting.cancel()
    await asyncio.wait([evicting])
    await crash(store)
    lookalike.switch()
    async with CheckpointStore.open(config({"pmem": settings.tiers[1]}), read_only=True) as store:
        assert [info.damaged for info in await store.steps()] == [(), ()]
        await assert_restores(store, 1, "pmem")
