"""Of several ranks, a branch forks where rank 0 commits the save that forks; until then it stays on all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cohort import DEADLINE, Cohort, RanksPlace, assert_whole, part
from support.scenes import SOON, folder

from tieredckpt.checkpoint import Restored
from tieredckpt.errors import Invalid, TierUnavailable
from tieredckpt.events import OriginIgnored, StepCommitted

SIZE = 3


class Place(RanksPlace):
    @asynccontextmanager
    async def opened(self, *steps: int, **settings: Any) -> AsyncIterator[Cohort]:
        """Ranks that have saved some steps."""
        async with self.open(**settings) as ranks:
            for step in steps:
                await ranks.reached(await ranks.save(step), "disk")
            yield ranks


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path / "disk", SIZE)


async def branches(ranks: Cohort) -> list[list[int]]:
    """The steps that are on the branch, on every rank."""
    return [[info.step for info in await store.steps() if not info.off_branch] for store in ranks.stores]


async def outcomes(ranks: Cohort, *how: dict[str, Any]) -> list[Restored | BaseException | None]:
    """What each rank's restore of step 1 comes to, where they say different things."""
    restores = (store.restore(**({"step": 1} | each)) for store, each in zip(ranks.stores, how, strict=True))
    return list(await asyncio.gather(*restores, return_exceptions=True))


async def test_a_look_at_an_older_step_leaves_the_branch_on_every_rank(place: Place) -> None:
    async with place.opened(1, 2) as ranks:
        disk = ranks.faulty(0).hold("put", key="packs/*", times=None)
        await ranks.save(3)
        await disk.reached()
        await ranks.restored(1)
        disk.release()
        await ranks.flush()
        assert await branches(ranks) == [[1, 2, 3]] * SIZE
        assert [await store.where(3) for store in ranks.stores] == [("ram", "disk")] * SIZE
    async with place.opened() as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 3)


async def test_a_fork_is_real_once_all_have_their_parts_and_not_before(place: Place) -> None:
    async with place.opened(1, 2, 3) as ranks:
        await ranks.restored(1)
        held = ranks.world.hold(1, "send", topic="log/*")
        saves = await ranks.save(2, seed=22)
        await held.reached()
        assert await branches(ranks) == [[1, 2, 3]] * SIZE
        following = await ranks.save(4)  # which continues that one
        held.release()
        await ranks.reached([*saves, *following], "disk")
        assert await branches(ranks) == [[1, 2, 4]] * SIZE
        assert not any(heard.of(OriginIgnored) for heard in ranks.heard)
    async with place.opened() as ranks:
        assert await branches(ranks) == [[1, 2, 4]] * SIZE


