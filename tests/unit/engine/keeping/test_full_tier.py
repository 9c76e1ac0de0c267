"""The newest step wins on a tier that its own retained steps fill: those leave for it, oldest first, and it is told."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.agents import end_agent, until
from support.cohort import cohort
from support.insight import tier_of
from support.limits import limit
from support.scenes import CHUNK, SOON, Heard, Keeper, assert_restored, config, folder, polled, ram, steps_on

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import NoSpace, TierUnavailable
from tieredckpt.events import RetentionCut, StepEvicted, StepPromoted, TierFailed, TierRecovered

STEP = 2 * CHUNK


def state(seed: int, nbytes: int = STEP) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)}


class Place:
    """A store over RAM and a folder with room for three or four steps, by its capacity or its device."""

    def __init__(self, shared_memory: Path, limit: str, disk: Path, mode: str) -> None:
        self.ram = shared_memory / "of-test" / "ram"
        self.disk, self.mode = disk, mode
        self._settings = {"capacity": 4 * (STEP + (8 << 10))} if limit == "capacity" else {}
        self._ram = ram(shared_memory)

    def settings(self, *, retain: Any = "all", **more: Any) -> StoreConfig:
        disk = folder(self.disk, retain=retain, **self._settings)
        return config({"ram": self._ram | more, "disk": disk}, promote_in=self.mode)

    @asynccontextmanager
    async def opened(self, **settings: Any) -> AsyncIterator[CheckpointStore]:
        async with CheckpointStore.open(self.settings(**settings)) as store:
            yield store


@pytest.fixture(params=["capacity-trainer", "capacity-agent", "device-trainer", "device-agent"])
def place(request: pytest.FixtureRequest, shared_memory: Path, tiny_file_system: Path) -> Iterator[Place]:
    limit, mode = request.param.split("-")
    place = Place(shared_memory, limit, tiny_file_system / "disk", mode)
    yield place
    end_agent(place.ram)


async def test_the_newest_step_drives_out_the_oldest_that_are_retained(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.opened() as store:
        heard, keeper = Heard(store), Keeper(store, ("ram", "disk"))
        for step in range(1, 11):
            await (await store.save(step, state(step))).reached("disk")
        await store.flush()
        held = await steps_on(store, "disk")
        assert 2 <= len(held) < 6
        assert held == list(range(11 - len(held), 11)), "the newest, without a gap"
        cut = [event.step for event in heard.of(RetentionCut)]
        assert cut == list(range(1, 11 - len(held)))
        assert cut == [event.step for event in heard.of(StepEvicted) if event.tier == "disk"]
        assert not heard.of(TierFailed)
        assert not keeper.broken
        (disk,) = [info for info in await store.tier_infos() if info.name == "disk"]
        assert disk.healthy
        assert "no room for all the steps that its policy retains" in disk.note
        for step in held:
            assert_restored(await store.restore(step, resume=False), state(step))
            assert not any(found.problem for found in await store.verify(step))
    if place.mode == "trainer":
        told = [record for record in caplog.records if "no room for all the steps" in record.getMessage()]
        assert [record.levelno for record in told] == [logging.WARNING], "once"


async def test_what_found_no_room_beside_newer_steps_keeps_nothing_from_working(place: Place) -> None:
    async with place.opened(retain={"kind": "last_n", "n": 9}, on_close="keep") as store:
        for step in range(1, 10):
            await (await store.save(step, state(step))).reached("disk")
        await store.evict(9, "ram")
        held = await steps_on(store, "disk")
    async with place.opened(retain={"kind": "last_n", "n": 9}) as store:
        heard = Heard(store)
        await store.flush()  # RAM may have older steps, which nobody knows to have been there
        await (await store.save(10, state(10))).reached("disk")
        await store.flush()
        assert (await steps_on(store, "disk"))[-1] == 10
        assert min(await steps_on(store, "disk")) >= min(held)
        assert not heard.of(TierFailed)


async def test_a_step_that_would_not_fit_after_all_evictions_drives_none_out(place: Place, faults: FaultyTiers) -> None:
    async with place.opened() as store:
        for step in (1, 2, 3):
            await (await store.save(step, state(step))).reached("disk")
        with pytest.raises(NoSpace):
            await (await store.save(4, state(4, nbytes=6 * STEP))).reached("disk")
        assert await steps_on(store, "disk") == [1, 2, 3]


@pytest.mark.parametrize(("chunks", "left"), [(5, [2, 3]), (7, [1, 2])], ids=["has room then", "has none even then"])
async def test_a_step_drives_out_older_ones_where_what_may_leave_and_what_was_free_are_enough(
    shared_memory: Path, tmp_path: Path, chunks: int, left: list[int]
) -> None:
    """The newest step of the tier may not leave before a newer one is there, and does not count."""
    disk = folder(tmp_path / "disk", capacity=10 * (CHUNK + 4096) + CHUNK, retain="all")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk})) as store:
        for step in (1, 2):
            await (await store.save(step, state(step, nbytes=4 * CHUNK))).reached("disk")
        newest = await store.save(3, state(3, nbytes=chunks * CHUNK))
        with nullcontext() if 3 in left else pytest.raises(NoSpace):
            await newest.reached("disk")
        assert await steps_on(store, "disk") == left


async def test_a_step_off_the_branch_drives_out_none(shared_memory: Path, tmp_path: Path) -> None:
    disk = folder(tmp_path / "disk", capacity=5 * (CHUNK + 4096) + CHUNK, retain="all", promote="never")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk})) as store:
        for step in (1, 2):
            await store.save(step, state(step))
            await store.promote(step, "disk")
        await store.save(3, state(3))
        await store.restore(2, resume=True)
        await store.save(4, state(4))
        with pytest.raises(NoSpace):
            await store.promote(3, "disk")
        assert await store.where(1) == ("ram", "disk")
        await store.promote(4, "disk")
        assert await steps_on(store, "disk") == [2, 4]


async def test_dead_packs_make_room_before_any_step_does(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    disk = folder(tmp_path / "disk", capacity=5 * (CHUNK + 4096) + CHUNK, retain={"kind": "last_n", "n": 1})
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk})) as store:
        for step in (1, 2):
            await (await store.save(step, state(step))).reached("disk")
        faults["disk"].fail("delete", TierUnavailable("by script"), key="packs/*")
        with pytest.raises(TierUnavailable):
            await store.evict(1, "disk")
        await store.save(3, state(3))
        await (await store.save(4, state(4, nbytes=CHUNK))).reached("disk")
        await store.flush()
        assert min(await steps_on(store, "disk")) == 2


async def test_a_step_drives_out_none_that_a_slower_tier_is_still_to_get(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    disk = folder(tmp_path / "disk", capacity=10 * (CHUNK + 4096) + CHUNK, retain="all")
    tiers = {"ram": ram(shared_memory), "disk": disk, "far": folder(tmp_path / "far", retain="all", deadline=SOON)}
    async with CheckpointStore.open(config(tiers)) as store:
        heard, coming = Heard(store), faults["far"].hold("put", key="packs/*")
        for step in (1, 2):
            await (await store.save(step, state(step, nbytes=4 * CHUNK))).reached("disk")
        await coming.reached()
        newest = await store.save(3, state(3, nbytes=5 * CHUNK))
        with pytest.raises(NoSpace):
            await newest.reached("disk")
        assert "disk" in await store.where(1)
        coming.release()
        await heard.first(StepPromoted, lambda event: (event.step, event.tier) == (3, "disk"))
        assert await store.where(1) == ("ram", "far")


@pytest.mark.parametrize("capacity", [4 * STEP + CHUNK, None], ids=["capacity", "device"])
async def test_a_step_that_ram_cannot_hold_drives_out_older_ones_as_well(
    shared_memory: Path, tmp_path: Path, request: pytest.FixtureRequest, capacity: int | None
) -> None:
    root = tmp_path if capacity else request.getfixturevalue("tiny_file_system")
    disk = folder(root / "disk", retain="all", capacity=capacity)
    async with CheckpointStore.open(config({"ram": ram(shared_memory, capacity=CHUNK), "disk": disk})) as store:
        heard = Heard(store)
        for step in range(1, 11):
            assert not (await store.save(step, state(step))).skipped
        held = [info.step for info in await store.steps()]
        assert len(held) >= 2
        assert held == list(range(11 - len(held), 11))
        assert not heard.of(TierFailed)


async def test_a_device_without_room_for_a_lease_gives_up_an_older_step(
    shared_memory: Path, tiny_file_system: Path, faults: FaultyTiers
) -> None:
    tiers = {"ram": ram(shared_memory), "disk": folder(tiny_file_system / "disk", retain="all")}
    async with CheckpointStore.open(config(tiers)) as store:
        heard = Heard(store)
        for step in (1, 2, 3):
            await (await store.save(step, state(step))).reached("disk")
        await fill_up_under_lease(store, tiny_file_system)
        checkpoint = await store.save(4, state(4))
        await heard.first(TierRecovered)
        await checkpoint.reached("disk")
        assert heard.of(RetentionCut)[0].step == 1
        (tiny_file_system / "filler").unlink()


async def test_a_device_without_room_for_a_lease_keeps_its_steps_while_none_is_due(
    shared_memory: Path, tiny_file_system: Path, faults: FaultyTiers
) -> None:
    disk = folder(tiny_file_system / "disk", retain="all", promote="never")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk})) as store:
        heard = Heard(store)
        for step in (1, 2, 3):
            await store.save(step, state(step))
            await store.promote(step, "disk")
        await fill_up_under_lease(store, tiny_file_system)
        tried = lease_puts(faults)
        await polled(lambda: lease_puts(faults) > tried + 2)
        assert [info.tiers for info in await store.steps()] == [("ram", "disk")] * 3
        (tiny_file_system / "filler").unlink()
        await heard.first(TierRecovered)


def lease_puts(faults: FaultyTiers) -> int:
    return sum(call.verb == "put" and call.key.startswith("leases/") for call in faults["disk"].calls)


async def fill_up_under_lease(store: CheckpointStore, folder: Path) -> None:
    """Fill the device, so that the tier "disk" cannot renew its lease, and report the failure to the engine."""
    fill_up(folder)

    async def renew() -> None:
        tier = tier_of(store, "disk")
        assert tier.lease is not None
        with pytest.raises(NoSpace) as failed:
            await tier.lease.renew()
        store._life.engine.state.report(tier, failed.value)

    await store._life.loop.call(renew())


def fill_up(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("limit", ["capacity", "device"])
async def test_several_ranks_bring_their_newest_step_to_a_full_tier(
    shared_memory: Path, tmp_path: Path, small_tmpfs: Path, limit: str
) -> None:
    disk = tmp_path / "disk" if limit == "capacity" else small_tmpfs / "disk"
    settings: dict[str, Any] = {"retain": "all"}
    step_bytes = 800 << 10
    if limit == "capacity":
        settings["capacity"] = 4 * step_bytes
    else:
        (small_tmpfs / "ballast").write_bytes(bytes((64 << 20) - 4 * step_bytes))
    async with cohort(2, shared_memory, disk, disk_settings=settings) as ranks:
        for step in range(1, 9):
            await ranks.reached(await ranks.save(step), "disk")
        held = await steps_on(ranks[0], "disk")
        assert len(held) >= 2
        assert held == list(range(9 - len(held), 9))
        await ranks.flush()


async def test_a_device_without_room_for_an_index_alone_gives_up_as_many_small_steps_as_that_takes(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    disk = folder(tmp_path / "disk", retain="all")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk})) as store:

        async def save(step: int) -> None:
            small = {f"w{i}": np.arange(16) + step for i in range(100)}  # inside the index
            await (await store.save(step, small)).reached("disk")

        for step in (1, 2, 3):
            await save(step)
        faults["disk"].fail("put", NoSpace("the device is full"), key="steps/*/btree*", times=2)
        await save(4)
        assert await steps_on(store, "disk") == [3, 4]


async def test_a_device_that_fills_twice_under_one_step_gives_up_an_older_one_each_time(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time the step lacks little, and far more has left the device; it lacked more the first time."""
    limit(monkeypatch, pack_size=2 * CHUNK)  # one chunk in each
    disk = folder(tmp_path / "disk", retain="all")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk})) as store:
        for step in (1, 2, 3):
            await (await store.save(step, state(step, nbytes=16 * CHUNK))).reached("disk")
        for nth in (14, 16):
            faults["disk"].fail("put", NoSpace("the device is full"), key="packs/*", nth=nth)
        await (await store.save(4, state(4, nbytes=16 * CHUNK))).reached("disk")
        assert await steps_on(store, "disk") == [3, 4]


