"""Parts become one step when they agree, and a conflict that names key and ranks when they do not."""

from __future__ import annotations

import re
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cuts import boxes_between, cuts
from support.records import first_record

from tieredckpt.errors import Conflict
from tieredckpt.format import layout
from tieredckpt.format.boxes import Box
from tieredckpt.format.grid import Grid, plan_block
from tieredckpt.format.manifest import RUN, ArrayIndex, Chunk, StepIndex, StepRecord
from tieredckpt.format.merging import merge, merge_structures
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.part import Part, PartArray, PartChunk
from tieredckpt.format.structure import (
    ArrayNode,
    DictNode,
    IntNode,
    ListNode,
    NamedTupleNode,
    Node,
    NoneNode,
    ObjectNode,
    TupleNode,
    TypedNode,
)

STORE = str(uuid.UUID(int=1))
SHAPE = (8, 4)
U1 = np.dtype(np.uint8)


def node(key: str, shape: tuple[int, ...] = SHAPE) -> ArrayNode:
    return ArrayNode(key, "uint8", shape, "numpy")


def record(rank: int, ranks: int, structure: Node) -> StepRecord:
    return first_record(
        structure,
        store=STORE,
        step=5,
        serial=3,
        line=((1, 3),),
        saved_at=10.0 + rank,
        nbytes=1,
        metrics={"loss": float(rank), f"rank {rank}": 1.0},
        rank=rank,
        ranks=ranks,
    )


def extent(number: int) -> Extent:
    return Extent(layout.pack_key(f"{number:032x}"), 4096 * number, 4)


def block(grid: Grid, first: int = 0) -> PartArray:
    """An array whose chunks are numbered by place, so that their order can be seen."""
    chunks: list[PartChunk] = [
        Chunk(number.to_bytes(16, "big"), extent(number)) for number in range(first, first + grid.size)
    ]
    return PartArray(grid, U1, chunks)


def rows(rank: int, ranks: int) -> Part:
    """The part of a rank that has a few rows of the array ``w``."""
    height = SHAPE[0] // ranks
    box = Box((rank * height, 0), (height, SHAPE[1]))
    array = block(plan_block(box, SHAPE, 1, 16), rank * 100)
    return Part(record(rank, ranks, DictNode(["w"], [node("w")])), {layout.block_key("w", box.offset): array})


def test_the_step_has_the_record_of_the_lowest_rank_and_the_metrics_of_all() -> None:
    step = merge([rows(1, 2), rows(0, 2)])
    expected = record(0, 2, DictNode(["w"], [node("w")]))
    metrics: dict[str, float | str] = {"loss": 0.0, "rank 0": 1.0, "rank 1": 1.0}
    assert step.record == msgspec.structs.replace(expected, rank=None, nbytes=32, metrics=metrics)


@given(cut=cuts(), world=st.integers(1, 4))
def test_every_item_is_found_in_the_chunk_that_its_rank_wrote(
    cut: tuple[tuple[int, ...], list[Box]], world: int
) -> None:
    shape, boxes = cut
    parts: list[Part] = []
    expected = np.zeros(shape, int)
    first = 0
    for rank in range(world):
        arrays: dict[str, PartArray] = {}
        for box in boxes[rank::world]:
            grid = plan_block(box, shape, 1, 16)
            arrays[layout.block_key("w", box.offset)] = block(grid, first)
            expected[box.slices()] = first + of_cell(grid)
            first += grid.size
        parts.append(Part(record(rank, world, DictNode(["w"], [node("w", shape)])), arrays))
    assert np.array_equal(items(merge(parts), shape), expected)


