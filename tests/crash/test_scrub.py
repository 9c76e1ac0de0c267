"""A scrub finds what is damaged anywhere on a tier, repairs it from whatever still has it, and names what is lost."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from reliability.tiers import FaultyTiers
from support.command_line import run
from support.insight import flip, flip_chunk, slab_of, tier_of
from support.scenes import (
    CHUNK,
    Heard,
    assert_restored,
    assert_same,
    config,
    crash,
    folder,
    new_shared_folder,
    ram,
    ram_in,
)

from tieredckpt import CheckpointStore
from tieredckpt.blobs.ram.find import find_ram
from tieredckpt.blobs.ram.owner import write_owner
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.blobs.wrap import Pace
from tieredckpt.config import to_toml
from tieredckpt.engine.repairing import background, repair
from tieredckpt.engine.repairing.check import Checked
from tieredckpt.engine.repairing.verify import Verified
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, Invalid, NoSpace, NotFound, TierUnavailable
from tieredckpt.events import ChunkRepaired, TierFailed, TierRecovered
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId
from tieredckpt.format.marker import decode_marker

TIERS = ("ram", "disk", "far")
STEPS = (1, 2)
KEYS = ("a", "b", "c")
INDEX = "tieredckpt/step.json"


def state(step: int) -> dict[str, Any]:
    """Three arrays of two chunks; the first is the same in every step."""
    arrays = {key: np.random.default_rng([i, step if i else 0]).bytes(2 * CHUNK) for i, key in enumerate(KEYS)}
    return {key: np.frombuffer(data, np.uint8).copy() for key, data in arrays.items()} | {"step": step}


@pytest.fixture
def place(shared_memory: Path) -> Path:
    return shared_memory


@asynccontextmanager
async def opened(place: Path, *names: str, **options: Any) -> AsyncIterator[CheckpointStore]:
    tiers = {"ram": ram(place, on_close="keep", retain="all", capacity="4 MiB")}
    tiers |= {name: folder(place / "of-test" / name, retain="all") for name in ("disk", "far")}
    chosen = config({name: tiers[name] for name in names or TIERS}, name="of-test")
    if names == ("ram",):
        make_alone(Path(tiers["ram"]["path"]))
    async with CheckpointStore.open(chosen, **options) as store:
        yield store


@asynccontextmanager
async def saved(place: Path, *names: str) -> AsyncIterator[CheckpointStore]:
    """A store with the steps on every tier."""
    async with opened(place, *names) as store:
        for step in STEPS:
            await store.save(step, state(step))
        await store.flush()
        yield store


def make_alone(root: Path) -> None:
    """Make RAM that of a store without other tiers."""
    for found in find_ram(root):
        assert found.owner is not None
        write_owner(Path(found.folder), replace(found.owner, places=()))


async def assert_whole(place: Path, *names: str) -> None:
    """Every tier alone has every step, bit for bit, and nothing is damaged there any more."""
    for name in names or TIERS:
        async with opened(place, name) as store:
            for step in STEPS:
                assert_restored(await store.restore(step, resume=False), state(step))
            assert all(not each.problem for each in await store.scrub())


async def use_all_memory(store: CheckpointStore) -> None:
    """Save until every byte of the slab that was free was written."""
    for step in range(10, 16):
        await store.save(step, {"x": np.full(slab_of(store).capacity // 4, step, np.uint8)})
        await store.flush()


def told(found: list[Verified]) -> list[tuple[int | None, str, tuple[str, ...], bool]]:
    """What was damaged: step, tier, keys, and whether it was repaired."""
    return [
        (None if each.id is None else each.id.step, each.tier, each.damaged, each.repaired)
        for each in found
        if each.problem
    ]


def root_of(place: Path, tier: str) -> Path:
    root = place / "of-test" / tier
    return ram_in(root) if tier == "ram" else root


def some_file(place: Path, tier: str, name: str) -> Path:
    return max(root_of(place, tier).glob(name))


async def flip_index(place: Path, store: CheckpointStore, tier: str) -> None:
    path = some_file(place, tier, "steps/*2-*/btree*")
    flip(path, path.stat().st_size // 2)


async def flip_manifest(place: Path, store: CheckpointStore, tier: str) -> None:
    flip(some_file(place, tier, "steps/*2-*/manifest.ocdbt"), 30)


async def lose_index(place: Path, store: CheckpointStore, tier: str) -> None:
    some_file(place, tier, "steps/*2-*/btree*").unlink()


async def lose_manifest(place: Path, store: CheckpointStore, tier: str) -> None:
    some_file(place, tier, "steps/*2-*/manifest.ocdbt").unlink()


async def flip_marker(place: Path, store: CheckpointStore, tier: str) -> None:
    flip(root_of(place, tier) / layout.MARKER, 5)


async def flip_identity(place: Path, store: CheckpointStore, tier: str) -> None:
    """The marker names another store, which is as good a marker as any."""
    path = root_of(place, tier) / layout.MARKER
    store_id = decode_marker(path.read_bytes(), "").store
    path.write_bytes(
        path.read_bytes().replace(store_id.encode(), f"{int(store_id[0], 16) ^ 1:x}{store_id[1:]}".encode())
    )


async def lose_marker(place: Path, store: CheckpointStore, tier: str) -> None:
    (root_of(place, tier) / layout.MARKER).unlink()


async def flip_footer(place: Path, store: CheckpointStore, tier: str) -> None:
    flip(some_file(place, tier, "packs/*/*.pack"), -60)


async def flip_one_chunk(place: Path, store: CheckpointStore, tier: str) -> None:
    await flip_chunk(store, tier, 2, "b", 1)


async def flip_shared_chunk(place: Path, store: CheckpointStore, tier: str) -> None:
    await flip_chunk(store, tier, 2, "a", 0)


Damage = Callable[[Path, CheckpointStore, str], Any]

MARKERS = [flip_marker, flip_identity, lose_marker]
COMMITS = [flip_index, flip_manifest, lose_index]
CHUNKS = [flip_one_chunk, flip_shared_chunk]
EVERYWHERE: list[tuple[Damage, str]] = [
    (damage, tier)
    for tier in TIERS
    for damage in [*CHUNKS, *COMMITS, *MARKERS, flip_footer]
    if (damage, tier) != (flip_footer, "ram")  # which has none
]
IDS = [f"{damage.__name__} on {tier}" for damage, tier in EVERYWHERE]


def expected(damage: Damage, place: Path, tier: str, *, repaired: bool) -> list[Any]:
    if damage is flip_one_chunk:
        return [(2, tier, ("b",), repaired)]
    if damage is flip_shared_chunk:
        return [(step, tier, ("a",), repaired) for step in STEPS]
    if damage in COMMITS:
        return [(2, tier, (INDEX,), repaired)]
    if damage in MARKERS:
        return [(None, tier, (layout.MARKER,), repaired)]
    pack = some_file(place, tier, "packs/*/*.pack").relative_to(root_of(place, tier)).as_posix()
    return [(None, tier, (pack,), repaired)]


@pytest.mark.parametrize(("damage", "tier"), EVERYWHERE, ids=IDS)
async def test_damage_of_any_kind_under_an_open_store_is_told_and_repaired(
    place: Path, damage: Damage, tier: str
) -> None:
    async with saved(place) as store:
        await damage(place, store, tier)
        would_repair = expected(damage, place, tier, repaired=True)
        assert told(await store.scrub()) == expected(damage, place, tier, repaired=False)
        repaired = await store.scrub(repair=True)
        assert told(repaired) == would_repair
        assert not any(each.lost for each in repaired)
        assert told(await store.scrub()) == []
        assert [info.tiers for info in await store.steps()] == [TIERS, TIERS]
    await assert_whole(place)


@pytest.mark.parametrize(("damage", "tier"), EVERYWHERE, ids=IDS)
async def test_damage_of_any_kind_that_came_while_nobody_looked_is_repaired(
    place: Path, damage: Damage, tier: str
) -> None:
    async with saved(place) as store:
        victim = some_file(place, tier, "packs/*/*.pack")
        await damage(place, store, tier)
        await crash(store)
    async with opened(place) as store:
        await store.flush()
        await store.scrub(repair=True)
        await store.flush()
        assert victim.exists() == (damage is not flip_footer)
        assert told(await store.scrub()) == []
        held = [info.tiers for info in await store.steps()]
        # A step whose commit was damaged in RAM has left it: the slower tiers have it.
        assert held[0] == TIERS
        assert held[1] == (TIERS[1:] if tier == "ram" and damage in COMMITS else TIERS)
        for step in STEPS:
            assert_restored(await store.restore(step, resume=False), state(step))
    await assert_whole(place, "disk", "far")


async def test_a_step_whose_commit_is_damaged_everywhere_is_told_as_damaged_and_not_as_missing(place: Path) -> None:
    async with saved(place) as store:
        for tier in TIERS:
            await flip_manifest(place, store, tier)
        await crash(store)
    async with opened(place) as store:
        with pytest.raises(Corrupt, match="'disk', 'far'"):
            await store.restore(2)
        with pytest.raises(Corrupt, match="'disk', 'far'"):
            await store.promote(2, "far")
        with pytest.raises(NotFound, match="held: 1"):
            await store.restore(3)
        found = await store.restore()
        assert found is not None
        assert found.step == 1


@settings(max_examples=25)
@given(
    bad=st.lists(st.sampled_from(EVERYWHERE), unique=True, min_size=1, max_size=6),
    again=st.booleans(),
)
@example(bad=[(flip_index, tier) for tier in TIERS], again=True)
@example(bad=[(flip_footer, "far"), *((flip_one_chunk, tier) for tier in TIERS)], again=False)
@example(bad=[(flip_identity, "disk"), (flip_identity, "far")], again=True)
@example(bad=[(flip_identity, "ram"), (flip_identity, "disk")], again=True)  # two markers that are wrong in one way
@example(
    bad=[
        (flip_one_chunk, "ram"),
        *((damage, tier) for damage in (flip_shared_chunk, flip_identity) for tier in ("disk", "far")),
    ],
    again=True,
)
@example(
    bad=[(flip_index, "disk"), (flip_shared_chunk, "ram"), *((flip_one_chunk, tier) for tier in TIERS)],
    again=True,
)
def test_damage_of_several_kinds_at_once_is_repaired_or_named(bad: list[tuple[Damage, str]], again: bool) -> None:
    commits = {tier for damage, tier in bad if damage in COMMITS}
    marked: dict[str, Damage] = {}
    for damage, tier in bad:
        if damage in MARKERS:
            marked.setdefault(tier, damage)
    if again and marked.get("disk") is marked.get("far") is flip_identity:
        commits.add("ram")  # what both tiers say is believed, and RAM of another store is left alone
    # Where the commit is damaged, what lists the chunks is the pack's footer; the slab has none.
    forgotten = {tier for tier in commits if tier == "ram" or (flip_footer, tier) in bad}
    lost = [damage for damage in CHUNKS if all((damage, tier) in bad or tier in forgotten for tier in TIERS)]

    async def check(place: Path) -> None:
        async with saved(place) as store:
            for damage, tier in sorted(bad, key=lambda each: each[0] is lose_index):
                if damage not in MARKERS or damage is marked[tier]:
                    await damage(place, store, tier)
            if again:
                await crash(store)
            else:
                await assert_repaired(store)
        if again:
            async with opened(place) as store:
                with suppress(Corrupt) if lost else nullcontext():
                    await store.flush()
                await assert_repaired(store)

    async def assert_repaired(store: CheckpointStore) -> None:
        await store.scrub(repair=True)
        await store.scrub(repair=True)  # what was committed anew on one tier may be what another was waiting for
        left = await store.scrub()
        keys = {key for each in left for key in each.damaged}
        allowed = {"a" if damage is flip_shared_chunk else "b" for damage in lost}
        # Who never saw the step whole commits it anew with all its chunks, or not.
        allowed |= {INDEX} if len(commits) == len(TIERS) or (commits - {"ram"} and lost and again) else set()
        # A pack is written anew with all that its steps use of it, so one with a lost chunk stays as it is.
        allowed |= {key for key in keys if key.startswith(layout.PACKS)} if lost else set()
        assert keys <= allowed
        for step in STEPS:
            try:
                found = await store.restore(step, resume=False)
            except Corrupt:
                assert lost or len(commits) == len(TIERS)
            except NotFound:  # by a store that never saw it whole
                assert again
                assert len(commits) == len(TIERS)
            else:
                assert_restored(found, state(step))

    place = new_shared_folder()
    try:
        asyncio.run(check(place))
    finally:
        shutil.rmtree(place)


# -- what is lost -----------------------------------------------------------------------------------------


async def test_what_is_lost_is_named_and_keeps_nothing_else_from_being_repaired(place: Path) -> None:
    async with saved(place) as store:
        heard = Heard(store)
        for tier in TIERS:
            await flip_chunk(store, tier, 2, "b", 0)
        for tier in ("ram", "disk"):
            await flip_chunk(store, tier, 2, "b", 1)
            await flip_chunk(store, tier, 2, "c", 1)
        found = [each for each in await store.scrub(repair=True) if each.problem]
        assert [(each.tier, each.damaged, each.lost, each.repaired) for each in found] == [
            ("ram", ("b", "c"), ("b",), False),
            ("disk", ("b", "c"), ("b",), False),
            ("far", ("b",), ("b",), False),
        ]
        assert all("array 'b' of step 2 (serial 2) is lost" in each.problem for each in found)
        assert {(event.tier, event.key) for event in heard.of(ChunkRepaired)} == {
            (tier, key) for tier in ("ram", "disk") for key in ("b", "c")
        }
        left = [each for each in await store.scrub() if each.problem]
        assert [(each.tier, each.damaged) for each in left] == [(tier, ("b",)) for tier in TIERS]
        whole = await store.restore(2, keys=["a", "c"], resume=False)
        assert whole is not None
        assert_same(whole.tree["c"], state(2)["c"])


@pytest.mark.parametrize("tier", ["ram", "disk"])
async def test_every_array_that_has_a_lost_chunk_is_named(place: Path, tier: str) -> None:
    """Only one of the equal ones was, and the others were told to be repaired."""
    async with opened(place, tier) as store:
        equal = state(1)["a"]
        await store.save(1, {"a": equal, "b": state(1)["b"], "c": equal.copy(), "d": equal.copy()})
        await flip_chunk(store, tier, 1, "c", 1)
        (found,) = await store.verify(1, repair=True)
        assert (found.damaged, found.lost, found.repaired) == (("a", "c", "d"), ("a", "c", "d"), False)


async def test_a_chunk_that_was_lost_is_whole_again_when_it_is_saved_again(place: Path) -> None:
    async with saved(place, "disk", "far") as store:
        for tier in ("disk", "far"):
            await flip_chunk(store, tier, 2, "b", 0)
        await store.scrub(repair=True)
        await store.save(3, state(2) | {"step": 3})
        await store.flush()
        assert_restored(await store.restore(3), state(2) | {"step": 3})
        await store.scrub(repair=True)
        assert told(await store.scrub()) == []
    await assert_whole(place, "disk", "far")


async def test_a_pack_that_stays_for_a_lost_chunk_is_not_told_as_repaired(place: Path) -> None:
    async with opened(place, "disk") as store:
        await store.save(1, state(1))
        await flip_chunk(store, "disk", 1, "b")
        await flip_footer(place, store, "disk")
        pack = some_file(place, "disk", "packs/*/*.pack").relative_to(root_of(place, "disk")).as_posix()
        assert told(await store.scrub(repair=True)) == [(1, "disk", ("b",), False), (None, "disk", (pack,), False)]


async def test_a_step_that_was_repaired_in_ram_counts_as_a_good_copy_again(place: Path) -> None:
    async with opened(place, "ram") as store:
        await store.save(1, state(1))
        await flip_chunk(store, "ram", 1, "a")
        assert (await store.verify(1, repair=True))[0].lost == ("a",)
        assert [step.step for step in tier_of(store, "ram").steps.impaired] == [1]
        await store.save(2, state(2))  # which has the same "a"
        assert (await store.verify(1, repair=True))[0].repaired
        assert not tier_of(store, "ram").steps.impaired


async def test_a_step_that_is_evicted_while_it_is_repaired_is_no_failure(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with saved(place, "disk", "far") as store:
        await flip_chunk(store, "disk", 1, "b")
        copy = repair.copy_step

        async def evicted(*arguments: Any, **options: Any) -> int:
            await store._life.engine.admin.evict(1, "disk")
            return await copy(*arguments, **options)

        monkeypatch.setattr(repair, "copy_step", evicted)
        with pytest.raises(NotFound, match="left tier 'disk' while it was verified"):
            await store.verify(1, "disk", repair=True)
        assert "could not be repaired" not in caplog.text


async def test_a_step_that_is_evicted_before_its_index_is_repaired_does_not_come_back(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with saved(place, "disk", "far") as store:
        repair_index = background.repair_index

        async def evicted(*arguments: Any) -> None:
            await store._life.engine.admin.evict(2, "disk")
            await repair_index(*arguments)

        monkeypatch.setattr(background, "repair_index", evicted)
        tier_of(store, "disk").steps.indexes.clear()
        await flip_manifest(place, store, "disk")
        assert_restored(await store.restore(2, resume=False), state(2))
        await store.flush()
        assert await store.where(2) == ("far",)
        assert "could not be repaired" not in caplog.text
        assert not tier_of(store, "disk").steps.damaged


# -- commits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", COMMITS, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("tier", ["ram", "disk"])
async def test_the_only_commit_of_a_step_is_written_anew_from_memory(place: Path, damage: Damage, tier: str) -> None:
    async with saved(place, tier) as store:
        await damage(place, store, tier)
        assert told(await store.scrub(repair=True)) == [(2, tier, (INDEX,), True)]
        assert told(await store.scrub()) == []
        await crash(store)
    await assert_whole(place, tier)


@pytest.mark.parametrize("tier", ["ram", "disk"])
async def test_a_step_that_is_leaving_its_tier_is_not_brought_back_by_a_scrub(place: Path, tier: str) -> None:
    async with saved(place, "ram", "disk") as store:
        leaving = tier_of(store, tier)
        (step,) = (held for held in leaving.steps.held if held.step == 1)
        leaving.steps.leaving.add(step)  # as while its eviction waits for the device
        (manifest,) = root_of(place, tier).glob("steps/*1-*/manifest.ocdbt")
        manifest.unlink()
        found = await store.scrub(tier, repair=True)
        assert [each.id for each in found if each.id is not None and each.id.step == 1] == []
        assert not manifest.exists()
        leaving.steps.leaving.discard(step)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "btree"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
async def test_memory_that_is_being_viewed_is_not_reused_after_its_commit_was_damaged(
    place: Path, damage: str, name: str
) -> None:
    async with saved(place, "ram", "disk") as store:
        seen = await store.restore(2, copy=False, resume=False)
        assert seen is not None
        path = some_file(place, "ram", f"steps/*2-*/{name}")
        if damage == "missing":
            path.unlink()
        else:
            flip(path, 30)
        await store.scrub(repair=True)
        with suppress(NotFound):
            await store.evict(2, "ram")
        await use_all_memory(store)
        assert_same(seen.tree, state(2))
        await seen.verified()
        del seen


@pytest.mark.parametrize("damage", [*COMMITS, lose_manifest], ids=lambda damage: damage.__name__)
async def test_the_only_copy_of_a_step_stays_in_ram_though_its_commit_is_damaged_while_it_is_viewed(
    place: Path, damage: Damage
) -> None:
    """Promise 6: this process still knows where its chunks are."""
    async with saved(place, "ram") as store:
        seen = await store.restore(2, copy=False, resume=False)
        assert seen is not None
        await damage(place, store, "ram")
        assert told(await store.scrub(repair=True)) == [(2, "ram", (INDEX,), True)]
        assert told(await store.scrub()) == []
        await store.save(3, state(3))
        await store.evict(2, "ram")
        await use_all_memory(store)
        assert_same(seen.tree, state(2))
        await seen.verified()


@pytest.mark.parametrize("evicted", ["before", "after"])
@pytest.mark.parametrize("damage", COMMITS, ids=lambda damage: damage.__name__)
async def test_memory_that_is_being_viewed_outlives_a_repair_and_the_process(
    place: Path, damage: Damage, evicted: str
) -> None:
    """The next one finds what is read by the commit that was replaced, though that was damaged: promise 4."""
    async with saved(place, "ram") as store:
        seen = await store.restore(2, copy=False, resume=False)
        assert seen is not None
        await damage(place, store, "ram")
        assert told(await store.scrub(repair=True)) == [(2, "ram", (INDEX,), True)]
        await store.save(3, state(3))
        if evicted == "before":
            await store.evict(2, "ram")
        await crash(store)
    async with opened(place, "ram") as store:
        if evicted == "after":
            await store.evict(2, "ram")
        await use_all_memory(store)
        assert_same(seen.tree, state(2))


async def test_memory_that_is_being_viewed_outlives_a_process_that_dies_right_after_a_repair(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_file.commit

    async def last(*arguments: Any, **options: Any) -> None:
        await commit(*arguments, **options)
        raise TierUnavailable("the process died")

    async with saved(place, "ram") as store:
        seen = await store.restore(2, copy=False, resume=False)
        assert seen is not None
        await flip_manifest(place, store, "ram")
        with monkeypatch.context() as patch:
            patch.setattr(commit_file, "commit", last)
            await store.scrub(repair=True)
        await crash(store)
    async with opened(place, "ram") as store:
        await store.save(3, state(3))
        await store.evict(2, "ram")
        await use_all_memory(store)
        assert_same(seen.tree, state(2))


async def test_two_repairs_of_a_commit_at_a_time_keep_the_step(place: Path) -> None:
    """Promise 6: the one finds in memory what the other reads anew."""
    async with saved(place, "ram") as store:
        await flip_manifest(place, store, "ram")
        await asyncio.gather(store.scrub(repair=True), store.verify(2, repair=True))
        assert told(await store.scrub()) == []
        assert_restored(await store.restore(2, resume=False), state(2))


async def assert_all_memory_comes_back(store: CheckpointStore) -> None:
    """What two steps used is free when they have left."""
    await store.save(3, state(3))
    for step in STEPS:
        await store.evict(step, "ram")
    assert [*tier_of(store, "ram").ram.index._uses.values()] == [1] * 2 * len(KEYS)


async def test_a_restore_beside_a_repair_reads_the_step_in_ram(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process remembered of a step with a damaged commit was set aside while a verification read that."""
    reading, may_read, read = threading.Event(), threading.Event(), step_index.read

    async def slow(*arguments: Any) -> Any:
        if not reading.is_set():
            reading.set()
            await asyncio.to_thread(may_read.wait)
        return await read(*arguments)

    async with saved(place, "ram") as store:
        await flip_manifest(place, store, "ram")
        monkeypatch.setattr(step_index, "read", slow)
        verifying = asyncio.create_task(store.verify(2, repair=True))
        await asyncio.to_thread(reading.wait)
        try:
            assert_restored(await store.restore(2, resume=False), state(2))
        finally:
            may_read.set()
            (found,) = await verifying
        assert found.repaired
        assert told(await store.scrub()) == []
        await assert_all_memory_comes_back(store)


