"""A store that somebody made up is refused or read as far as it is sound; it costs no memory, time or other files."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from reliability.forging import (
    BTREE,
    SERIAL,
    STEP,
    as_json,
    entries_of,
    forged_record,
    marker_json,
    resealed,
    sample_arrays,
    tampered_steps,
    tree_of,
)
from support.scenes import CHUNK, assert_restored, assert_same, config, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.errors import Corrupt, Invalid, TieredCkptError
from tieredckpt.format import layout, ocdbt, pack
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.grid import Grid
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepRecord, encode_step
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.structure import ArrayNode, DictNode

MIB = 1 << 20
GIB = 1 << 30
PATTERN = np.random.default_rng(5).integers(0, 255, 8192, dtype=np.uint8)


@contextmanager
def resident(at_most: int) -> Iterator[None]:
    """Fail if the process has at any moment of the block more memory than that beyond what it had."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now; see proc_pid_clear_refs(5)
    before = _peak()
    yield
    assert _peak() - before < at_most


def _peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def write(root: Path, key: str, data: bytes) -> Path:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def plant(root: Path, files: ocdbt.Index | None = None, *, btree: str = BTREE) -> Path:
    """A tier of the forged store: its marker, a pack with the three chunks of the sample, and a step."""
    write(root, layout.MARKER, as_json(marker_json()))
    plant_pack(root, "ab" * 16, [PATTERN.tobytes()] * 3)
    if files is not None:
        write(root, btree, files.btree)
        write(root, str(Path(btree).parent / "manifest.ocdbt"), files.manifest)
    return root


def plant_pack(root: Path, name: str, chunks: list[bytes], digests: list[bytes] | None = None) -> None:
    data = b"".join((chunk + bytes(4)).ljust(12288, b"\0") for chunk in chunks)
    entries = [
        pack.PackEntry(digests[i] if digests else digest(chunk), 12288 * i, len(chunk) + 4)
        for i, chunk in enumerate(chunks)
    ]
    write(root, layout.pack_key(name), data + pack.encode_footer(entries, len(data)))


def sound() -> tuple[StepRecord, dict[str, ArrayIndex]]:
    """The sample, whose stored chunks are those that `plant` puts into its pack."""
    arrays = sample_arrays()
    chunks = [Chunk(digest(PATTERN), chunk.where) for chunk in arrays["params/w"].chunks]
    arrays["params/w"] = ArrayIndex(arrays["params/w"].grid, arrays["params/w"].dtype, chunks)
    return forged_record(tree_of(arrays), nbytes=sum(array.grid.nbytes for array in arrays.values())), arrays


def step_of(arrays: dict[str, ArrayIndex], **changes: Any) -> ocdbt.Index:
    record = msgspec.structs.replace(sound()[0], structure=tree_of(arrays), **changes)
    return encode_step(record, arrays, btree_path=BTREE, encoding=CRC32C)


def bytes_array(shape: tuple[int, ...], cell: tuple[int, ...], where: list[Extent]) -> ocdbt.Index:
    """A step of one array ``w`` of which every chunk claims to be the sample's."""
    arrays = {"w": ArrayIndex(Grid(shape, cell, 1), np.dtype(np.uint8), [Chunk(digest(PATTERN), at) for at in where])}
    tree = DictNode(["w"], [ArrayNode("w", "uint8", shape, "numpy")])
    return encode_step(forged_record(tree), arrays, btree_path=BTREE, encoding=CRC32C)


@asynccontextmanager
async def opened(*roots: Path, **settings: Any) -> AsyncIterator[CheckpointStore]:
    tiers = {f"tier{i}": folder(root, retain="all") for i, root in enumerate(roots)}
    async with CheckpointStore.open(config(tiers, **settings)) as store:
        yield store


async def test_the_store_of_these_tests_is_sound(tmp_path: Path) -> None:
    record, arrays = sound()
    plant(tmp_path / "a", encode_step(record, arrays, btree_path=BTREE, encoding=CRC32C))
    async with opened(tmp_path / "a") as store:
        found = await store.restore()
        assert found is not None
        assert_same(found.tree["params"]["w"], np.stack([PATTERN] * 3))
        assert all(each.intact for each in await store.verify())


