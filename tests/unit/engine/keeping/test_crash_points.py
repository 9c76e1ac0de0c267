"""A crash at any point of a promotion, eviction, collection or repair costs no step and leaves no litter."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.collecting import (
    Place,
    a_sparse_pack,
    assert_restores,
    changed,
    opened,
    referenced,
    two_steps,
    two_steps_apart,
)
from support.insight import flip_chunk
from support.scenes import Heard, crash, files_under, folder

from tieredckpt import CheckpointStore
from tieredckpt.errors import TieredCkptError, TierUnavailable
from tieredckpt.events import TierRecovered
from tieredckpt.format import layout


@dataclass(frozen=True)
class Act:
    """Something that changes a tier: what is there before, and how it is done."""

    prepare: Callable[[CheckpointStore], Awaitable[dict[int, Any]]]
    """Saves steps; the trees of all that are committed on the disk afterwards."""
    run: Callable[[CheckpointStore], Awaitable[object]]
    leaves: frozenset[int] = frozenset()
    """Steps that need not be on the disk afterwards."""


async def promote_the_third(store: CheckpointStore) -> None:
    await (await store.save(3, changed(3, keeps=2))).reached("disk")


async def evict_the_first(store: CheckpointStore) -> None:
    await store.evict(1, "disk")


async def collect(store: CheckpointStore) -> None:
    await store.collect()


async def a_damaged_step(store: CheckpointStore) -> dict[int, Any]:
    trees = await two_steps(store)
    for key in ("w3", "w7"):
        await flip_chunk(store, "disk", 2, key)
    return trees


async def repair(store: CheckpointStore) -> None:
    results = await store.verify(2, "disk", repair=True)
    assert all(found.intact for found in results)


ACTS = {
    "promotion": Act(two_steps, promote_the_third),
    "eviction": Act(two_steps_apart, evict_the_first, frozenset({1})),
    "collection": Act(a_sparse_pack, collect),
    "repair": Act(a_damaged_step, repair),
}


@pytest.mark.parametrize("ends", ["crash", "crash without RAM", "comes back", "comes back, an answer was lost"])
@pytest.mark.parametrize("name", ACTS)
async def test_a_device_that_dies_at_any_point_costs_no_step_and_leaves_no_litter(
    place: Place, faults: FaultyTiers, name: str, ends: str
) -> None:
    """All calls from the n-th on fail, for every n, until the act gets by without noticing."""
    act = ACTS[name]
    far = {"far": folder(place.far, retain="all")}
    for n in range(1, 500):
        for left in (place.root / "of-test").glob("*"):
            shutil.rmtree(left)
        store = await opened(place, folder(place.disk, retain="all"), **far)
        heard = Heard(store)
        trees = await act.prepare(store)
        # The leases stay out of it: a crashed process gives up its own.
        lost = ends == "comes back, an answer was lost"
        disk = faults["disk"]  # a tier that fails may be opened again before its calls are counted
        disk.fail("*", TierUnavailable("it died"), key="[!l]*", nth=n, after=lost, times=None)
        if lost:
            disk.fail("*", TierUnavailable("it died"), key="[!l]*", nth=n + 1, times=None)
        calls = len(disk.calls)
        with suppress(TieredCkptError, AssertionError):
            await act.run(store)
        made = [call for call in disk.calls[calls:] if not call.key.startswith(layout.LEASES)]
        got_by = len(made) < n
        if ends.startswith("comes back"):
            faults["disk"].clear()
            if not all(tier.healthy for tier in await store.tier_infos()):
                await heard.first(TierRecovered)
        else:
            await crash(store)
            if ends == "crash without RAM":
                shutil.rmtree(place.root / "of-test" / "ram")
            store = await opened(place, folder(place.disk, retain="all"), **far)
        try:
            if not ends.startswith("comes back"):  # a step is there whole or not at all
                assert not any(info.damaged for info in await store.steps()), n
            await assert_sound(store, place, trees, act, n)
        finally:
            await store.close()
        if got_by:
            assert n > 3
            return
    pytest.fail("it never got by")


async def assert_sound(store: CheckpointStore, place: Place, trees: dict[int, Any], act: Act, n: int) -> None:
    for step, tree in trees.items():
        await assert_restores(store, step, tree)
    await store.flush()
    where = {info.step: info.tiers for info in await store.steps()}
    for step, tree in trees.items():
        assert step in act.leaves or "disk" in where[step], (n, step, where)
        for found in await store.verify(step, repair=True):
            assert found.intact, (n, found)
        await assert_restores(store, step, tree)
    await (await store.save(9, changed(9, keeps=3))).reached("disk")
    await store.flush()
    place.let_the_grace_pass()
    await store.collect()
    assert set(files_under(place.disk)) == referenced(place.disk), n
    for info in await store.steps():
        for found in await store.verify(info.step):
            assert found.intact, (n, found)
    await assert_restores(store, 9, changed(9, keeps=3))