@pytest.mark.parametrize(("where", "what"), [(commit_file, "_put_manifest"), (RamStore, "keep")])
async def test_a_repair_that_fails_costs_neither_the_step_nor_memory(
    place: Path, where: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 6: the commit was only misread, and nothing else has the step."""

    async def misread(tier: Tier, step: StepId) -> Any:
        raise Corrupt("it came wrong")

    async with saved(place, "ram") as store:
        with monkeypatch.context() as patch:
            patch.setattr(step_index, "read", misread)
            patch.setattr(where, what, Mock(side_effect=NoSpace("no memory is left")))
            assert [each[3] for each in told(await store.scrub(repair=True))] == [False, False]
        await crash(store)
    async with opened(place, "ram") as store:
        for step in STEPS:
            assert_restored(await store.restore(step, resume=False), state(step))
        assert told(await store.scrub()) == []
        await assert_all_memory_comes_back(store)


async def test_a_step_in_ram_whose_repair_failed_still_gets_to_the_slower_tier(
    place: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process knows what it consists of, and nothing else has it."""
    async with opened(place, "ram", "disk") as store:
        heard = Heard(store)
        faults.kill("disk")
        await store.save(2, state(2))
        await heard.first(TierFailed)
        await flip_manifest(place, store, "ram")
        with monkeypatch.context() as patch:
            patch.setattr(commit_file, "_put_manifest", Mock(side_effect=NoSpace("no memory is left")))
            (found,) = await store.verify(2, "ram", repair=True)
        assert not found.repaired
        faults.revive("disk")
        await heard.first(TierRecovered)
        await store.flush()
        assert await store.where(2) == ("ram", "disk")
        assert_restored(await store.restore(2, resume=False), state(2))


async def test_a_commit_that_could_not_be_written_anew_is_told(place: Path, faults: FaultyTiers) -> None:
    async with saved(place, "disk") as store:
        await flip_manifest(place, store, "disk")
        faults["disk"].fail("put", NoSpace("the device is full"), key="steps/*")
        (found,) = [each for each in await store.scrub(repair=True) if each.problem]
        assert (found.damaged, found.repaired, found.lost) == ((INDEX,), False, ())
        assert "it could not be committed anew: the device is full" in found.problem
        assert told(await store.scrub(repair=True)) == [(2, "disk", (INDEX,), True)]
        assert told(await store.scrub()) == []


# -- markers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [flip_marker, lose_marker], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("tier", ["ram", "disk"])
async def test_a_store_of_one_tier_knows_itself_by_its_steps(place: Path, damage: Damage, tier: str) -> None:
    async with saved(place, tier) as store:
        before = tier_of(store, tier).marker
        await damage(place, store, tier)
        await crash(store)
    async with opened(place, tier, read_only=True) as reader:
        assert len(await reader.steps()) == 2
    async with opened(place, tier) as store:
        assert tier_of(store, tier).marker == before
    assert decode_marker((root_of(place, tier) / layout.MARKER).read_bytes(), "") == before
    await assert_whole(place, tier)


@pytest.mark.parametrize("more", [{}, {"forked_from": [str(UUID(int=1))]}, {"later": {"a": [None, 1.5]}}], ids=str)
async def test_a_marker_of_another_format_is_never_replaced(place: Path, more: dict[str, object]) -> None:
    async with saved(place, "disk"):
        pass
    path = root_of(place, "disk") / layout.MARKER
    newer = json.dumps({**json.loads(path.read_bytes()), "format_version": 4, **more}).encode()
    path.write_bytes(newer)
    for read_only in (True, False):
        with pytest.raises(Corrupt, match="use a newer tieredckpt"):
            async with opened(place, "disk", read_only=read_only):
                pass
    assert path.read_bytes() == newer


# -- how much is read -------------------------------------------------------------------------------------


async def test_what_steps_share_is_read_once(place: Path) -> None:
    async with saved(place) as store:
        for tier in TIERS:
            read: list[int] = []
            assert all(each.intact for each in await store.scrub(tier, progress=read.append))
            assert sum(read) == (2 * len(KEYS) + 2 * (len(KEYS) - 1)) * CHUNK


async def test_a_rate_bounds_what_is_read() -> None:
    """By a clock of the test: time goes on only while the check sleeps."""
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += max(0.0, seconds)

    checked = Checked(Pace(1000.0, clock=lambda: now[0], sleep=sleep))
    read = 0
    for batch in checked.batches(range(50), lambda _: 100):
        assert sum(100 for _ in batch) <= 250
        await checked.pace.take(100 * len(batch))
        read += 100 * len(batch)
        assert read <= 250 + 1000 * now[0]
    assert read == 5000
    assert now[0] >= 4.7
    assert list(Checked(Pace(1.0)).batches(["large"], lambda _: 1 << 30)) == [["large"]]
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(Invalid):
            Pace(rate)


async def test_a_scrub_takes_the_rate_it_is_given(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    take = Pace.take

    async def counted(pace: Pace, nbytes: int) -> None:
        turns.append(nbytes)
        assert pace.rate == 1e9
        await take(pace, nbytes)

    monkeypatch.setattr(Pace, "take", counted)
    async with saved(place) as store:
        await store.scrub("disk", rate=1e9)
    assert sum(turns) == (2 * len(KEYS) + 2 * (len(KEYS) - 1)) * CHUNK


# -- the command line -------------------------------------------------------------------------------------


@pytest.fixture
async def config_file(place: Path, tmp_path: Path) -> Path:
    async with saved(place) as store:
        await flip_chunk(store, "disk", 1, "c", 0)
        for tier in TIERS:
            await flip_chunk(store, tier, 2, "b", 1)
        path = tmp_path / "ckpt.toml"
        path.write_text(to_toml(store.config))
    return path


async def test_repair_without_a_step_repairs_whole_tiers_and_names_what_is_lost(config_file: Path) -> None:
    result = await asyncio.to_thread(run, "verify", config_file, "--repair", "--rate", "1 GB/s", "--json")
    assert result.exit_code == 1
    damaged = [
        (each["step"], each["tier"], each["damaged"], each["repaired"], each["lost"])
        for each in json.loads(result.stdout)
        if each["problem"]
    ]
    assert damaged == [(1, "disk", ["c"], True, []), *((2, tier, ["b"], False, ["b"]) for tier in TIERS)]
    result = await asyncio.to_thread(run, "verify", config_file, "--repair")
    assert "lost: on no tier intact" in result.stdout
    assert result.stdout.strip().splitlines()[-1].split() == ["2", "2", "b"]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--rate", "1 GB/s"),
        ("1", "--repair", "--rate", "1 GB/s"),
        ("--all", "--rate", "soon"),
        ("--all", "--rate", "0"),
    ],
)
def test_a_rate_that_makes_no_sense_is_wrong_usage(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    assert run("verify", tmp_path, *wrong).exit_code == 2
