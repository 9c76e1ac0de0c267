"""When the slab is full, ``when_full`` decides, training goes on, and the last copy stays."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.insight import bytes_of_listed_steps, flip_chunk, slab_of, tier_of
from support.scenes import CHUNK, SOON, Heard, assert_restored, config, folder, ram, steps_on

from tieredckpt import Checkpoint, CheckpointStore
from tieredckpt.blobs.ram import store as ram_store
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.engine.keeping.evictor import Evictor
from tieredckpt.engine.keeping.retention import evict_unretained, evict_until
from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.events import SaveSkipped, StepEvicted, TierFailed, TierRecovered

CHUNKS = 6
STATE = CHUNKS * slab_size(CHUNK)
"""Bytes of the slab that one state takes."""


def state(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).integers(0, 255, CHUNKS * CHUNK, dtype=np.uint8)}


class Scene:
    """A store whose slab holds ``states`` states, or as many as it likes, and whose next tier is behind a gate."""

    def __init__(self, store: CheckpointStore, faults: FaultyTiers) -> None:
        self.store = store
        self.heard = Heard(store)
        self.faults = faults
        self.disk = faults["disk"]
        self.gate = self.disk.hold("put", key="packs/*", times=None)

    async def save(self, step: int) -> Checkpoint:
        return await self.store.save(step, state(step))

    async def fill(self, *steps: int) -> None:
        """Save steps, of which the first is on its way to the next tier, and held there."""
        for step in steps:
            assert not (await self.save(step)).skipped
            await self.gate.reached()

    def kill(self) -> None:
        """Make the next tier fail."""
        self.faults.kill("disk")
        self.gate.release()

    async def revive(self) -> None:
        self.faults.revive("disk")
        await self.heard.first(TierRecovered)

    async def in_ram(self) -> list[int]:
        return await steps_on(self.store, "ram")

    async def check(self, *steps: int) -> None:
        """These steps and no others are there, on the next tier, as they were saved, and the slab has no more."""
        self.gate.release()
        await self.store.flush()
        infos = await self.store.steps()
        assert [info.step for info in infos if "disk" in info.tiers] == [info.step for info in infos] == list(steps)
        for step in steps:
            assert_restored(await self.store.restore(step, resume=False), state(step))
        assert slab_of(self.store).used == await bytes_of_listed_steps(self.store)


@pytest.fixture
def scene(shared_memory: Path, tmp_path: Path, faults: FaultyTiers) -> Any:
    @asynccontextmanager
    async def opened(when_full: str, states: int | None, retained: int = 1, **settings: Any) -> AsyncIterator[Scene]:
        capacity = "auto" if states is None else states * STATE + STATE // 2
        tiers = {
            "ram": ram(shared_memory, capacity=capacity, retain={"kind": "last_n", "n": retained}),
            "disk": folder(tmp_path / "disk", retain="all", **settings),
        }
        async with CheckpointStore.open(config(tiers, when_full=when_full)) as store:
            scene = Scene(store, faults)
            try:
                yield scene
            finally:
                scene.gate.release()
                faults.revive("disk")

    return opened


async def still_waits(saving: asyncio.Task[Checkpoint]) -> bool:
    done, _ = await asyncio.wait([saving], timeout=0.3)
    return not done


# -- wait -------------------------------------------------------------------------------------------------


async def test_wait_returns_once_a_promotion_has_made_room(scene: Any) -> None:
    async with scene("wait", 2) as s:
        await s.fill(1, 2)
        saving = asyncio.create_task(s.save(3))
        assert await still_waits(saving)
        s.gate.release()
        async with asyncio.timeout(SOON):
            assert not (await saving).skipped
        assert not s.heard.of(SaveSkipped)
        await s.check(1, 2, 3)


async def test_a_save_that_waits_and_is_cancelled_leaves_nothing(scene: Any) -> None:
    async with scene("wait", 1) as s:
        await s.fill(1)
        saving = asyncio.create_task(s.save(2))
        assert await still_waits(saving)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        await s.check(1)


@pytest.mark.parametrize("states", [1, 3])
async def test_wait_does_not_outlast_a_tier_that_dies(scene: Any, states: int) -> None:
    async with scene("wait", states) as s:
        steps = range(1, states + 1)
        await s.fill(*steps)
        saving = asyncio.create_task(s.save(99))
        assert await still_waits(saving)
        s.kill()
        async with asyncio.timeout(SOON):
            skipped = (await saving).skipped
        await s.heard.first(TierFailed)
        # One state cannot be replaced: it is the last copy of all.
        assert bool(skipped) == (states == 1)
        assert await s.in_ram() == ([1] if states == 1 else [2, 3, 99])
        await s.revive()
        await s.check(*([1] if states == 1 else [2, 3, 99]))


async def test_wait_does_not_wait_for_a_tier_whose_lost_call_is_being_tried_again(scene: Any) -> None:
    async with scene("wait", 2, retries=3) as s:
        s.gate.release()
        s.disk.fail("put", TierUnavailable("no answer"), key="packs/*")
        again = s.disk.hold("put", key="packs/*", nth=2, times=None)
        for step in (1, 2):
            await s.save(step)
        await again.reached()
        async with asyncio.timeout(SOON):
            await s.save(3)
        assert s.heard.of(TierFailed) == [], "it is still being tried"
        again.release()


async def test_wait_does_not_begin_to_wait_for_a_tier_that_is_dead(scene: Any) -> None:
    async with scene("wait", 2) as s:
        s.kill()
        for step in range(1, 8):
            async with asyncio.timeout(SOON):
                assert not (await s.save(step)).skipped
            await s.heard.first(TierFailed)
        assert await s.in_ram() == [6, 7]
        await s.revive()
        await s.check(6, 7)


async def test_wait_does_not_wait_for_a_promotion_that_nobody_wants(scene: Any) -> None:
    async with scene("wait", 2, promote={"kind": "every_n_steps", "n": 1000}) as s:
        for step in range(1, 6):
            async with asyncio.timeout(SOON):
                assert not (await s.save(step)).skipped
        assert await s.in_ram() == [4, 5]


async def test_wait_does_not_wait_for_a_snapshot_that_is_damaged_and_cannot_be_promoted(scene: Any) -> None:
    async with scene("wait", 2) as s:
        await s.fill(1, 2)
        await flip_chunk(s.store, "ram", 2, "x")
        s.gate.release()
        with pytest.raises(Corrupt, match=r"array 'x' of step 2 .* is lost"):
            await s.store.flush()
        for step in (3, 4, 5):
            async with asyncio.timeout(SOON):
                assert not (await s.save(step)).skipped
        await s.check(1, 3, 4, 5)


# -- skip -------------------------------------------------------------------------------------------------


async def test_skip_says_so_and_the_next_save_works(scene: Any) -> None:
    async with scene("skip", 3) as s:
        await s.fill(1, 2, 3)
        async with asyncio.timeout(SOON):
            checkpoint = await s.save(4)
        assert "step 4 was not saved: the slab of tier 'ram' (420 KiB) is full" in checkpoint.skipped
        assert s.heard.of(SaveSkipped) == [SaveSkipped(4, checkpoint.skipped)]
        for tier in ("ram", "disk"):
            with pytest.raises(NotFound, match="step 4 was not saved"):
                await checkpoint.reached(tier)
        with pytest.raises(NotFound):
            await s.store.where(4)
        assert slab_of(s.store).used == 3 * STATE, "nothing of it stays behind"
        assert await s.in_ram() == [1, 2, 3], "and nothing had to go for it"
        s.gate.release()
        await s.store.flush()
        assert not (await s.save(4)).skipped
        await s.check(1, 2, 3, 4)


async def test_skip_evicts_what_is_promoted_before_it_skips(scene: Any) -> None:
    async with scene("skip", 1) as s:
        s.gate.release()
        for step in range(1, 5):
            assert not (await s.save(step)).skipped
            await s.store.flush()
        assert await s.in_ram() == [4]
        await s.check(1, 2, 3, 4)


# -- replace ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when_full", ["wait", "skip", "replace"])
async def test_a_save_takes_the_room_of_a_step_that_is_leaving(
    scene: Any, monkeypatch: pytest.MonkeyPatch, when_full: str
) -> None:
    """It was skipped, or replaced another step, while memory was about to become free."""
    begun, go_on = threading.Event(), threading.Event()
    retire = RamStore.retire

    def late(self: RamStore, *arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(SOON)
        return retire(self, *arguments)

    async with scene(when_full, 2) as s:
        s.gate.release()
        await s.save(1)
        await s.store.flush()
        held = s.disk.hold("put", key="packs/*")
        await s.save(2)
        await held.reached()
        monkeypatch.setattr(RamStore, "retire", late)
        leaving = asyncio.create_task(s.store.evict(1, "ram"))
        assert await asyncio.to_thread(begun.wait, SOON)
        saving = asyncio.create_task(s.save(3))
        assert await still_waits(saving)
        go_on.set()
        assert not (await saving).skipped
        await leaving
        assert await s.in_ram() == [2, 3]
        held.release()
        await s.check(1, 2, 3)


async def test_replace_drops_the_oldest_snapshot_that_is_not_being_promoted(scene: Any) -> None:
    async with scene("replace", 3) as s:
        await s.fill(1, 2, 3)
        async with asyncio.timeout(SOON):
            assert not (await s.save(4)).skipped
        assert s.heard.of(StepEvicted) == [StepEvicted(2, 2, "ram")]
        assert await s.in_ram() == [1, 3, 4]
        assert not s.heard.of(SaveSkipped)
        await s.check(1, 3, 4)


async def test_replace_never_drops_the_last_copy(scene: Any) -> None:
    async with scene("replace", 1) as s:
        s.kill()
        assert not (await s.save(1)).skipped
        await s.heard.first(TierFailed)
        for step in (2, 3):
            async with asyncio.timeout(SOON):
                assert (await s.save(step)).skipped
        assert await s.in_ram() == [1]
        await s.revive()
        await s.store.flush()
        assert not (await s.save(4)).skipped
        await s.check(1, 4)


async def test_replace_prefers_what_is_promoted(scene: Any) -> None:
    async with scene("replace", 2) as s:
        await s.fill(1)
        s.gate.release()
        await s.store.flush()
        gate = s.disk.hold("put", key="packs/*", times=None)
        await s.save(2)
        await gate.reached()
        assert not (await s.save(3)).skipped
        assert [event.step for event in s.heard.of(StepEvicted)] == [1]
        gate.release()
        await s.check(1, 2, 3)


# -- a slab that grows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("retained", "states"), [(1, 2), (3, 4)])
async def test_an_automatic_slab_has_the_memory_of_the_steps_that_it_retains_and_one_more(
    scene: Any, retained: int, states: int
) -> None:
    async with scene("wait", None, retained) as s:
        s.gate.release()
        for step in range(1, 9):
            await s.save(step)
            await s.store.flush()
            assert {*range(max(1, step - retained + 1), step + 1)} <= {*await s.in_ram()}
        assert slab_of(s.store).reserved == states * STATE
        await s.check(*range(1, 9))


async def test_an_automatic_slab_of_pieces_of_all_sizes_does_not_grow_for_ever(scene: Any) -> None:
    rng = np.random.default_rng(0)
    tree = {f"w{i}": rng.integers(0, 255, int(rng.integers(5_000, 200_000)), dtype=np.uint8) for i in range(24)}
    nbytes = sum(array.nbytes for array in tree.values())
    async with scene("wait", None) as s:
        s.gate.release()
        for step in range(1, 61):
            for key in rng.choice(sorted(tree), 24 if step % 10 == 0 else 3, replace=False):
                tree[key] += 1
            assert not (await s.store.save(step, tree)).skipped
            await s.store.flush()
        assert slab_of(s.store).reserved < 5 * nbytes
        assert slab_of(s.store).used == await bytes_of_listed_steps(s.store)


async def test_an_automatic_slab_grows_for_steps_that_wait_for_their_promotion(scene: Any) -> None:
    async with scene("wait", None) as s:
        await s.fill(1, 2, 3, 4, 5)
        assert await s.in_ram() == [1, 2, 3, 4, 5]
        assert slab_of(s.store).reserved == 5 * STATE
        s.gate.release()
        await s.store.flush()
        await s.save(6)
        assert slab_of(s.store).reserved == 5 * STATE
        assert await s.in_ram() == [5, 6]
        await s.check(1, 2, 3, 4, 5, 6)


async def test_an_automatic_slab_takes_the_memory_of_a_step_that_somebody_has_read(scene: Any) -> None:
    async with scene("wait", None) as s:
        s.gate.release()
        await s.save(1)
        seen = await s.store.restore(1, copy=False, resume=False)
        await s.store.flush()
        await s.save(2)
        await s.store.flush()
        call, collector = s.store._life.loop.call, s.store._life.engine.collector
        await call(evict_unretained(s.store._life.engine.state, collector, tier_of(s.store, "ram")))
        assert await s.in_ram() == [2]
        assert slab_of(s.store).used == 2 * STATE
        del seen
        gc.collect()
        await call(evict_unretained(s.store._life.engine.state, collector, tier_of(s.store, "ram")))
        assert slab_of(s.store).used == STATE


@pytest.mark.parametrize("error", [Corrupt("the index is torn"), OSError(5, "Input/output error")])
async def test_an_automatic_slab_grows_where_a_step_cannot_be_evicted(
    scene: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene("wait", None) as s:
        s.gate.release()
        for step in (1, 2):
            await s.save(step)
            await s.store.flush()

        async def refuse(*_: object) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(Evictor, "evict", refuse)
            assert not (await s.save(3)).skipped
        assert slab_of(s.store).reserved == 3 * STATE
        await s.check(1, 2, 3)


async def test_parts_of_what_may_become_a_step_leave_for_room_that_is_needed_alone(scene: Any) -> None:
    async with scene("wait", None) as s:
        s.gate.release()
        await s.save(1)
        await s.store.flush()
        tier = tier_of(s.store, "ram")

        collector = s.store._life.engine.collector
        tier.steps.set_apart()
        await s.store._life.loop.call(evict_unretained(s.store._life.engine.state, collector, tier))
        assert len(tier.steps.parts) == 1
        await s.store._life.loop.call(evict_until(s.store._life.engine.state, collector, tier, lambda: False))
        assert len(tier.steps.parts) == 0
        await s.check(1)


# -- in any case ------------------------------------------------------------------------------------------


async def test_chunks_that_occur_twice_in_a_step_leave_with_it(scene: Any) -> None:
    async with scene("wait", 2) as s:
        s.gate.release()
        for step in range(1, 10):
            half = state(step)["x"][: CHUNKS * CHUNK // 2]
            assert not (await s.store.save(step, {"x": np.tile(half, 2)})).skipped
            await s.store.flush()
        assert 1 < len(await s.in_ram()) < 9
        assert slab_of(s.store).used == await bytes_of_listed_steps(s.store)


async def test_automatic_slabs_share_a_quarter_of_memory_with_other_stores(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quarter = 4 * STATE
    monkeypatch.setattr(ram_store, "memory_limit", lambda: (4 * quarter, "the test"))
    stores = []
    for name in ("one", "two"):
        disk = folder(tmp_path / name, retain="all")
        nearest = ram(shared_memory, capacity="auto", retain={"kind": "last_n", "n": 3})
        stores.append(await CheckpointStore.open(config({"ram": nearest, "disk": disk})))
    one, two = stores
    for store in stores:
        for step in range(1, 4):
            ckpt = await store.save(step, state(step))
            assert not ckpt.skipped
            await store.flush()
    assert slab_of(one).reserved == 3 * STATE
    assert slab_of(one).reserved + slab_of(two).reserved <= quarter
    assert "may not grow" in caplog.text
    assert tier_of(one, "ram").store.location in caplog.text
    assert "tieredckpt forget" in caplog.text
    for store in stores:
        for step in range(1, 4):
            assert_restored(await store.restore(step), state(step))
        await store.close()


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
async def test_a_save_goes_on_where_shared_memory_has_room_for_no_further_file(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """Promise 5: an eviction, which made a folder, raised into the training."""
    mkdir = Path.mkdir

    def no_inode(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "retired":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", no_inode)
    settings = config({"ram": ram(shared_memory, capacity=2 * STATE), "disk": folder(tmp_path / "disk", retain="all")})
    async with CheckpointStore.open(settings) as store:
        views = []
        for step in 1, 2:
            await (await store.save(step, state(step))).reached("disk")
            if read:
                views.append(await store.restore(step, copy=False, resume=False))
        await (await store.save(3, state(3))).reached("disk")
        assert ("ram" in await store.where(3)) is not read
