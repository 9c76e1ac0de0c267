"""Two steps that are compared: what differs is what differs in the restored trees, however their arrays are cut."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cohort import COLUMNS, ROWS, cohort, whole
from support.scenes import config, folder
from support.trees import SCALARS, arrays, fingerprint, large_arrays, trees

from tieredckpt import CheckpointStore, Corrupt, NotFound, Shard, SyncStore, _comparing, copy_steps
from tieredckpt._comparing import ONLY, Comparison, Difference, Side, compare
from tieredckpt.config import StoreConfig
from tieredckpt.format.keys import LEAF_KEY, ROOT, child_key

ROW = 8000
"""Bytes: a chunk of the fine store has one such row, of the coarse store three."""
FINE, COARSE = 8192, 3 * 8192
LEAVES = arrays() | large_arrays(6 * FINE) | SCALARS
GONE = object()


def disk(path: Path, chunk_size: int = FINE) -> StoreConfig:
    return config({"disk": folder(path, retain="all")}, chunk_size=chunk_size)


@dataclass
class Stores:
    """Stores of one folder each, with chunks of other sizes, and one that is copied to."""

    root: Path
    fine: SyncStore
    coarse: SyncStore
    copy: SyncStore
    steps: Iterator[int] = field(default_factory=lambda: count(1))

    def save(self, *saved: Any) -> list[int]:
        """Save trees in both stores; the numbers of their steps."""
        numbers = [next(self.steps) for _ in saved]
        for step, each in zip(numbers, saved, strict=True):
            self.fine.save(step, each)
            self.coarse.save(step, each)
        return numbers


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    root = tmp_path_factory.mktemp("compared")
    with (
        CheckpointStore.open(disk(root / "fine")).sync() as fine,
        CheckpointStore.open(disk(root / "coarse", COARSE)).sync() as coarse,
    ):
        fine.save(0, {})
        asyncio.run(copy_steps(disk(root / "fine"), disk(root / "copy")))
        with CheckpointStore.open(disk(root / "copy"), read_only=True).sync() as copy:
            yield Stores(root, fine, coarse, copy)


def compared(one: SyncStore, step: int, other: SyncStore, number: int, **options: Any) -> Comparison:
    return compare(Side.of(one, step, None), Side.of(other, number, None), **options)


def by_key(found: Comparison) -> dict[str, Difference]:
    return {each.key: each for each in found.differences}


def children(path: str, tree: Any) -> dict[str, tuple[Any, Any]]:
    """Name and value of everything in a container, by path."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree if isinstance(tree, list | tuple) else ())
    return {child_key(path, name): (name, child) for name, child in items}


def unlike(one: Any, other: Any, path: str) -> Iterator[str]:
    """The keys of what differs between two restored trees."""
    a, b = children(path, one), children(path, other)
    containers = [isinstance(each, dict | list | tuple) for each in (one, other)]
    if one is GONE or other is GONE:
        differs = not (a or b)
    elif all(containers):
        order = [fingerprint([side[key][0] for key in side if key in a and key in b]) for side in (a, b)]
        differs = type(one) is not type(other) or order[0] != order[1]
    else:
        differs = any(containers) or fingerprint(one) != fingerprint(other)
    if differs:
        yield path
    for key in {**a, **b}:
        yield from unlike(a.get(key, (None, GONE))[1], b.get(key, (None, GONE))[1], key)


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """A tree of which some leaves are others, some have another bit, and some containers lose or turn children."""
    if draw(st.integers(0, 9)) == 0:
        return draw(LEAVES)
    if isinstance(tree, dict):
        items = [(name, draw(changed(child))) for name, child in tree.items() if draw(st.integers(0, 5))]
        return dict(reversed(items) if draw(st.integers(0, 5)) == 0 else items)
    if isinstance(tree, list | tuple):
        kind = type(tree) if draw(st.integers(0, 5)) else draw(st.sampled_from([list, tuple]))
        return kind([draw(changed(child)) for child in tree if draw(st.integers(0, 5))])
    if isinstance(tree, np.ndarray) and tree.size and draw(st.booleans()):
        tree = tree.copy(order="C")
        raw = tree.reshape(-1).view(np.uint8)
        raw[draw(st.integers(0, len(raw) - 1))] ^= 1
    return tree


PAIRS = trees(LEAVES).flatmap(lambda tree: st.tuples(st.just(tree), changed(tree)))


