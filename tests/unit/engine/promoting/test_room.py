"""A tier with a codec keeps as many steps as it has room for compressed, and the newest also when it takes more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.insight import tier_of
from support.limits import limit
from support.scenes import CHUNK, SOON, Heard, assert_restored, config, folder, ram, steps_on

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import NoSpace
from tieredckpt.events import RetentionCut, TierFailed

PAGE = 4 << 10
CHUNKS = 8
RAW = CHUNKS * (CHUNK + PAGE)
"""Bytes that a step takes in packs at most."""


def state(seed: int, bits: int) -> dict[str, Any]:
    """Items of 64 bits of which so many are random."""
    random = np.random.default_rng(seed).integers(0, 1 << 62, CHUNKS * CHUNK // 8, np.int64)
    return {"w": random & ((1 << bits) - 1)}


def settings(shared_memory: Path, tmp_path: Path, capacity: int) -> StoreConfig:
    disk = folder(tmp_path / "disk", retain="all", codec="small", capacity=capacity)
    return config({"ram": ram(shared_memory, on_close="release"), "disk": disk}, name="room")


@pytest.mark.parametrize("opened_again", [False, True])
async def test_a_tier_is_filled_with_steps_as_they_are_compressed(
    shared_memory: Path, tmp_path: Path, opened_again: bool
) -> None:
    taken = CHUNKS * 2 * PAGE  # 24 bits of 64
    capacity = 3 * taken + 8 * PAGE  # with their indexes
    assert capacity < 2 * taken + RAW
    chosen = settings(shared_memory, tmp_path, capacity)
    async with CheckpointStore.open(chosen) as store:
        for step in (1, 2):
            await (await store.save(step, state(step, 24))).reached("disk")
        if not opened_again:
            await (await store.save(3, state(3, 24))).reached("disk")
            assert await steps_on(store, "disk") == [1, 2, 3]
    if opened_again:
        async with CheckpointStore.open(chosen) as store:
            await (await store.save(3, state(3, 24))).reached("disk")
            assert await steps_on(store, "disk") == [1, 2, 3]


async def test_a_step_that_takes_more_than_the_one_before_drives_out_older_ones(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, pack_size=3 * (CHUNK + PAGE))
    capacity = CHUNKS * PAGE + RAW + 6 * PAGE  # for one step that nearly vanishes and one of noise
    async with CheckpointStore.open(settings(shared_memory, tmp_path, capacity)) as store:
        heard = Heard(store)
        for step in (1, 2):
            await (await store.save(step, state(step, 2))).reached("disk")
        await (await store.save(3, state(3, 62))).reached("disk")
        assert await steps_on(store, "disk") == [2, 3]
        assert [event.step for event in heard.of(RetentionCut)] == [1]
        assert not heard.of(TierFailed)
        assert tier_of(store, "disk").packs.used <= capacity
        await store.evict(3, "ram")
        assert_restored(await store.restore(3), state(3, 62))


async def test_no_capacity_is_exceeded_by_a_step_that_takes_more_than_there_is(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, pack_size=3 * (CHUNK + PAGE))
    capacity = RAW + 2 * PAGE
    async with CheckpointStore.open(settings(shared_memory, tmp_path, capacity)) as store:
        await (await store.save(1, state(1, 24))).reached("disk")
        with pytest.raises(NoSpace, match="raise its capacity"):
            await (await store.save(2, state(2, 62))).reached("disk")
        assert await steps_on(store, "disk") == [1]
        assert tier_of(store, "disk").packs.used <= capacity
        scratch = store._life.engine.state.scratch

        async def borrow_all() -> None:
            async with scratch.lend(scratch.capacity):
                pass

        async with asyncio.timeout(SOON):  # what was lent for packs that did not fit was given back
            await store._life.loop.call(borrow_all())
