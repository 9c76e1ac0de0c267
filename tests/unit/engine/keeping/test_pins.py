"""A pinned step comes to its tier and stays there until the pin is taken away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.agents import end_agent
from support.cohort import RanksPlace
from support.insight import tier_of
from support.rescan import scan_again
from support.scenes import assert_restored, config, folder, polled, ram, save_steps, steps_on, tree

from tieredckpt import CheckpointStore, Conflict, Invalid, NoSpace, NotFound, Pin, StoreConfig, TierUnavailable
from tieredckpt.testing.faulty import Faulty

ONE = {"kind": "last_n", "n": 1}


class Place:
    """A store over RAM and two folders, which keep one step each."""

    def __init__(self, shared_memory: Path, disk: Path, mode: str = "trainer", **archive: Any) -> None:
        self.ram = shared_memory / "of-test" / "ram"
        self.archive = disk / "archive"
        tiers = {
            "ram": ram(shared_memory, on_close="keep"),
            "disk": folder(disk / "disk", retain=ONE),
            "archive": folder(self.archive, retain=ONE, **archive),
        }
        self.config: StoreConfig = config(tiers, promote_in=mode)

    @asynccontextmanager
    async def opened(self, *steps: int) -> AsyncIterator[CheckpointStore]:
        """The store, with those steps saved, each on all tiers before the next."""
        async with CheckpointStore.open(self.config) as store:
            await save_steps(store, *steps)
            yield store

    @property
    def files(self) -> list[str]:
        """The pins on the slowest tier."""
        return sorted(path.name for path in self.archive.glob("pins/*"))


@pytest.fixture(params=["trainer", "agent"])
def place(request: pytest.FixtureRequest, shared_memory: Path, tmp_path: Path) -> Iterator[Place]:
    place = Place(shared_memory, tmp_path, request.param)
    yield place
    end_agent(place.ram)


@pytest.fixture
def alone(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path)


async def test_a_pinned_step_stays_on_its_tier_until_the_pin_is_taken_away(place: Place) -> None:
    async with place.opened(1) as store:
        assert await store.pin(1) == "archive"
        await save_steps(store, 2, 3)
        assert (await steps_on(store, "disk"), await steps_on(store, "archive")) == ([3], [1, 3])
        assert await store.pins() == (Pin(1, 1, "archive"),)
        assert_restored(await store.restore(1, resume=False), tree(1))
        assert await store.pin(1, on=False) == "archive"
        await store.flush()
        assert await steps_on(store, "archive") == [3]
        assert await store.pins() == ()


async def test_a_step_comes_to_the_tier_where_it_is_pinned_whatever_the_policies_say(place: Place) -> None:
    """Without a pin, retention would take it from there at once."""
    async with place.opened(1) as store:
        await store.pin(1, "disk")
        await save_steps(store, 2)
        assert await steps_on(store, "archive") == [2]
        await store.pin(1, "archive")
        assert await steps_on(store, "archive") == [1, 2]
        await save_steps(store, 3)
        assert await steps_on(store, "archive") == [1, 3]


async def test_a_pin_outlives_the_process_and_a_reader_sees_it(alone: Place) -> None:
    async with alone.opened(1) as store:
        await store.pin(1, "disk")
    async with alone.opened(2, 3) as store, CheckpointStore.open(alone.config, read_only=True) as reader:
        assert await steps_on(store, "disk") == [1, 3]
        assert await reader.pins() == (Pin(1, 1, "disk"),)
        with pytest.raises(Invalid, match="read_only"):
            await reader.pin(3)


async def test_who_deletes_or_evicts_by_hand_is_told_of_the_pin_and_can_insist(place: Place) -> None:
    async with place.opened(1, 2) as store:
        await store.pin(2)
        await save_steps(store, 3)
        with pytest.raises(Conflict, match=r"step 2 \(serial 2\) is pinned on tier 'archive'.*pin --off"):
            await store.evict(2, "archive")
        with pytest.raises(Conflict, match=r"cannot delete: step 2 .* is pinned on tier 'archive'.*--force"):
            await store.delete(2)
        assert await steps_on(store, "archive") == [2, 3]
        await store.delete(2, force=True)
        assert await steps_on(store, "archive") == [3]
        assert await store.pins() == ()
        assert place.files == []


async def test_a_full_tier_gives_up_other_steps_than_pinned_ones(shared_memory: Path, tmp_path: Path) -> None:
    place = Place(shared_memory, tmp_path, capacity="1900 KiB")
    async with place.opened(1, 2, 3) as store:
        held = await steps_on(store, "archive")
        assert held == [1, 2, 3], "as long as there is room"
        await store.pin(1)
        await save_steps(store, *range(4, 12))
        held = await steps_on(store, "archive")
        assert held[0] == 1
        assert held[-1] == 11
        assert 2 not in held
        for step in held[1:]:
            await store.pin(step)
        await store.save(12, tree(12))
        with pytest.raises(NoSpace, match=rf"pinned there, so that they stay: {len(held)} steps"):
            await store.flush()
        assert await steps_on(store, "archive") == held


async def test_what_cannot_be_pinned_is_refused_and_leaves_no_pin(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    place = Place(shared_memory, tmp_path, promote="never")
    async with place.opened(1) as store:
        with pytest.raises(NotFound, match="no tier holds step 7"):
            await store.pin(7)
        with pytest.raises(NotFound, match="did you mean 'archive'"):
            await store.pin(1, "archiv")
        with pytest.raises(Invalid, match="tier 'ram' is RAM"):
            await store.pin(1, "ram")
        await store.pin(1, "disk")
        with pytest.raises(NotFound, match="step 1 is not pinned on tier 'archive'; it is pinned on 'disk'"):
            await store.pin(1, on=False)
        faults["archive"].fail("put", TierUnavailable("no answer"), key="packs/*")
        with pytest.raises(TierUnavailable, match="no answer"):
            await store.pin(1)
        assert place.files == []
        assert await store.pins() == (Pin(1, 1, "disk"),)


async def test_a_store_of_ram_alone_has_no_tier_to_pin_on(shared_memory: Path) -> None:
    async with CheckpointStore.open(config({"ram": ram(shared_memory)}, name="of-pins")) as store:
        await store.save(1, tree(1))
        with pytest.raises(Invalid, match=r"tier 'ram' is RAM.*slower tier"):
            await store.pin(1)


async def test_a_tier_that_does_not_take_the_pin_says_so(alone: Place, faults: FaultyTiers) -> None:
    async with alone.opened(1) as store:
        faults["archive"].fail("put", TierUnavailable("no answer"), key="pins/*")
        with pytest.raises(TierUnavailable, match="no answer"):
            await store.pin(1)
        assert await store.pins() == ()
        await store.pin(1)
        faults["archive"].fail("put", TierUnavailable("no answer"), key="pins/*")
        with pytest.raises(TierUnavailable, match="no answer"):
            await store.pin(1)
        faults["archive"].fail("delete", TierUnavailable("no answer"), key="pins/*")
        with pytest.raises(TierUnavailable, match="no answer"):
            await store.pin(1, on=False)
        await save_steps(store, 2, 3)
        assert await steps_on(store, "archive") == [1, 3]


async def test_a_scan_of_a_tier_that_comes_back_knows_pins_of_before_and_of_meanwhile(
    alone: Place, faults: FaultyTiers
) -> None:
    async with alone.opened(1) as store:
        await store.pin(1)
        putting = faults["archive"].hold("put", key="pins/*-000002")
        await save_steps(store, 2)
        pinning = asyncio.create_task(store.pin(2))
        await putting.reached()
        listing = faults["archive"].hold("list", key="pins/*", after=True)
        scanning = asyncio.create_task(scan_again(store, tier_of(store, "archive")))
        await listing.reached()
        putting.release()
        await polled(lambda: len(alone.files) == 2)
        listing.release()
        await asyncio.wait([scanning, pinning])
        assert {step.step for step in tier_of(store, "archive").steps.pinned} == {1, 2}
        await scan_again(store, tier_of(store, "archive"))
        await store.pin(2, on=False)
        await save_steps(store, 3, 4)
        assert await steps_on(store, "archive") == [1, 4]


async def test_a_pin_that_comes_while_the_step_is_being_evicted_brings_it_back(
    alone: Place, faults: FaultyTiers
) -> None:
    async with alone.opened(1) as store:
        deleting = faults["archive"].hold("delete", key="steps/*-000001/manifest*")
        saved = await store.save(2, tree(2))
        await deleting.reached()
        pinning = asyncio.create_task(store.pin(1))
        await polled(lambda: alone.files == ["0000000001-000001"])
        deleting.release()
        await pinning
        await saved.reached("archive")
        await save_steps(store, 3)
        assert await steps_on(store, "archive") == [1, 3]


async def test_of_two_pins_one_that_is_cancelled_leaves_the_other(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    place = Place(shared_memory, tmp_path, promote="never")
    async with place.opened(1) as store:
        copying = faults["archive"].hold("put", key="packs/*")
        first = asyncio.create_task(store.pin(1))
        await copying.reached()
        second = asyncio.create_task(store.pin(1))
        await store.steps()  # by then the engine has it
        first.cancel()
        copying.release()
        await second
        assert await store.pins() == (Pin(1, 1, "archive"),)
        assert await steps_on(store, "archive") == [1]


async def test_a_pin_whose_answer_was_lost_is_in_force_and_can_be_taken_away(alone: Place, faults: FaultyTiers) -> None:
    async with alone.opened(1) as store:
        for verb, after in (("put", True), ("delete", False)):
            faults["archive"].fail(verb, TierUnavailable("no answer"), key="pins/*", after=after)
        with pytest.raises(TierUnavailable, match="no answer"):
            await store.pin(1)
        assert await store.pins() == (Pin(1, 1, "archive"),)
        await save_steps(store, 2, 3)
        assert await steps_on(store, "archive") == [1, 3]
        await store.pin(1, on=False)
        assert (await store.pins(), await steps_on(store, "archive")) == ((), [3])


async def test_a_pin_is_taken_away_on_a_full_device_that_has_no_room_for_a_lease(
    alone: Place, faults: FaultyTiers
) -> None:
    async with alone.opened(1) as store:
        await store.pin(1)
        await save_steps(store, 2)

    def full(tier: str, faulty: Faulty) -> None:
        if tier == "archive":
            faulty.full_after(0)

    with faults.from_opening(full):
        async with CheckpointStore.open(alone.config) as store:
            assert tier_of(store, "archive").lacks_lease
            await store.pin(1, on=False)
            assert await store.pins() == ()
            assert await steps_on(store, "archive") == [2]


async def test_a_step_that_cannot_be_read_for_now_is_not_evicted_if_it_is_pinned(
    alone: Place, faults: FaultyTiers
) -> None:
    async with alone.opened(1) as store:
        await store.pin(1)
        await save_steps(store, 2)

    def unreadable(tier: str, faulty: Faulty) -> None:
        faulty.fail("get", TierUnavailable("EIO"), key="steps/*-000001/*", times=None)

    with faults.from_opening(unreadable):
        async with CheckpointStore.open(alone.config) as store:
            assert [step.step for step in tier_of(store, "archive").steps.damaged] == [1]
            with pytest.raises(Conflict, match="pinned"):
                await store.evict(1, "archive")
    assert list(alone.archive.glob("steps/*-000001/manifest*"))


async def test_of_a_tier_that_was_not_read_yet_nobody_says_that_nothing_is_pinned(
    alone: Place, faults: FaultyTiers
) -> None:
    async with alone.opened(1) as store:
        await store.pin(1)
    faults.refuse("archive")
    async with CheckpointStore.open(alone.config) as store:
        with pytest.raises(TierUnavailable):
            await store.pin(1, on=False)


async def test_a_deletion_that_a_pin_of_a_lossy_copy_forbids_deletes_nothing(
    shared_memory: Path, tmp_path: Path
) -> None:
    rules = [{"keys": ["params/**"], "max_error": 0.01}]
    lossy = {name: folder(tmp_path / name, retain="all", lossy=rules) for name in ("light", "lighter")}
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")} | lossy
    async with CheckpointStore.open(config(tiers)) as store:
        await save_steps(store, 1, 2)
        await store.pin(1, "lighter")
        with pytest.raises(Conflict, match="pinned on tier 'lighter'"):
            await store.delete(1)
        await store.flush()
        assert [info.lossy for info in await store.steps()] == [("light", "lighter")] * 2


async def test_a_step_that_is_being_deleted_is_not_pinned(place: Place) -> None:
    async with place.opened(1) as store:
        state = store._life.engine.state
        with state.being_deleted((state.find(1),)), pytest.raises(Conflict, match="being deleted"):
            await store.pin(1)


async def test_pins_are_told_of_the_tiers_that_answer(alone: Place, faults: FaultyTiers) -> None:
    async with alone.opened(1) as store:
        await store.pin(1, "disk")
        await store.pin(1)
        faults["archive"].fail("list", TierUnavailable("no answer"), key="pins/*")
        assert await store.pins() == (Pin(1, 1, "disk"),)
        assert {pin.tier for pin in await store.pins()} == {"disk", "archive"}


async def test_what_is_no_pin_is_left_alone(alone: Place) -> None:
    async with alone.opened(1) as store:
        await store.pin(1)
        (alone.archive / "pins" / "notes").write_text("of somebody")
        assert await store.pins() == (Pin(1, 1, "archive"),)
        await store.pin(1, on=False)
        assert alone.files == ["notes"]


async def test_a_lossy_copy_is_pinned_by_the_name_of_its_tier(shared_memory: Path, tmp_path: Path) -> None:
    rules = [{"keys": ["params/**"], "max_error": 0.01}]
    tiers = {
        "ram": ram(shared_memory),
        "disk": folder(tmp_path / "disk", retain=ONE),
        "light": folder(tmp_path / "light", retain=ONE, lossy=rules),
    }
    async with CheckpointStore.open(config(tiers)) as store:
        await save_steps(store, 1)
        assert await store.pin(1, "light") == "light"
        await save_steps(store, 2, 3)
        assert [info.step for info in await store.steps() if "light" in info.lossy] == [1, 3]
        assert await steps_on(store, "disk") == [3]


async def test_rank_0_pins_for_all(shared_memory: Path, tmp_path: Path) -> None:
    place = RanksPlace(shared_memory, tmp_path, 2, {"disk_settings": {"retain": ONE}})
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.flush()
        with pytest.raises(Invalid, match="rank 0 does that"):
            await ranks[1].pin(1)
        assert await ranks[0].pin(1) == "disk"
        for step in (2, 3):
            await ranks.save(step)
            await ranks.flush()
        assert await steps_on(ranks[0], "disk") == [1, 3]
