"""A slab smaller than the state still works: the save streams through it, and takes as long as the next tier."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reliability.tiers import FaultyTiers
from support.insight import bytes_of_listed_steps, slab_of, tier_of
from support.limits import limit
from support.scenes import CHUNK, SOON, Heard, assert_restored, assert_same, config, folder, pack_bytes, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs import mapping
from tieredckpt.blobs.ram import store as ram_module
from tieredckpt.engine.saving import spill
from tieredckpt.engine.saving.capture import Capture
from tieredckpt.engine.saving.lazy import LazyCapture
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import NoSpace, NotFound, TierUnavailable
from tieredckpt.events import SaveSkipped, StepPromoted, StepSaved, TierFailed
from tieredckpt.format.manifest import ArrayIndex, StepRecord

MIB = 1 << 20
CHUNKS = 24
SLAB = 5 * slab_size(CHUNK)


def state(seed: int, chunks: int = CHUNKS, frozen: int = 0) -> dict[str, Any]:
    """Chunks of which the first ``frozen`` are the same for every seed."""
    rng = np.random.default_rng(seed)
    return {
        "frozen": np.random.default_rng(0).integers(0, 255, frozen * CHUNK, dtype=np.uint8),
        "x": rng.integers(0, 255, (chunks - frozen) * CHUNK, dtype=np.uint8),
        "small": rng.standard_normal(10),
        "step": seed,
    }


async def assert_restores(store: CheckpointStore, steps: dict[int, Any]) -> None:
    for step, saved in steps.items():
        assert_restored(await store.restore(step, resume=False), saved)


@pytest.fixture
def opened(shared_memory: Path, tmp_path: Path) -> Callable[..., Any]:
    """Opens a store over a small slab and a directory; ``far`` adds another."""

    @asynccontextmanager
    async def opened(*, far: bool = False, capacity: Any = SLAB, **settings: Any) -> AsyncIterator[CheckpointStore]:
        tiers = {"ram": ram(shared_memory, capacity=capacity), "disk": folder(tmp_path / "disk", retain="all")}
        if far:
            tiers["far"] = folder(tmp_path / "far", retain="all")
        async with CheckpointStore.open(config(tiers, **settings)) as store:
            yield store
            if not settings:
                assert slab_of(store).used == await bytes_of_listed_steps(store)

    return opened


async def test_a_state_larger_than_the_slab_reaches_the_next_tier_bit_for_bit(opened: Any) -> None:
    async with opened() as store:
        heard = Heard(store)
        checkpoint = await store.save(1, state(1))
        await checkpoint.reached("disk")
        assert await store.where(1) == ("disk",)
        (saved,) = heard.of(StepSaved)
        assert (saved.tier, saved.nbytes, saved.new_bytes) == ("disk", CHUNKS * CHUNK + 80, CHUNKS * CHUNK + 80)
        assert not heard.of(StepPromoted)
        assert slab_of(store).used == 0
        restored = await store.restore()
        assert restored is not None
        assert restored.sources == {"disk": CHUNKS * CHUNK + 80}
        assert_same(restored.tree, state(1))
        assert not any(found.problem for found in await store.verify(1))


async def test_what_was_streamed_is_said_not_to_be_in_ram(opened: Any) -> None:
    async with opened() as store:
        checkpoint = await store.save(1, state(1))
        with pytest.raises(NotFound, match=r"step 1 \(serial 1\) is not in tier 'ram': it was too large .* 'disk' has"):
            await checkpoint.reached("ram")


async def test_what_was_streamed_is_promoted_further(opened: Any) -> None:
    async with opened(far=True) as store:
        heard = Heard(store)
        checkpoint = await store.save(1, state(1))
        await checkpoint.reached("far")
        assert [event.tier for event in heard.of(StepPromoted)] == ["far"]
        assert await store.where(1) == ("disk", "far")
        await store.evict(1, "disk")
        await assert_restores(store, {1: state(1)})


async def test_what_was_streamed_is_there_after_a_restart(opened: Any) -> None:
    async with opened() as store:
        await store.save(1, state(1))
    async with opened() as store:
        await assert_restores(store, {1: state(1)})


async def test_what_a_tier_forgets_while_a_save_streams_to_it_is_known_to_the_save(
    opened: Any, faults: FaultyTiers
) -> None:
    """As the end of another promotion makes it forget on any rank but the first of several."""
    async with opened() as store:
        await store.save(1, state(1, frozen=1))
        held = faults["disk"].hold("put", key="packs/*")
        saving = asyncio.create_task(store.save(2, state(2, frozen=1)))
        await held.reached()

        async def forget() -> None:
            tier_of(store, "disk").packs.index.clear()

        await store._life.loop.call(forget())
        held.release()
        await saving
        await assert_restores(store, {step: state(step, frozen=1) for step in (1, 2)})


async def test_the_same_state_again_writes_nothing(opened: Any, tmp_path: Path) -> None:
    async with opened() as store:
        heard = Heard(store)
        await store.save(1, state(1))
        written = pack_bytes(tmp_path / "disk")
        for step in (2, 3, 4):
            await store.save(step, state(1))
        assert [event.new_bytes for event in heard.of(StepSaved)] == [CHUNKS * CHUNK + 80, 0, 0, 0]
        assert pack_bytes(tmp_path / "disk") == written
        await assert_restores(store, dict.fromkeys(range(1, 5), state(1)))


async def test_a_state_of_which_most_is_frozen_is_never_skipped(opened: Any) -> None:
    # What changes fits the slab alone; but the frozen part does not lie there.
    states = {step: state(step, frozen=CHUNKS - 2) for step in range(1, 6)}
    async with opened() as store:
        heard = Heard(store)
        for step, saved in states.items():
            assert not (await store.save(step, saved)).skipped
        assert [event.tier for event in heard.of(StepSaved)] == ["disk"] * 5
        assert [event.new_bytes for event in heard.of(StepSaved)] == [CHUNKS * CHUNK + 80] + [2 * CHUNK + 80] * 4
        await assert_restores(store, states)


async def test_small_and_large_states_take_turns(opened: Any) -> None:
    states = {step: state(step, chunks=CHUNKS if step % 2 else 2) for step in range(1, 9)}
    async with opened() as store:
        heard = Heard(store)
        for step, saved in states.items():
            assert not (await store.save(step, saved)).skipped
        await store.flush()
        assert [event.tier for event in heard.of(StepSaved)] == ["disk", "ram"] * 4
        assert {info.step for info in await store.steps()} == set(states)
        await assert_restores(store, states)


async def test_a_slab_full_of_steps_on_their_way_down_lets_the_stream_pass_when_they_are_there(
    opened: Any, faults: FaultyTiers
) -> None:
    async with opened() as store:
        gate = faults["disk"].hold("put", key="packs/*", times=None)
        await store.save(1, state(1, chunks=5))
        await gate.reached()
        saving = asyncio.create_task(store.save(2, state(2)))
        done, _ = await asyncio.wait([saving], timeout=0.3)
        assert not done
        gate.release()
        async with asyncio.timeout(SOON):
            assert not (await saving).skipped
        await assert_restores(store, {1: state(1, chunks=5), 2: state(2)})


async def test_a_stream_that_finds_no_room_is_skipped_as_when_full_says(opened: Any, faults: FaultyTiers) -> None:
    async with opened(when_full="skip") as store:
        heard = Heard(store)
        gate = faults["disk"].hold("put", key="packs/*", times=None)
        await store.save(1, state(1, chunks=5))
        await gate.reached()
        checkpoint = await store.save(2, state(2))
        assert "step 2 was not saved" in checkpoint.skipped
        assert heard.of(SaveSkipped) == [SaveSkipped(2, checkpoint.skipped)]
        gate.release()
        await store.flush()
        assert not (await store.save(2, state(2))).skipped
        await assert_restores(store, {1: state(1, chunks=5), 2: state(2)})


async def test_retention_holds_for_what_is_streamed(shared_memory: Path, tmp_path: Path) -> None:
    tiers = {
        "ram": ram(shared_memory, capacity=SLAB),
        "disk": folder(tmp_path / "disk", retain={"kind": "last_n", "n": 2}),
    }
    async with CheckpointStore.open(config(tiers)) as store:
        for step in range(1, 7):
            await store.save(step, state(step))
        assert [info.step for info in await store.steps()] == [5, 6]
        assert pack_bytes(tmp_path / "disk") < 2 * (CHUNKS + 5) * slab_size(CHUNK)


# -- tiers that fail --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 3])
async def test_a_tier_that_fails_under_a_stream_leaves_it_to_the_next(
    opened: Any, faults: FaultyTiers, nth: int
) -> None:
    async with opened(far=True) as store:
        heard = Heard(store)
        faults["disk"].fail("put", NoSpace("the device is full"), key="packs/*", nth=nth, times=None)
        assert not (await store.save(1, state(1))).skipped
        assert [event.tier for event in heard.of(StepSaved)] == ["far"]
        assert heard.of(StepSaved)[0].new_bytes == CHUNKS * CHUNK + 80
        failed = await heard.first(TierFailed)
        assert (failed.tier, str(failed.error)) == ("disk", "the device is full")
        assert slab_of(store).used == 0
        await assert_restores(store, {1: state(1)})
        faults["disk"].clear()


async def test_ram_that_goes_away_while_a_tree_passes_through_it_is_no_failure_of_the_save(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = spill._Streaming._sealed

    async def disconnect(streaming: Any, *arguments: Any) -> Any:
        if (nearest := streaming.state.tiers[0]).blobs is not None:
            shutil.rmtree(nearest.store.location)
            await nearest.disconnect()  # as its promoter does where its folder went away
        return await sealed(streaming, *arguments)

    async with opened(grace=3600) as store:
        heard = Heard(store)
        monkeypatch.setattr(spill._Streaming, "_sealed", disconnect)
        assert not (await store.save(1, state(1))).skipped
        assert await store.where(1) == ("disk",)
        assert [event for event in heard.of(TierFailed) if event.tier == "disk"] == []
        await assert_restores(store, {1: state(1)})


async def test_ram_that_is_made_anew_before_the_commit_leaves_the_save_to_the_next_tier(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_file.commit

    async def fail_in_ram(tier: Tier, record: StepRecord, arrays: dict[str, ArrayIndex], **encoded: Any) -> None:
        if tier.ram is not None:
            await store._life.engine._reconnect(tier)
            raise TierUnavailable("the folder went away")
        await commit(tier, record, arrays, **encoded)

    async with opened(capacity="16 MiB") as store:
        heard = Heard(store)
        monkeypatch.setattr(commit_file, "commit", fail_in_ram)
        assert not (await store.save(1, state(1))).skipped
        assert [event.tier for event in heard.of(StepSaved)] == ["disk"]
        assert str((await heard.first(TierFailed)).error) == "the folder went away"
        await assert_restores(store, {1: state(1)})


@pytest.mark.parametrize("alone", [True, False], ids=["a store of RAM alone", "with a directory"])
async def test_ram_that_is_made_anew_under_a_save_takes_a_second_copy(
    alone: bool, shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 5: RAM works again, so that nothing has failed and no other tier is needed."""
    copied = Capture.copied

    async def copied_and_made_anew(making: Any, *arguments: Any, **more: Any) -> None:
        await copied(making, *arguments, **more)
        monkeypatch.undo()
        await store._life.engine._reconnect(store._life.engine.state.tiers[0])

    tiers = {"ram": ram(shared_memory)} | ({} if alone else {"disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(config(tiers, name="anew")) as store:
        heard = Heard(store)
        monkeypatch.setattr(Capture, "copied", copied_and_made_anew)
        await (await store.save(1, state(1))).reached("ram")
        assert [event.tier for event in heard.of(StepSaved)] == ["ram"]
        assert not heard.of(TierFailed)
        await assert_restores(store, {1: state(1)})


@pytest.mark.parametrize("capture", ["copy", "lazy"])
async def test_ram_that_is_made_anew_under_a_save_holds_no_step_of_bytes_that_are_gone(
    opened: Any, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, capture: Any
) -> None:
    """Promises 3 and 4: the copy is made once more, or if the arrays may have changed since, the save fails."""
    kind = LazyCapture if capture == "lazy" else Capture
    copied = kind.copied

    async def copied_and_gone(making: Any, *arguments: Any, **more: Any) -> None:
        await copied(making, *arguments, **more)
        monkeypatch.undo()
        shutil.rmtree(shared_memory / "of-test" / "ram")
        await store._life.engine._reconnect(store._life.engine.state.tiers[0])

    async with opened(capacity="16 MiB") as store:
        await (await store.save(1, state(1))).reached("disk")
        monkeypatch.setattr(kind, "copied", copied_and_gone)
        ckpt = await store.save(2, state(2), capture=capture)
        if capture == "lazy":
            await ckpt.captured()
            with pytest.raises(TierUnavailable, match="made anew"):
                await ckpt.reached("ram")
        await assert_restores(store, {1: state(1)} if capture == "lazy" else {1: state(1), 2: state(2)})


async def test_where_nothing_slower_can_take_it_the_error_says_why(opened: Any, faults: FaultyTiers) -> None:
    async with opened() as store:
        await store.save(1, state(1, chunks=2))
        await store.flush()
        faults.kill("disk")
        with pytest.raises(NoSpace, match=r"the tree of 384 KiB does not fit into RAM.*tier 'disk' failed \(.*dead"):
            await store.save(2, state(2))
        await assert_restores(store, {1: state(1, chunks=2)})
        faults.revive("disk")


async def test_of_a_store_without_ram_no_error_says_that_ram_is_too_small(tmp_path: Path, faults: FaultyTiers) -> None:
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk")})) as store:
        faults.kill("disk")
        with pytest.raises(NoSpace, match=r"the tree of 384 KiB is taken by no tier: tier 'disk' failed \(.*dead"):
            await store.save(1, state(1))
        faults.revive("disk")


async def test_without_a_slower_tier_the_error_says_what_to_do(shared_memory: Path) -> None:
    only = config({"ram": ram(shared_memory, capacity=SLAB, on_close="release")}, name="only-ram")
    async with CheckpointStore.open(only) as store:
        with pytest.raises(NoSpace, match="there is no other tier; give the RAM tier a larger capacity, or add one"):
            await store.save(1, state(1))
        assert not (await store.save(1, state(1, chunks=3))).skipped


async def test_a_save_that_has_all_scratch_memory_waits_for_none_to_look_at_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 5: chunks of an earlier process are read before they are referred to."""
    reserve = Scratch.__init__
    monkeypatch.setattr(Scratch, "__init__", lambda scratch, _, **more: reserve(scratch, 2 * CHUNK, **more))
    settings = config({"disk": folder(tmp_path / "disk", retain="all")})
    async with CheckpointStore.open(settings) as store:
        for step in range(1, 8):  # the newest of them vouch for what they have
            await store.save(step, state(step))
    async with CheckpointStore.open(settings) as store, asyncio.timeout(SOON):
        assert (await store.save(8, state(1))).saved is not None
        await assert_restores(store, {8: state(1)})


# -- memory that is not to be had -------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 2], ids=["before the first save", "after it"])
async def test_a_full_shared_memory_makes_saves_slower_and_fails_none(
    small_tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """``first`` is the first step that is saved when it is full."""
    monkeypatch.setattr(ram_module, "memory_limit", lambda: (160 * MIB, "the test"))
    tiers = {"ram": {"kind": "ram", "path": small_tmpfs / "ram"}, "disk": folder(tmp_path / "disk", retain="all")}
    async with CheckpointStore.open(config(tiers)) as store:
        heard = Heard(store)
        states = {1: tree(1), 2: tree(2), 3: state(3)}
        for step, saved in states.items():
            if step == first:
                await asyncio.to_thread(fill_up, small_tmpfs)
            assert not (await store.save(step, saved)).skipped
        told = [event.tier for event in heard.of(StepSaved)]
        assert told[-1] == "disk", "not even the index of a step finds room in RAM"
        assert first > 1 or told == ["disk"] * 3
        await assert_restores(store, states)
        (small_tmpfs / "filler").unlink()
    assert not heard.of(SaveSkipped)


def fill_up(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


async def test_a_slab_that_cannot_grow_in_the_middle_of_a_save_lets_the_save_pass(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_memory, grown = mapping.reserve, 0

    def refuse(fd: int, mapped: npt.NDArray[np.uint8], offset: int, nbytes: int) -> None:
        nonlocal grown
        if fd == slab_of(store).fileno():
            grown += nbytes
            if grown > SLAB:
                raise OSError(28, "No space left on device")
        have_memory(fd, mapped, offset, nbytes)

    monkeypatch.setattr(ram_module, "memory_limit", lambda: (160 * MIB, "the test"))
    monkeypatch.setattr(mapping, "reserve", refuse)
    tiers = {"ram": ram(shared_memory, capacity="auto"), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers)) as store:
        heard = Heard(store)
        slab_of(store).reserve(4096)  # so that the save finds it growing, as a second save does
        assert not (await store.save(1, state(1))).skipped
        assert heard.of(StepSaved)[0].tier == "disk"
        assert slab_of(store).capacity < CHUNKS * CHUNK
        assert slab_of(store).used == 0
        await assert_restores(store, {1: state(1)})


# -- without RAM ------------------------------------------------------------------------------------------


async def test_without_a_ram_tier_a_save_passes_through_scratch_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: FaultyTiers
) -> None:
    limit(monkeypatch, scratch_size=0)
    tiers = {"disk": folder(tmp_path / "disk", retain="all"), "far": folder(tmp_path / "far", retain="all")}
    states = {step: state(step) for step in range(1, 4)}
    async with CheckpointStore.open(config(tiers)) as store:
        heard = Heard(store)
        gate = faults["far"].hold("put", key="packs/*", times=None)
        assert not (await store.save(1, states[1])).skipped
        await gate.reached()  # while its promotion holds scratch memory
        saving = asyncio.create_task(store.save(2, states[2]))
        reading = asyncio.create_task(store.restore(1, resume=False))
        gate.release()
        async with asyncio.timeout(SOON):
            assert not (await saving).skipped
            await reading
            assert not (await store.save(3, states[3])).skipped
            await store.flush()
        assert [event.tier for event in heard.of(StepSaved)] == ["disk"] * 3
        assert tier_of(store, "disk").ram is None
        await assert_restores(store, states)


async def test_a_save_waits_for_scratch_memory_that_others_have_borrowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, scratch_size=0)
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk")})) as store:
        scratch = store._life.engine.state.scratch

        async def borrow_all() -> int:
            return await scratch.borrow(scratch.capacity)

        async def give_back(offset: int) -> None:
            scratch.give_back(offset, scratch.capacity)

        borrowed = await store._life.loop.call(borrow_all())
        saving = asyncio.create_task(store.save(1, state(1)))
        done, _ = await asyncio.wait([saving], timeout=0.3)
        assert not done
        await store._life.loop.call(give_back(borrowed))
        async with asyncio.timeout(SOON):
            assert not (await saving).skipped
        await assert_restores(store, {1: state(1)})


async def test_a_borrower_of_scratch_memory_is_woken_by_a_save_that_used_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: FaultyTiers
) -> None:
    limit(monkeypatch, scratch_size=0)
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk", retain="all")})) as store:
        zeros = {"x": np.zeros(4 * CHUNK, np.uint8)}  # one chunk for several places, which passes through such memory
        await store.save(1, zeros)
        gate = faults["disk"].hold("put", key="packs/*", times=None)
        saving = asyncio.create_task(store.save(2, state(2)))
        await gate.reached()
        restoring = asyncio.create_task(store.restore(1, resume=False))
        done, _ = await asyncio.wait([restoring], timeout=0.3)
        assert not done
        gate.release()
        async with asyncio.timeout(SOON):
            await saving
            restored = await restoring
        assert_restored(restored, zeros)
