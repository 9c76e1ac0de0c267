"""Boxes: a set of them tiles an array exactly if it covers every item once."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.cuts import cuts

from tieredckpt.format.boxes import Box, Boxes, tile

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    spans = [st.tuples(st.integers(0, full), st.integers(0, full)).map(sorted) for full in shape]
    return st.tuples(*spans).map(lambda found: Box(tuple(a for a, _ in found), tuple(b - a for a, b in found)))


def covered(shape: tuple[int, ...], boxes: list[Box]) -> NDArray[np.int64]:
    counts = np.zeros(shape, np.int64)
    for box in boxes:
        counts[box.slices()] += 1
    return counts


@given(data=st.data(), shape=SHAPES)
def test_any_boxes_tile_exactly_if_they_cover_every_item_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    assert tile(shape, boxes) == bool((covered(shape, boxes) == 1).all())


@given(cut=cuts(), data=st.data())
def test_a_cut_tiles_until_one_of_its_boxes_is_missing_doubled_or_moved(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    boxes = data.draw(st.permutations(boxes))
    assert tile(shape, boxes)
    assert not tile(shape, boxes[1:])
    assert not tile(shape, [*boxes, boxes[0]])
    moved = Box((boxes[0].offset[0] + 1, *boxes[0].offset[1:]), boxes[0].shape)
    assert not tile(shape, [moved, *boxes[1:]])


@given(data=st.data(), shape=SHAPES)
def test_an_intersection_has_the_items_of_both(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, two = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = covered(shape, [one, two]) == 2
    found = one.intersection(two)
    assert bool(both.any()) == (found is not None)
    if found is not None:
        assert np.array_equal(covered(shape, [found]) == 1, both)
        assert one.contains(found)
        assert two.contains(found)
        assert found.within(one).slices() == tuple(
            slice(a - b, a - b + n) for a, b, n in zip(found.offset, one.offset, found.shape, strict=True)
        )


@given(data=st.data(), shape=SHAPES)
def test_the_boxes_that_meet_another_are_those_that_share_an_item_with_it(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    box = data.draw(boxes_in(shape))
    sharing = [i for i, other in enumerate(boxes) if (covered(shape, [box, other]) == 2).any()]
    assert Boxes(boxes).meeting(box) == sharing


def test_boxes_of_another_number_of_axes_tile_nothing() -> None:
    assert not tile((4,), [Box((0, 0), (4, 1))])
    assert not tile((4, 4), [Box((0,), (4,))])
    assert not tile((4,), [Box((0,), (5,)), Box((3,), (-1,))])


def test_many_boxes_of_a_mesh_are_checked_as_a_whole() -> None:
    boxes = [Box((16 * i, 8 * j, k), (16, 8, 1)) for i in range(32) for j in range(32) for k in range(8)]
    assert tile((512, 256, 8), boxes)
    assert not tile((512, 256, 8), [*boxes[:-1], boxes[0]])


@pytest.mark.parametrize("axes", [1, 31])
def test_boxes_with_hostile_corners_are_refused_without_exploding(axes: int) -> None:
    boxes = [Box((0,) * axes, (1 << 61 // axes,) * axes)] * 2
    begin = time.process_time()
    assert not tile(((1 << 61 // axes) * 2,) + (1 << 61 // axes,) * (axes - 1), boxes)
    assert time.process_time() - begin < 8
