"""What several ranks have alike is stored once, by all of them evenly, and each knows its part without asking."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.trees import indexed

from tieredckpt.errors import Conflict
from tieredckpt.format.boxes import Box, tile
from tieredckpt.format.joining import join
from tieredckpt.format.layout import block_key
from tieredckpt.format.manifest import INLINE_MAX, ArrayIndex
from tieredckpt.format.structure import array_nodes
from tieredckpt.tree import Flat, Place, flatten, host_view, replicated
from tieredckpt.tree.replicated import split

CHUNK = 8192

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 40000)),
        st.tuples(st.integers(1, 300), st.integers(1, 60)),
        st.tuples(st.integers(1, 5), st.integers(1, 30), st.integers(1, 30)),
        st.just(()),
    ),
    max_size=5,
)
NODES = st.one_of(
    st.builds(lambda nodes, each: [f"node{n}" for n in range(nodes) for _ in range(each)], *[st.integers(1, 4)] * 2),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=7),
)


@pytest.fixture(autouse=True)
def _cells_as_small_as_in_a_small_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated, "_SMALLEST", 4096)


def parts(tree: Any, nodes: list[str], patterns: tuple[str, ...] = ("**",)) -> list[Flat]:
    flat = flatten(tree)
    return [split(flat, patterns, rank=rank, nodes=nodes, chunk_size=CHUNK) for rank in range(len(nodes))]


def stored(flat: Flat) -> dict[str, list[Any]]:
    """The boxes that a rank stores, by key of the array."""
    found: dict[str, list[Any]] = {}
    for leaf in flat.arrays:
        found.setdefault(leaf.place.key if leaf.place else leaf.key, []).append(leaf.box)
    return found


@settings(max_examples=60)
@given(shapes=SHAPES, nodes=NODES)
@example(shapes=[(5, 30, 30)], nodes=["a", "b", "b", "a", "c", "c"])
@example(shapes=[(2, 100, 50)], nodes=["a"] * 6)
def test_every_node_holds_everything_once_or_all_together_do_where_nodes_differ(
    shapes: list[tuple[int, ...]], nodes: list[str]
) -> None:
    tree = {f"k{i}": np.arange(np.prod(shape)).reshape(shape) for i, shape in enumerate(shapes)}
    ranks = parts(tree, nodes)
    equal = len(set(Counter(nodes).values())) == 1
    for key, array in tree.items():
        whole = array.nbytes <= INLINE_MAX or not array.size
        for node in set(nodes) if equal else {"all"}:
            members = [flat for flat, of in zip(ranks, nodes, strict=True) if not equal or of == node]
            held = [box for flat in members for box in stored(flat).get(key, [])]
            if whole:
                assert [box.shape for box in held] == [array.shape] * len(members)
            else:
                assert tile(array.shape, held)
    for flat in ranks:
        for leaf in flat.arrays:
            array = tree[leaf.place.key if leaf.place else leaf.key]
            assert host_view(leaf).tolist() == array[leaf.box.slices()].tolist()


@settings(max_examples=60)
@given(shapes=SHAPES, nodes=NODES)
def test_every_rank_stores_about_the_same_number_of_bytes(shapes: list[tuple[int, ...]], nodes: list[str]) -> None:
    tree = {f"k{i}": np.zeros(shape) for i, shape in enumerate(shapes)}
    ranks = parts(tree, nodes)
    large = [array for array in tree.values() if array.nbytes > INLINE_MAX]
    cell = max((CHUNK, *(array[:1].nbytes for array in large if array.ndim == 1)))
    copies = len(set(nodes)) if len(set(Counter(nodes).values())) == 1 else 1
    even = copies * sum(array.nbytes for array in large) / len(nodes)
    for flat in ranks:
        mine = sum(box.size * 8 for key, boxes in stored(flat).items() for box in boxes if tree[key].nbytes > 4096)
        # The cells of an array are equal, so the last may hold almost nothing: as if each array were a cell longer.
        assert abs(mine - even) <= cell * (copies + len(large))


@settings(max_examples=60)
@given(shapes=SHAPES, nodes=NODES)
def test_every_rank_has_all_of_what_is_divided_in_the_same_pieces(
    shapes: list[tuple[int, ...]], nodes: list[str]
) -> None:
    tree = {f"k{i}": np.arange(np.prod(shape)).reshape(shape) for i, shape in enumerate(shapes)}
    names = []
    for flat in parts(tree, nodes):
        found = {leaf.key: leaf for leaf in flat.arrays}
        for group in flat.replicated:
            assert group.ranks == tuple(range(len(nodes)))
            found |= {leaf.key: leaf for leaf in group.elsewhere}
            names.append({*group.here, *(leaf.key for leaf in group.elsewhere)})
            assert len(names[-1]) == len(group.here) + len(group.elsewhere)
        for key, array in tree.items():
            assert tile(array.shape, [leaf.box for leaf in found.values() if leaf.array == key]) or not array.size
    assert all(name == names[0] for name in names)


def test_four_replicas_of_a_tree_write_a_quarter_each() -> None:
    tree = {f"layer{i}": {"w": np.zeros((97, 120)), "b": np.zeros(120)} for i in range(6)}
    ranks = parts(tree, ["here"] * 4)
    total = sum(layer["w"].nbytes for layer in tree.values())
    shares = [
        sum(box.size * 8 for key, boxes in stored(flat).items() for box in boxes if key.endswith("/w")) / total
        for flat in ranks
    ]
    assert sum(shares) == 1
    assert all(0.2 <= share <= 0.3 for share in shares)


def test_chunks_as_large_as_the_tree_do_not_leave_it_all_to_one_rank() -> None:
    flat = flatten({"w": np.zeros((1024, 256))})
    ranks = [split(flat, ("w",), rank=rank, nodes=["here"] * 4, chunk_size=16 << 20) for rank in range(4)]
    assert [sum(box.size for box in stored(found)["w"]) for found in ranks] == [256 * 256] * 4


def test_a_piece_of_what_a_process_has_is_split_within_that() -> None:
    """As of a tensor whose process has several boxes of it, side by side in memory."""
    whole = np.random.default_rng(0).random((400, 50))
    local = np.concatenate([whole[100:200], whole[300:400]])
    (leaf,) = flatten({"w": local}).arrays
    leaves = [
        replace(
            leaf,
            key=block_key("w", (start, 0)),
            shape=(100, 50),
            place=Place("w", whole.shape, (start, 0), (100, 50), replicas=(0, 1, 2)),
            part=(slice(at, at + 100), slice(0, 50)),
        )
        for start, at in ((100, 0), (300, 100))
    ]
    flat = Flat(flatten({"w": whole}).structure, tuple(leaves), in_pieces=True)
    boxes = []
    for rank in range(3):
        for found in split(flat, (), rank=rank, nodes=["a"] * 3, chunk_size=CHUNK).arrays:
            assert host_view(found).tolist() == whole[found.box.slices()].tolist()
            boxes.append(found.box)
    assert tile(whole.shape, [*boxes, Box((0, 0), (100, 50)), Box((200, 0), (100, 50))])


@settings(max_examples=30)
@given(shapes=SHAPES, nodes=NODES)
def test_what_the_ranks_store_joins_to_whole_arrays(shapes: list[tuple[int, ...]], nodes: list[str]) -> None:
    tree = {f"k{i}": np.random.default_rng(i).random(shape) for i, shape in enumerate(shapes)}
    ranks = parts(tree, nodes)
    arrays: dict[str, ArrayIndex] = {}
    for flat in ranks:
        for key, array in indexed(flat, CHUNK).items():
            assert key not in arrays or arrays[key].chunks == array.chunks
            arrays[key] = array
    assert join(ranks[0].structure, arrays).keys() == tree.keys()


@settings(max_examples=40)
@given(
    st.lists(
        st.integers(1, 150).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows), st.integers(1, 50))),
        min_size=1,
        max_size=5,
    )
)
@example([(150, 150, 50)])
@example([(250, 200, 50)])
@example([(20, 13, 40)] * 5)
def test_shards_of_some_ranks_are_split_among_these(shards: list[tuple[int, int, int]]) -> None:
    """Two shards of every array, the second perhaps shorter, each on two of four ranks, as HSDP has them."""
    tree = {
        f"k{i}": np.random.default_rng(i).random((rows + last, columns))
        for i, (rows, last, columns) in enumerate(shards)
    }
    large = {f"k{i}" for i, (_, last, columns) in enumerate(shards) if last * columns * 8 > INLINE_MAX}
    structure = flatten(tree).structure
    flats = []
    for rank in range(4):
        leaves = []
        for (key, whole), (rows, _, columns) in zip(tree.items(), shards, strict=True):
            at = rows * (rank % 2)
            (leaf,) = flatten({"local": whole[at : at + rows]}).arrays
            place = Place(key, whole.shape, (at, 0), (rows, columns), replicas=(rank % 2, rank % 2 + 2))
            leaves.append(replace(leaf, key=block_key(key, (at, 0)), place=place))
        flats.append(Flat(structure, tuple(leaves), in_pieces=True))
    alike = [split(flat, (), rank=rank, nodes=["a"] * 4, chunk_size=CHUNK) for rank, flat in enumerate(flats)]
    apart = [
        split(flat, (), rank=rank, nodes=["a", "a", "b", "b"], chunk_size=CHUNK) for rank, flat in enumerate(flats)
    ]
    for together in (alike, apart[:2], apart[2:]):
        for key, whole in tree.items():
            boxes = [box for flat in together for box in stored(flat).get(key, [])]
            assert tile(whole.shape, boxes if key in large else [*dict.fromkeys(boxes)])
        found = [leaf for flat in together for leaf in flat.arrays]
        assert all(host_view(leaf).tolist() == tree[leaf.array][leaf.box.slices()].tolist() for leaf in found)
        arrays = {key: array for flat in together for key, array in indexed(flat, CHUNK).items()}
        assert large <= join(structure, arrays).keys()


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=4), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_range_of_cells_is_some_boxes_that_have_each_of_them_once(
    counts: list[int], ends: tuple[float, float]
) -> None:
    numbers = np.arange(np.prod(counts)).reshape(counts)
    first, stop = sorted(round(end * numbers.size) for end in ends)
    boxes = list(replicated._boxes(tuple(counts), first, stop))
    assert [n for box in boxes for n in numbers[box.slices()].reshape(-1)] == list(range(first, stop))


@pytest.mark.parametrize("replicas", [(1, 2), (0, 3)])
def test_replicas_on_processes_that_are_no_ranks_of_the_store_are_not_divided(replicas: tuple[int, ...]) -> None:
    """As of a framework that counts other processes, or in another order, than the store does."""
    (leaf,) = flatten({"w": np.zeros((150, 50))}).arrays
    place = Place("w", (300, 50), (0, 0), (150, 50), replicas=replicas)
    flat = Flat(flatten({"w": np.zeros((300, 50))}).structure, (replace(leaf, place=place),), in_pieces=True)
    assert split(flat, (), rank=0, nodes=["a"] * 3, chunk_size=CHUNK).arrays == flat.arrays


def test_what_no_pattern_chooses_stays_as_it_is() -> None:
    tree = {"params": {"w": np.zeros(9000)}, "own": np.zeros(9000), "n": 1}
    flat = flatten(tree)
    for nodes in (["a", "b"], ["a"] * 3):
        for found in parts(tree, nodes, ("params/**", "nothing/**")):
            assert found.structure == flat.structure
            assert [leaf.box.shape for leaf in found.arrays if leaf.key == "own"] == [(9000,)]
        assert parts(tree, nodes, ())[1].arrays == flat.arrays
    assert parts(tree, ["a"])[0].arrays == flat.arrays


def test_what_one_rank_alone_stores_is_missed_when_its_part_is() -> None:
    tree = {"w": np.zeros((400, 60))}
    ranks = parts(tree, ["a"] * 3)
    arrays = {key: array for flat in ranks[:2] for key, array in indexed(flat, CHUNK).items()}
    assert [node.key for node in array_nodes(ranks[0].structure)] == ["w"]
    with pytest.raises(Conflict, match="'w'"):
        join(ranks[0].structure, arrays)
