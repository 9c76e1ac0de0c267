"""A restore changes nothing that is stored; the next save decides what it continues, and forks or extends."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.frameworks import require
from support.scenes import CHUNK, Heard, assert_restored, config, folder, ram, steps_on, tree

from tieredckpt import CheckpointStore
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Invalid, NoSpace, NotFound
from tieredckpt.events import OriginIgnored, SaveSkipped, TierFailed, TierRecovered
from tieredckpt.format.manifest import ArrayIndex, StepRecord

LATER = 60.0
"""Seconds until a test that hangs is ended."""


class Place:
    """A store over RAM and a folder that retains everything."""

    def __init__(self, shared_memory: Path, disk: Path) -> None:
        self._shared_memory, self.disk = shared_memory, disk

    @asynccontextmanager
    async def opened(
        self, *steps: int, slab: str = "16 MiB", settings: Mapping[str, Any] | None = None, **disk: Any
    ) -> AsyncIterator[CheckpointStore]:
        tiers = {
            "ram": ram(self._shared_memory, capacity=slab),
            "disk": folder(self.disk, **({"retain": "all"} | disk)),
        }
        async with CheckpointStore.open(config(tiers, **(settings or {}))) as store:
            for step in steps:
                await store.save(step, tree(step))
            yield store


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path / "disk")


async def branch(store: CheckpointStore) -> list[tuple[int, int]]:
    """Step and serial of what is on the branch."""
    return [(info.step, info.serial) for info in await store.steps() if not info.off_branch]


# -- a look -----------------------------------------------------------------------------------------------


async def test_a_look_at_an_older_step_costs_none_that_was_saved_after_it(place: Place, faults: FaultyTiers) -> None:
    async with place.opened() as store:
        await (await store.save(1, tree(1))).reached("disk")
        heard = Heard(store)
        faults.kill("disk")
        for step in (2, 3):
            await store.save(step, tree(step))
        await store.restore(1)
        await heard.first(TierFailed)
        faults.revive("disk")
        await heard.first(TierRecovered)
        await store.flush()
        assert await steps_on(store, "disk") == [1, 2, 3]
    async with place.opened() as store:
        assert await branch(store) == [(1, 1), (2, 2), (3, 3)]
        assert_restored(await store.restore(), tree(3))


LOOKS: list[list[tuple[int | None, dict[str, Any]]]] = [
    [(1, {"resume": False})],
    [(1, {"keys": ["params/**"]})],
    [(1, {"keys": ["params/**"], "resume": True})],
    [(3, {})],
    [(None, {})],
    [(1, {}), (3, {})],
    [(1, {}), (None, {})],
    [(1, {"resume": True}), (None, {"resume": True})],
]
"""Restores after which the next save extends the branch, whose newest step is 3, without a warning."""


@pytest.mark.parametrize("restores", LOOKS, ids=str)
async def test_after_a_look_or_the_newest_step_a_save_extends_the_branch(
    place: Place, restores: list[tuple[int | None, dict[str, Any]]]
) -> None:
    async with place.opened(1, 2, 3) as store:
        heard = Heard(store)
        for step, how in restores:
            await store.restore(step, **how)
        with pytest.raises(Conflict, match="step 2 was saved before on this branch"):
            await store.save(2, tree(22))
        await store.save(4, tree(4))
        assert await branch(store) == [(1, 1), (2, 2), (3, 3), (4, 4)]
        assert not heard.of(OriginIgnored)


async def test_in_a_store_that_is_only_read_a_restore_notes_nothing(place: Place) -> None:
    async with place.opened(1, 2):
        pass
    async with CheckpointStore.open(config({"disk": folder(place.disk)}), read_only=True) as store:
        assert await store.restore(1, resume=True) is not None
        assert await branch(store) == [(1, 1), (2, 2)]


# -- the save decides -------------------------------------------------------------------------------------


FORKS: list[tuple[list[tuple[int | None, dict[str, Any]]], int, bool, list[tuple[int, int]]]] = [
    ([(1, {})], 2, False, [(1, 1), (2, 4)]),
    ([(1, {})], 2, True, [(1, 1), (2, 4)]),
    ([(1, {})], 3, False, [(1, 1), (3, 4)]),
    ([(1, {"resume": True})], 4, False, [(1, 1), (4, 4)]),
    ([(1, {"resume": True})], 3, True, [(1, 1), (3, 4)]),
    ([(2, {}), (1, {})], 2, False, [(1, 1), (2, 4)]),
    ([(1, {}), (2, {})], 3, False, [(1, 1), (2, 2), (3, 4)]),
    ([(1, {}), (3, {"resume": False})], 2, False, [(1, 1), (2, 4)]),
    ([(1, {}), (None, {"keys": ["epoch"]})], 2, False, [(1, 1), (2, 4)]),
    ([(1, {}), (9, {})], 2, False, [(1, 1), (2, 4)]),
    ([(2, {"resume": True})], 2, True, [(1, 1), (2, 2), (2, 4)]),
]
"""Restores, a save with or without ``overwrite``, and the branch then: it was 1, 2, 3."""


@pytest.mark.parametrize(("restores", "step", "overwrite", "then"), FORKS, ids=str)
async def test_a_save_below_the_newest_step_or_one_that_resumes_forks(
    place: Place,
    restores: list[tuple[int | None, dict[str, Any]]],
    step: int,
    overwrite: bool,
    then: list[tuple[int, int]],
) -> None:
    async with place.opened(1, 2, 3) as store:
        heard = Heard(store)
        await store.flush()
        before = await store.steps()
        for number, how in restores:
            try:
                await store.restore(number, **how)
            except NotFound:
                assert number == 9
        assert await store.steps() == before
        await store.save(step, tree(40), overwrite=overwrite)
        assert await branch(store) == then
        forked = {info.serial: info for info in await store.steps()}[4]
        assert forked.restored_from == then[-2][1]
        assert not heard.of(OriginIgnored)
        with pytest.raises(Conflict):  # the origin is cleared
            await store.save(step, tree(41))
        await store.save(50, tree(50))
        assert await branch(store) == [*then, (50, 5)]


@pytest.mark.parametrize(("step", "overwrite"), [(4, False), (3, True)])
async def test_a_save_above_the_newest_step_extends_and_says_how_to_resume(
    place: Place, step: int, overwrite: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.opened(1, 2, 3) as store:
        heard = Heard(store)
        await store.restore(1)
        with caplog.at_level(logging.WARNING, "tieredckpt"):
            await store.save(step, tree(40), overwrite=overwrite)
        told = heard.of(OriginIgnored)
        assert [(event.step, event.origin, event.newest) for event in told] == [(step, 1, 3)]
        for text in (told[0].advice, caplog.text):
            assert "step 3" in text
            assert "step 1" in text
            assert "resume=True" in text
        assert await branch(store) == [(1, 1), (2, 2), (3, 3), (step, 4)]
        assert (await store.steps())[-1].restored_from is None
        with pytest.raises(Conflict, match="on this branch"):  # the origin is cleared
            await store.save(2, tree(41))


async def test_after_a_fork_the_number_is_checked_against_the_new_branch(place: Place) -> None:
    async with place.opened(1, 5, 6) as store:
        await store.restore(5)
        with pytest.raises(Conflict, match="step 5 was saved before on this branch"):
            await store.save(5, tree(55))
        with pytest.raises(Conflict, match="step 1 was saved before on this branch"):
            await store.save(1, tree(55))
        await store.save(6, tree(66))  # which the branch that it leaves has
        assert await branch(store) == [(1, 1), (5, 2), (6, 4)]


async def test_until_a_save_forks_a_restart_takes_the_newest_step(place: Place) -> None:
    async with place.opened(1, 2, 3) as store:
        await store.restore(1, resume=True)
    async with place.opened() as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 3
        await store.save(4, tree(4))
        assert await branch(store) == [(1, 1), (2, 2), (3, 3), (4, 4)]


# -- a save that does not come about ------------------------------------------------------------------------


async def _fails(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = commit_file.commit

    async def broken(tier: Tier, record: StepRecord, arrays: Mapping[str, ArrayIndex], *how: Any, **more: Any) -> None:
        if tier.ram is not None:
            raise RuntimeError("the machine is on fire")
        await commit(tier, record, arrays, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(commit_file, "commit", broken)
        with pytest.raises(RuntimeError):
            await store.save(2, tree(22))


async def _is_refused(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Invalid):
        await store.save(2, {"x": object()})


async def _has_no_room(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoSpace):
        await store.save(2, {"x": np.zeros(64 << 20, np.uint8)})


async def _is_cancelled(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        gate = Gate(patch, 2)
        saving = asyncio.create_task(store.save(2, tree(22)))
        await gate.entered()
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)


class Gate:
    """Holds up the commits of a step in RAM."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()
        commit = commit_file.commit

        async def held(
            tier: Tier, record: StepRecord, arrays: Mapping[str, ArrayIndex], *how: Any, **more: Any
        ) -> None:
            if record.step == step and tier.ram is not None:
                self._entered.set()
                while not self._open.is_set():
                    await asyncio.sleep(0.01)
            await commit(tier, record, arrays, *how, **more)

        patch.setattr(commit_file, "commit", held)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, LATER)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("happens", [_fails, _is_refused, _has_no_room, _is_cancelled])