# -- bombs and places that are none -----------------------------------------------------------------------


async def test_an_array_of_terabytes_that_stands_on_one_chunk_is_refused_with_its_size(tmp_path: Path) -> None:
    one = Extent(layout.pack_key("ab" * 16), 0, GIB + 4)
    plant(tmp_path / "a", bytes_array((4096, GIB), (1, GIB), [one] * 4096))
    async with opened(tmp_path / "a") as store:
        assert [info.step for info in await store.steps()] == [STEP]
        with resident(256 * MIB), pytest.raises(Invalid, match=r"take 4 TiB, and .* restore a part of it"):
            await store.restore()


@pytest.mark.parametrize("offset", [12288 * 3, 12288 * 1000, 1 << 40, (1 << 62)])
async def test_extents_outside_of_their_pack_lose_their_array_and_no_other(tmp_path: Path, offset: int) -> None:
    record, arrays = sound()
    chunks: Any = arrays["params/w"].chunks
    where = chunks[1].where
    assert isinstance(where, Extent)
    chunks[1] = Chunk(b"\1" * 16, Extent(where.path, offset, where.length))
    plant(tmp_path / "a", encode_step(record, arrays, btree_path=BTREE, encoding=CRC32C))
    async with opened(tmp_path / "a") as store:
        with resident(256 * MIB), pytest.raises(Corrupt, match=r"array 'params/w' of step 20 .* is lost"):
            await store.restore()
        rest = await store.restore(keys=["small", "scalar", "epoch"])
        assert rest is not None
        assert_same(rest.tree["small"], np.arange(4, dtype=np.float32))
        (verified,) = await store.verify(repair=True)
        assert verified.damaged == ("params/w",)


async def test_extents_that_overlap_are_read_as_their_digests_say(tmp_path: Path) -> None:
    record, arrays = sound()
    path = layout.pack_key("ab" * 16)
    chunks: Any = arrays["params/w"].chunks
    chunks[1] = Chunk(digest(PATTERN), Extent(path, 0, 8196))
    chunks[2] = Chunk(digest(PATTERN), Extent(path, 4096, 8196))
    plant(tmp_path / "a", encode_step(record, arrays, btree_path=BTREE, encoding=CRC32C))
    async with opened(tmp_path / "a") as store:
        found = await store.restore()  # the pack has the chunk elsewhere too
        assert found is not None
        assert_same(found.tree["params"]["w"], np.stack([PATTERN] * 3))


async def test_bytes_in_the_index_that_are_not_what_their_digest_says_come_from_another_tier(tmp_path: Path) -> None:
    record, arrays = sound()
    (chunk,) = arrays["small"].chunks
    assert isinstance(chunk.where, bytes)
    forged = {
        **arrays,
        "small": ArrayIndex(arrays["small"].grid, arrays["small"].dtype, [Chunk(chunk.digest, bytes(16))]),
    }
    plant(tmp_path / "a", encode_step(record, forged, btree_path=BTREE, encoding=CRC32C))
    async with opened(tmp_path / "a") as store:
        with pytest.raises(Corrupt, match=r"array 'small' of step 20 .* is lost"):
            await store.restore()
        (verified,) = await store.verify(repair=True)
        assert (verified.damaged, verified.lost, verified.repaired) == (("small",), ("small",), False)
    plant(tmp_path / "b", encode_step(record, arrays, btree_path=BTREE, encoding=CRC32C))
    async with opened(tmp_path / "a", tmp_path / "b") as store:
        (verified,) = await store.verify(tier="tier0", repair=True)
        assert (verified.damaged, verified.lost, verified.repaired) == (("small",), (), True)
    async with opened(tmp_path / "a") as store:
        found = await store.restore()
        assert found is not None
        assert_same(found.tree["small"], np.arange(4, dtype=np.float32))
    plant(tmp_path / "a", encode_step(record, forged, btree_path=BTREE, encoding=CRC32C))
    async with opened(tmp_path / "a", tmp_path / "b") as store:
        found = await store.restore()
        assert found is not None
        assert found.sources["tier1"] == 16
        await store.flush()
        assert all(each.intact for each in await store.scrub())


