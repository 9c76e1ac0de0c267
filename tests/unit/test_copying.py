"""Steps that are copied from one store to another: equal to the last bit, only what is missing, or not at all."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.limits import limit
from support.object_stores import Place
from support.proxy import proxy
from support.scenes import assert_restored, assert_same, config, folder, ram, tree

from tieredckpt import CheckpointStore, Conflict, Corrupt, Invalid, NoSpace, NotFound, TierUnavailable, copy_steps
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.config import StoreConfig, dump_with_secrets
from tieredckpt.errors import TieredCkptError


def disk(path: Path, **settings: Any) -> StoreConfig:
    return config({"disk": folder(path, retain="all") | settings})


@pytest.fixture
async def source(tmp_path: Path) -> StoreConfig:
    """Steps 1 to 3, a fork at 2, and step 4 of the new branch."""
    settings = disk(tmp_path / "source")
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2, 3):
            await store.save(step, tree(step), metrics={"loss": step / 8})
        await store.restore(2, resume=True)
        await store.save(4, tree(4), metrics={"loss": float("nan")})
    return settings


async def content(settings: StoreConfig) -> list[Any]:
    """What a reader sees of a store's steps, and their trees."""
    found = []
    async with CheckpointStore.open(settings, read_only=True) as store:
        for info in await store.steps():
            details = await store.describe(info.step, serial=info.serial)
            arrays = [(each.key, each.dtype, each.shape) for each in details.arrays]
            told = (info.step, info.serial, info.saved_at, info.off_branch, info.nbytes, repr(info.metrics))
            found.append((told, details.provenance, arrays, details.scalars))
        for number in await store.all_steps():
            assert_restored(await store.restore(number), tree(number))
            assert all(not each.problem for each in await store.verify(number))
    return found


def files(path: Path, pattern: str = "packs/*/*") -> set[Path]:
    return {each.relative_to(path) for each in path.glob(pattern)}


async def test_from_a_folder_to_s3_and_back_nothing_is_lost(
    source: StoreConfig, s3_place: Place, tmp_path: Path
) -> None:
    far = config({"s3": s3_place.tier(retain="all")})
    copied = await copy_steps(source, far)
    assert [each.step for each in copied] == [1, 2, 3, 4]
    assert all(each.written for each in copied)
    back = disk(tmp_path / "back")
    await copy_steps(far, back)
    assert await content(source) == await content(far) == await content(back)
    async with CheckpointStore.open(back) as store:  # and it goes on
        await store.save(5, tree(5))
        assert await store.all_steps() == (1, 2, 4, 5)


async def test_what_is_there_is_not_copied_again(source: StoreConfig, tmp_path: Path) -> None:
    target = disk(tmp_path / "target")
    (two,) = await copy_steps(source, target, [2])
    assert (two.step, two.serial) == (2, 2)
    packs = files(tmp_path / "target")
    copied = await copy_steps(source, target)
    assert [bool(each.written) for each in copied] == [True, False, True, True]
    assert packs < files(tmp_path / "target")
    everything = files(tmp_path / "target")
    async with CheckpointStore.open(source) as store:
        await store.save(5, tree(4))
    (*_, last) = await copy_steps(source, target)
    assert (last.step, last.written) == (5, 0)  # the chunks are those of step 4
    assert files(tmp_path / "target") == everything


async def test_a_corrupt_chunk_is_named_and_not_copied_and_other_steps_are(source: StoreConfig, tmp_path: Path) -> None:
    some = tree(1)["params"]["w0"].tobytes()[:1024]
    (pack,) = [path for path in (tmp_path / "source").glob("packs/*/*") if some in path.read_bytes()]
    bad = bytes([some[0] ^ 1]) + some[1:]
    pack.write_bytes(pack.read_bytes().replace(some, bad))
    target = disk(tmp_path / "target")
    with pytest.raises(Corrupt, match=r"array 'params/w0' of step 1 .*3 of 4 steps are in the other store"):
        await copy_steps(source, target)
    async with CheckpointStore.open(target, read_only=True) as store:
        assert [info.step for info in await store.steps()] == [2, 3, 4]
    assert not any(bad in path.read_bytes() for path in (tmp_path / "target").glob("packs/*/*"))


async def test_a_step_whose_commit_is_damaged_is_named(source: StoreConfig, tmp_path: Path) -> None:
    (manifest,) = (tmp_path / "source").glob("steps/0000000003-*/manifest.ocdbt")
    manifest.write_bytes(b"torn")
    target = disk(tmp_path / "target")
    with pytest.raises(Corrupt, match=r"step 3 \(serial 3\) cannot be read.*3 of 4 steps are in the other store"):
        await copy_steps(source, target)
    with pytest.raises(Corrupt, match="step 3"):
        await copy_steps(source, target, [3])
    async with CheckpointStore.open(target, read_only=True) as store:
        assert [info.step for info in await store.steps()] == [1, 2, 4]


KILLED = """
import asyncio, json, sys
from tieredckpt import copy_steps
source, target = map(json.loads, sys.argv[1:])
asyncio.run(copy_steps(source, target, progress=lambda each: print("copied", each.step, flush=True)))
"""


