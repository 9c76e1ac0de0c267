"""A store does the same whether its own process promotes or an agent does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.agents import end_agent
from support.cohort import cohort
from support.insight import flip_chunk, tier_of
from support.scenes import Heard, assert_restored, assert_same, config, crash, files_under, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound
from tieredckpt.events import ChunkRepaired, StepEvicted, StepPromoted, StepSaved


class Place:
    """A store over RAM, a folder that every step goes to, and one that only hands promote to."""

    def __init__(self, shared_memory: Path, disk: Path, mode: str) -> None:
        self.ram = shared_memory / "of-test" / "ram"
        self.disk, self.archive = disk / "disk", disk / "archive"
        self.mode = mode
        self._shared_memory = shared_memory

    @asynccontextmanager
    async def opened(self, **disk: Any) -> AsyncIterator[CheckpointStore]:
        tiers = {
            "ram": ram(self._shared_memory, on_close="keep"),
            "disk": folder(self.disk, **disk),
            "archive": folder(self.archive, promote="never", retain="all"),
        }
        async with CheckpointStore.open(config(tiers, promote_in=self.mode)) as store:
            yield store


@pytest.fixture(params=["trainer", "agent"])
def place(request: pytest.FixtureRequest, shared_memory: Path, tmp_path: Path) -> Iterator[Place]:
    place = Place(shared_memory, tmp_path, request.param)
    yield place
    end_agent(place.ram)


async def test_a_lazy_save_is_promoted_once_it_is_confirmed_and_not_if_it_changed(place: Place) -> None:
    async with place.opened() as store:
        state = tree(1)
        checkpoint = await store.save(1, state, capture="lazy")
        await checkpoint.reached("disk")
        late = await store.save(2, state, capture="lazy")
        state["params"]["w0"] += 1
        with pytest.raises(Invalid, match="'params/w0'"):
            await late.reached("disk")
        await store.flush()
        assert await store.all_steps() == (1,)
        await store.save(3, state, capture="lazy")
    async with place.opened() as store:
        assert await store.where(3) == ("ram", "disk")
        assert_restored(await store.restore(), state)


async def test_steps_arrive_are_waited_for_and_told_of(place: Place) -> None:
    async with place.opened(retain={"kind": "last_n", "n": 2}) as store:
        heard = Heard(store)
        for step in (1, 2, 3):
            ckpt = await store.save(step, tree(step))
            await ckpt.reached("disk")
            assert "disk" in await store.where(step)
        await store.flush()
        with pytest.raises(NotFound, match="not due on tier 'archive'"):
            await ckpt.reached("archive")
        assert [event.step for event in heard.of(StepSaved)] == [1, 2, 3]
        assert [event.step for event in heard.of(StepPromoted) if event.tier == "disk"] == [1, 2, 3]
        assert [event.step for event in heard.of(StepEvicted) if event.tier == "disk"] == [1]
        assert all(event.written > 0 for event in heard.of(StepPromoted))
        infos = {info.name: info for info in await store.tier_infos()}
        assert infos["disk"].steps == 2
        assert infos["disk"].used == sum(size for name, size in files_under(place.disk).items() if "/" in name)
        assert infos["disk"].healthy
        assert store.observed().promotion_seconds is not None
    assert {path.name for path in (place.disk / "leases").glob("*")} == set()


async def test_what_is_asked_by_hand_is_done_and_refused_alike(place: Place) -> None:
    async with place.opened() as store:
        await store.save(1, tree(1))
        assert await store.promote(1, "archive") > 0
        assert await store.promote(1, "archive") == 0
        assert set(await store.where(1)) >= {"ram", "archive"}
        await store.flush()
        await store.evict(1, "disk")
        assert await store.where(1) == ("ram", "archive")
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(1, "archive")
        with pytest.raises(NotFound, match="no tier holds step 9"):
            await store.promote(9, "archive")
        with pytest.raises(NotFound, match="there is no tier 'nowhere'"):
            await store.promote(1, "nowhere")
        with pytest.raises(Invalid, match="gets there by being saved"):
            await store.promote(1, "ram")
        assert [each.tier for each in await store.collect()] == ["ram", "disk", "archive"]
        await store.evict(1, "ram")
        restored = await store.restore(1, resume=False)
        assert restored is not None
        assert set(restored.sources) == {"archive"}
        assert_same(restored.tree, tree(1))


async def test_damage_is_found_told_and_repaired_wherever_it_is(place: Place) -> None:
    async with place.opened() as store:
        heard = Heard(store)
        await store.save(1, tree(1))
        await store.promote(1, "archive")
        await store.flush()
        read: list[int] = []
        intact = await store.verify(1, progress=read.append)
        assert [(each.tier, each.intact) for each in intact] == [("ram", True), ("disk", True), ("archive", True)]
        assert sum(read) > 0

        await damage(store, "disk")
        assert [each.tier for each in await store.verify(1) if not each.intact] == ["disk"]
        assert all(each.intact for each in await store.verify(1, "disk", repair=True))
        assert {event.tier for event in heard.of(ChunkRepaired)} == {"disk"}

        await damage(store, "archive")
        scrubbed = await store.scrub("archive", repair=True)
        assert [(each.tier, each.repaired) for each in scrubbed] == [("archive", True)]

        await damage(store, "disk")
        await store.evict(1, "ram")
        restored = await store.restore(1, resume=False)  # which meets the damage, and has it repaired behind
        assert_restored(restored, tree(1))
        await store.flush()
        assert all(each.intact for each in await store.scrub())


async def damage(store: CheckpointStore, tier: str) -> None:
    await flip_chunk(store, tier, 1, "params/w1")


async def test_what_is_lost_everywhere_is_named(place: Place) -> None:
    async with place.opened() as store:
        await store.save(1, tree(1))
        await store.flush()
        await store.evict(1, "ram")
        await damage(store, "disk")
        with pytest.raises(Corrupt, match="params/w1"):
            await store.restore(1, resume=False)


async def test_the_promoter_learns_of_a_rollback(place: Place) -> None:
    async with place.opened(retain={"kind": "last_n", "n": 2}) as store:
        for step in (1, 2, 3):
            await store.save(step, tree(step))
        await store.flush()
        await store.restore(2)
        await store.save(3, tree(33))
        await store.flush()
        assert [(info.step, info.off_branch) for info in await store.steps() if "disk" in info.tiers] == [
            (2, False),
            (3, False),
        ]
    async with place.opened(retain={"kind": "last_n", "n": 2}) as store:
        assert_restored(await store.restore(), tree(33))


async def test_a_look_at_an_older_step_costs_none_that_was_saved_after_it(place: Place) -> None:
    async with place.opened(promote={"kind": "on_signal", "signal": "now"}, retain={"kind": "last_n", "n": 2}) as store:
        await store.save(1, tree(1))
        await store.promote(1, "disk")
        for step in (2, 3):
            await store.save(step, tree(step))
        await store.restore(1)
        store.signal("now")
        await store.flush()
        assert [(info.step, info.off_branch) for info in await store.steps() if "disk" in info.tiers] == [
            (1, False),
            (3, False),
        ]
    async with place.opened() as store:
        assert_restored(await store.restore(), tree(3))


async def test_the_promoter_learns_of_a_fork_with_the_step_that_makes_it(place: Place) -> None:
    async with place.opened(promote={"kind": "on_signal", "signal": "now"}, retain={"kind": "last_n", "n": 2}) as store:
        for step in (1, 2, 3):
            await store.save(step, tree(step))
            await store.promote(step, "disk")
        await store.restore(2)
        await store.collect()
        await store.flush()
        assert await store.where(3) == ("ram", "disk")
        await store.save(3, tree(33))
        await store.flush()
        # Until the save that forked is as safe.
        held = [(info.step, info.off_branch) for info in await store.steps() if "disk" in info.tiers]
        assert held == [(2, False), (3, True)]
        store.signal("now")
        await store.flush()
        assert [(info.serial, info.off_branch) for info in await store.steps() if "disk" in info.tiers] == [
            (2, False),
            (4, False),
        ]


async def test_a_signal_reaches_the_policies(place: Place) -> None:
    async with place.opened(promote={"kind": "on_signal", "signal": "now"}) as store:
        ckpt = await store.save(1, tree(1))
        with pytest.raises(NotFound, match="not due on tier 'disk'"):
            await ckpt.reached("disk")
        store.signal("now")
        await store.flush()
        assert await store.where(1) == ("ram", "disk")


async def test_a_call_that_is_cancelled_leaves_the_store_usable(place: Place) -> None:
    async with place.opened(rate_limit="500 KB/s") as store:
        ckpt = await store.save(1, tree(1))
        for call in (ckpt.reached("disk"), store.flush(), store.promote(1, "disk"), store.verify(1, repair=True)):
            task = asyncio.create_task(call)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await ckpt.reached("disk")
        await store.flush()
        assert all(each.intact for each in await store.verify(1))


async def test_a_step_that_ram_cannot_hold_is_streamed_past_it_and_its_chunks_are_written_once(place: Place) -> None:
    async with place.opened(retain={"kind": "last_n", "n": 2}) as store:
        large = tree(0, nbytes=6 << 20)  # four such arrays; the slab has 16 MiB
        for step in (1, 2, 3):
            large["params"]["w0"] = tree(step, arrays=1, nbytes=6 << 20)["params"]["w0"]
            ckpt = await store.save(step, large)
            assert ckpt.saved is not None
            assert ckpt.saved.tier == "disk"
            if step > 1:
                assert 6 << 20 <= ckpt.saved.new_bytes < 7 << 20
        await store.flush()
        await store.collect()
        assert [(info.step, info.tiers) for info in await store.steps()] == [(2, ("disk",)), (3, ("disk",))]
        assert await store.promote(3, "archive") > 0
        for tier in ("disk", "archive"):
            assert all(each.intact for each in await store.verify(3, tier))
        assert_restored(await store.restore(), large)
        await store.save(4, tree(4))
        await store.flush()
        assert await store.where(4) == ("ram", "disk")


async def test_a_store_that_follows_goes_on_where_the_last_one_was(place: Place) -> None:
    async with place.opened() as store:
        await store.save(1, tree(1))
        await crash(store)
    async with place.opened() as store:
        restored = await store.restore()
        assert restored is not None
        assert set(restored.sources) == {"ram"}
        await store.save(2, tree(2))
        await store.flush()
        assert await store.where(1) == ("ram", "disk")
        assert await store.where(2) == ("ram", "disk")
    async with place.opened() as store:
        assert [info.tiers for info in await store.steps()] == [("ram", "disk")] * 2
        assert tier_of(store, "disk").healthy


async def test_several_ranks_are_told_that_they_promote_themselves(shared_memory: Path, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="promote_in = 'agent' is for a store of one rank, and there are 2"):
        async with cohort(2, shared_memory, tmp_path, promote_in="agent"):
            pass
    assert files_under(tmp_path) == {}
