"""A tier may store chunks compressed, in frames of any length: everything that is done to steps works as it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from reliability.tiers import FaultyTiers
from support.cohort import assert_whole, blank, cohort, part
from support.insight import extents, flip_chunk, tier_of
from support.limits import limit
from support.scenes import CHUNK, assert_restored, assert_same, config, folder, pack_bytes, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.engine.promoting import dedupe
from tieredckpt.engine.tier.chunk_reader import read_chunk
from tieredckpt.format.pack import is_compressed


def soft(seed: int = 0) -> dict[str, Any]:
    """A tree of which some can be compressed, and some cannot; some arrays of several chunks, some in the index."""
    return tree(seed) | {"soft": np.arange(3 * CHUNK // 8) // (seed + 7), "flags": np.zeros(100, bool)}


@pytest.fixture
def tiers(shared_memory: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "ram": ram(shared_memory),
        "disk": folder(tmp_path / "disk", retain="all", codec="fast"),
        "far": {
            "kind": "kvstore",
            "spec": {"driver": "file", "path": f"{tmp_path}/far/"},
            "retain": "all",
            "codec": "small",
        },
    }


@pytest.mark.parametrize("keys", [None, ["params/w1"]], ids=["whole", "in part"])
async def test_steps_go_down_the_tiers_and_come_back_from_each(tiers: dict[str, Any], keys: list[str] | None) -> None:
    async with CheckpointStore.open(config(tiers)) as store:
        for step in (1, 2):
            await store.save(step, soft(step))
        await store.flush()
        for gone in (None, "ram", "disk"):
            if gone is not None:
                await store.evict(1, gone)
            restored = await store.restore(1, keys=keys, resume=False)
            assert restored is not None
            if keys is None:
                assert_same(restored.tree, soft(1))
            else:
                assert_same(restored.tree["params"]["w1"], soft(1)["params"]["w1"])
        lengths = [extent.length for _, extent in await extents(store, "disk", 2, "soft")]
        assert max(lengths) < CHUNK // 2
        assert all(not found.problem for found in await store.verify())


async def test_stock_tensorstore_opens_what_is_stored(tiers: dict[str, Any]) -> None:
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, soft())
        await store.flush()
        for name in ("disk", "far"):
            for key, expected in (("soft", soft()["soft"]), ("params/w2", soft()["params"]["w2"]), ("count", 0)):
                spec = await store.spec(1, key, tier=name)
                found = ts.open(spec, open=True, read=True).result().read().result()
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rotten", ["disk", "far"])
@pytest.mark.parametrize("key", ["soft", "params/w3"])
async def test_damage_is_found_restored_around_and_repaired(tiers: dict[str, Any], rotten: str, key: str) -> None:
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, soft())
        await store.flush()
        await store.evict(1, "ram")
        await flip_chunk(store, rotten, 1, key, 1)
        assert_restored(await store.restore(into=soft(9)), soft())
        await store.verify(1, rotten, repair=True)
        (found,) = await store.verify(1, rotten)
        assert not found.problem
        await store.evict(1, "far" if rotten == "disk" else "disk")
        restored = await store.restore()
        assert restored is not None
        assert set(restored.sources) == {rotten}
        assert_same(restored.tree, soft())


async def test_a_store_that_is_opened_again_refers_to_what_it_finds(tiers: dict[str, Any]) -> None:
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, soft())
        await store.flush()
        used = tier_of(store, "disk").packs.sizes.total
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(2, soft() | {"epoch": 2})
        await store.flush()
        assert tier_of(store, "disk").packs.sizes.total == used
        await store.evict(2, "ram")
        assert_restored(await store.restore(), soft() | {"epoch": 2})


async def test_what_ram_cannot_hold_is_streamed(tiers: dict[str, Any]) -> None:
    tiers["ram"]["capacity"] = 5 * 2 * CHUNK
    async with CheckpointStore.open(config(tiers)) as store:
        for step in (1, 2):
            await store.save(step, soft(1) | {"epoch": step})
        await store.flush()
        assert await store.where(2) == ("disk", "far")
        assert_restored(await store.restore(), soft(1) | {"epoch": 2})


@pytest.mark.parametrize("capacity", ["16 MiB", 10 * 2 * CHUNK], ids=["promoted", "streamed"])
async def test_ranks_write_and_restore_together(shared_memory: Path, tmp_path: Path, capacity: Any) -> None:
    disk, settings = tmp_path / "disk", {"capacity": capacity, "on_close": "release"}
    small = {"codec": "small"}
    async with cohort(2, shared_memory, disk, ram_settings=settings, disk_settings=small) as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step, 5), "disk")
        assert (await ranks[0].where(2) == ("disk",)) is (capacity != "16 MiB")
        for found in await ranks.restored():
            assert_whole(found, 5)
    async with cohort(2, shared_memory, disk, ram_settings=settings, disk_settings=small) as ranks:
        for rank, restored in enumerate(await ranks.all(lambda store, rank: store.restore(into=blank(rank, 2)))):
            assert restored is not None
            np.testing.assert_array_equal(restored.tree["w"].array, part(5, rank, 2)["w"].array)


@pytest.mark.parametrize("codec", ["none", "small"])
async def test_ranks_that_stream_find_intact_what_is_there(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    disk, settings = tmp_path / "disk", {"capacity": 10 * 2 * CHUNK, "on_close": "release"}
    read: list[BaseException | None] = []

    async def reading(*args: Any) -> None:
        try:
            await read_chunk(*args)
        except BaseException as error:
            read.append(error)
            raise
        read.append(None)

    monkeypatch.setattr(dedupe, "read_chunk", reading)
    limit(monkeypatch, steps_asked=0)  # or they would vouch for it
    for step in (1, 2):
        async with cohort(2, shared_memory, disk, ram_settings=settings, disk_settings={"codec": codec}) as ranks:
            await ranks.reached(await ranks.save(step, 5), "disk")
            assert await ranks[0].where(step) == ("disk",)
            if step == 1:
                used = pack_bytes(disk)
    assert pack_bytes(disk) == used
    assert read
    assert not any(read)


async def test_a_frame_that_does_not_decode_is_one_chunk_that_is_damaged(tiers: dict[str, Any]) -> None:
    """Its neighbours of the same run come from the same tier."""
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, soft())
        await store.flush()
        await store.evict(1, "ram")
        path, extent = (await extents(store, "disk", 1, "soft"))[0]
        with path.open("r+b") as file:
            file.seek(extent.offset)
            file.write(bytes(16))
        (found,) = await store.verify(1, "disk")
        assert found.damaged == ("soft",)
        restored = await store.restore()
        assert_restored(restored, soft())
        assert restored.sources["far"] == CHUNK


def with_codec(tmp_path: Path, codec: str) -> Any:
    return config({"disk": folder(tmp_path / "disk", retain="all", codec=codec)})


async def saved(tmp_path: Path, codec: str, step: int, value: dict[str, Any]) -> int:
    """Bytes of the packs of a store of one folder, after a step was saved."""
    async with CheckpointStore.open(with_codec(tmp_path, codec)) as store:
        await store.save(step, value)
        return tier_of(store, "disk").packs.sizes.total


CHANGES = [("none", "small"), ("small", "none"), ("small", "fast"), ("fast", "none")]


@pytest.mark.parametrize(("before", "after"), CHANGES)
async def test_a_tier_whose_codec_was_changed_reads_repairs_and_extends_what_it_has(
    tmp_path: Path, before: str, after: str
) -> None:
    first = await saved(tmp_path, before, 1, soft())
    second = await saved(tmp_path, after, 2, soft())
    framing = {codec: codec == "none" for codec in (before, after)}
    assert (first == second) is (framing[before] == framing[after])  # what the other codec can refer to is not written
    assert await saved(tmp_path, after, 3, soft()) == second
    async with CheckpointStore.open(with_codec(tmp_path, after)) as store:
        assert all(not found.problem for found in await store.verify())
        for step, codec in ((1, before), (2, after), (3, after)):
            for key in ("soft", "params/w2", "count"):
                spec = await store.spec(step, key)
                expected = {"soft": soft()["soft"], "params/w2": soft()["params"]["w2"], "count": 0}[key]
                np.testing.assert_array_equal(ts.open(spec, open=True, read=True).result().read().result(), expected)
            lengths = [extent.length for _, extent in await extents(store, "disk", step, "soft")]
            assert (max(lengths) == CHUNK + 4) is framing[codec]


@pytest.mark.parametrize("asked", [4, 0], ids=["the newest step has it", "no step that is asked has it"])
@pytest.mark.parametrize(("before", "after"), [("none", "small"), ("small", "none")])
async def test_what_lies_in_both_forms_is_read_only_where_no_step_vouches_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, asked: int
) -> None:
    await saved(tmp_path, before, 1, soft())
    used = await saved(tmp_path, after, 2, soft())
    read: list[bytes] = []

    async def reading(tier: Any, where: Any, digest: bytes, *rest: Any) -> None:
        read.append(digest)
        await read_chunk(tier, where, digest, *rest)

    monkeypatch.setattr(dedupe, "read_chunk", reading)
    limit(monkeypatch, steps_asked=asked)
    assert await saved(tmp_path, after, 4, soft()) == used
    assert len(read) == len(set(read)), "each in the form that the tier has now"
    assert bool(read) is (asked == 0)
    async with CheckpointStore.open(with_codec(tmp_path, after)) as store:
        for step in (1, 4):
            assert_restored(await store.restore(step, resume=False), soft())


@pytest.mark.parametrize(("before", "after"), [("none", "small"), ("small", "none")])
async def test_a_step_vouches_for_no_copy_in_another_form_than_its_own(tmp_path: Path, before: str, after: str) -> None:
    await saved(tmp_path, before, 1, soft())
    packs = {*tmp_path.glob("disk/packs/*/*.pack")}
    await saved(tmp_path, after, 2, soft())
    # As a crash may leave it: the step was never committed, and of its packs the footers came before the chunks.
    for path in {*tmp_path.glob("disk/packs/*/*.pack")} - packs:
        with path.open("r+b") as file:
            file.write(bytes(CHUNK))
    (step,) = tmp_path.glob("disk/steps/*2-*")
    shutil.rmtree(step)
    await saved(tmp_path, after, 3, soft())
    async with CheckpointStore.open(with_codec(tmp_path, after)) as store:
        assert all(not found.problem for found in await store.verify())


@pytest.mark.parametrize(("before", "after"), [("none", "small"), ("small", "none")])
async def test_damage_to_what_lies_in_both_forms_is_repaired_and_not_referred_to(
    tmp_path: Path, before: str, after: str
) -> None:
    await saved(tmp_path, before, 1, soft())
    await saved(tmp_path, after, 2, soft())
    tiers = {
        "disk": folder(tmp_path / "disk", retain="all", codec=after),
        "far": folder(tmp_path / "far", retain="all"),
    }
    async with CheckpointStore.open(config(tiers)) as store:
        for step in (1, 2):
            await store.promote(step, "far")
        await flip_chunk(store, "disk", 2, "soft", 1)
    async with CheckpointStore.open(config(tiers)) as store:
        (found,) = await store.verify(2, "disk", repair=True)
        assert found.repaired
        await store.save(3, soft())
        for step in (1, 2, 3):
            (found,) = await store.verify(step, "disk")
            assert not found.problem


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("key", ["soft", "params/w3"])
async def test_a_step_that_is_repaired_after_a_change_of_codec_stays_as_stock_readers_open_it(
    tmp_path: Path, before: str, after: str, key: str
) -> None:
    await saved(tmp_path, before, 1, soft())
    tiers = {
        "disk": folder(tmp_path / "disk", retain="all", codec=after),
        "far": folder(tmp_path / "far", retain="all", codec="small"),
    }
    async with CheckpointStore.open(config(tiers)) as store:
        await store.promote(1, "far")
        await flip_chunk(store, "disk", 1, key, 1)
        used = tier_of(store, "disk").packs.used
        (found,) = await store.verify(1, "disk", repair=True)
        assert found.repaired
        assert tier_of(store, "disk").packs.used < used + 2 * CHUNK, "chunks that are intact were written anew"
        (found,) = await store.verify(1, "disk")
        assert not found.problem
        spec = await store.spec(1, key, tier="disk")
        expected = soft()["soft"] if key == "soft" else soft()["params"]["w3"]
        np.testing.assert_array_equal(ts.open(spec, open=True, read=True).result().read().result(), expected)


@pytest.mark.parametrize(("before", "after"), [("none", "small"), ("small", "none")])
@pytest.mark.parametrize("capacity", ["16 MiB", 10 * 2 * CHUNK], ids=["promoted", "streamed"])
async def test_ranks_go_on_after_a_change_of_codec(
    shared_memory: Path, tmp_path: Path, before: str, after: str, capacity: Any
) -> None:
    disk, settings = tmp_path / "disk", {"capacity": capacity, "on_close": "release"}
    for step, codec in enumerate([before, after, after], start=1):
        async with cohort(
            2, shared_memory, disk, ram_settings=settings, disk_settings={"codec": codec, "retain": "all"}
        ) as ranks:
            await ranks.reached(await ranks.save(step, 5), "disk")
            for number in range(1, step + 1):
                for found in await ranks.restored(number):
                    assert_whole(found, 5)


async def test_a_marker_says_version_2_once_a_tier_may_have_compressed_chunks(tmp_path: Path) -> None:
    marker = tmp_path / "disk" / "tieredckpt.json"
    for step, (codec, version) in enumerate([("none", 1), ("small", 2), ("none", 2)]):
        await saved(tmp_path, codec, step, {"w": np.arange(CHUNK) + step})
        assert f'"format_version": {version}' in marker.read_text()
        packs = sorted((tmp_path / "disk" / "packs").rglob("*.pack"), key=lambda path: path.stat().st_mtime_ns)
        assert is_compressed(packs[-1].read_bytes()) is (codec == "small")
        assert (b'"blosc"' in (tmp_path / "disk" / f"steps/{step:010}-{step + 1:06}/btree").read_bytes()) is (
            codec == "small"
        )


async def test_a_marker_that_was_lost_is_of_version_2_again_where_there_are_compressed_chunks(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    await saved(tmp_path, "small", 1, soft())
    marker = tmp_path / "disk" / "tieredckpt.json"
    before = marker.read_bytes()
    marker.unlink()
    await saved(tmp_path, "none", 2, soft())
    assert marker.read_bytes() == before
    assert [call.key for call in faults["disk"].calls if call.verb == "put"].count(marker.name) == 1


async def test_packs_of_chunks_that_nearly_vanish_are_not_rewritten(tiers: dict[str, Any]) -> None:
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, {f"moment{i}": np.full(CHUNK // 8, float(i)) for i in range(8)})
        await store.flush()
        before = await extents(store, "disk", 1, "moment3")
        await store.collect()
        assert await extents(store, "disk", 1, "moment3") == before