def items(step: StepIndex, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For every item of ``w``, the number of the chunk that it is in."""
    found = np.full(shape, -1)
    for box, name in step.blocks("w"):
        array = step.arrays[name]
        numbers = np.array([int.from_bytes(chunk.digest, "big") for chunk in array.chunks])
        found[box.slices()] = numbers[of_cell(array.grid)]
    return found


BOX = st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 4)).filter(lambda axis: sum(axis) <= 4)] * 2)


@given(boxes=st.lists(BOX, min_size=1, max_size=4, unique_by=lambda box: (box[0][0], box[1][0])), data=st.data())
def test_blocks_of_any_cells_make_an_array_in_which_every_item_is_their_own_or_none(
    boxes: list[tuple[tuple[int, int], ...]], data: st.DataObject
) -> None:
    shape = tuple(max(start + size for start, size in axis) for axis in zip(*boxes, strict=True))
    seen = np.zeros(shape, int)
    expected = np.zeros(shape, int)
    arrays: dict[str, PartArray] = {}
    first = 0
    for axes in boxes:
        box = Box(tuple(start for start, _ in axes), tuple(size for _, size in axes))
        grid = Grid(box.shape, data.draw(st.sampled_from([(1, 2), (2, 1), (2, 2)])), 1)
        arrays[layout.block_key("w", box.offset)] = block(grid, first)
        seen[box.slices()] += 1
        expected[box.slices()] = first + of_cell(grid)
        first += grid.size
    part = Part(record(0, 1, DictNode(["w"], [node("w", shape)])), arrays)
    if (seen == 1).all():
        assert np.array_equal(items(merge([part]), shape), expected)
    else:
        assert "shards of array 'w' do not add up" in conflict(part)


def test_a_last_block_that_is_shorter_than_its_cell_is_joined_with_the_others() -> None:
    structure = DictNode(["w"], [node("w", (5,))])
    arrays = {layout.block_key("w", (at,)): block(Grid((size,), (2,), 1), at) for at, size in ((0, 4), (4, 1))}
    assert list(merge([Part(record(0, 1, structure), arrays)]).arrays) == ["w"]


def of_cell(grid: Grid) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For every item of an array, the ordinal of the cell that it is in, counted out without `cells`."""
    index = [np.arange(full) // part for full, part in zip(grid.shape, grid.cell, strict=True)]
    return np.ravel_multi_index(np.meshgrid(*index, indexing="ij"), grid.counts)


def test_chunks_left_to_another_rank_have_the_place_where_that_rank_wrote_them() -> None:
    grid = Grid(SHAPE, (4, 4), 1)
    structure = DictNode(["w"], [node("w")])
    one, two = Chunk(b"1" * 16, extent(1)), Chunk(b"2" * 16, extent(2))
    first = Part(record(0, 2, structure), {"w": PartArray(grid, U1, [one, (b"2" * 16, None)])})
    second = Part(record(1, 2, structure), {"w": PartArray(grid, U1, [(b"1" * 16, None), two])})
    assert merge([first, second]).arrays == {"w": ArrayIndex(grid, U1, [one, two])}
    other = PartArray(grid, U1, [(b"1" * 16, None), (b"2" * 16, None)])
    with pytest.raises(Conflict, match="'w' was left to another rank, and no rank wrote it"):
        merge([first, Part(record(1, 2, structure), {"w": other})])


def conflict(*parts: Part) -> str:
    with pytest.raises(Conflict) as caught:
        merge(parts)
    return str(caught.value)


def test_a_step_without_all_its_ranks_is_none() -> None:
    assert "ranks 1, 2 of 4 did not contribute" in conflict(rows(0, 4), rows(3, 4))
    assert "no rank" in conflict()
    assert "two parts of one rank" in conflict(rows(0, 2), rows(0, 2), rows(1, 2))


def test_ranks_that_are_missing_are_not_counted_in_memory() -> None:
    """A damaged record may name more than fit there."""
    alone = rows(0, 2)
    message = conflict(Part(msgspec.structs.replace(alone.record, ranks=1 << 62), alone.arrays))
    assert f"ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and {(1 << 62) - 11} more of {1 << 62} did not" in message


@pytest.mark.parametrize("changes", [{"step": 6}, {"serial": 4}, {"store": "x"}, {"restored_from": 1}, {"ranks": 3}])
def test_parts_of_different_steps_are_none(changes: dict[str, Any]) -> None:
    other = rows(1, 2)
    message = conflict(rows(0, 2), Part(msgspec.structs.replace(other.record, **changes), other.arrays))
    assert "ranks 0 and 1" in message
    assert next(iter(changes)) in message


def test_parts_of_one_serial_that_different_runs_saved_are_no_step() -> None:
    def of_run(part: Part, run: str) -> Part:
        return Part(msgspec.structs.replace(part.record, provenance={RUN: run}), part.arrays)

    assert merge([of_run(rows(0, 2), "one"), of_run(rows(1, 2), "one")]).record.provenance == {RUN: "one"}
    assert "ranks 0 and 1 have parts of it that different runs saved" in conflict(
        of_run(rows(0, 2), "one"), of_run(rows(1, 2), "other")
    )


def whole(rank: int, digest: bytes, cell: tuple[int, ...] = SHAPE) -> Part:
    grid = Grid(SHAPE, cell, 1)
    return Part(record(rank, 2, DictNode(["w"], [node("w")])), {"w": PartArray(grid, U1, [Chunk(digest, bytes(32))])})


def test_a_leaf_that_differs_between_ranks_is_a_conflict_that_names_it() -> None:
    assert merge([whole(0, b"a" * 16), whole(1, b"a" * 16)]).arrays.keys() == {"w"}
    assert "'w' is not the same on ranks 0, 1" in conflict(whole(0, b"a" * 16), whole(1, b"b" * 16))
    assert "cut array 'w' in different ways" in conflict(whole(0, b"a" * 16), whole(1, b"a" * 16, (9, 4)))
    assert "'w' was saved whole by one rank, and as shards" in conflict(whole(0, b"a" * 16), rows(1, 2))


def test_shards_that_leave_a_gap_or_overlap_are_a_conflict_that_names_their_array() -> None:
    moved = Part(rows(1, 2).record, {layout.block_key("w", (3, 0)): rows(1, 2).arrays[layout.block_key("w", (4, 0))]})
    assert "shards of array 'w' do not add up" in conflict(rows(0, 2), moved)
    nothing = Part(rows(1, 2).record, {})
    assert "shards of array 'w' do not add up" in conflict(rows(0, 2), nothing)
    empty = [Part(record(rank, 2, DictNode(["w"], [node("w")])), {}) for rank in range(2)]
    assert "no rank saved array 'w'" in conflict(*empty)
    box, name = Box((8, 0), (0, 4)), layout.block_key("w", (8, 0))
    no_items = [Part(part.record, {name: block(plan_block(box, SHAPE, 1, 16))}) for part in empty]
    assert "shards of array 'w' do not add up" in conflict(*no_items)
    twice = {layout.block_key("w", (at, 0)): block(Grid((4, 4), (2, 4), 1)) for at in (0, 2)}  # as many cells as all
    assert "shards of array 'w' do not add up" in conflict(Part(empty[0].record, twice), nothing)


def test_a_block_that_begins_inside_a_cell_of_the_array_is_not_taken_for_all_of_it() -> None:
    array = PartArray(Grid((3, 4), (4, 4), 1), U1, [Chunk(bytes(16), extent(0))])
    structure = DictNode(["w"], [node("w", (4, 4))])
    part = Part(record(0, 1, structure), {layout.block_key("w", (1, 0)): array})
    assert "shards of array 'w' do not add up" in conflict(part)


def test_ranks_without_items_do_not_keep_an_array_from_being_joined() -> None:
    structure = DictNode(["w"], [node("w", (3, 4))])
    boxes = [*boxes_between([[0, 1, 2, 3], [0, 4]]), Box((3, 0), (0, 4))]
    parts = [
        Part(
            record(rank, 4, structure),
            {layout.block_key("w", box.offset): block(plan_block(box, (3, 4), 1, 16, (1, 4)), rank)},
        )
        for rank, box in enumerate(boxes)
    ]
    step = merge(parts)
    assert list(step.arrays) == ["w"]
    assert [chunk.where for chunk in step.arrays["w"].chunks] == [extent(0), extent(1), extent(2)]


def test_an_array_without_items_is_joined_from_blocks_without_any() -> None:
    box = Box((0, 0), (0, 4))
    part = Part(
        record(0, 1, DictNode(["w"], [node("w", (0, 8))])),
        {layout.block_key("w", (0, 0)): block(plan_block(box, (0, 8), 1, 16))},
    )
    assert merge([part]).arrays["w"].grid.shape == (0, 8)


def test_the_blocks_of_an_index_are_in_the_order_of_their_offsets() -> None:
    grid = Grid((1,), (1,), 1)
    names = [layout.block_key("w", (offset,)) for offset in (10, 9, 100)]
    step = StepIndex(record(0, 1, NoneNode()), {name: ArrayIndex(grid, U1, []) for name in names})
    assert [box.offset for box, _ in step.blocks("w")] == [(9,), (10,), (100,)]
    assert step.blocks("v") == []


# -- structures -------------------------------------------------------------------------------------------


def test_dicts_of_ranks_have_the_names_of_all_in_the_order_of_the_lowest() -> None:
    merged = merge_structures(
        {
            2: DictNode(["c", "a"], [node("c"), node("a")]),
            0: DictNode(["b", "layers"], [node("b"), DictNode([0], [node("layers/0")])]),
            1: DictNode(["layers", "a"], [DictNode([1], [node("layers/1")]), node("a")]),
        }
    )
    layers = DictNode([0, 1], [node("layers/0"), node("layers/1")])
    assert merged == DictNode(["b", "layers", "a", "c"], [node("b"), layers, node("a"), node("c")])


def test_dicts_of_any_keys_are_merged_as_dicts_are() -> None:
    zero, one = ObjectNode("set", [0]), ObjectNode("set", [1])
    merged = merge_structures({1: TypedNode(["=1", "b"], [one, zero], "map"), 0: TypedNode(["b"], [zero], "map")})
    assert merged == TypedNode(["b", "=1"], [zero, one], "map")


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        (IntNode(1), IntNode(2), "'leaf': 1 and 2;"),
        (DictNode(["x"], [ObjectNode("set", [1])]), DictNode(["x"], [ObjectNode("set", [2])]), "'x': a set [1] and a"),
        (TypedNode([0], [NoneNode()], "deque", 3), TypedNode([0], [NoneNode()], "deque", 4), "root"),
        (TypedNode(["a"], [NoneNode()], "map"), TypedNode(["a"], [NoneNode()], "counter"), "root"),
        (TypedNode(["a"], [NoneNode()], "namespace"), TypedNode(["b"], [NoneNode()], "namespace"), "root"),
        (TypedNode(["=[1]"], [NoneNode()], "map"), DictNode([1], [NoneNode()]), "root: a map of 1 and a dict of 1"),
        (TypedNode(["=[1]"], [NoneNode()], "map"), DictNode(["=2"], [NoneNode()]), "root: a map of 1 and a dict of 1"),
        (DictNode(["x"], [IntNode(1)]), DictNode(["x"], [IntNode(2)]), "'x': 1 and 2;"),
        (DictNode(["x"], [node("x")]), DictNode(["x"], [node("x", (9, 4))]), "'x'"),
        (DictNode(["x"], [node("x")]), DictNode(["x"], [NoneNode()]), "'x'"),
        (DictNode(["x"], [ListNode([])]), DictNode(["x"], [TupleNode([])]), "'x'"),
        (ListNode([NoneNode()]), ListNode([NoneNode(), NoneNode()]), "root"),
        (NamedTupleNode(["a"], [NoneNode()]), NamedTupleNode(["b"], [NoneNode()]), "root"),
        (DictNode([1], [NoneNode()]), DictNode(["1"], [NoneNode()]), "'1'"),
        (DictNode(["x"], [DictNode(["y"], [IntNode(1)])]), DictNode(["x"], [DictNode(["y"], [IntNode(3)])]), "'x/y'"),
    ],
)
def test_any_other_difference_is_a_conflict_that_names_path_and_ranks(one: Node, other: Node, path: str) -> None:
    assert merge_structures({3: one, 5: one}) == one
    with pytest.raises(Conflict, match=f"ranks 3 and 7 disagree at .*{re.escape(path)}"):
        merge_structures({3: one, 5: one, 7: other})


