"""Chunks go to a durable tier as they were saved: sealed, verified on the way, and in packs of bounded size."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scenes import CHUNK, assert_same, config, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.engine.promoting.copy_step import _GROWTH, Need, _packs
from tieredckpt.engine.promoting.pack_writer import Payload, seal_all, stored_size, tail_size
from tieredckpt.errors import Corrupt
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import CHECKSUM_SIZE
from tieredckpt.format.ocdbt import Extent


@given(
    nbytes=st.lists(st.integers(1, 5 << 12), max_size=30),
    first=st.integers(0, 20 << 12),
    limit=st.integers(0, 20 << 12),
    tails_limit=st.integers(0, 20 << 12),
)
def test_packs_hold_every_chunk_once_in_order_and_no_more_than_they_may(
    nbytes: list[int], first: int, limit: int, tails_limit: int
) -> None:
    sizes = {number.to_bytes(16, "big"): size for number, size in enumerate(nbytes)}
    needs = [(digest, ("key", number)) for number, digest in enumerate(sizes)]
    found = list(_packs(needs, sizes, first, limit, tails_limit))
    assert [need for pack in found for need in pack] == needs
    for number, pack in enumerate(found):
        room = min(limit, first * _GROWTH**number)
        assert len(pack) == 1 or fits(pack, sizes, room, tails_limit)
        if number + 1 < len(found):  # and none has room for what the next begins with
            assert not fits([*pack, found[number + 1][0]], sizes, room, tails_limit)


def fits(pack: list[tuple[bytes, Need]], sizes: dict[bytes, int], room: int, room_for_tails: int) -> bool:
    stored, tails = (sum(size(sizes[digest]) for digest, _ in pack) for size in (stored_size, tail_size))
    return stored <= room and tails <= room_for_tails


@given(changed=st.sets(st.integers(0, 19)), threads=st.integers(1, 4))
def test_every_chunk_that_changed_is_found_and_every_chunk_has_its_checksum_behind_it(
    changed: set[int], threads: int
) -> None:
    rng = np.random.default_rng(0)
    payloads = []
    for number in range(20):
        nbytes = 100 + 700 * number
        memory = rng.integers(0, 256, stored_size(nbytes), dtype=np.uint8)
        payloads.append(Payload(digest(memory[:nbytes]), nbytes, memory))
    for number in changed:
        payloads[number].memory[payloads[number].nbytes // 2] ^= 1
    with ThreadPoolExecutor(threads) as pool:
        found = asyncio.run(seal_all(payloads, pool, threads))
    assert {id(payload) for payload in found} == {id(payloads[number]) for number in changed}
    for payload in payloads:
        end = payload.nbytes + CHECKSUM_SIZE
        stored = int.from_bytes(payload.memory[payload.nbytes : end].tobytes(), "little")
        assert stored == crc32c(payload.memory[: payload.nbytes])


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
        (step,) = tier.held
        for key in ("w2", "w5"):
            where = (await tier.load_index(step)).arrays[key].chunks[1].where
            assert isinstance(where, Extent)
            tier.ram.slab.array[where.offset] ^= 1
        if not elsewhere:
            with pytest.raises(Corrupt, match=r"w2|w5"):
                await store.promote(1, "far")
            assert tuple(await store.where(1)) == ("ram",)
            return
        await store.promote(1, "far")
        await store.evict(1, "ram")
        await store.evict(1, "disk")
        restored = await store.restore()
        assert restored is not None
        assert set(restored.sources) == {"far"}
        assert_same(restored.tree, tree)