@pytest.mark.parametrize("mode", ["promoted", "past RAM", "lease"])
async def test_where_evictions_free_no_room_the_history_stays(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers, mode: str
) -> None:
    """One of many storage targets is full, say, or a snapshot holds what is deleted."""
    sizes = {"capacity": CHUNK} if mode == "past RAM" else {}
    tiers = {"ram": ram(shared_memory, **sizes), "disk": folder(tmp_path / "disk", retain="all")}
    # No lease is renewed meanwhile, which might be told that the device is full before the steps are.
    async with CheckpointStore.open(config(tiers, lease_ttl=600.0)) as store:
        heard = Heard(store)
        for step in range(1, 11):
            await (await store.save(step, state(step))).reached("disk")
        full = NoSpace("tier 'disk': the storage target is full")
        faults["disk"].fail("put", full, key="packs/*" if mode != "lease" else "*", times=None)
        # The second one may be told of a lease for which there is no room either.
        for step, told in ((11, "left it, which made no room"), (12, "the storage target is full")):
            if mode == "past RAM":
                with pytest.raises(NoSpace):
                    await store.save(step, state(step))
            else:
                checkpoint = await store.save(step, state(step))
                with pytest.raises(NoSpace, match=told):
                    await checkpoint.reached("disk")
        before = len(heard.of(TierFailed))
        if mode == "lease":

            async def fail() -> None:
                store._life.engine.state.report(tier_of(store, "disk"), full)

            await store._life.loop.call(fail())
        if mode != "past RAM":  # it is tried again and again
            await heard.first(TierFailed, lambda _: len(heard.of(TierFailed)) >= before + 4)
        held = await steps_on(store, "disk")
        assert len(held) >= 8
        assert held == list(range(11 - len(held), 11))
        faults["disk"].clear()
        disk = tier_of(store, "disk")
        await until(store, lambda: disk.healthy)  # it may have recovered and failed before, too
        checkpoint = await store.save(13, state(13))
        await checkpoint.reached("disk")
        assert tier_of(store, "disk").health.freed == 0