async def test_a_copy_in_an_object_store_takes_what_has_come_since(source: StoreConfig, s3_place: Place) -> None:
    """Its catalog says of each step which store saved it: those of the source do not become its own."""
    target = config({"s3": s3_place.tier(retain="all")})
    await copy_steps(source, target)
    copied = await copy_steps(source, target)
    assert [each.written for each in copied] == [0, 0, 0, 0]
    async with CheckpointStore.open(source) as store:
        await store.save(5, tree(5))
    copied = await copy_steps(source, target)
    assert [bool(each.written) for each in copied] == [False, False, False, False, True]
    assert await content(target) == await content(source)


async def test_a_copy_that_was_killed_goes_on_where_it_was(source: StoreConfig, s3_place: Place) -> None:
    """It dies with the index of step 3 on its way."""
    with proxy(s3_place.server) as between:
        target = config({"s3": s3_place.tier(between.url, retain="all")})
        hang = between.hang("PUT", key="0000000003-", times=1)
        stores = [json.dumps(dump_with_secrets(settings)) for settings in (source, target)]
        command = [sys.executable, "-c", KILLED, *stores]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert await asyncio.to_thread(hang.reached.wait, 300)
            finally:
                process.kill()
            assert "copied 2\n" in process.communicate()[0]
        hang.release()
        between.heal()
        async with CheckpointStore.open(target, read_only=True) as store:
            assert [info.step for info in await store.steps()] == [1, 2]  # nothing half visible
        between.restart_count()
        copied = await copy_steps(source, target)
        assert [bool(each.written) for each in copied] == [False, False, False, True]
        assert sum("/packs/" in path for verb, path in between.asked if verb == "PUT") == 1
        assert await content(target) == await content(source)


