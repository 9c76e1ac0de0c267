"""Rank 0 commits what very many ranks wrote, from their parts as files, and the store opens with it.

The limits hold for a machine that has nothing else to do; so that they do on a busy one, what is asserted is
processor time. Nothing here waits for another process or a device for long.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from support.records import first_record
from support.scenes import config, folder

from tieredckpt import CheckpointStore
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.engine.ranks.commit.merged import MergedStep, placed, without_places
from tieredckpt.engine.ranks.commit.parts import extents_of, holders, merge_parts, share_out
from tieredckpt.format import layout, pack
from tieredckpt.format.boxes import Box
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.grid import plan_block
from tieredckpt.format.manifest import StepIndex, encode_step
from tieredckpt.format.marker import StoreMarker, encode_marker
from tieredckpt.format.merging import merge
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.part import Part, PartArray, decode_part, encode_part
from tieredckpt.format.structure import ArrayNode, DictNode

T = TypeVar("T")

COLUMNS = 1024
CHUNK = COLUMNS * 4
STORED = 2 * layout.ALIGNMENT
"""A chunk with its checksum, and zeros up to the next page."""
STEP, SERIAL = 1, 1


def row(rank: int) -> NDArray[np.float32]:
    return np.full(COLUMNS, rank + 1, np.float32)


def write_rank(root: Path, rank: int, ranks: int, structure: DictNode, store: str) -> None:
    """The pack and the part of a rank, which has a row of every array; of the first array alone there are bytes.

    The rest of the pack is a hole: what is tested is what is said about chunks, and not what is in them.
    """
    path = layout.pack_key(f"{rank % 256:02x}{rank:030x}")
    shape = (ranks, COLUMNS)
    box = Box((rank, 0), (1, COLUMNS))
    grid = plan_block(box, shape, 4, 16 << 20)
    names = [str(name) for name in structure.keys]
    raw = row(rank).tobytes()
    digests = [digest(raw), *(os.urandom(16) for _ in names[1:])]
    extents = [Extent(path, STORED * place, CHUNK + 4) for place in range(len(names))]
    arrays = {
        layout.block_key(name, box.offset): PartArray(grid, np.dtype("<f4"), [chunk])
        for name, chunk in zip(names, zip(digests, extents, strict=True), strict=True)
    }
    record = first_record(
        structure,
        store=store,
        step=STEP,
        serial=SERIAL,
        line=((SERIAL, SERIAL),),
        nbytes=CHUNK * len(names),
        rank=rank,
        ranks=ranks,
    )
    end = STORED * len(names)
    entries = [
        pack.PackEntry(name, extent.offset, extent.length) for name, extent in zip(digests, extents, strict=True)
    ]
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    with (root / path).open("wb") as file:
        file.write(raw + crc32c(raw).to_bytes(4, "little"))
        file.seek(end)
        file.write(pack.encode_footer(entries, end))
    part = root / layout.part_key(STEP, SERIAL, rank)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(encode_part(Part(record, arrays)))


def parts(root: Path, ranks: int) -> Iterator[Part]:
    for rank in range(ranks):
        name = layout.part_key(STEP, SERIAL, rank)
        yield decode_part((root / name).read_bytes(), name)


async def commit(root: Path, ranks: int) -> None:
    """What rank 0 does once all parts are there."""
    whole = merge(parts(root, ranks))
    btree_key = layout.btree_key(STEP, SERIAL)
    files = encode_step(whole.record, whole.arrays, btree_path=btree_key, encoding=CRC32C)
    store = PosixStore(root)
    try:
        await store.put(btree_key, [files.btree])
        await store.put(layout.manifest_key(STEP, SERIAL), [files.manifest])
        for rank in range(ranks):
            await store.delete(layout.part_key(STEP, SERIAL, rank))
    finally:
        await store.close()


def resident(what: str) -> int:
    """Bytes of memory that this process has (``VmRSS``), or has had at most (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what + ":"))


