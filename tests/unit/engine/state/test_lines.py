"""Which step a restore takes: the newest save of the line that is trained, whatever its number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.limits import limit
from support.scenes import (
    CHUNK,
    Heard,
    assert_restored,
    assert_same,
    config,
    crash,
    folder,
    ram,
    save_steps,
    steps_on,
    tree,
)

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, NotFound
from tieredckpt.events import TierRecovered
from tieredckpt.format.manifest import ArrayIndex, StepRecord


@pytest.mark.parametrize("loses_ram", [False, True], ids=["with its RAM", "without its RAM"])
async def test_after_a_rollback_the_newest_save_wins_over_the_higher_step(
    shared_memory: Path, tmp_path: Path, loses_ram: bool
) -> None:
    tiers = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")})
    store = await CheckpointStore.open(tiers)
    for step in (50, 100, 150, 200):
        await store.save(step, tree(step))
    await store.flush()
    restored = await store.restore(step=100)
    assert restored is not None
    assert restored.step == 100
    await (await store.save(101, tree(101))).reached("disk")
    await crash(store)
    if loses_ram:
        (shared_memory / "of-test").rename(shared_memory / "lost")

    async with CheckpointStore.open(tiers) as store:
        assert {info.step for info in await store.steps() if info.off_branch} == {150, 200}
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 101
        assert_same(restored.tree, tree(101))
        info = {info.step: info for info in await store.steps()}[101]
        assert info.restored_from == {i.step: i.serial for i in await store.steps()}[100]
        assert not info.off_branch


async def test_off_branch_steps_leave_first_and_never_come_back_by_themselves(
    shared_memory: Path, tmp_path: Path
) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path, retain={"kind": "last_n", "n": 3})})
    async with CheckpointStore.open(settings) as store:
        for step in (10, 20, 30):
            await store.save(step, tree(step))
        await store.flush()
        await store.restore(step=10)
        await save_steps(store, 11, 12)
        assert await steps_on(store, "disk") == [10, 11, 12]
    async with CheckpointStore.open(settings) as store:
        await store.flush()
        assert [info.step for info in await store.steps()] == [10, 11, 12]
        with pytest.raises(NotFound, match="no tier holds step 30"):
            await store.restore(step=30)


async def test_where_room_is_short_off_branch_steps_leave_first(shared_memory: Path, tmp_path: Path) -> None:
    room = 4 * 17 * CHUNK  # for four steps: a chunk takes a page more than its bytes
    settings = config(
        {"ram": ram(shared_memory), "disk": folder(tmp_path, capacity=room, retain={"kind": "last_n", "n": 1})}
    )
    async with CheckpointStore.open(settings) as store:
        await save_steps(store, 10, 20, 30, to="disk")
        await store.restore(step=10)
        await save_steps(store, 11, 12, to="disk")
        on_disk = await steps_on(store, "disk")
        assert on_disk == [10, 30, 11, 12]


async def test_serials_keep_clear_of_those_that_a_silent_tier_turns_out_to_have(
    tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, serials_skipped=1)
    near, far = folder(tmp_path / "near"), folder(tmp_path / "far", retain="all")
    async with CheckpointStore.open(config({"near": near, "far": far})) as store:
        await save_steps(store, 1)
    async with CheckpointStore.open(config({"far": far})) as store:
        for step in range(2, 7):
            await store.save(step, {"x": step})
    faults.refuse("far")
    async with CheckpointStore.open(config({"near": near, "far": far})) as store:
        heard = Heard(store)
        faults.allow("far")
        await heard.first(TierRecovered)
        await (await store.save(2, tree(2))).reached("far")
        assert [info.serial for info in await store.steps()] == [1, 2, 3, 4, 5, 6, 7]


async def test_off_branch_steps_stay_where_the_policy_keeps_them(shared_memory: Path, tmp_path: Path) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path, retain="all")})
    async with CheckpointStore.open(settings) as store:
        for step in (10, 20, 30):
            await store.save(step, tree(step))
        await store.flush()
        await store.restore(step=10)
        await store.save(20, tree(1020))
        await store.flush()
        held = await store.steps()
        assert [(info.step, info.off_branch) for info in held] == [(10, False), (20, True), (30, True), (20, False)]
        assert_restored(await store.restore(step=20), tree(1020))


async def test_a_save_forks_at_an_off_branch_step_that_was_restored_to_resume(tiers: StoreConfig) -> None:
    async with CheckpointStore.open(tiers) as store:
        for step in (10, 20, 30):
            await store.save(step, tree(step))
        await store.flush()
        await store.restore(step=10)
        await save_steps(store, 11)
        await store.restore(step=30, resume=True)
        await store.save(31, tree(31))
        lines = {info.step: info.off_branch for info in await store.steps()}
        assert lines == {10: False, 20: False, 30: False, 11: True, 31: False}


async def test_a_step_number_is_saved_once_on_a_branch_unless_asked_for(tiers: StoreConfig) -> None:
    async with CheckpointStore.open(tiers) as store:
        await store.save(7, tree(1))
        with pytest.raises(Conflict, match="step 7 was saved before on this branch"):
            await store.save(7, tree(2))
        assert_restored(await store.restore(), tree(1))
        await (await store.save(7, tree(2), overwrite=True)).reached("disk")
        assert_restored(await store.restore(step=7), tree(2))
    async with CheckpointStore.open(tiers) as store:
        assert_restored(await store.restore(), tree(2))
        with pytest.raises(Conflict, match="step 7"):
            await store.save(7, tree(3))


async def test_serials_jump_over_what_a_silent_tier_may_hold(tmp_path: Path, faults: FaultyTiers) -> None:
    near, far = folder(tmp_path / "near"), folder(tmp_path / "far", retain="all")
    async with CheckpointStore.open(config({"near": near, "far": far})) as store:
        await save_steps(store, 1)
    # Another run, with the far tier alone, goes on where this one cannot see it.
    async with CheckpointStore.open(config({"far": far})) as store:
        await store.restore()
        for step in (2, 3):
            await store.save(step, tree(step))
    faults.refuse("far")
    async with CheckpointStore.open(config({"near": near, "far": far})) as store:
        heard = Heard(store)
        checkpoint = await store.save(2, tree(1002))
        faults.allow("far")
        await heard.first(TierRecovered)
        await checkpoint.reached("far")
        steps = await store.steps()
        assert len({info.serial for info in steps}) == len(steps) == 4
        assert_restored(await store.restore(), tree(1002))


async def test_a_serial_is_used_once_though_its_commit_failed(
    tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_file.commit

    async def broken(tier: Tier, record: StepRecord, arrays: Mapping[str, ArrayIndex], **how: Any) -> None:
        if record.step == 2:
            raise RuntimeError("the machine is on fire")
        await commit(tier, record, arrays, **how)

    monkeypatch.setattr(commit_file, "commit", broken)
    async with CheckpointStore.open(tiers) as store:
        await store.save(1, tree(1))
        with pytest.raises(RuntimeError):
            await store.save(2, tree(2))
        await store.save(3, tree(3))
        assert [(info.step, info.serial, info.off_branch) for info in await store.steps()] == [
            (1, 1, False),
            (3, 3, False),
        ]
