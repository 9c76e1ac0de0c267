"""Arrays given to be filled that share memory: refused before a byte is written, unless they are to be equal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scenes import CHUNK, assert_same, config, folder, ram

from tieredckpt import CheckpointStore, Shard, Sharded
from tieredckpt.engine.restoring.targets import check_memory
from tieredckpt.errors import Invalid
from tieredckpt.format.manifest import StepIndex
from tieredckpt.sync import SyncStore

SIZE = 3 * CHUNK // 4 + 5


@pytest.fixture(params=["ram", "disk"])
def store(request: pytest.FixtureRequest, shared_memory: Path, tmp_path: Path) -> Iterator[SyncStore]:
    tiers = {
        "ram": ram(shared_memory, on_close="release", retain="all"),
        "disk": folder(tmp_path / "disk", retain="all"),
    }
    with CheckpointStore.open(config({request.param: tiers[request.param]}, name="alone")).sync() as store:
        yield store


def floats(seed: int, size: int = SIZE) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def shared(one: int, other: int) -> dict[str, Any]:
    """Two arrays of ``SIZE`` that begin so many items into one memory."""
    memory = np.full(3 * SIZE, 7, np.float32)
    return {"embed": memory[one : one + SIZE], "head": memory[other : other + SIZE]}


@pytest.mark.parametrize("other", [0, 1, SIZE - 1])
def test_memory_that_leaves_of_different_values_share_is_refused_before_it_is_written(
    store: SyncStore, other: int
) -> None:
    store.save(1, {"embed": floats(1), "head": floats(2)})
    into = shared(0, other)
    with pytest.raises(Invalid, match=r"leaf 'embed' and leaf 'head' share memory, and step 1 "):
        store.restore(into=into)
    assert (into["embed"] == 7).all()
    assert (into["head"] == 7).all()


def test_memory_side_by_side_is_filled(store: SyncStore) -> None:
    saved = {"embed": floats(1), "head": floats(2), "none": np.empty((0, 4))}
    store.save(1, saved)
    into = {**shared(SIZE, 0), "none": np.empty((0, 4))}
    store.restore(into=into)
    assert_same(into, saved)


def test_no_items_share_no_memory(store: SyncStore) -> None:
    saved = {"w": floats(1), "none": np.empty(0, np.float32)}
    store.save(1, saved)
    memory = np.full(SIZE, 7, np.float32)
    into = {"w": memory, "none": memory[5:5]}
    store.restore(into=into)
    assert_same(into, saved)


def test_tied_leaves_are_filled_where_they_were_equal(store: SyncStore) -> None:
    saved = floats(1)
    store.save(1, {"embed": saved, "head": saved.copy()})
    into = shared(0, 0)
    store.restore(into=into)
    assert_same(into, {"embed": saved, "head": saved})


def test_equal_leaves_that_share_a_part_of_their_memory_are_refused(store: SyncStore) -> None:
    saved = np.zeros(SIZE, np.float32)
    store.save(1, {"embed": saved, "head": saved})
    with pytest.raises(Invalid, match=r"'embed' and leaf 'head' share memory"):
        store.restore(into=shared(0, 8))


def test_one_memory_of_two_shapes_or_dtypes_is_refused(store: SyncStore) -> None:
    store.save(1, {"embed": np.zeros((2, 8)), "head": np.zeros((8, 2)), "bits": np.zeros(16, np.int64)})
    memory = np.ones(16)
    for other in ({"head": memory.reshape(8, 2)}, {"bits": memory.view(np.int64)}):
        with pytest.raises(Invalid, match="share memory"):
            store.restore(keys=["embed", *other], into={"embed": memory.reshape(2, 8), **other})
    assert (memory == 1).all()


def test_tied_parameters_of_torch_are_filled_and_views_of_one_buffer_refused(store: SyncStore) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.arange(float(SIZE)).bfloat16()
    store.save(1, {"embed": weight, "head": weight})
    store.save(2, {"embed": weight, "head": weight + 1})
    tied = torch.nn.Parameter(torch.zeros(SIZE).bfloat16())
    store.restore(1, into={"embed": tied, "head": tied}, resume=False)
    assert torch.equal(tied, weight)
    buffer = torch.zeros(2 * SIZE).bfloat16()
    with pytest.raises(Invalid, match=r"'embed' and leaf 'head' share memory, and step 2 "):
        store.restore(2, into={"embed": buffer[:SIZE], "head": buffer[1 : SIZE + 1]})
    assert not buffer.any()


def test_pieces_of_arrays_are_told_apart_by_what_they_are_pieces_of(store: SyncStore) -> None:
    whole = floats(1, 4 * SIZE)
    cut = [Shard(whole[at : at + SIZE], whole.shape, (at,)) for at in range(0, 4 * SIZE, SIZE)]
    store.save(1, {"embed": Sharded(cut), "head": Sharded(cut), "other": whole[::-1].copy()})
    memory = np.zeros(SIZE, np.float32)

    def piece(of: int) -> Shard:
        return Shard(memory, whole.shape, (of,))

    store.restore(into={"embed": piece(SIZE), "head": piece(SIZE), "other": Shard(floats(0, 3), whole.shape, (1,))})
    assert memory.tobytes() == whole[SIZE : 2 * SIZE].tobytes()
    with pytest.raises(Invalid, match=rf"the piece of leaf 'embed' at \[{SIZE}\] and the piece of leaf 'other'"):
        store.restore(keys=["embed", "other"], into={"embed": piece(SIZE), "other": piece(SIZE)})
    with pytest.raises(Invalid, match=rf"leaf 'embed' at \[0\] and the piece of leaf 'embed' at \[{SIZE}\]"):
        store.restore(keys=["embed"], into={"embed": Sharded([piece(0), piece(SIZE)])})


def test_one_memory_of_two_shapes_is_refused_for_pieces_too(store: SyncStore) -> None:
    whole = floats(1, 64).reshape(8, 8)
    store.save(1, {"embed": whole, "head": whole.copy()})
    memory = np.zeros(8, np.float32)
    pieces = {"embed": memory.reshape(2, 4), "head": memory.reshape(4, 2)}
    with pytest.raises(Invalid, match="share memory"):
        store.restore(into={key: Shard(piece, whole.shape, (0, 0)) for key, piece in pieces.items()})


def test_many_leaves_are_looked_at_in_a_moment() -> None:
    memory = np.zeros((50_000, 2))
    nothing: Any = None
    begin = time.monotonic()
    check_memory(StepIndex(nothing, {}), {f"leaf-{i}": row for i, row in enumerate(memory)})
    assert time.monotonic() - begin < 10, "it takes 50 ms on a machine that does nothing else"