@pytest.mark.benchmark
@pytest.mark.parametrize(
    ("ranks", "arrays"),
    [(64, 100), pytest.param(1024, 977, marks=pytest.mark.slow)],
    ids=["6,400 chunks of 64 ranks", "1,000,448 chunks of 1,024 ranks"],
)
def test_the_parts_of_very_many_ranks_are_committed_and_opened_in_seconds(
    tmp_path: Path, ranks: int, arrays: int
) -> None:
    names: list[Any] = [f"w{number:04d}" for number in range(arrays)]
    structure = DictNode(names, [ArrayNode(name, "float32", (ranks, COLUMNS), "numpy") for name in names])
    store = str(uuid.uuid4())
    root = tmp_path / "disk"
    root.mkdir()
    for rank in range(ranks):
        write_rank(root, rank, ranks, structure, store)
    (root / layout.MARKER).write_bytes(encode_marker(StoreMarker(store=store)))

    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began, worked = time.perf_counter(), time.process_time()
    asyncio.run(commit(root, ranks))
    waited, committed = time.perf_counter() - began, time.process_time() - worked
    growth = resident("VmHWM") - before

    gc.collect()
    opened = asyncio.run(assert_opens(root, ranks, names))
    sys.stdout.write(
        f"\n{ranks * arrays} chunks of {ranks} ranks: committed in {committed:.1f} s of work ({waited:.1f} s "
        f"by the clock) and {growth / 2**20:.0f} MiB, opened in {opened:.1f} s of work\n"
    )
    assert committed < 30
    assert growth < 1 << 30
    assert opened < 3
    assert not list(root.rglob("parts/*"))


@pytest.mark.benchmark
@pytest.mark.parametrize(
    ("ranks", "arrays"),
    [(64, 100), pytest.param(256, 500, marks=pytest.mark.slow)],
    ids=["6,400 chunks of 64 ranks", "128,000 chunks of 256 ranks"],
)
def test_a_promotion_costs_rank_0_no_second_merge(tmp_path: Path, ranks: int, arrays: int) -> None:
    """What rank 0 computes for a step while it trains: once when the ranks agree on it, and for each tier."""
    names: list[Any] = [f"w{number:04d}" for number in range(arrays)]
    structure = DictNode(names, [ArrayNode(name, "float32", (ranks, COLUMNS), "numpy") for name in names])
    store = str(uuid.uuid4())
    for rank in range(ranks):
        write_rank(tmp_path, rank, ranks, structure, store)
    said = {rank: (tmp_path / layout.part_key(STEP, SERIAL, rank)).read_bytes() for rank in range(ranks)}

    def agree() -> MergedStep:
        return without_places(merge_parts(said))

    def promote(whole: MergedStep) -> StepIndex:
        having, sizes = holders(said, lambda *_: False)
        share_out(having, sizes)
        index = placed(whole, extents_of(said), {}, CRC32C)
        encode_step(index.record, index.arrays, btree_path=layout.btree_key(STEP, SERIAL), encoding=CRC32C)
        return index

    agreed, whole = least_work(agree)
    promoted, index = least_work(lambda: promote(whole))
    sys.stdout.write(
        f"\n{ranks * arrays} chunks of {ranks} ranks: agreed on in {agreed:.2f} s of work, "
        f"promoted in {promoted:.2f} s\n"
    )
    assert index == merge_parts(said)
    assert promoted < 1.5 * agreed  # 2.5 times as long with a merge for each tier


def least_work(work: Callable[[], T]) -> tuple[float, T]:
    """The seconds of processor time that something takes, the least of three: what else runs costs some too."""
    took = []
    for _ in range(3):
        gc.collect()
        began = time.process_time()
        found = work()
        took.append(time.process_time() - began)
    return min(took), found


async def assert_opens(root: Path, ranks: int, names: list[str]) -> float:
    """The store has the arrays that the ranks cut, whole; returns the seconds of work to open it."""
    began = time.process_time()
    async with CheckpointStore.open(config({"disk": folder(root)})) as store:
        opened = time.process_time() - began
        assert [info.step for info in await store.steps()] == [STEP]
        restored = await store.restore(keys=[names[0]])
    assert restored is not None
    assert np.array_equal(restored.tree[names[0]], np.stack([row(rank) for rank in range(ranks)]))
    return opened
