"""A file that cannot be read costs its step alone, as long as it cannot; a tier that does not answer is no damage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.insight import flip, tier_of
from support.scenes import Heard, assert_restored, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.engine.opening.unreadable import Reads
from tieredckpt.errors import Corrupt, NoSpace, TierUnavailable
from tieredckpt.events import TierFailed, TierRecovered
from tieredckpt.testing.faulty import Faulty

GRACE = 3600.0
BAD = TierUnavailable("/disk/file cannot be read: Input/output error")
OF_2 = "steps/0000000002-*/"


@pytest.fixture
def settings(tmp_path: Path) -> StoreConfig:
    return config({"disk": folder(tmp_path / "disk", retain="all")}, grace=GRACE)


@pytest.fixture
async def saved(settings: StoreConfig, tmp_path: Path) -> Path:
    """The folder of a store of three steps, all older than ``grace``."""
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2, 3):
            await store.save(step, tree(step))
    for path in (tmp_path / "disk").glob("packs/*/*"):
        os.utime(path, (time.time() - 2 * GRACE,) * 2)
    for path in (tmp_path / "disk").glob("catalogs/*"):
        path.unlink()
    return tmp_path / "disk"


@contextmanager
def unreadable(faults: FaultyTiers, *keys: str) -> Iterator[None]:
    """From their opening on, tiers cannot read files of such keys."""

    def failing(tier: str, faulty: Faulty) -> None:
        for key in keys:
            faulty.fail("get", BAD, key=key, times=None)
            faulty.fail("get_into", BAD, key=key, times=None)

    with faults.from_opening(failing):
        yield


async def assert_restores(store: CheckpointStore, step: int) -> None:
    assert_restored(await store.restore(step, resume=False), tree(step))


@pytest.mark.parametrize("content", [None, "{"], ids=["lost", "damaged"])
async def test_the_other_steps_tell_whose_store_it_is_where_the_marker_does_not(
    settings: StoreConfig, saved: Path, faults: FaultyTiers, content: str | None
) -> None:
    marker = saved / "tieredckpt.json"
    if content is None:
        marker.unlink()
    else:
        marker.write_text(content)
    with unreadable(faults, "steps/0000000003-*/manifest.ocdbt"):
        async with CheckpointStore.open(settings) as store:
            await assert_restores(store, 2)


async def test_a_tier_without_a_marker_whose_only_step_cannot_be_read_is_not_taken_for_an_empty_one(
    settings: StoreConfig, saved: Path, faults: FaultyTiers
) -> None:
    """A marker of a store that was made up was written there, and RAM left alone as another's."""
    async with CheckpointStore.open(settings) as store:
        for step in await store.all_steps():
            if step != 3:
                await store.delete(step)
    (saved / "tieredckpt.json").unlink()
    manifest = "steps/0000000003-*/manifest.ocdbt"
    with unreadable(faults, manifest), pytest.raises(TierUnavailable, match="cannot be read"):
        await CheckpointStore.open(settings)
    assert not (saved / "tieredckpt.json").exists()
    async with CheckpointStore.open(settings) as store:
        await assert_restores(store, 3)


@pytest.mark.parametrize("file", ["manifest.ocdbt", "btree*"])
async def test_a_file_that_cannot_be_read_costs_its_step_alone_until_it_can(
    settings: StoreConfig, saved: Path, faults: FaultyTiers, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    with unreadable(faults, OF_2 + file):
        async with CheckpointStore.open(settings) as store:
            heard = Heard(store)
            assert [info.step for info in await store.steps()] == [1, 3]
            told = next(record for record in caplog.messages if "Input/output error" in record)
            assert "tier 'disk'" in told
            assert "step 2" in told
            with pytest.raises(Corrupt, match="step 2"):
                await store.restore(2, resume=False)
            await (await store.save(4, tree(4))).reached("disk")
            await store.evict(1, "disk")
            await store.collect()
            for step in (3, 4):
                await assert_restores(store, step)
            assert not heard.of(TierFailed)
            faults["disk"].clear()
            reading = faults["disk"].hold("get", key=OF_2 + file)
            await reading.reached()  # by itself
            reading.release()
            await store.collect()
            assert await store.where(2) == ("disk",)
            await assert_restores(store, 2)


async def test_a_pack_that_cannot_be_read_keeps_no_tier_from_being_opened(
    settings: StoreConfig, saved: Path, faults: FaultyTiers
) -> None:
    (manifest,) = saved.glob("steps/0000000002-*/manifest.ocdbt")
    pack = min(saved.glob("packs/*/*"), key=lambda path: abs(path.stat().st_ctime - manifest.stat().st_ctime))
    with unreadable(faults, pack.relative_to(saved).as_posix()):
        async with CheckpointStore.open(settings) as store:
            assert [info.step for info in await store.steps()] == [1, 2, 3]
            await (await store.save(4, tree(4))).reached("disk")
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2, 3, 4):
            await assert_restores(store, step)


