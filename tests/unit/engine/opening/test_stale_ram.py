"""A node that comes back with old memory does not bring back what the training has left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.cohort import assert_whole, cohort
from support.scenes import CHUNK, Heard, assert_same, config, crash, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.events import StepPromoted


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(3 * CHUNK, value, np.uint8)}


@pytest.fixture
def place(shared_memory: Path) -> Path:
    return shared_memory


def on(node: str, place: Path) -> StoreConfig:
    nearest = ram(place, path=place / node / "ram", on_close="keep")
    return config({"ram": nearest, "disk": folder(place / "disk", retain="all")}, name="run")


async def left_behind(place: Path, faults: FaultyTiers) -> None:
    """Step 1 is everywhere; steps 2 and 3 are in the memory of node a alone; node b saved another step 2, and a 3."""
    async with CheckpointStore.open(on("a", place)) as store:
        await store.save(1, state(1))
    store = await CheckpointStore.open(on("a", place))
    held = faults["disk"].hold("put", key="packs/*", times=None)
    await store.save(2, state(20))
    await store.save(3, state(30))
    await crash(store)
    held.release()


async def test_what_a_node_kept_in_memory_does_not_replace_what_was_saved_after_it(
    place: Path, faults: FaultyTiers
) -> None:
    await left_behind(place, faults)
    async with CheckpointStore.open(on("b", place)) as store:
        await store.restore()
        await store.save(2, state(2))
    async with CheckpointStore.open(on("a", place), read_only=True) as reader:
        assert [(info.step, info.tiers) for info in await reader.steps()] == [(1, ("ram", "disk")), (2, ("disk",))]
    async with CheckpointStore.open(on("a", place)) as store:
        assert [(info.step, info.tiers) for info in await store.steps()] == [(1, ("ram", "disk")), (2, ("disk",))]
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree, state(2))
        await store.save(3, state(3))
        await store.flush()
    async with CheckpointStore.open(on("a", place)) as store:
        found = await store.restore()
        assert found is not None
        assert_same(found.tree, state(3))
        for info in await store.steps():
            assert all(each.intact for each in await store.verify(info.step))


async def test_what_only_memory_has_is_still_the_newest_where_nobody_went_on(place: Path, faults: FaultyTiers) -> None:
    await left_behind(place, faults)
    async with CheckpointStore.open(on("b", place)) as store:
        await store.restore()
    async with CheckpointStore.open(on("a", place)) as store:
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree, state(30))


async def test_what_followed_since_both_have_the_same_again_is_kept(place: Path, faults: FaultyTiers) -> None:
    await left_behind(place, faults)
    async with CheckpointStore.open(on("b", place)) as store:
        await store.restore()
        await store.save(2, state(2))
    faults.refuse("disk")
    store = await CheckpointStore.open(on("a", place))  # which cannot know what b has saved
    heard = Heard(store)
    await store.restore()
    await store.save(4, state(4))
    faults.allow("disk")
    await heard.first(StepPromoted, lambda event: event.step == 4)
    held = faults["disk"].hold("put", key="packs/*", times=None)
    await store.save(5, state(5))
    await crash(store)
    held.release()
    async with CheckpointStore.open(on("a", place)) as store:
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree, state(5))


async def test_of_several_ranks_too_what_was_left_behind_is_dropped(shared_memory: Path, faults: FaultyTiers) -> None:
    disk = shared_memory / "disk"
    async with cohort(2, shared_memory, disk, nodes=["a", "b"]) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    async with cohort(2, shared_memory, disk, nodes=["a", "b"], crashing=True) as ranks:
        faults.kill("disk")
        await ranks.save(2, seed=20)
        await ranks.all(lambda store, rank: store._life.loop.call(agreed(store, 2)))
    faults.revive("disk")
    async with cohort(2, shared_memory, disk, nodes=["c", "d"]) as ranks:
        await ranks.restored()
        await ranks.reached(await ranks.save(2, seed=2), "disk")
    async with cohort(2, shared_memory, disk, nodes=["a", "b"]) as ranks:
        assert [(info.step, info.tiers) for info in await ranks[0].steps()] == [(1, ("ram", "disk")), (2, ("disk",))]
        for restored in await ranks.restored():
            assert_whole(restored, 2)


async def agreed(store: CheckpointStore, step: int) -> None:
    state = store._life.engine.state
    await state.changed.until(lambda: any(held.step == step for held in state.tiers[0].steps.held))