def dict_node(found: dict[str, Node]) -> Node:
    """A dict as it is stored, by the names of its keys."""
    if any(name.startswith("=") for name in found):
        return TypedNode(list(found), list(found.values()), "map")
    return DictNode(list(found), list(found.values()))


NODES = st.recursive(
    st.just(NoneNode()) | st.integers(0, 2).map(IntNode),
    lambda below: st.dictionaries(st.sampled_from(["a", "b", "=[1,2]", "=[0]"]), below, max_size=3).map(dict_node),
    max_leaves=8,
)


@given(whole=NODES, ranks=st.integers(1, 4), data=st.data())
def test_dicts_cut_into_parts_are_whole_again(whole: Node, ranks: int, data: st.DataObject) -> None:
    def part(found: Node) -> Node:
        if not isinstance(found, DictNode | TypedNode):
            return found
        kept = [pair for pair in zip(found.keys, found.children, strict=True) if data.draw(st.booleans())]
        return dict_node({str(name): part(child) for name, child in kept})

    merged = merge_structures({**{rank: part(whole) for rank in range(ranks)}, ranks: whole})
    assert sorted_names(merged) == sorted_names(whole)


def sorted_names(found: Node) -> Any:
    if not isinstance(found, DictNode | TypedNode):
        return found
    return type(found), {name: sorted_names(child) for name, child in zip(found.keys, found.children, strict=True)}
