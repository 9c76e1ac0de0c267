"""Promise 5: a device that has no room for a lease when the store is opened is read, and caught up later."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.limits import limit
from support.scenes import SOON, Heard, assert_restored, config, folder, leases, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.posix import store as posix
from tieredckpt.config import StoreConfig
from tieredckpt.engine.promoting.promoter import Promoter
from tieredckpt.engine.tier import lease
from tieredckpt.errors import Conflict, NoSpace, TierUnavailable
from tieredckpt.events import TierFailed, TierRecovered

COMPRESSIBLE = 256 << 10
"""Bytes of `compressible`."""


def compressible(seed: int) -> dict[str, Any]:
    return {"w": np.arange(COMPRESSIBLE // 8) + seed}


def manifests(disk: Path) -> int:
    return len([*disk.glob("steps/*/manifest.ocdbt")])


@contextmanager
def no_room_on(disk: Path, steps: int = 0) -> Iterator[None]:
    """A device without room for a single file while it has so many steps, as one that others fill."""
    put = posix.PosixStore.put

    async def put_elsewhere(store: posix.PosixStore, key: str, parts: Any, *, create_only: bool = False) -> None:
        if store.location == str(disk) and manifests(disk) >= steps:
            raise NoSpace(f"{key} was not written: no space left on device")
        await put(store, key, parts, create_only=create_only)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posix.PosixStore, "put", put_elsewhere)
        yield


async def test_a_step_is_restored_from_a_device_that_is_full_when_the_store_is_opened(disk: Path) -> None:
    settings = config({"disk": folder(disk)})
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
    with no_room_on(disk):
        async with CheckpointStore.open(settings) as store:
            assert_restored(await store.restore(), tree(1))
            (info,) = await store.tier_infos()
            assert "no space left on device" in info.problem


async def test_a_device_that_was_full_at_the_opening_is_caught_up_under_a_lease(
    two_tiers: StoreConfig, disk: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, tree(1))).reached("disk")
    with ExitStack() as full:
        full.enter_context(no_room_on(disk))
        async with CheckpointStore.open(two_tiers) as store:
            heard = Heard(store)
            checkpoint = await store.save(2, tree(2))
            assert await store.where(1) == ("disk",)
            assert not (disk / "leases").exists()
            full.close()
            await heard.first(TierRecovered)
            await checkpoint.reached("disk")
            assert len(leases(disk)) == 1
            assert set(await store.all_steps()) == {1, 2}
            with pytest.raises(Conflict, match="is being written to by"):
                await CheckpointStore.open(config({"disk": folder(disk)}))


async def test_a_full_device_that_comes_late_is_restored_from(
    two_tiers: StoreConfig, disk: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(config({"disk": folder(disk)})) as store:
        await store.save(7, tree(7))
    faults.refuse("disk")
    async with CheckpointStore.open(two_tiers) as store:
        with no_room_on(disk):
            faults.allow("disk")
            async with asyncio.timeout(SOON):
                while await store.latest_step() != 7:
                    await asyncio.sleep(0.01)
            assert_restored(await store.restore(), tree(7))


def held_retries(patch: pytest.MonkeyPatch) -> threading.Event:
    """Failed tiers are tried again once it is set; the retry could begin in the middle of what makes room for it."""
    come_back, may_come = Promoter._come_back, threading.Event()

    async def later(self: Promoter) -> None:
        assert await asyncio.to_thread(may_come.wait, SOON)
        await come_back(self)

    patch.setattr(Promoter, "_come_back", later)
    return may_come


async def filled(settings: StoreConfig) -> None:
    async with CheckpointStore.open(settings) as store:
        for step in 1, 2, 3:
            await (await store.save(step, tree(step))).reached("disk")


@pytest.mark.parametrize("delete", [False, True], ids=["evict", "delete"])
async def test_a_person_makes_room_on_a_device_that_has_none_for_a_lease(
    disk: Path, monkeypatch: pytest.MonkeyPatch, delete: bool
) -> None:
    """The step left, its packs stayed for `grace`, and the person was told of another writer."""
    limit(monkeypatch, first_retry=SOON)  # one that came at that moment would read what is there for another writer's
    settings = config({"disk": folder(disk, retain="all")})
    await filled(settings)
    with no_room_on(disk, steps=3):
        async with CheckpointStore.open(settings) as store:
            await (store.delete(1) if delete else store.evict(1, "disk"))
            assert len(leases(disk)) == 1
    assert manifests(disk) == len([*disk.glob("packs/*/*.pack")]) == 2
    async with CheckpointStore.open(settings) as store:
        assert set(await store.all_steps()) == {2, 3}


async def test_one_older_step_leaves_a_full_device_for_a_newer_one(
    two_tiers: StoreConfig, disk: Path, faults: FaultyTiers
) -> None:
    await filled(two_tiers)
    with no_room_on(disk, steps=3):
        async with CheckpointStore.open(two_tiers) as store:
            heard = Heard(store)
            checkpoint = await store.save(4, tree(4))
            await heard.first(TierRecovered)
            await checkpoint.reached("disk")
    assert manifests(disk) == len([*disk.glob("packs/*/*.pack")]) == 3
    async with CheckpointStore.open(config({"disk": folder(disk)}), read_only=True) as store:
        assert set(await store.all_steps()) == {2, 3, 4}


@pytest.mark.parametrize("before", [True, False], ids=["before", "meanwhile"])
async def test_nothing_is_collected_where_another_writer_has_been_before_there_was_room_for_a_lease(
    disk: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    limit(monkeypatch, first_retry=SOON)
    settings = config({"disk": folder(disk, retain="all")})
    await filled(settings)
    delete = posix.PosixStore.delete

    def another_writes() -> None:
        another = disk / "packs" / "00" / f"{'0' * 32}.pack"
        another.parent.mkdir(exist_ok=True)
        another.write_bytes(b"of another writer")

    async def delete_beside_another(store: posix.PosixStore, key: str) -> None:
        await delete(store, key)
        another_writes()

    with no_room_on(disk, steps=3):
        async with CheckpointStore.open(settings) as store:
            if before:
                another_writes()
            else:
                monkeypatch.setattr(posix.PosixStore, "delete", delete_beside_another)
            with pytest.raises(TierUnavailable, match=r"another (one|writer) has been there"):
                await store.evict(1, "disk")
            monkeypatch.undo()
    assert manifests(disk) == (3 if before else 2)
    assert len([*disk.glob("packs/*/*.pack")]) == 4


async def test_a_step_leaves_a_device_that_has_no_room_to_renew_the_lease(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config({"disk": folder(disk, retain="all")}, lease_ttl=1000)
    async with CheckpointStore.open(settings) as store:
        for step in 1, 2, 3:
            await (await store.save(step, tree(step))).reached("disk")
        now = lease._now
        monkeypatch.setattr(lease, "_now", lambda: now() + 1001)
        with no_room_on(disk, steps=3):
            await store.evict(1, "disk")
    assert manifests(disk) == len([*disk.glob("packs/*/*.pack")]) == 2


@pytest.mark.parametrize("marker", ["of an earlier format", "damaged", "lost"])
async def test_a_full_device_is_read_and_given_room_though_its_marker_is_to_be_written_anew(
    disk: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    """As by a person who compresses the next steps because it is full."""
    may_come = held_retries(monkeypatch)
    settings = config({"disk": folder(disk, retain="all")})
    await filled(settings)
    path = disk / "tieredckpt.json"
    match marker:
        case "of an earlier format":
            settings = config({"disk": folder(disk, retain="all", codec="small")})
        case "damaged":
            path.write_text("{")
        case "lost":
            path.unlink()
    with no_room_on(disk, steps=3):
        async with CheckpointStore.open(settings) as store:
            heard = Heard(store)
            assert_restored(await store.restore(), tree(3))
            await store.evict(1, "disk")
            may_come.set()
            await heard.first(TierRecovered)
            assert json.loads(path.read_text())["format_version"] == (2 if marker == "of an earlier format" else 1)
            await (await store.save(4, tree(4))).reached("disk")


async def test_an_empty_device_that_is_full_counts_as_never_seen(shared_memory: Path, disk: Path) -> None:
    """Else the steps in RAM were left alone after a crash, as of a store that a person has removed."""
    settings = config({"ram": ram(shared_memory, on_close="keep"), "disk": folder(disk)})
    with no_room_on(disk):
        async with CheckpointStore.open(settings) as store:
            await store.save(1, tree(1))
    async with CheckpointStore.open(settings) as store:
        assert_restored(await store.restore(), tree(1))


async def test_nothing_is_compressed_before_a_full_device_has_the_marker_that_says_so(
    disk: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version would take the tier for one that it can read."""
    may_come = held_retries(monkeypatch)
    ram_of_test = ram(shared_memory)
    await filled(config({"ram": ram_of_test, "disk": folder(disk, retain="all")}))
    with no_room_on(disk, steps=3):
        compressing = config({"ram": ram_of_test, "disk": folder(disk, retain="all", codec="small")})
        async with CheckpointStore.open(compressing) as store:
            await store.save(4, compressible(4))
            await store.evict(1, "disk")
            await store.promote(4, "disk")
            pack = max(disk.glob("packs/*/*.pack"), key=lambda path: path.stat().st_mtime_ns)
            version = json.loads((disk / "tieredckpt.json").read_text())["format_version"]
            assert version == (1 if pack.stat().st_size > COMPRESSIBLE else 2)
            may_come.set()