async def test_a_save_that_does_not_come_about_leaves_branch_and_origin(
    place: Place, monkeypatch: pytest.MonkeyPatch, happens: Any
) -> None:
    async with place.opened(1, 2, 3, slab="2 MiB", capacity="4 MiB") as store:
        await store.flush()
        await store.restore(1)
        before = await branch(store)
        await happens(store, monkeypatch)
        assert await branch(store) == before == [(1, 1), (2, 2), (3, 3)]
        await store.save(2, tree(22))
        after = await branch(store)
        assert [step for step, _ in after] == [1, 2]
        assert after[-1][1] > 3


async def test_a_save_that_is_skipped_leaves_branch_and_origin(place: Place, faults: FaultyTiers) -> None:
    async with place.opened(1, slab="700 KiB", settings={"when_full": "skip"}) as store:  # for two trees
        await store.flush()
        heard = Heard(store)
        gate = faults["disk"].hold("put", key="packs/*", times=None)
        for step in (2, 3):
            await store.save(step, tree(step))
            await gate.reached()
        await store.restore(1)
        await store.save(2, tree(22))
        assert len(heard.of(SaveSkipped)) == 1
        assert await branch(store) == [(1, 1), (2, 2), (3, 3)]
        gate.release()
        await store.flush()
        await store.save(2, tree(22))
        assert await branch(store) == [(1, 1), (2, 4)]