async def test_a_copy_holds_a_part_of_a_step_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, scratch_size=4 << 20)
    source, target = disk(tmp_path / "source"), disk(tmp_path / "target")
    async with CheckpointStore.open(source) as store:
        await store.save(1, {"w": np.random.default_rng(1).integers(0, 1 << 62, (16 << 20) // 8)})
    tracemalloc.start()
    try:
        (copied,) = await copy_steps(source, target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert copied.written > 16 << 20
    assert len(files(tmp_path / "target")) >= 16  # of a quarter of the scratch memory each, at most
    assert peak < 8 << 20


async def test_a_writer_of_the_target_is_not_disturbed(source: StoreConfig, tmp_path: Path) -> None:
    target = disk(tmp_path / "target")
    async with CheckpointStore.open(target) as store:
        with pytest.raises(Conflict, match="is being written to by process"):
            await copy_steps(source, target)
        assert await store.steps() == ()
    async with CheckpointStore.open(source) as store:  # which may be saved to meanwhile
        await store.save(5, tree(5))
        assert [each.step for each in await copy_steps(source, target)] == [1, 2, 3, 4, 5]


async def test_steps_of_another_store_are_not_mixed_in(source: StoreConfig, tmp_path: Path) -> None:
    target = disk(tmp_path / "target")
    async with CheckpointStore.open(target) as store:
        await store.save(1, tree(7))
    with pytest.raises(Conflict, match="holds steps of another store"):
        await copy_steps(source, target)
    copy = disk(tmp_path / "copy")
    await copy_steps(source, copy, [1, 2])
    for settings in (source, copy):
        async with CheckpointStore.open(settings) as store:
            await store.save(9, tree(9))
    await copy_steps(copy, disk(tmp_path / "third"))
    async with CheckpointStore.open(source, read_only=True) as store:
        assert [info.step for info in await store.steps()] == [1, 2, 3, 4, 9]


async def test_a_copy_that_went_on_keeps_its_own_step_of_a_serial(source: StoreConfig, tmp_path: Path) -> None:
    copy = disk(tmp_path / "copy")
    await copy_steps(source, copy, [1, 2])
    async with CheckpointStore.open(copy) as store:
        await store.save(3, {"w": np.ones(3)})
    with pytest.raises(Conflict, match=r"holds another step 3"):
        await copy_steps(source, copy)
    async with CheckpointStore.open(copy, read_only=True) as store:
        assert_same((await store.restore(3)).tree, {"w": np.ones(3)})


async def test_a_copy_that_went_on_is_not_mixed_with_steps_of_the_same_serials_or_later_ones(
    source: StoreConfig, tmp_path: Path
) -> None:
    copy = disk(tmp_path / "copy")
    await copy_steps(source, copy, [1, 2])
    async with CheckpointStore.open(copy) as store:
        await store.save(30, tree(30))  # serial 3, as step 3 of the source
    everything = files(tmp_path / "copy", "**/*")
    with pytest.raises(Conflict, match=r"holds another step 30 \(serial 3\), with the serial of step 3"):
        await copy_steps(source, copy)
    with pytest.raises(Conflict, match=r"has gone on by itself.*from serial 3, so step 4"):
        await copy_steps(source, copy, [4])
    assert files(tmp_path / "copy", "**/*") == everything


async def test_a_target_with_steps_in_ram_alone_is_refused(
    source: StoreConfig, tmp_path: Path, shared_memory: Path
) -> None:
    slow = folder(tmp_path / "target", retain="all", promote="never")
    target = config({"ram": ram(shared_memory), "disk": slow})
    async with CheckpointStore.open(target) as store:
        await store.save(7, tree(7))
    with pytest.raises(Conflict, match=r"RAM at .* has step 7 \(serial 1\)"):
        await copy_steps(source, target)
    async with CheckpointStore.open(target) as store:
        assert await store.all_steps() == (7,)


async def test_a_copy_evicts_nothing(source: StoreConfig, tmp_path: Path) -> None:
    await copy_steps(source, disk(tmp_path / "target"), [1, 2])
    used = sum(path.stat().st_size for path in (tmp_path / "target").glob("packs/*/*"))
    small = config({"disk": folder(tmp_path / "target", retain={"kind": "last_n", "n": 1}) | {"capacity": used + 4096}})
    with pytest.raises(NoSpace, match=r"a copy evicts nothing.*--steps"):
        await copy_steps(source, small)
    async with CheckpointStore.open(small, read_only=True) as store:
        assert [info.step for info in await store.steps()] == [1, 2]


async def test_a_step_begins_only_where_the_target_has_room_for_it(
    source: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await copy_steps(source, disk(tmp_path / "target"), [1])
    before = files(tmp_path / "target")

    async def little(store: PosixStore) -> int:
        return 1000

    monkeypatch.setattr(PosixStore, "free", little)
    with pytest.raises(NoSpace, match=r"target has 1000 B free; step 2 .* needs .*--steps"):
        await copy_steps(source, disk(tmp_path / "target"))
    assert files(tmp_path / "target") == before
    assert [each.written for each in await copy_steps(source, disk(tmp_path / "target"), [1])] == [0]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Corrupt("a link stands there"), TierUnavailable),
        (TierUnavailable("it is gone"), TierUnavailable),
        (NoSpace("it is full"), NoSpace),
    ],
)
async def test_an_error_of_the_target_is_told_as_such(
    source: StoreConfig, tmp_path: Path, faults: FaultyTiers, error: TieredCkptError, kind: type[TieredCkptError]
) -> None:
    target = config({"far": folder(tmp_path / "target", retain="all")})
    with pytest.raises(kind, match=f"the store that is copied to: {error}"):
        await copy_steps(source, target, progress=lambda _: faults["far"].fail("put", error, key="packs/*"))
    async with CheckpointStore.open(target, read_only=True) as store:
        assert [info.step for info in await store.steps()] == [1]


async def test_the_marker_of_a_target_that_compresses_says_so(source: StoreConfig, tmp_path: Path) -> None:
    await copy_steps(source, disk(tmp_path / "target", codec="small"))
    assert json.loads((tmp_path / "target" / "tieredckpt.json").read_text())["format_version"] == 2
    assert await content(disk(tmp_path / "target")) == await content(source)


async def test_what_cannot_be_copied_is_told(source: StoreConfig, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no store"):
        await copy_steps(disk(tmp_path / "none"), disk(tmp_path / "target"))
    assert not (tmp_path / "target").exists()
    with pytest.raises(NotFound, match="step 8"):
        await copy_steps(source, disk(tmp_path / "target"), [8])
    assert not (tmp_path / "target").exists()
    with pytest.raises(Invalid, match="both stores are at"):
        await copy_steps(source, disk(tmp_path / "source"))
    (tmp_path / "link").symlink_to(tmp_path / "source")
    with pytest.raises(Invalid, match="both stores are at"):
        await copy_steps(source, disk(tmp_path / "link"))
    for nested in (tmp_path / "source" / "copy", tmp_path / "link" / "copy", tmp_path):
        with pytest.raises(Invalid, match="lie in each other"):
            await copy_steps(source, disk(nested))
    assert not (tmp_path / "source" / "copy").exists()
    with pytest.raises(Invalid, match="RAM alone"):
        await copy_steps(source, {"store": {"name": "mine"}, "tiers": {"ram": {"kind": "ram"}}})


async def test_a_prefix_in_that_of_the_source_is_refused(source: StoreConfig, s3_place: Place) -> None:
    far = config({"s3": s3_place.tier(retain="all")})
    await copy_steps(source, far)
    for url in (f"{s3_place.url}/copy", s3_place.url.rpartition("/")[0]):
        with pytest.raises(Invalid, match="lie in each other"):
            await copy_steps(far, config({"s3": s3_place.tier(url=url)}))
    beside = config({"s3": s3_place.tier(url=f"{s3_place.url}-copy", retain="all")})
    await copy_steps(far, beside)
    assert await content(beside) == await content(far)


async def test_no_bucket_lies_in_a_folder(s3_place: Place) -> None:
    with pytest.raises(NotFound, match="there is no store"):
        await copy_steps(disk(Path("/")), config({"s3": s3_place.tier()}))
