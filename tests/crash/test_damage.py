"""Damage on any tier is found, read around and repaired; what is lost everywhere is named, and never made up."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reliability.tiers import FaultyTiers
from support.insight import bytes_of_listed_steps, extents, flip, flip_chunk, index_of, slab_of, tier_of
from support.limits import limit
from support.scenes import (
    CHUNK,
    Heard,
    assert_restored,
    assert_same,
    config,
    crash,
    folder,
    new_shared_folder,
    polled,
    ram,
)

from tieredckpt import CheckpointStore
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NoSpace, NotFound, TierUnavailable
from tieredckpt.events import ChunkRepaired, StepRestored
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepId

TIERS = ("ram", "disk", "far")
KEYS = ("a", "b", "c")
PER_ARRAY = 3


def state(seed: int) -> dict[str, Any]:
    """Three arrays of three chunks, an inline one, and a number."""
    rng = np.random.default_rng(seed)
    return {key: rng.integers(0, 255, PER_ARRAY * CHUNK, dtype=np.uint8) for key in KEYS} | {
        "inline": rng.standard_normal(7),
        "step": seed,
    }


TOTAL = len(KEYS) * PER_ARRAY * CHUNK + 7 * 8


@pytest.fixture
def place(shared_memory: Path) -> Path:
    return shared_memory


@asynccontextmanager
async def opened(place: Path, *names: str, **far: str) -> AsyncIterator[CheckpointStore]:
    """A store over some of the tiers, all of them by default."""
    tiers = {"ram": ram(place, on_close="keep")}
    tiers |= {name: folder(place / "of-test" / name, retain="all") for name in ("disk", "far")}
    tiers["far"] |= far
    async with CheckpointStore.open(config({name: tiers[name] for name in names or TIERS}, name="test")) as store:
        yield store


@asynccontextmanager
async def saved(place: Path, *names: str) -> AsyncIterator[CheckpointStore]:
    """A store with step 1 on every tier."""
    async with opened(place, *names) as store:
        await store.save(1, state(1))
        await store.flush()
        yield store


async def saved_alike(place: Path) -> Path:
    """Save steps 1 and 2, which share all chunks, and 3; returns the commit of step 1."""
    async with opened(place, "disk") as store:
        await store.save(1, state(1))
        await store.save(2, state(1))
        await store.save(3, state(3))
    (manifest,) = (place / "of-test" / "disk").glob("steps/*1-*/manifest.ocdbt")
    return manifest


async def restored(store: CheckpointStore, how: str = "copy") -> dict[str, int]:
    """Restore step 1 bit for bit; the bytes from each tier."""
    target = {key: np.zeros_like(value) for key, value in state(1).items() if key != "step"} | {"step": 0}
    arguments = {"copy": {}, "into": {"into": target}, "like": {"like": state(2)}}[how]
    found = await store.restore(1, resume=False, **arguments)
    assert_restored(found, state(1))
    if how == "into":
        assert_same({**target, "step": 1}, state(1))
    return dict(found.sources)


async def assert_clean(store: CheckpointStore, *tiers: str) -> None:
    """Step 1 is on these tiers and on no others, and nothing of it is damaged there."""
    await store.flush()
    results = await store.verify(1)
    assert {found.tier: found.problem for found in results} == dict.fromkeys(tiers or TIERS, "")
    assert not any(info.damaged for info in await store.steps())


async def test_a_commit_that_could_not_be_read_once_is_read_again_by_a_verification(place: Path) -> None:
    async with opened(place, "disk") as store:
        await store.save(1, state(1))
    (manifest,) = (place / "of-test" / "disk").glob("steps/*/manifest.ocdbt")
    flip(manifest, 40)
    async with opened(place, "disk") as store:
        assert [info.damaged for info in await store.steps()] == []
        with pytest.raises(Corrupt):
            await store.restore()
        (found,) = await store.verify(1)
        assert found.problem
        flip(manifest, 40)  # the medium had lied, and does so no more
        (found,) = await store.verify(1)
        assert not found.problem
        assert await store.where(1) == ("disk",)
        assert await restored(store) == {"disk": TOTAL}


@pytest.mark.parametrize("for_good", [False, True], ids=["lied about", "damaged for good"])
async def test_what_an_unreadable_commit_uses_outlives_the_other_steps_that_use_it(
    for_good: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = place / "of-test" / "disk"
    manifest = await saved_alike(place)
    flip(manifest, 40)
    async with opened(place, "disk") as store:
        (found,) = await store.verify(1)
        assert found.problem
        await store.collect()  # which sees that step 2 uses the same packs,
        await store.evict(2, "disk")  # and now it does no more
        if for_good:
            limit(monkeypatch, unreadable_commit=0.0)  # a minute is over
            packs = set(disk.glob("packs/*/*"))
            await store.collect()
            assert set(disk.glob("packs/*/*")) < packs
        else:
            flip(manifest, 40)
            (found,) = await store.verify(1)
            assert not found.problem
            assert await restored(store) == {"disk": TOTAL}


async def test_a_commit_that_is_misread_after_all_was_well_keeps_its_packs_for_the_grace(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = place / "of-test" / "disk"
    manifest = await saved_alike(place)
    for pack in disk.glob("packs/*/*"):
        os.utime(pack, (0, 0))
    async with opened(place, "disk") as store:
        await store.collect()
        flip(manifest, 40)
        tier_of(store, "disk").steps.indexes.clear()
        (found,) = await store.verify(1)
        assert found.problem
        limit(monkeypatch, unreadable_commit=0.0)
        await store.evict(2, "disk")
        await store.collect()
        flip(manifest, 40)
        (found,) = await store.verify(1)
        assert not found.problem


async def test_beside_a_commit_that_cannot_be_read_a_full_tier_deletes_no_more_than_it_must(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = place / "of-test" / "disk"
    full = config({"disk": folder(disk, retain={"kind": "last_n", "n": 1}, capacity="600 KiB")}, name="test")
    async with CheckpointStore.open(full) as store:
        for step in (1, 2, 3):
            await store.save(step, state(step))
        assert [info.step for info in await store.steps()] == [1, 2, 3]
    (manifest,) = disk.glob("steps/*1-*/manifest.ocdbt")
    flip(manifest, 40)
    async with CheckpointStore.open(full) as store:
        with pytest.raises(NoSpace):
            await store.save(4, state(4))
        assert [info.step for info in await store.steps() if info.tiers] == [2, 3]
        limit(monkeypatch, unreadable_commit=0.0)  # a minute is over
        await store.save(4, state(4))
        assert (await store.steps())[-1].step == 4
        (found,) = await store.verify(4)
        assert not found.problem


# -- chunks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["copy", "into", "like"])
async def test_a_chunk_that_changed_in_ram_comes_from_the_next_tier_and_is_repaired(place: Path, how: str) -> None:
    async with saved(place) as store:
        heard = Heard(store)
        await flip_chunk(store, "ram", 1, "b", 1)
        assert await restored(store, how) == {"ram": TOTAL - CHUNK, "disk": CHUNK}
        assert heard.of(StepRestored)[0].sources == {"ram": TOTAL - CHUNK, "disk": CHUNK}
        await store.flush()
        assert heard.of(ChunkRepaired) == [ChunkRepaired(1, "b", "ram", "disk", CHUNK)]
        await assert_clean(store)
        assert await restored(store, how) == {"ram": TOTAL}
        assert slab_of(store).used == await bytes_of_listed_steps(store)


async def test_what_is_lost_in_ram_is_whole_again_where_the_same_is_saved_once_more(place: Path) -> None:
    async with opened(place, "ram") as store:
        await store.save(1, state(1))
        await flip_chunk(store, "ram", 1, "b", 1)
        with pytest.raises(Corrupt, match="array 'b'"):
            await store.restore(1)
        heard = Heard(store)
        await store.save(2, state(1) | {"step": 2})
        assert_restored(await store.restore(2), state(1) | {"step": 2})
        assert (await extents(store, "ram", 2, "b"))[1] != (await extents(store, "ram", 1, "b"))[1]
        assert (await extents(store, "ram", 2, "b"))[0] == (await extents(store, "ram", 1, "b"))[0]
        (found,) = await store.verify(1, repair=True)
        assert found.repaired
        assert heard.of(ChunkRepaired) == [ChunkRepaired(1, "b", "ram", "ram", CHUNK)]
        await assert_clean(store, "ram")
    async with opened(place, "ram") as store:  # which finds a chunk in two places
        await assert_clean(store, "ram")
        assert_restored(await store.restore(2), state(1) | {"step": 2})
        await store.save(3, state(3))
        await store.evict(1, "ram")
        await store.evict(2, "ram")
        await store.collect()
        assert slab_of(store).used == await bytes_of_listed_steps(store)


@pytest.mark.parametrize("how", ["copy", "into", "like"])
async def test_a_chunk_that_changed_on_disk_comes_from_the_next_tier_and_is_repaired(place: Path, how: str) -> None:
    async with saved(place) as store:
        heard = Heard(store)
        await store.evict(1, "ram")
        await flip_chunk(store, "disk", 1, "b", 1)
        assert await restored(store, how) == {"disk": TOTAL - CHUNK, "far": CHUNK}
        await store.flush()
        assert heard.of(ChunkRepaired) == [ChunkRepaired(1, "b", "disk", "far", CHUNK)]
        await assert_clean(store, "disk", "far")
        assert await restored(store, how) == {"disk": TOTAL}
    async with opened(place) as store:
        await assert_clean(store, "disk", "far")


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after the other"])
async def test_a_chunk_that_two_restores_find_damaged_is_written_once(
    place: Path, faults: FaultyTiers, at_once: bool
) -> None:
    async with saved(place) as store:
        heard = Heard(store)
        await store.evict(1, "ram")
        await flip_chunk(store, "disk", 1, "b", 1)
        before = len([call for call in faults["disk"].calls if (call.verb, call.key[:6]) == ("put", "packs/")])
        reading = faults["far"].hold("*", key="packs/*")  # in the first restore, which knows of the damage by then
        first = asyncio.create_task(restored(store))
        await reading.reached()
        writing = faults["disk"].hold("put", key="packs/*")
        assert await restored(store) == {"disk": TOTAL - CHUNK, "far": CHUNK}
        await writing.reached()
        if at_once:
            reading.release()
            await first
            await asyncio.sleep(0.3)  # in which its repair comes to wait for the other
        writing.release()
        await polled(lambda: bool(heard.of(ChunkRepaired)))
        reading.release()
        await first
        await store.flush()
        puts = [call for call in faults["disk"].calls if (call.verb, call.key[:6]) == ("put", "packs/")]
        assert len(puts) == before + 1
        if not at_once:
            assert heard.of(ChunkRepaired) == [ChunkRepaired(1, "b", "disk", "far", CHUNK)]
        await assert_clean(store, "disk", "far")


@pytest.mark.parametrize("how", ["copy", "into"])
async def test_a_step_of_which_every_tier_lost_something_else_is_put_together(place: Path, how: str) -> None:
    async with saved(place) as store:
        await flip_chunk(store, "ram", 1, "a", 0)
        await flip_chunk(store, "disk", 1, "b", 1)
        for tier in ("ram", "disk"):
            await flip_chunk(store, tier, 1, "c", 2)
        assert await restored(store, how) == {"ram": TOTAL - 2 * CHUNK, "disk": CHUNK, "far": CHUNK}
        await store.flush()
        # What was not read was not seen to be damaged: that takes a verification.
        found = {found.tier: (found.damaged, found.repaired) for found in await store.verify(1, repair=True)}
        assert found == {"ram": ((), False), "disk": (("b",), True), "far": ((), False)}
        await assert_clean(store)
        assert await restored(store, how) == {"ram": TOTAL}
        await store.evict(1, "ram")
        assert await restored(store, how) == {"disk": TOTAL}


async def test_a_chunk_that_is_lost_everywhere_keeps_no_other_from_being_repaired(place: Path) -> None:
    async with saved(place) as store:
        for tier in TIERS:
            await flip_chunk(store, tier, 1, "b", 1)
        await flip_chunk(store, "disk", 1, "a", 0)
        heard = Heard(store)
        await store.verify(1, "disk", repair=True)
        assert heard.of(ChunkRepaired) == [ChunkRepaired(1, "a", "disk", "ram", CHUNK)]
        found = {found.tier: found.damaged for found in await store.verify(1)}
        assert found["disk"] == ("b",)


@pytest.mark.parametrize("how", ["copy", "into", "like"])
async def test_an_array_that_is_damaged_everywhere_is_named_and_nothing_is_made_up(place: Path, how: str) -> None:
    async with saved(place) as store:
        for tier in TIERS:
            await flip_chunk(store, tier, 1, "b", 1)
        for _ in range(2):
            with pytest.raises(Corrupt, match=r"array 'b' of step 1 \(serial 1\) is lost: no tier has its chunk 1"):
                await restored(store, how)
            await store.flush()
        assert_restored(
            await store.restore(1, keys=["a", "c", "inline"]), {key: state(1)[key] for key in ("a", "c", "inline")}
        )
        results = await store.verify(1, repair=True)
        assert {found.tier: (found.damaged, found.repaired) for found in results} == dict.fromkeys(
            TIERS, (("b",), False)
        )
        with pytest.raises(Corrupt, match="array 'b'"):
            await store.restore(1, keys=["b"])


async def test_a_chunk_is_not_lost_while_a_tier_that_may_have_it_tells_no_index(
    place: Path, faults: FaultyTiers
) -> None:
    async with saved(place, "disk", "far") as store:
        await flip_chunk(store, "disk", 1, "b", 1)
        chunk = (await index_of(store, "far", 1))["b"].chunks[1]
        tier_of(store, "far").packs.forget(chunk.digest)  # whose footer was damaged, say
        tier_of(store, "far").steps.indexes.clear()
        faults["far"].fail("get", TierUnavailable("no answer"), key="steps/*", times=None)
        with pytest.raises(TierUnavailable, match="chunk 1 is intact on no tier that answers, and 'far' may have it"):
            await restored(store)
        (found,) = await store.verify(1, "disk", repair=True)
        assert (found.damaged, found.lost, found.repaired) == (("b",), (), False)
        faults["far"].clear()
        assert await restored(store) == {"disk": TOTAL - CHUNK, "far": CHUNK}


async def test_an_older_step_is_whole_when_the_newest_is_lost(place: Path) -> None:
    async with saved(place) as store:
        await store.save(2, state(2))
        await store.flush()
        for tier in TIERS:
            await flip_chunk(store, tier, 2, "a")
        with pytest.raises(Corrupt, match="array 'a' of step 2"):
            await store.restore()
        await restored(store)


async def test_a_chunk_that_two_steps_share_is_repaired_for_both(place: Path) -> None:
    async with saved(place) as store:
        await store.save(2, state(1) | {"step": 2})
        await store.flush()
        await flip_chunk(store, "disk", 2, "a")
        await store.verify(2, "disk", repair=True)
        await store.flush()
        results = await store.verify(1, "disk", repair=True)
        assert all(found.intact for found in results)
        await assert_clean(store)
        assert not any(found.problem for found in await store.verify(2))


async def test_a_chunk_that_was_repaired_for_one_step_is_found_for_the_other(place: Path) -> None:
    async with saved(place, "ram", "disk") as store:
        await store.save(2, state(1) | {"step": 2})
        await store.flush()
        await flip_chunk(store, "disk", 2, "a")
        await store.verify(2, "disk", repair=True)
        await store.flush()
    async with opened(place, "disk") as store:
        assert_restored(await store.restore(1), state(1))


async def test_a_snapshot_that_changed_before_it_was_promoted_is_lost_and_said_to_be(place: Path) -> None:
    async with saved(place, "ram", "disk") as store:
        before = await extents(store, "ram", 1, "a")
        flip(before[0][0], before[0][1].offset)
        checkpoint = await store.save(2, state(1) | {"step": 2})  # its chunks are there already, it seems
        await checkpoint.reached("disk")
        assert_restored(await store.restore(2), state(1) | {"step": 2})


@settings(max_examples=25)
@given(bad=st.sets(st.tuples(st.sampled_from(TIERS), st.sampled_from(KEYS), st.integers(0, PER_ARRAY - 1))))
def test_whatever_is_damaged_a_restore_is_right_or_says_what_is_lost(bad: set[tuple[str, str, int]]) -> None:
    lost = {(key, ordinal) for _, key, ordinal in bad if {(tier, key, ordinal) for tier in TIERS} <= bad}

    async def check(place: Path) -> None:
        async with saved(place) as store:
            for tier, key, ordinal in bad:
                await flip_chunk(store, tier, 1, key, ordinal)
            if lost:
                with pytest.raises(Corrupt, match="|".join(f"array '{key}' of step 1" for key, _ in lost)):
                    await restored(store)
                return
            sources = await restored(store)
            for tier in TIERS:
                came = sources.get(tier, 0)
                nearest = [
                    (key, ordinal)
                    for key in KEYS
                    for ordinal in range(PER_ARRAY)
                    if next(name for name in TIERS if (name, key, ordinal) not in bad) == tier
                ]
                assert came == len(nearest) * CHUNK + (7 * 8 if tier == "ram" else 0)
            await store.flush()
            for found in await store.verify(1, repair=True):
                assert found.intact
            await assert_clean(store)

    place = new_shared_folder()
    try:
        asyncio.run(check(place))
    finally:
        shutil.rmtree(place)


# -- packs ------------------------------------------------------------------------------------------------


def missing(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def without_its_footer(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def with_a_changed_footer(path: Path) -> None:
    flip(path, -60)


def of_other_bytes(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


PACKS = [missing, empty, half, without_its_footer, with_a_changed_footer, of_other_bytes, a_folder]


@pytest.mark.parametrize("again", [False, True], ids=["in the same process", "in a new one"])
@pytest.mark.parametrize("damage", PACKS, ids=lambda damage: damage.__name__)
async def test_a_damaged_pack_costs_nothing_while_another_tier_has_its_chunks(
    place: Path, damage: Callable[[Path], None], again: bool
) -> None:
    async with saved(place) as store:
        await store.evict(1, "ram")
        (path, *_) = {path for key in KEYS for path, _ in await extents(store, "disk", 1, key)}
        if not again:
            damage(path)
            sources = await restored(store)
            assert sum(sources.values()) == TOTAL
            await assert_clean(store, "disk", "far")
            assert await restored(store) == {"disk": TOTAL}
    if again:
        damage(path)
    async with opened(place) as store:
        sources = await restored(store)
        assert sum(sources.values()) == TOTAL
        if damage in (missing, empty, of_other_bytes, a_folder) and again:
            assert sources == {"disk": 7 * 8, "far": TOTAL - 7 * 8}
        await assert_clean(store, "disk", "far")
        await store.save(2, state(2))
        await store.flush()
        assert await restored(store) == {"disk": TOTAL}


@pytest.mark.parametrize("damage", [missing, half, of_other_bytes], ids=lambda damage: damage.__name__)
async def test_a_damaged_pack_without_another_copy_is_corrupt(place: Path, damage: Callable[[Path], None]) -> None:
    async with saved(place, "disk") as store:
        (path, *_) = {path for key in KEYS for path, _ in await extents(store, "disk", 1, key)}
        damage(path)
        with pytest.raises(Corrupt, match=r"array '[abc]' of step 1 \(serial 1\) is lost"):
            await restored(store)
        assert_restored(await store.restore(1, keys=["inline"]), {"inline": state(1)["inline"]})
        # The same chunks again: they are written anew, for what is damaged is no longer relied on.
        await store.verify(1, repair=True)
        await store.save(2, state(1) | {"step": 2})
        assert_restored(await store.restore(2), state(1) | {"step": 2})


# -- commits ----------------------------------------------------------------------------------------------


def flipped(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


COMMITS = [missing, empty, half, flipped, of_other_bytes]


@pytest.mark.parametrize("name", ["btree", "manifest.ocdbt"])
@pytest.mark.parametrize("damage", COMMITS, ids=lambda damage: damage.__name__)
async def test_a_damaged_commit_in_ram_is_dropped_and_the_next_tier_serves(
    place: Path, damage: Callable[[Path], None], name: str
) -> None:
    async with saved(place) as store:
        path = next(Path(tier_of(store, "ram").store.location).glob(f"steps/*/{name}"))
        await crash(store)
    damage(path)
    async with opened(place) as store:
        assert slab_of(store).used == await bytes_of_listed_steps(store) == 0
        assert await restored(store) == {"disk": TOTAL}
        await assert_clean(store, "disk", "far")
        await store.save(2, state(2))
        assert slab_of(store).used == len(KEYS) * PER_ARRAY * slab_size(CHUNK)


async def test_a_step_that_claims_memory_of_a_newer_one_is_dropped_from_ram(place: Path) -> None:
    async with saved(place) as store:
        root = Path(tier_of(store, "ram").store.location)
        (folder_of_1,) = root.glob("steps/*")
        shutil.copytree(folder_of_1, place / "kept")
        await store.evict(1, "ram")
        slab_of(store).allocate(2 * PER_ARRAY * slab_size(CHUNK))  # so that step 2 lies where array c was
        await store.save(2, {"a": state(2)["a"]})
        await store.flush()
        await crash(store)
    shutil.move(place / "kept", folder_of_1)
    async with opened(place) as store:
        assert [(info.step, info.tiers) for info in await store.steps()] == [(1, ("disk", "far")), (2, TIERS)]
        assert slab_of(store).used == await bytes_of_listed_steps(store) == PER_ARRAY * slab_size(CHUNK)
        assert not folder_of_1.exists()
        assert await restored(store) == {"disk": TOTAL}


@pytest.mark.parametrize("name", ["btree", "manifest.ocdbt"])
@pytest.mark.parametrize("damage", COMMITS, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("with_ram", [True, False], ids=["with RAM", "without RAM"])
async def test_a_damaged_commit_on_disk_is_written_anew(
    place: Path, damage: Callable[[Path], None], name: str, with_ram: bool
) -> None:
    async with saved(place) as store:
        path = next(Path(tier_of(store, "disk").store.location).glob(f"steps/*/{name}"))
        await crash(store)
    damage(path)
    if not with_ram:
        shutil.rmtree(place / "of-test" / "ram")
    async with opened(place) as store:
        sources = await restored(store)
        assert sum(sources.values()) == TOTAL  # from the disk too, if that was repaired before it was read
        if damage is missing and name == "manifest.ocdbt" and not with_ram:
            await assert_clean(store, "far")  # a step without a commit was never there, or was let go
            return
        await assert_clean(store, *(TIERS if with_ram else ("disk", "far")))
    async with opened(place, "disk", "far") as store:
        assert await restored(store) == {"disk": TOTAL}
        await assert_clean(store, "disk", "far")


@pytest.mark.parametrize("name", ["btree", "manifest.ocdbt"])
async def test_a_commit_that_is_damaged_under_an_open_store_is_found_and_repaired(place: Path, name: str) -> None:
    async with saved(place) as store:
        await store.evict(1, "ram")
        path = next(Path(tier_of(store, "disk").store.location).glob(f"steps/*/{name}"))
        await crash(store)
    async with opened(place) as store:
        flipped(path)
        await store._life.loop.call(forget_indexes(store))
        assert await restored(store) == {"far": TOTAL}
        await assert_clean(store, "disk", "far")


async def forget_indexes(store: CheckpointStore) -> None:
    for tier in store._life.engine.state.tiers:
        tier.steps.indexes.clear()


@pytest.mark.parametrize("how", ["restore", "verify"])
@pytest.mark.parametrize("name", ["ram", "disk"])
async def test_bytes_that_were_wrong_when_their_index_was_written_come_from_the_next_tier_and_are_repaired(
    place: Path, name: str, how: str
) -> None:
    """The checksum of the index was computed over them: the digest alone tells."""

    async def commit_wrong_bytes(tier: Tier) -> None:
        (step,) = tier.steps.held
        index = await step_index.load(tier, step)
        inline = index.arrays["inline"]
        (chunk,) = inline.chunks
        assert isinstance(chunk.where, bytes)
        wrong = ArrayIndex(inline.grid, inline.dtype, [Chunk(chunk.digest, bytes(len(chunk.where)))])
        await commit_file.commit(tier, index.record, {**index.arrays, "inline": wrong})

    async with saved(place) as store:
        await store._life.loop.call(commit_wrong_bytes(tier_of(store, name)))
        if name == "disk":
            await store.evict(1, "ram")
        await crash(store)
    async with opened(place) as store:
        heard = Heard(store)
        if how == "restore":
            assert (await restored(store))["far" if name == "disk" else "disk"] == 7 * 8
            await store.flush()
        else:
            found = {found.tier: (found.damaged, found.repaired) for found in await store.verify(1, repair=True)}
            assert found[name] == (("inline",), True)
        assert [(event.key, event.tier) for event in heard.of(ChunkRepaired)] == [("inline", name)]
        await assert_clean(store, *TIERS[TIERS.index(name) :])
    async with opened(place) as store:
        assert await restored(store) == {name: TOTAL}


async def test_a_store_of_which_every_commit_is_damaged_says_so(place: Path) -> None:
    async with saved(place, "disk", "far") as store:
        paths = [next(Path(tier_of(store, name).store.location).glob("steps/*/btree")) for name in ("disk", "far")]
    for path in paths:
        flipped(path)
    async with opened(place, "disk", "far") as store:
        with pytest.raises(Corrupt, match=r"no step can be read: the commit of step 1 .* on tier 'far' is damaged"):
            await store.restore()


async def test_a_damaged_step_that_is_evicted_while_it_is_read_again_does_not_come_back(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with saved(place, "disk", "far") as store:
        path = next(Path(tier_of(store, "far").store.location).glob("steps/*/btree"))
    good = path.read_bytes()
    flipped(path)
    read_index = step_index.read

    async def leave(tier: Tier, step: StepId) -> tuple[bytes, bytes, str]:
        index = await read_index(tier, step)
        if tier.name == "far":
            await commit_file.retract(tier, step)
        return index

    async with opened(place, "disk", "far", promote="never") as store:  # else it may come anew before
        path.write_bytes(good)
        monkeypatch.setattr(step_index, "read", leave)
        with pytest.raises(NotFound):
            await store.verify(1, tier="far")
        assert await store.where(1) == ("disk",)