async def test_a_pack_of_a_sparse_terabyte_costs_no_memory(tmp_path: Path) -> None:
    plant(tmp_path / "a", encode_step(*sound(), btree_path=BTREE, encoding=CRC32C))
    footer = pack.encode_footer([pack.PackEntry(bytes(16), 0, 4096)], 4096)
    path = write(tmp_path / "a", layout.pack_key("cd" * 16), b"")
    count, end = 1 << 33, 1 << 39
    trailer = footer[-40:-24] + end.to_bytes(8, "little") + count.to_bytes(8, "little") + footer[-8:]
    os.truncate(path, end + -(-(count * 32 + 40) // 4096) * 4096)
    with path.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(trailer)
    with resident(256 * MIB):
        async with opened(tmp_path / "a") as store:
            assert await store.restore() is not None


async def test_a_pack_that_lists_a_chunk_with_another_length_is_not_built_on(tmp_path: Path) -> None:
    data = np.random.default_rng(3).integers(0, 255, CHUNK, dtype=np.uint8)
    plant(tmp_path / "a")
    plant_pack(tmp_path / "a", "ef" * 16, [b"too short"], [digest(data)])
    async with opened(tmp_path / "a") as store:
        await store.save(30, {"x": np.concatenate([data, data[::-1]])})
        await store.flush()
    async with opened(tmp_path / "a") as store:
        found = await store.restore()
        assert found is not None
        assert found.tree["x"].tobytes() == data.tobytes() + data[::-1].tobytes()


def told_otherwise(other: str) -> dict[str, ArrayIndex]:
    """The arrays of the sample, but for what a tier may tell differently of ``params/w``."""
    _, arrays = sound()
    chunks = arrays["params/w"].chunks
    inline = Chunk(digest(PATTERN), b"none of it")
    forged = {
        "a shape": ArrayIndex(Grid((3, 2, 4096), (1, 2, 4096), 1), np.dtype(np.uint8), chunks),
        "a dtype": ArrayIndex(Grid((3, 8192), (1, 8192), 1), np.dtype(np.int8), chunks),
        "fewer chunks": ArrayIndex(Grid((1, 8192), (1, 8192), 1), np.dtype(np.uint8), chunks[:1]),
        "shorter chunks": ArrayIndex(Grid((3, 10), (1, 10), 1), np.dtype(np.uint8), [inline] * 3),
    }
    if other in forged:
        return {**arrays, "params/w": forged[other]}
    return {key: array for key, array in arrays.items() if key != "params/w"}


OTHERWISE = ["a shape", "a dtype", "fewer chunks", "shorter chunks", "no such array"]


@pytest.mark.parametrize("how", ["like", "into", "plain"])
@pytest.mark.parametrize("other", OTHERWISE)
async def test_a_record_of_one_tier_is_not_mixed_with_the_arrays_of_another(
    tmp_path: Path, other: str, how: str
) -> None:
    """The record is that of the nearest tier, whose index cannot be read as a whole."""
    entries = entries_of(encode_step(*sound(), btree_path=BTREE, encoding=CRC32C))
    del entries[b"small/c/0"], entries[b"small/zarr.json"]
    plant(tmp_path / "a", resealed(entries))
    arrays = told_otherwise(other)
    plant(tmp_path / "b", encode_step(forged_record(tree_of(arrays)), arrays, btree_path=BTREE, encoding=CRC32C))
    target = {"params": {"w": np.zeros((3, 8192), np.uint8)}}
    async with opened(tmp_path / "a", tmp_path / "b") as store:
        with pytest.raises(Corrupt, match="params/w"):
            await store.restore(STEP, keys=["params"], **({} if how == "plain" else {how: target}))
    assert not target["params"]["w"].any()


@pytest.mark.parametrize("other", OTHERWISE)
async def test_a_chunk_is_not_taken_from_a_tier_that_tells_otherwise_of_its_array(tmp_path: Path, other: str) -> None:
    root = plant(tmp_path / "a", encode_step(*sound(), btree_path=BTREE, encoding=CRC32C))
    arrays = told_otherwise(other)
    plant(tmp_path / "b", encode_step(forged_record(tree_of(arrays)), arrays, btree_path=BTREE, encoding=CRC32C))
    for pack_file in (*root.rglob("*.pack"), *(tmp_path / "b").rglob("*.pack")):
        os.truncate(pack_file, 4096)
    async with opened(tmp_path / "a", tmp_path / "b") as store:
        with pytest.raises(Corrupt, match=r"array 'params/w' of step 20 .* is lost"):
            await store.restore(STEP)


# -- files that are none, and numbers that go on ----------------------------------------------------------


@pytest.mark.parametrize("name", ["btree", "manifest.ocdbt", "pack", "marker", "lease"])
async def test_a_pipe_in_the_place_of_a_file_hangs_nobody(tmp_path: Path, name: str) -> None:
    root = plant(tmp_path / "a", encode_step(*sound(), btree_path=BTREE, encoding=CRC32C))
    path = {
        "btree": root / BTREE,
        "manifest.ocdbt": root / layout.manifest_key(STEP, SERIAL),
        "pack": root / layout.pack_key("ab" * 16),
        "marker": root / layout.MARKER,
        "lease": root / "leases" / ("0" * 16),
    }[name]
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    async with asyncio.timeout(20):
        with suppress(Corrupt):
            async with opened(root) as store:
                with suppress(Corrupt):
                    await store.restore()
                await store.save(50, {"x": np.arange(3)})


@pytest.mark.parametrize("number", [2**63, 10**19, 10**45])
@pytest.mark.parametrize("what", ["step", "serial"])
async def test_folders_with_absurd_numbers_do_not_keep_a_store_from_saving(
    tmp_path: Path, number: int, what: str
) -> None:
    root = plant(tmp_path / "a")
    name = f"steps/{number}-000004/" if what == "step" else f"steps/0000000004-{number}/"
    write(root, f"{name}manifest.ocdbt", b"garbage")
    async with opened(root) as store:
        await store.save(5, {"x": np.arange(3)})
    async with opened(root) as store:
        assert [(info.step, info.serial) for info in await store.steps()] == [(5, 1)]


async def test_a_step_with_the_largest_serial_is_restored_and_refuses_the_next_save_in_plain_words(
    tmp_path: Path,
) -> None:
    top = layout.MAX_NUMBER
    btree = layout.btree_key(STEP, top)
    record, arrays = sound()
    record = msgspec.structs.replace(record, serial=top, line=((top, top),))
    plant(tmp_path / "a", encode_step(record, arrays, btree_path=btree, encoding=CRC32C), btree=btree)
    async with opened(tmp_path / "a") as store:
        assert await store.restore() is not None
        with pytest.raises(Invalid, match=r"neither may exceed 2\*\*63 - 1"):
            await store.save(21, {"x": np.arange(3)})


async def test_a_step_number_that_no_format_holds_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as store:
        with pytest.raises(Invalid):
            await store.save(2**63, {"x": np.arange(3)})
        await store.save(2**63 - 1, {"x": np.arange(3)})


@pytest.mark.parametrize(
    "lease",
    [
        b"[" * 4000,
        b'{"host":"a","machine":"b","process":1,"process_started":"1","taken_at":1e300,"renewed_at":1e300}',
        b'{"host":"a","machine":"b","process":%d,"process_started":"1","taken_at":1,"renewed_at":1}' % 10**30,
        bytes(100_000),
    ],
    ids=["deep", "for ever", "no process", "large"],
)
async def test_a_made_up_lease_keeps_nobody_out(tmp_path: Path, lease: bytes) -> None:
    root = plant(tmp_path / "a")
    write(root, "leases/0000000000000000", lease)
    async with opened(root) as store:
        await store.save(1, {"x": np.arange(3)})


async def test_a_tier_whose_marker_is_no_marker_says_so(tmp_path: Path) -> None:
    root = plant(tmp_path / "a", encode_step(*sound(), btree_path=BTREE, encoding=CRC32C))
    for data in (b"[" * 60_000, as_json({**marker_json(), "format_version": 4}), bytes(MIB)):
        write(root, layout.MARKER, data)
        (root / layout.manifest_key(STEP, SERIAL)).unlink(missing_ok=True)
        with pytest.raises(Corrupt):
            async with opened(root):
                pass
        assert (root / layout.MARKER).read_bytes() == data


# -- links ------------------------------------------------------------------------------------------------

LINKS = [
    "steps",
    "packs",
    "leases",
    "packs/ab",
    "steps/0000000020-000003",
    layout.MARKER,
    BTREE,
    layout.manifest_key(STEP, SERIAL),
    layout.pack_key("ab" * 16),
]


@pytest.mark.parametrize("name", LINKS)
async def test_nothing_is_read_written_or_deleted_where_a_link_leads(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "new_pack_id", lambda: "ef" + secrets.token_hex(15))  # none goes where a link is
    root = plant(tmp_path / "a", encode_step(*sound(), btree_path=BTREE, encoding=CRC32C))
    outside = tmp_path / "outside"
    write(root, "leases/0000000000000000", b"{}")
    (root / name).rename(outside)
    (root / name).symlink_to(outside)
    if outside.is_dir():
        for key in ("0000000001-000001/btree", "cd/" + "cd" * 16 + ".pack", ".%s.tmp~" % ("0" * 32)):
            old = write(outside, key, b"mine")
            os.utime(old, (1, 1))
    before = snapshot(outside)
    async with opened(root, tmp_path / "b") as store:
        with suppress(TieredCkptError):
            found = await store.restore()
            assert found is None or name not in (BTREE, layout.manifest_key(STEP, SERIAL))
        for step in (30, 31, 32):
            await store.save(step, {"x": np.random.default_rng(step).random(9000)})
        for work in (store.collect, store.flush, lambda: store.evict(STEP, "tier0")):
            with suppress(TieredCkptError):
                await work()
        with suppress(TieredCkptError):
            await store.verify(STEP, repair=True)
        assert await store.restore(32) is not None
    assert snapshot(outside) == before


def snapshot(path: Path) -> dict[str, tuple[bytes, int]]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    folders = [] if path.is_file() else [folder for folder in path.rglob("*") if folder.is_dir()]
    found = {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}
    return found | {str(folder): (b"", folder.stat().st_mtime_ns) for folder in folders}


async def test_what_a_store_makes_is_its_users_alone(tmp_path: Path, shared_memory: Path) -> None:
    before = os.umask(0)
    try:
        tiers = {"ram": ram(shared_memory, on_close="keep"), "disk": folder(tmp_path / "disk")}
        async with CheckpointStore.open(config(tiers)) as store:
            await store.save(1, {"x": np.random.default_rng(0).random(9000)})
            await store.flush()
            made = [*(tmp_path / "disk").rglob("*"), *(shared_memory / "of-test" / "ram").rglob("*")]
            made = [path for path in made if not path.name.endswith("~")]  # as of a lease that is being renewed
            assert len(made) > 10
            for path in (tmp_path / "disk", shared_memory / "of-test" / "ram", *made):
                assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(before)


# -- anything -------------------------------------------------------------------------------------------


async def lead_a_life(root: Path) -> None:
    """Call every method of a store; each may be refused, and nothing else may happen."""
    with suppress(TieredCkptError):
        async with opened(root, root.parent / "b") as store:
            for info in await store.steps():
                with suppress(TieredCkptError):
                    await store.describe(info.step, serial=info.serial)
            await store.tier_infos()
            for work in (
                store.restore,
                lambda: store.verify(STEP, repair=True),
                lambda: store.promote(STEP, "tier1"),
                lambda: store.save(STEP + 1, {"x": np.arange(20_000)}),
                store.collect,
                store.flush,
            ):
                with suppress(TieredCkptError):
                    await work()
            assert_restored(await store.restore(STEP + 1), {"x": np.arange(20_000)})


def any_step(files: ocdbt.Index | None) -> None:
    place = Path(tempfile.mkdtemp(prefix="tieredckpt-hostile-"))
    try:
        asyncio.run(lead_a_life(plant(place / "a", files)))
    finally:
        shutil.rmtree(place)


@settings(max_examples=25)
@given(files=tampered_steps())
def test_a_store_lives_with_any_step_that_somebody_planted(files: ocdbt.Index | None) -> None:
    any_step(files)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=500)
@given(files=tampered_steps())
def test_a_store_lives_for_a_long_time_with_any_step_that_somebody_planted(files: ocdbt.Index | None) -> None:
    any_step(files)
