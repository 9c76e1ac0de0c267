"""A tier may store chunks in an encoding whose sizes vary: everything that is done to steps works as it is.

The encoding of these tests is zarr's ``gzip``, which stock readers know, with ``crc32c`` behind it.
"""

from __future__ import annotations

import zlib
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from support.cohort import assert_whole, blank, cohort, part
from support.insight import extents, flip_chunk, tier_of
from support.scenes import CHUNK, assert_same, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.engine.tier.packs import Packs
from tieredckpt.errors import Corrupt
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import copy_start_and_digest, digest_array
from tieredckpt.format.encoding import ENCODINGS, Bytes, Encoded, Encoding
from tieredckpt.format.layout import aligned

_GZIP = 31  # of zlib: with the header of gzip


def _encode(memory: Bytes, nbytes: int, itemsize: int, room: Bytes | None) -> Encoded:
    assert room is not None
    packer = zlib.compressobj(1, wbits=_GZIP)
    frame = packer.compress(memory[:nbytes].tobytes()) + packer.flush()
    stored = frame + crc32c(frame).to_bytes(4, "little")
    room[: len(stored)] = np.frombuffer(stored, np.uint8)
    return Encoded(digest_array(memory[:nbytes]), len(stored), [room[: aligned(len(stored))]])


def _decode(frame: Bytes, nbytes: int, into: Bytes) -> bytes:
    try:
        chunk = zlib.decompress(frame.tobytes(), wbits=_GZIP)
    except zlib.error as error:
        raise Corrupt(f"no frame of gzip: {error}") from error
    if len(chunk) != nbytes:
        raise Corrupt(f"a chunk of {nbytes} bytes has a frame of {len(chunk)}")
    return copy_start_and_digest(np.frombuffer(chunk, np.uint8), into)


DEFLATED = Encoding(
    "deflated",
    raw=False,
    overhead=200,
    checksum_size=4,
    codecs=lambda _: [{"name": "gzip", "configuration": {"level": 1}}, {"name": "crc32c"}],
    encode=_encode,
    decode=_decode,
)


@pytest.fixture(autouse=True)
def deflated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tier below RAM stores chunks so."""
    monkeypatch.setitem(ENCODINGS, DEFLATED.name, DEFLATED)
    monkeypatch.setattr(Packs, "__init__", partialmethod(Packs.__init__, encoding=DEFLATED))


def soft(seed: int = 0) -> dict[str, Any]:
    """A tree of which some can be compressed, and some cannot; some arrays of several chunks, some in the index."""
    return tree(seed) | {"soft": np.arange(3 * CHUNK // 8) // (seed + 7), "flags": np.zeros(100, bool)}


@pytest.fixture
def tiers(shared_memory: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "ram": ram(shared_memory),
        "disk": folder(tmp_path / "disk", retain="all"),
        "far": {"kind": "kvstore", "spec": {"driver": "file", "path": f"{tmp_path}/far/"}, "retain": "all"},
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
async def test_damage_is_found_restored_around_and_mended(tiers: dict[str, Any], rotten: str, key: str) -> None:
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, soft())
        await store.flush()
        await store.evict(1, "ram")
        await flip_chunk(store, rotten, 1, key, 1)
        restored = await store.restore(into=soft(9))
        assert restored is not None
        assert_same(restored.tree, soft())
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
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree, soft() | {"epoch": 2})


async def test_what_ram_cannot_hold_is_streamed(tiers: dict[str, Any]) -> None:
    tiers["ram"]["capacity"] = 5 * 2 * CHUNK
    async with CheckpointStore.open(config(tiers)) as store:
        for step in (1, 2):
            await store.save(step, soft(1) | {"epoch": step})
        await store.flush()
        assert await store.where(2) == ("disk", "far")
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree, soft(1) | {"epoch": 2})


@pytest.mark.parametrize("capacity", ["16 MiB", 10 * 2 * CHUNK], ids=["promoted", "streamed"])
async def test_ranks_write_and_restore_together(shared_memory: Path, tmp_path: Path, capacity: Any) -> None:
    disk, settings = tmp_path / "disk", {"capacity": capacity, "on_close": "release"}
    async with cohort(2, shared_memory, disk, ram_settings=settings) as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step, 5), "disk")
        assert (await ranks[0].where(2) == ("disk",)) is (capacity != "16 MiB")
        for found in await ranks.restored():
            assert_whole(found, 5)
    async with cohort(2, shared_memory, disk, ram_settings=settings) as ranks:
        for rank, restored in enumerate(await ranks.all(lambda store, rank: store.restore(into=blank(rank, 2)))):
            assert restored is not None
            np.testing.assert_array_equal(restored.tree["w"].array, part(5, rank, 2)["w"].array)


async def test_a_frame_that_does_not_decode_is_one_chunk_that_is_damaged(tiers: dict[str, Any], tmp_path: Path) -> None:
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
        assert restored is not None
        assert_same(restored.tree, soft())
        assert restored.sources["far"] == CHUNK