@settings(max_examples=40)
@given(PAIRS)
def test_what_differs_is_what_differs_in_the_restored_trees(stores: Stores, pair: tuple[Any, Any]) -> None:
    numbers = stores.save(*pair)
    one, other = (stores.fine.restore(step, as_="saved", resume=False) for step in numbers)
    assert one is not None
    assert other is not None
    leaves = not any(isinstance(each.tree, dict | list | tuple) for each in (one, other))
    wanted = list(unlike(one.tree, other.tree, LEAF_KEY if leaves else ROOT))
    alike = compared(stores.fine, numbers[0], stores.fine, numbers[1])
    assert [each.key for each in alike.differences] == wanted
    mixed = compared(stores.coarse, numbers[0], stores.fine, numbers[1])
    assert repr(mixed) == repr(alike)  # chunks are counted as the second store has them
    assert not compared(stores.coarse, numbers[1], stores.fine, numbers[1]).differences
    asyncio.run(copy_steps(disk(stores.root / "fine"), disk(stores.root / "copy"), numbers[:1]))
    for there, store in ((numbers[0], stores.fine), (numbers[0], stores.copy)):
        assert not compared(stores.fine, numbers[0], store, there).differences


def test_bits_count_and_not_what_equals(stores: Stores) -> None:
    zeros = np.zeros(7 * ROW // 4, np.float32)
    nan = np.array(0x7FC00001, np.uint32).view(np.float32)
    tree = {"zero": zeros, "nan": np.full_like(zeros, np.nan), "inline": 0.0, "true": 1, "none": math.nan}
    turned = {**tree, "zero": -zeros, "nan": np.full_like(zeros, nan), "inline": -0.0, "true": True}
    one, other = stores.save(tree, turned)
    for store in (stores.fine, stores.coarse):
        assert not compared(store, one, stores.fine, one).differences
        found = by_key(compared(store, one, stores.fine, other))
        assert {key: each.what for key, each in found.items()} == {
            "zero": ("values",),
            "nan": ("values",),
            "inline": ("value",),
            "true": ("kind",),
        }


def test_the_chunks_that_differ_are_counted_without_what_lies_beyond_the_array(stores: Stores) -> None:
    array = np.arange(7 * ROW // 4, dtype=np.float32).reshape(7, -1)  # of 3, 3 and 1 rows in the coarse store
    last, more = array.copy(), array.copy()
    last[6, 5] = more[0, 0] = more[6, 5] = -1
    steps = stores.save({"w": array}, {"w": last}, {"w": more}, {"w": array[:6]}, {"w": array.view(np.int32)})
    for one, (step, chunks, rows) in [
        (one, case)
        for one in (stores.fine, stores.coarse)
        for case in ((steps[1], 1, 1), (steps[2], 2, 4), (steps[3], 2, 6), (steps[4], 3, 7))
    ]:
        found = compared(one, steps[0], stores.coarse, step)
        (difference,) = found.differences
        assert (difference.differing_chunks, difference.differing_nbytes) == (chunks, rows * ROW)
        assert found.nbytes == (6 if step == steps[3] else 7) * ROW
        assert difference.what == {steps[3]: ("shape",), steps[4]: ("dtype",)}.get(step, ("values",))


def test_what_one_step_lacks_is_told_by_its_leaves_in_the_order_of_the_tree(stores: Stores) -> None:
    array = np.ones((2, ROW // 4), np.float32)
    one, other = stores.save(
        {"a": array, "old": {"x": array, "y": 1}, "none": {}, "z": 1},
        {"a": array, "new": [array, ()], "kind": 2, "z": {"below": 1}},
    )
    found = compared(stores.fine, one, stores.fine, other)
    assert [(each.key, each.what) for each in found.differences] == [
        ("old/x", (ONLY[0],)),
        ("old/y", (ONLY[0],)),
        ("none", (ONLY[0],)),
        ("z", ("kind",)),
        ("z/below", (ONLY[1],)),
        ("new/0", (ONLY[1],)),
        ("new/1", (ONLY[1],)),
        ("kind", (ONLY[1],)),
    ]
    assert (found.same_arrays, found.nbytes) == (1, 2 * array.nbytes)
    assert [(each.of_array, each.chunks, each.differing_nbytes) for each in found.differences if each.of_array] == [
        (True, 0, 0),
        (True, 2, array.nbytes),
    ]


def test_containers_of_another_kind_or_order_differ(stores: Stores) -> None:
    point = {"x": 1, "y": 2, "z": 3}
    one, other = stores.save(
        {"pair": [1, 2], "point": point, "numbers": {1: 1, 2: 2}, "grown": {"x": 1, "y": 2}, "q": deque([1], 2)},
        {
            "pair": (1, 2),
            "point": {"x": 1, "z": 3, "y": 2},
            "numbers": {1: 1, "2": 2},
            "grown": {"a": 0, **point},
            "q": deque([1], 3),
        },
    )
    found = by_key(compared(stores.fine, one, stores.fine, other))
    assert {key: each.what for key, each in found.items()} == {
        "pair": ("kind",),
        "point": ("keys",),
        "numbers": ("keys",),
        "grown/a": (ONLY[1],),
        "grown/z": (ONLY[1],),
        "q": ("about",),
    }
    assert (found["point"].before, found["point"].after) == (
        {"kind": "dict", "keys": ["y", "z"]},
        {"kind": "dict", "keys": ["z", "y"]},
    )


def test_keys_choose_leaves_of_either_step(stores: Stores) -> None:
    one, other = stores.save({"a": [1, 2, 3], "b": 1, "old": 1}, {"a": [1, 5], "b": 2, "new": 1})
    for keys, wanted in (
        (["a"], ["a/1", "a/2"]),  # a list of which a part is chosen is no other kind of container
        (["a/0", "a/1"], ["a/1"]),
        (["old", "n*"], ["old", "new"]),
        (["a/0"], []),
    ):
        assert [*by_key(compared(stores.fine, one, stores.fine, other, keys=keys))] == wanted
    with pytest.raises(NotFound, match=rf"step {one} .* as step {other} .* no leaf that matches 'oldd'; near: 'old'"):
        compared(stores.fine, one, stores.fine, other, keys=["a", "oldd"])


def test_arrays_that_are_cut_alike_are_not_read(tmp_path: Path) -> None:
    array = np.arange(5 * ROW // 4, dtype=np.float32).reshape(5, -1)
    for name, chunk_size in (("fine", FINE), ("same", FINE), ("coarse", COARSE)):
        with CheckpointStore.open(disk(tmp_path / name, chunk_size)).sync() as store:
            store.save(1, {"w": array, "v": array})
            store.save(2, {"w": array + 1, "v": array})
            store.flush()
        shutil.rmtree(tmp_path / name / "packs")
    told: list[float] = []
    with (
        CheckpointStore.open(disk(tmp_path / "fine"), read_only=True).sync() as fine,
        CheckpointStore.open(disk(tmp_path / "same"), read_only=True).sync() as same,
        CheckpointStore.open(disk(tmp_path / "coarse", COARSE), read_only=True).sync() as coarse,
    ):
        for other in (fine, same):
            assert not compared(fine, 1, other, 1, progress=told.append).differences
            assert [*by_key(compared(fine, 1, other, 2, progress=told.append))] == ["w"]
        assert told == []
        with pytest.raises((Corrupt, NotFound), match="array 'w' of step 1"):
            compared(fine, 1, coarse, 1)


def test_what_is_read_is_read_a_part_at_a_time(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"w": np.ones((10, ROW // 4), np.float32), "v": np.ones((3, ROW), np.int8)}
    parts: list[int] = []
    read = Side.read

    def counted(side: Side, forms: Any) -> Any:
        found = read(side, forms)
        parts.append(sum(array.nbytes for array in found.values()))
        return found

    monkeypatch.setattr(Side, "read", counted)
    monkeypatch.setattr(_comparing, "_PART", 2 * ROW)
    (step,) = stores.save(tree)
    told: list[float] = []
    assert not compared(stores.coarse, step, stores.fine, step, progress=told.append).differences
    assert parts == [size for size in [2 * ROW] * 6 + [ROW] for _ in range(2)]
    assert sum(told) == pytest.approx(1)
    parts.clear()
    assert not compared(stores.fine, step, stores.coarse, step).differences
    assert max(parts) == 3 * ROW  # one chunk


@pytest.mark.parametrize("columns", [False, True])
async def test_a_step_of_ranks_is_compared_with_one_of_other_ranks(
    shared_memory: Path, tmp_path: Path, columns: bool
) -> None:
    """By digests where their parts join to whole arrays, and by values where each is stored by itself."""
    size = 2

    def of(array: Any, rank: int) -> dict[str, Any]:
        rows, width = (ROWS, COLUMNS // size) if columns else (ROWS // size, COLUMNS)
        offset = (0, rank * width) if columns else (rank * rows, 0)
        cut = array[offset[0] : offset[0] + rows, offset[1] : offset[1] + width]
        return {"w": Shard(cut, shape=array.shape, offset=offset), "n": 1}

    async def save(step: int, array: Any, store: CheckpointStore, rank: int) -> None:
        await store.save(step, of(array, rank))

    turned = whole(1)
    turned[-1, -1] = 0
    async with cohort(size, shared_memory, tmp_path / "ranks", disk_settings={"retain": "all"}) as ranks:
        for step, array in ((1, whole(1)), (2, turned)):
            await ranks.all(partial(save, step, array))
        await ranks.flush()
    with (
        CheckpointStore.open(disk(tmp_path / "ranks"), read_only=True).sync() as ranked,
        CheckpointStore.open(disk(tmp_path / "alone", 16 << 10)).sync() as alone,
    ):
        for step, array in ((1, whole(1)), (2, turned)):
            alone.save(step, {"w": array, "n": 1})
        told: list[float] = []
        for one, other in ((ranked, alone), (alone, ranked), (ranked, ranked)):
            assert not compared(one, 1, other, 1, progress=told.append).differences
            (difference,) = compared(one, 1, other, 2, progress=told.append).differences
            assert (difference.key, difference.what, difference.differing_chunks) == ("w", ("values",), 1)
        assert bool(told) == columns
