"""A step of many ranks is merged once, and has on every tier the places that the ranks have written there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cohort import assert_whole, cohort
from support.records import first_record
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.engine.ranks.commit import commit, coordinator
from tieredckpt.engine.ranks.commit.merged import placed, without_places
from tieredckpt.engine.ranks.commit.parts import encode_own, encode_written, extents_of, holders, merge_parts, share_out
from tieredckpt.errors import Conflict, Corrupt
from tieredckpt.format import layout
from tieredckpt.format.boxes import Box
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.grid import plan, plan_block
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepIndex
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.structure import ArrayNode, DictNode

COLUMNS = 1024
STORE = "12345678-1234-1234-1234-123456789012"


def pack(of: int) -> str:
    return layout.pack_key(f"{of:032x}")


def part(rank: int, ranks: int, rows: int, contents: int, inline: bool) -> StepIndex:
    """What a rank has in RAM: rows of one array, one that all have, and one in the index itself."""
    names = ["all", "cut", "small"]
    shapes = [(rows, COLUMNS), (rows * ranks, COLUMNS), (3,)]
    nodes = [ArrayNode(name, "float32", shape, "numpy") for name, shape in zip(names, shapes, strict=True)]
    arrays: dict[str, ArrayIndex] = {}
    offset = 0
    for number, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        box = Box((rank * rows, 0), (rows, COLUMNS)) if name == "cut" else Box.whole(shape)
        grid = plan_block(box, shape, 4, 4 * COLUMNS) if name == "cut" else plan(shape, 4, 4 * COLUMNS)
        whose = rank if name == "cut" else ranks
        chunks = []
        for at in range(grid.size):
            digest = bytes([whose, number, at % contents]) + bytes(13)  # some chunks are alike
            where: Extent | bytes = Extent(pack(99), offset, grid.cell_nbytes)
            if name == "small" and inline:
                where = bytes(grid.cell_nbytes)
            chunks.append(Chunk(digest, where))
            offset += 8192
        key = layout.block_key(name, box.offset) if name == "cut" else name
        arrays[key] = ArrayIndex(grid, np.dtype("<f4"), chunks)
    record = first_record(DictNode(list(names), list(nodes)), store=STORE, rank=rank, ranks=ranks)
    return StepIndex(record, arrays)


def write(parts: Mapping[int, StepIndex]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The parts as they are in RAM, and as the ranks write them to a tier, each its share."""
    own = {rank: encode_own(index) for rank, index in parts.items()}
    shares = share_out(*holders(own, lambda *_: False))
    written = {}
    for rank, index in parts.items():
        extents = {
            digest: Extent(pack(rank), 8192 * at, 4 * COLUMNS + 4 if digest[1] < 2 else 3 * 4 + 4)
            for at, digest in enumerate(shares.get(rank, ()))
        }
        written[rank] = encode_written(index, extents)
    return own, written


@given(ranks=st.integers(1, 4), rows=st.integers(1, 4), contents=st.integers(1, 4), inline=st.booleans())
def test_the_places_that_ranks_have_written_make_the_step_that_their_parts_make(
    ranks: int, rows: int, contents: int, inline: bool
) -> None:
    own, written = write({rank: part(rank, ranks, rows, contents, inline) for rank in range(ranks)})
    found = placed(without_places(merge_parts(own)), extents_of(written), {}, CRC32C)
    assert found == merge_parts(written)


def test_a_chunk_that_nobody_wrote_or_that_does_not_fit_its_place_is_refused() -> None:
    own, written = write({rank: part(rank, 2, 2, 2, True) for rank in range(2)})
    whole, extents = without_places(merge_parts(own)), extents_of(written)
    digest, extent = next(iter(extents.items()))
    with pytest.raises(Conflict, match="nowhere on the tier"):
        placed(whole, {name: where for name, where in extents.items() if name != digest}, {}, CRC32C)
    with pytest.raises(Corrupt, match="is said to have 5 bytes"):
        placed(whole, extents | {digest: Extent(extent.path, extent.offset, 5)}, {}, CRC32C)
    assert placed(whole, {}, extents, CRC32C) == placed(whole, extents, {}, CRC32C)


@pytest.mark.parametrize("steps", [1, 4])
async def test_a_step_is_merged_once_for_all_tiers_and_anew_where_newer_ones_have_come(
    steps: int, shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged: list[str] = []

    def counted(where: str) -> Any:
        def merge(parts: Mapping[int, bytes]) -> StepIndex:
            merged.append(where)
            return merge_parts(parts)

        return merge

    monkeypatch.setattr(coordinator, "merge_parts", counted("votes"))
    monkeypatch.setattr(commit, "merge_parts", counted("commit"))
    tiers = {
        "ram": ram(shared_memory, on_close="keep"),
        "disk": folder(tmp_path / "disk", promote="never"),
        "far": folder(tmp_path / "far", promote="never"),
    }
    async with cohort(2, shared_memory, tmp_path, tiers=tiers) as ranks:
        for step in range(1, steps + 1):
            await ranks.reached(await ranks.save(step), "ram")
        for tier in ("disk", "far"):
            await ranks[0].promote(1, tier)
    assert merged.count("votes") == steps
    assert merged.count("commit") == (0 if steps == 1 else 2)
    async with CheckpointStore.open(config({"far": folder(tmp_path / "far")}), ranks=None) as store:
        assert_whole(await store.restore(1), 1)