@pytest.mark.parametrize("hurt", [0, 1])
async def test_a_save_that_fails_on_one_rank_leaves_branch_and_origin_on_all(
    place: Place, hurt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(nbytes: int) -> Any:
        raise OSError("the device is gone")

    async with place.opened(1, 2, 3) as ranks:
        await ranks.restored(1)
        with monkeypatch.context() as patch:
            patch.setattr(ranks[hurt]._life.engine.state.tiers[0].ram.index, "allocate", fail)
            saving = (store.save(2, part(22, rank, SIZE)) for rank, store in enumerate(ranks.stores))
            await asyncio.gather(*saving, return_exceptions=True)
        await ranks.failed(step=2)
        assert await branches(ranks) == [[1, 2, 3]] * SIZE
        await ranks.reached(await ranks.save(2, seed=23), "disk")
        assert await branches(ranks) == [[1, 2]] * SIZE


async def test_a_save_that_follows_a_fork_which_fails_forks_at_its_origin(place: Place) -> None:
    async with place.opened(1, 2, 3) as ranks:
        await ranks.restored(1)
        held = ranks.world.hold(2, "send", topic="log/*")
        trees = [part(22, rank, SIZE) for rank in range(SIZE)]
        trees[1]["common"] = trees[1]["common"][:1]  # it does not fit the others'
        await asyncio.gather(*(store.save(2, trees[rank]) for rank, store in enumerate(ranks.stores)))
        await held.reached()
        following = await ranks.save(4)
        held.release()
        await ranks.failed(step=2)
        await ranks.reached(following, "disk")
        assert await branches(ranks) == [[1, 4]] * SIZE


@pytest.mark.parametrize(
    "how",
    [
        [{}, {"step": 2}, {}],
        [{}, {}, {"resume": True}],
        [{"resume": False}, {}, {}],
        [{}, {"keys": ["common"]}, {}],
        [{"keys": ["common"], "resume": False}, {"resume": False}, {"resume": False}],
    ],
    ids=str,
)
async def test_ranks_that_do_not_restore_alike_are_all_refused(place: Place, how: list[dict[str, Any]]) -> None:
    async with place.opened(1, 2, 3) as ranks:
        assert all(isinstance(outcome, Invalid) for outcome in await outcomes(ranks, *how))
        await ranks.reached(await ranks.save(4), "disk")
        assert await branches(ranks) == [[1, 2, 3, 4]] * SIZE
        assert not any(heard.of(OriginIgnored) for heard in ranks.heard)


async def test_ranks_of_which_one_did_not_restore_make_no_step_until_all_have(place: Place) -> None:
    async with place.opened(1, 2, 3) as ranks:
        held = ranks.world.hold(1, "recv", topic="restored/*")
        restoring = [asyncio.create_task(store.restore(1)) for store in ranks.stores]
        await held.reached()
        assert all(isinstance(restored, Restored) for restored in await asyncio.gather(restoring[0], restoring[2]))
        restoring[1].cancel()
        await asyncio.gather(restoring[1], return_exceptions=True)
        held.release()
        await ranks.save(4)
        for event in await ranks.failed(step=4):
            assert "rank 1 has not restored last what rank 0 has" in event.reason
        assert await branches(ranks) == [[1, 2, 3]] * SIZE
        await ranks.restored(1, resume=True)
        await ranks.reached(await ranks.save(4), "disk")
        assert await branches(ranks) == [[1, 4]] * SIZE


async def test_a_commit_that_comes_late_ends_an_origin_on_every_rank(place: Place) -> None:
    """Else the rank that had given the save up forks again where the others do not, and no such step is committed."""
    async with place.opened(1, 2, 3) as ranks:
        await ranks.restored(1)
        ranks.let_wait(DEADLINE)
        await ranks.save(4, ranks=[1, 2])
        await ranks.failed([1, 2], step=4)
        ranks.let_wait(SOON)
        await ranks.save(4, ranks=[0])
        await asyncio.gather(*(each.first(StepCommitted, lambda event: event.step == 4) for each in ranks.heard))
        await ranks.reached(await ranks.save(2, overwrite=True), "disk")
        assert await branches(ranks) == [[1, 2, 3, 4, 2]] * SIZE


async def test_that_a_branch_is_extended_is_logged_by_rank_0_for_all(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.opened(1, 2, 3) as ranks:
        await ranks.restored(1)
        with caplog.at_level(logging.WARNING, "tieredckpt"):
            await ranks.reached(await ranks.save(4), "disk")
        assert sum("resume=True" in record.getMessage() for record in caplog.records) == 1
        for heard in ranks.heard:
            assert [(event.step, event.origin, event.newest) for event in heard.of(OriginIgnored)] == [(4, 1, 3)]
        assert await branches(ranks) == [[1, 2, 3, 4]] * SIZE


async def test_a_schedule_counts_from_the_origin_alike_on_all_ranks(place: Place) -> None:
    async with place.opened(10, 25, schedule={"kind": "every_n_steps", "n": 10}) as ranks:
        await ranks.restored(10)
        for step, due in ((19, False), (20, True), (25, True), (29, False), (30, True)):
            assert [store.due(step) for store in ranks.stores] == [due] * SIZE, step
        held = ranks.world.hold(1, "send", topic="log/*")
        saves = await ranks.save(20)
        await held.reached()
        assert not any(store.due(29) for store in ranks.stores)
        assert all(store.due(30) for store in ranks.stores)
        held.release()
        await ranks.reached(saves, "disk")


async def test_a_save_that_is_streamed_forks_once_it_is_committed(place: Place) -> None:
    async with place.opened(1, 2, 3, tiers={"disk": folder(place.disk)}) as ranks:
        await ranks.restored(1)
        ranks.faulty(0).fail("put", TierUnavailable("by script"), key="steps/*/btree")
        await ranks.save(2, seed=22)
        await ranks.failed(tier="disk")
        assert await branches(ranks) == [[1, 2, 3]] * SIZE
        await ranks.reached(await ranks.save(2, seed=23), "disk")
        assert await branches(ranks) == [[1, 2]] * SIZE
    async with place.opened(tiers={"disk": folder(place.disk)}) as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 23)
