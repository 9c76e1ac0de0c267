"""Chunks go to a durable tier as they were saved: sealed, verified on the way, and in packs of bounded size."""

from __future__ import annotations

import asyncio
import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cohort import cohort
from support.insight import tier_of
from support.limits import limit
from support.scenes import CHUNK, SOON, assert_same, config, files_below, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.engine.promoting.copy_step import _GROWTH, _packs
from tieredckpt.engine.promoting.pack_writer import Need, Payload, seal_all
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.tier import step_index
from tieredckpt.errors import Corrupt, NoSpace, TierUnavailable
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.ocdbt import Extent
from tieredckpt.testing.faulty import Faulty

PAGES = st.integers(0, 20).map(lambda pages: pages << 12)  # of numbers of bytes, nearly all examples would be tiny
CHUNKS = st.builds(lambda pages, less: (pages << 12) - less, st.integers(1, 5), st.integers(0, 5))


@given(
    nbytes=st.lists(CHUNKS, min_size=2, max_size=30), first=PAGES, limit=PAGES, room_limit=PAGES, behind=st.booleans()
)
def test_packs_hold_every_chunk_once_in_order_and_no_more_than_they_may(
    nbytes: list[int], first: int, limit: int, room_limit: int, behind: bool
) -> None:
    needs = [Need(number.to_bytes(16, "big"), "key", number, size) for number, size in enumerate(nbytes)]
    found = list(_packs(needs, first, limit, room_limit, CRC32C, behind=behind))
    assert [need for pack in found for need in pack] == needs
    for number, pack in enumerate(found):
        room = min(limit, first * _GROWTH**number)
        assert len(pack) == 1 or fits(pack, room, room_limit, behind=behind)
        if number + 1 < len(found):  # and none has room for what the next begins with
            assert not fits([*pack, found[number + 1][0]], room, room_limit, behind=behind)


def fits(pack: list[Need], most: int, room_limit: int, *, behind: bool) -> bool:
    stored = sum(CRC32C.stored_size(need.nbytes) for need in pack)
    return stored <= most and sum(CRC32C.room(need.nbytes, behind=behind) for need in pack) <= room_limit


@given(changed=st.sets(st.integers(0, 19)), threads=st.integers(1, 4))
def test_every_chunk_that_changed_is_found_and_every_chunk_has_its_checksum_behind_it(
    changed: set[int], threads: int
) -> None:
    rng = np.random.default_rng(0)
    payloads = []
    for number in range(20):
        nbytes = 100 + 700 * number
        memory = rng.integers(0, 256, CRC32C.stored_size(nbytes), dtype=np.uint8)
        payloads.append(Payload(digest(memory[:nbytes]), nbytes, 1, memory))
    for number in changed:
        payloads[number].memory[payloads[number].nbytes // 2] ^= 1
    with ThreadPoolExecutor(threads) as pool:
        sealed = asyncio.run(seal_all(payloads, CRC32C, pool, threads))
    assert {number for number, encoded in enumerate(sealed) if encoded is None} == changed
    for payload in payloads:
        end = payload.nbytes + CRC32C.overhead
        stored = int.from_bytes(payload.memory[payload.nbytes : end].tobytes(), "little")
        assert stored == crc32c(payload.memory[: payload.nbytes])


async def borrowed(scratch: Scratch) -> None:
    """Borrow all memory, and give it back."""
    async with scratch.lend(scratch.capacity):
        pass


@pytest.mark.parametrize("elsewhere", [True, False], ids=["intact elsewhere", "intact nowhere"])
async def test_a_chunk_that_was_damaged_in_ram_is_never_promoted_as_it_is(
    shared_memory: Path, tmp_path: Path, elsewhere: bool
) -> None:
    tree = {f"w{i}": np.random.default_rng(i).integers(0, 256, 2 * CHUNK, dtype=np.uint8) for i in range(8)}
    disk, far = (folder(tmp_path / name, promote="never") for name in ("disk", "far"))
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk, "far": far})) as store:
        await store.save(1, tree)
        if elsewhere:
            await store.promote(1, "disk")
        (tier, *_) = store._life.engine.state.tiers
        assert tier.ram is not None
        (step,) = tier.steps.held
        for key in ("w2", "w5"):
            where = (await step_index.load(tier, step)).arrays[key].chunks[1].where
            assert isinstance(where, Extent)
            tier.ram.slab.array[where.offset] ^= 1
        if not elsewhere:
            with pytest.raises(Corrupt, match=r"w2|w5"):
                await store.promote(1, "far")
            assert tuple(await store.where(1)) == ("ram",)
            async with asyncio.timeout(SOON):  # all memory that was lent for the pack is given back
                await store._life.loop.call(borrowed(store._life.engine.state.scratch))
            return
        await store.promote(1, "far")
        await store.save(2, tree)
        restored = await store.restore()
        assert restored is not None
        assert set(restored.sources) == {"ram"}, "a later save refers to the damaged bytes"
        await store.evict(1, "ram")
        await store.evict(1, "disk")
        restored = await store.restore(1)
        assert restored is not None
        assert set(restored.sources) == {"far"}
        assert_same(restored.tree, tree)


async def test_packs_before_a_failure_are_referred_to_by_the_next_try(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, pack_size=4 * CHUNK)
    tree = {f"w{i}": np.random.default_rng(i).integers(0, 256, 2 * CHUNK, dtype=np.uint8) for i in range(8)}
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", promote="never")}
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, tree)
        disk = tier_of(store, "disk")
        disk.blobs = faulty = Faulty(disk.store)
        faulty.fail("put", NoSpace("full"), key="packs/*", nth=4)
        with pytest.raises(NoSpace):
            await store.promote(1, "disk")
        before = dict(disk.packs.sizes)
        assert len(before) >= 2
        await store.promote(1, "disk")
        assert before.items() <= disk.packs.sizes.items()
        assert sum(at.length for at in disk.packs.index.values()) == 16 * (CHUNK + CRC32C.overhead)
        assert {at.path for at in disk.packs.index.values()} == disk.packs.sizes.keys()
        # A put that was cancelled by the failure may have stored its pack; that one is collected later.
        stored = {path.stem for path in files_below(tmp_path / "disk" / "packs") if path.suffix == ".pack"}
        assert {key.rpartition("/")[2].removesuffix(".pack") for key in disk.packs.sizes} <= stored
        assert len(stored) <= len(disk.packs.sizes) + 1


async def test_why_a_pack_could_not_be_written_is_told_with_the_error_of_the_system(
    shared_memory: Path, tmp_path: Path
) -> None:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", promote="never")}
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, {"w": np.zeros(CHUNK, dtype=np.uint8)})
        disk = tier_of(store, "disk")
        disk.blobs = faulty = Faulty(disk.store)
        failed = TierUnavailable("no answer")
        failed.__cause__ = OSError(errno.EIO, "input/output error")
        faulty.fail("put", failed, key="packs/*")
        with pytest.raises(TierUnavailable) as raised:
            await store.promote(1, "disk")
        assert raised.value is failed
        assert isinstance(failed.__cause__, OSError)


async def test_a_rank_that_follows_remembers_no_packs(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(2, shared_memory, tmp_path / "disk") as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        leader, follower = (tier_of(ranks[rank], "disk") for rank in (0, 1))
        assert len(leader.packs.sizes) >= 2
        assert {at.path for at in leader.packs.index.values()} == leader.packs.sizes.keys()
        assert not any((follower.packs.sizes, follower.packs.index, follower.packs.orphans))