async def test_a_full_tier_says_which_unreadable_step_keeps_its_packs(
    saved: Path, faults: FaultyTiers, shared_memory: Path
) -> None:
    size = sum(path.stat().st_size for path in saved.glob("packs/*/*"))
    tiers: dict[str, Any] = {"ram": ram(shared_memory), "disk": folder(saved, retain="all", capacity=size + (64 << 10))}
    with unreadable(faults, OF_2 + "*"):
        async with CheckpointStore.open(config(tiers, grace=GRACE)) as store:
            with pytest.raises(NoSpace, match=r"step 2 .* cannot be read there"):
                await (await store.save(4, tree(4))).reached("disk")
            heard = Heard(store)
            await store.evict(2, "disk")
            await heard.first(TierRecovered)
            await (await store.save(5, tree(5))).reached("disk")


@pytest.mark.parametrize("keys", [["*"], ["steps/*"], ["tieredckpt.json", OF_2 + "*"]], ids=["all", "steps", "marker"])
async def test_a_tier_that_does_not_answer_is_unavailable_and_nothing_there_damaged(
    settings: StoreConfig, saved: Path, faults: FaultyTiers, shared_memory: Path, keys: list[str]
) -> None:
    with unreadable(faults, *keys):
        with pytest.raises(TierUnavailable):
            await CheckpointStore.open(settings)
        tiers: dict[str, Any] = {"ram": ram(shared_memory), "disk": folder(saved, retain="all")}
        async with CheckpointStore.open(config(tiers, grace=GRACE)) as store:
            (disk,) = [info for info in await store.tier_infos() if info.name == "disk"]
            assert not disk.healthy
            assert not disk.damaged
    async with CheckpointStore.open(settings) as store:
        assert [info.step for info in await store.steps()] == [1, 2, 3]


async def test_a_reader_goes_on_beside_a_step_that_it_cannot_read(
    settings: StoreConfig, saved: Path, faults: FaultyTiers
) -> None:
    with unreadable(faults, OF_2 + "manifest.ocdbt"):
        async with CheckpointStore.open(settings, read_only=True) as reader:
            assert [info.step for info in await reader.steps()] == [1, 3]
            own = faults["disk"]
            own.fail("get", BAD, key="steps/0000000004-*", times=None)
            async with CheckpointStore.open(settings) as store:
                await (await store.save(4, tree(4))).reached("disk")
                await (await store.save(5, tree(5))).reached("disk")
            assert [info.step for info in await reader.steps()] == [1, 3, 5]
            await assert_restores(reader, 5)
            own.clear()


async def go_on_from_2(store: CheckpointStore, mend: Callable[[], None]) -> None:
    """Restore the newest step that can be read, and save step 3, once the other step 3 can be read again."""
    restored = await store.restore()
    assert restored is not None
    assert restored.step == 2
    mend()
    while 3 not in [info.step for info in await store.steps()]:
        await store.collect()
    await (await store.save(3, tree(30))).reached("disk")


async def assert_3_is_new(settings: StoreConfig) -> None:
    async with CheckpointStore.open(settings) as store:
        assert_restored(await store.restore(), tree(30))
        assert [(info.step, info.off_branch) for info in await store.steps()][-2:] == [(3, True), (3, False)]


@pytest.mark.parametrize("file", ["manifest.ocdbt", "btree*"])
async def test_a_training_that_begins_without_the_newest_step_goes_on_beside_it(
    settings: StoreConfig, saved: Path, faults: FaultyTiers, file: str
) -> None:
    with unreadable(faults, "steps/0000000003-*/" + file):
        async with CheckpointStore.open(settings) as store:
            await go_on_from_2(store, faults["disk"].clear)
    await assert_3_is_new(settings)


async def test_a_restore_that_passes_over_an_unreadable_step_forks_before_it(
    settings: StoreConfig, saved: Path
) -> None:
    (manifest,) = saved.glob("steps/0000000003-*/manifest.ocdbt")
    async with CheckpointStore.open(settings) as store:
        flip(manifest, -1)
        with suppress(Corrupt):
            await store.restore(3, resume=False)
        await store.collect()
        await go_on_from_2(store, lambda: flip(manifest, -1))
    await assert_3_is_new(settings)


async def test_what_a_tier_that_does_not_answer_said_is_the_cause(settings: StoreConfig, faults: FaultyTiers) -> None:
    """What the operating system said was lost."""
    error = TierUnavailable("the disk cannot be read")
    error.__cause__ = OSError(5, "Input/output error")
    async with CheckpointStore.open(settings) as store:
        faults["disk"].fail("get", BAD)
        with pytest.raises(TierUnavailable, match="the disk cannot be read") as raised:
            await store._life.loop.call(Reads(tier_of(store, "disk")).note(error))
    assert isinstance(raised.value.__cause__, OSError)