# -- several saves in flight --------------------------------------------------------------------------------


def immutable(seed: int) -> dict[str, Any]:
    jnp = require("jax").numpy
    return {"x": jnp.full(CHUNK, seed, jnp.uint8)}


async def test_a_save_that_was_called_before_a_restore_knows_nothing_of_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.opened(1, 2) as store:
        heard = Heard(store)
        gate = Gate(monkeypatch, 3)
        saves = [await store.save(step, immutable(step), capture="reference") for step in (3, 4)]
        await gate.entered()
        await store.restore(1, resume=True)
        gate.open()
        for save in saves:
            await save.reached("disk")
        assert [step for step, _ in await branch(store)] == [1, 2, 3, 4]
        await store.save(5, tree(5))  # it is the first that was called after the restore
        assert [step for step, _ in await branch(store)] == [1, 5]
        assert not heard.of(OriginIgnored)


async def test_saves_in_flight_continue_one_another_after_a_fork(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place.opened(1, 2, 3) as store:
        heard = Heard(store)
        gate = Gate(monkeypatch, 2)
        await store.restore(1)
        saves = [await store.save(step, immutable(step), capture="reference") for step in (2, 4)]
        await gate.entered()
        assert await branch(store) == [(1, 1), (2, 2), (3, 3)]  # nothing is committed yet
        gate.open()
        for save in saves:
            await save.reached("disk")
        assert await branch(store) == [(1, 1), (2, 4), (4, 5)]
        assert not heard.of(OriginIgnored)


async def test_a_step_in_flight_is_the_newest_for_a_restore_that_comes_after_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.opened(1, 2) as store:
        gate = Gate(monkeypatch, 3)
        save = await store.save(3, immutable(3), capture="reference")
        await gate.entered()
        await store.restore(2)  # the newest that is committed, and not of what was saved
        gate.open()
        await save.reached("disk")
        await store.save(3, tree(33))
        assert await branch(store) == [(1, 1), (2, 2), (3, 4)]


# -- streaming --------------------------------------------------------------------------------------------


async def test_a_save_that_streams_past_ram_forks_when_it_is_committed(place: Place, faults: FaultyTiers) -> None:
    def large(seed: int) -> dict[str, Any]:
        return tree(seed, nbytes=1 << 20)

    async with place.opened(1, 2, 3, slab="1 MiB") as store:
        await store.flush()
        await store.restore(1)
        heard = Heard(store)
        faults["disk"].fail("put", NoSpace("no room"), key="steps/*")
        with pytest.raises(NoSpace):
            await store.save(2, large(22))
        assert await branch(store) == [(1, 1), (2, 2), (3, 3)]
        await heard.first(TierRecovered)
        saved = (await store.save(2, large(22))).saved
        assert saved is not None
        assert saved.tier == "disk"
        assert [step for step, _ in await branch(store)] == [1, 2]


# -- schedules --------------------------------------------------------------------------------------------


async def test_a_schedule_counts_from_where_that_save_would_fork(place: Place) -> None:
    async with place.opened(10, 25, settings={"schedule": {"kind": "every_n_steps", "n": 10}}) as store:
        await store.restore(10)
        assert not store.due(19)
        assert store.due(20)  # it would fork at 10
        assert store.due(25)
        assert not store.due(29)  # it would extend, and 20 was passed before 25
        assert store.due(30)
        await store.restore(10, resume=True)
        assert store.due(29)
        await store.restore(10, resume=False)
        assert store.due(29)
        await store.save(29, tree(29))
        assert not store.due(29)
        assert store.due(30)


async def test_a_schedule_counts_from_the_newest_step_of_the_branch(place: Place) -> None:
    settings = {"schedule": {"kind": "every_n_steps", "n": 10}}
    async with place.opened(10, 25, settings=settings) as store:
        await store.restore(10)
        await store.restore()
        assert not store.due(29)
        assert store.due(30)
    async with place.opened(settings=settings) as store:
        assert not store.due(29)
        assert store.due(30)
        assert store.observed().last_save_step == 25


# -- what leaves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "there"), [(100, [100, 200]), (200, [200])], ids=["both", "it alone"])
async def test_off_branch_steps_stay_until_a_later_save_is_as_safe(place: Place, every: int, there: list[int]) -> None:
    """Also one that is the only durable step, until something of the branch is durable."""
    disk = {"promote": {"kind": "every_n_steps", "n": every}, "retain": {"kind": "last_n", "n": len(there)}}
    async with place.opened(100, 200, **disk) as store:
        await store.flush()
        await store.restore(100)
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(200, "disk")
        await store.save(101, tree(101))
        await store.flush()
        await store.collect()
        assert await steps_on(store, "disk") == there
        assert await store.where(200) == ("ram", "disk")
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(200, "disk")
        await store.promote(101, "disk")
        await store.flush()
        assert await steps_on(store, "disk") == [*there[:-1], 101]