@pytest.mark.parametrize("foreign", [False, True], ids=["this machine", "another"])
async def test_a_step_leaves_a_device_full_to_the_last_byte_whose_last_writer_died(
    disk: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    """As of a job that was queued again, on another node: its age was asked of a file that had no room."""
    limit(monkeypatch, first_retry=SOON)
    settings = config({"disk": folder(disk, retain="all")}, lease_ttl=1.0)
    await filled(settings)
    died = time.time() - 7200
    holder = lease.holder_of(os.getpid(), died)
    machine = "elsewhere" if foreign else holder.machine
    dead = msgspec.structs.replace(holder, machine=machine, process_started="long ago", renewed_at=died)
    left = disk / "leases" / ("0" * 16)
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(msgspec.json.encode(dead))
    os.utime(left, (died, died))
    with no_room_on(disk, steps=3):
        async with CheckpointStore.open(settings) as store:
            await store.evict(1, "disk")
    assert manifests(disk) == 2


@pytest.mark.parametrize("capacity", [None, "1 MiB"], ids=["without a capacity", "beyond its capacity"])
async def test_the_history_stays_on_a_device_that_others_fill_as_soon_as_a_step_leaves_it(
    shared_memory: Path, two_tiers: StoreConfig, disk: Path, faults: FaultyTiers, capacity: str | None
) -> None:
    """Each eviction counts, also where there is no room for the lease without which no pack is deleted."""
    async with CheckpointStore.open(two_tiers) as store:
        for step in range(1, 11):
            await (await store.save(step, tree(step))).reached("disk")
    smaller = config({"ram": ram(shared_memory), "disk": folder(disk, retain="all", capacity=capacity)})
    with no_room_on(disk):
        async with CheckpointStore.open(smaller) as store:
            heard = Heard(store)
            await store.save(11, tree(11))
            await heard.first(TierFailed, lambda _: len(heard.of(TierFailed)) >= 10)
            assert manifests(disk) >= 7


async def test_of_two_writers_without_leases_none_deletes_what_the_other_has_left(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 6: what the one knew of as newer had left."""
    limit(monkeypatch, first_retry=SOON)
    settings = config({"disk": folder(disk, retain="all")})
    await filled(settings)
    with no_room_on(disk):
        async with CheckpointStore.open(settings) as one, CheckpointStore.open(settings) as other:
            for step in 3, 2:
                with pytest.raises(NoSpace, match="nothing is collected there, for its device has no room for a lease"):
                    await one.delete(step, force=True)
            with pytest.raises(TierUnavailable, match="another writer has been there"):
                await other.evict(1, "disk")
    async with CheckpointStore.open(settings) as store:
        assert_restored(await store.restore(), tree(1))


async def test_a_tier_that_comes_late_is_taken_though_another_has_no_room_for_its_identity(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it told to be full; and RAM is marked, which a restart would leave alone else."""
    near, late = tmp_path / "near", tmp_path / "late"
    async with CheckpointStore.open(config({"late": folder(late)})) as store:
        await store.save(1, tree(1))
    late.rename(tmp_path / "away")
    late.write_text("no folder")
    tiers = {"near": folder(near, promote="never"), "late": folder(late, promote="never")}
    put, failed = posix.PosixStore.put, list[str]()

    async def put_elsewhere(store: posix.PosixStore, key: str, parts: Any, *, create_only: bool = False) -> None:
        if store.location == str(near) and key == "tieredckpt.json" and late.is_dir():
            failed.append(key)
            raise NoSpace(f"{key} was not written: no space left on device")
        await put(store, key, parts, create_only=create_only)

    monkeypatch.setattr(posix.PosixStore, "put", put_elsewhere)
    async with CheckpointStore.open(config({"ram": ram(shared_memory), **tiers})) as store:
        heard = Heard(store)
        late.unlink()
        (tmp_path / "away").rename(late)
        await heard.first(TierRecovered)
        assert failed
        assert not [event for event in heard.of(TierFailed) if isinstance(event.error, NoSpace)]
        marked = json.loads((late / "tieredckpt.json").read_text())["store"]
        (ours,) = shared_memory.rglob("tieredckpt.json")
        assert marked == json.loads(ours.read_text())["store"]
