"""What some ranks saved comes back on any number of ranks, with other cuts, from RAM and from the shared tier."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from support.cohort import cohort
from support.scenes import config, folder

from tieredckpt import CheckpointStore, Shard, Sharded
from tieredckpt.errors import Invalid

Array = np.ndarray[Any, Any]

WHOLE = np.random.default_rng(0).random((53, 260))
SAME = np.random.default_rng(1).random((200, 33)).astype(np.float32)


def shards(rank: int, size: int, axis: int, *, values: bool) -> Sharded:
    """Every ``size``-th part of an axis that does not divide evenly: several of them, side by side or not."""
    cuts = np.array_split(np.arange(WHOLE.shape[axis]), 3 * size)
    found = []
    for cut in cuts[rank::size]:
        index = tuple(slice(cut[0], cut[-1] + 1) if i == axis else slice(None) for i in range(2))
        part = WHOLE[index]
        offset = tuple(int(cut[0]) if i == axis else 0 for i in range(2))
        found.append(Shard(part if values else np.zeros(part.shape), WHOLE.shape, offset))
    return Sharded(found)


def part(rank: int, size: int, axis: int) -> dict[str, Any]:
    """What a rank saves: a layer of its own, parts of one that all have cut, and one that all have alike."""
    return {f"own{rank}": np.full(3000, rank), "cut": shards(rank, size, axis, values=True), "same": {"w": SAME}}


def assert_part(tree: dict[str, Any], rank: int, size: int, axis: int) -> None:
    expected = shards(rank, size, axis, values=True)
    for found, shard in zip(tree["cut"].shards, expected.shards, strict=True):
        assert (found.offset, found.array.tobytes()) == (shard.offset, shard.array.tobytes())
    assert tree["same"]["w"].tobytes() == SAME.tobytes()


@pytest.mark.parametrize(("saving", "restoring"), [(8, 3), (3, 8), (2, 2)])
async def test_ranks_restore_what_other_ranks_with_other_cuts_saved(
    shared_memory: Path, tmp_path: Path, saving: int, restoring: int
) -> None:
    disk = tmp_path / "disk"
    nodes = [f"old{rank // 2}" for rank in range(saving)]
    async with cohort(saving, shared_memory, disk, nodes=nodes) as old:
        saved = await old.all(lambda store, rank: store.save(1, part(rank, saving, 0), replicated=("same/**",)))
        await old.reached(saved, "ram")
        for axis in (1, 0):
            like = {rank: {"cut": shards(rank, saving, axis, values=False)} for rank in range(saving)}
            near = await asyncio.gather(*(store.restore(like=like[rank]) for rank, store in enumerate(old.stores)))
            for rank, restored in enumerate(near):
                assert restored is not None
                assert "disk" not in restored.sources
                for found, shard in zip(
                    restored.tree["cut"].shards, shards(rank, saving, axis, values=True).shards, strict=True
                ):
                    assert found.array.tobytes() == shard.array.tobytes()
        await old.reached(saved, "disk")
        spec = await old[0].spec(1, "cut", "disk")
    assert ts.open(spec, open=True).result().read().result().tobytes() == WHOLE.tobytes()

    nodes = [f"new{rank}" for rank in range(restoring)]
    async with cohort(restoring, shared_memory, disk, nodes=nodes) as new:
        likes = [
            {"cut": shards(rank, restoring, 1, values=False), "same": {"w": np.zeros_like(SAME)}}
            for rank in range(restoring)
        ]
        found = await new.all(lambda store, rank: store.restore(like=likes[rank]))
    for rank, restored in enumerate(found):
        assert restored is not None
        assert_part(restored.tree, rank, restoring, 1)

    async with CheckpointStore.open(config({"disk": folder(disk)}, name="test")) as alone:
        plain = await alone.restore()
        assert plain is not None
        assert plain.tree["cut"].tobytes() == WHOLE.tobytes()
        assert [plain.tree[f"own{rank}"][0] for rank in range(saving)] == list(range(saving))
        with pytest.raises(Invalid, match="1 missing from the step: 'other'"):
            await alone.restore(like={"other": np.zeros(3)})
