"""Shards as leaves: what a process has of an array, under keys of its own, and what is no part of one is refused."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tieredckpt import Shard, Sharded
from tieredckpt.engine.saving.capture import check_immutable
from tieredckpt.errors import Invalid
from tieredckpt.format.boxes import Box
from tieredckpt.format.layout import block_key
from tieredckpt.format.structure import array_nodes
from tieredckpt.tree import flatten, host_view, match, unflatten
from tieredckpt.tree.replicated import split

WHOLE = np.arange(24.0).reshape(6, 4)


def test_every_shard_is_a_piece_under_a_key_of_its_own_and_the_structure_names_the_array_once() -> None:
    flat = flatten({"w": Sharded([Shard(WHOLE[2:4], (6, 4), (2, 0)), Shard(WHOLE[5:], (6, 4), (5, 0))]), "n": 1})
    assert [leaf.key for leaf in flat.arrays] == [block_key("w", (2, 0)), block_key("w", (5, 0))]
    assert [host_view(leaf).tolist() for leaf in flat.arrays] == [WHOLE[2:4].tolist(), WHOLE[5:].tolist()]
    (node,) = array_nodes(flat.structure)
    assert (node.key, node.shape, node.dtype) == ("w", (6, 4), "float64")


def test_a_shard_of_all_of_an_array_is_that_array() -> None:
    large = np.zeros((600, 400))
    for tree in ({"w": Shard(large, large.shape, (0, 0))}, {"w": Shard(np.float32(3), (), ())}):
        flat = flatten(tree)
        (leaf,) = flat.arrays
        assert (leaf.key, leaf.array, leaf.box) == ("w", "w", Box.whole(tree["w"].shape))
        assert leaf.kind == "numpy"  # also of a NumPy scalar, since another rank may have an array
        (kept,) = split(flat, ["**"], rank=0, nodes=["a"] * 4, chunk_size=4096).arrays
        assert kept == leaf  # what is a shard is divided among nobody


def test_an_empty_shard_is_no_piece_but_tells_of_the_array() -> None:
    flat = flatten({"w": Shard(WHOLE[:0], (6, 4), (6, 0))})
    assert flat.arrays == ()
    assert [node.shape for node in array_nodes(flat.structure)] == [(6, 4)]


def test_an_empty_shard_of_a_cut_may_lie_at_the_end() -> None:
    """More ranks than ``torch.chunk`` has parts: 4 rows by 3 make two, and the third begins where the array ends."""
    flat = flatten({"w": Sharded([Shard(WHOLE[a:b], (4, 4), (a, 0), (3, 4)) for a, b in ((0, 3), (3, 4), (4, 4))])})
    assert [leaf.place.cut for leaf in flat.arrays if leaf.place is not None] == [(3, 4)] * 2


def test_shards_of_an_array_without_items_are_one_array() -> None:
    empty = np.zeros((1, 0), np.int8)
    flat = flatten({"w": Sharded([Shard(empty, (3, 0), (0, 0)), Shard(empty, (3, 0), (1, 0))])})
    assert [(leaf.key, leaf.shape) for leaf in flat.arrays] == [("w", (3, 0))]


@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        (Shard(WHOLE, (6, 3), (0, 0)), r"shape \[6, 4\] at \[0, 0\] does not lie in an array of shape \[6, 3\]"),
        (Shard(WHOLE[:2], (6, 4), (5, 0)), "does not lie in"),
        (Shard(WHOLE[:2], (6, 4), (-1, 0)), "does not lie in"),
        (Shard(WHOLE[:2], (6,), (0,)), "does not lie in"),
        (Shard(WHOLE[:2], (6, 4), (0,)), "does not lie in"),
        (Shard(WHOLE[:2], "abc", (0, 0)), "sequences of int"),
        (Shard(WHOLE[:2], (6.5, 4), (2, 0)), "sequences of int"),
        (Shard(WHOLE[:2], (6, 4), (2, 0), "abc"), "sequences of int"),
        (Shard(WHOLE[:2], (6, 4), (2, 0), (4, 4)), r"cut by \[4, 4\] begins at \[2, 0\]"),
        (Shard(WHOLE[:2], (6, 4), (2, 0), (2,)), "no shard of a cut"),
        (Shard(WHOLE[:2], (6, 4), (2, 0), (0, 4)), "no shard of a cut"),
        (Shard([1, 2], (6, 4), (0, 0)), "a list cannot be the array of a Shard"),
        (Shard(Shard(WHOLE[:1], (6, 4), (0, 0)), (6, 4), (0, 0)), "a Shard cannot be the array"),
        (Sharded([]), "without shards"),
        (Sharded((WHOLE,)), "holds Shards, not a ndarray"),
        (Sharded([Shard(WHOLE[:3], (6, 4), (0, 0)), Shard(WHOLE[2:], (6, 4), (2, 0))]), "overlap"),
        (Sharded([Shard(WHOLE, (6, 4), (0, 0)), Shard(WHOLE[:, :1], (6, 4), (0, 3))]), "overlap"),
        (Sharded([Shard(np.zeros(()), (), ())] * 2), "overlap"),
        (Sharded([Shard(WHOLE[:3], (6, 4), (0, 0)), Shard(WHOLE[:3].astype("f4"), (6, 4), (3, 0))]), "float32"),
        (Sharded([Shard(WHOLE[:3], (6, 4), (0, 0)), Shard(WHOLE[:3], (9, 4), (3, 0))]), r"\[9, 4\]"),
    ],
)
def test_what_is_no_part_of_one_array_is_refused_by_key(leaf: object, why: str) -> None:
    with pytest.raises(Invalid, match=rf"leaf 'a/b'.*{why}"):
        flatten({"a": {"b": leaf}})


def test_shards_that_can_be_gone_through_once_are_kept() -> None:
    like = Sharded(Shard(np.zeros((3, 4)), (6, 4), (i, 0)) for i in (0, 3))
    found = match({"w": like}, flatten({"w": WHOLE}).structure)
    got: Any = found.build(arrays_for(found, WHOLE))
    assert [shard.array.tolist() for shard in got["w"].shards] == [WHOLE[:3].tolist(), WHOLE[3:].tolist()]


def test_pieces_that_can_change_are_told_by_the_key_of_their_array() -> None:
    shards = [Shard(WHOLE[:3], (6, 4), (0, 0)), Shard(WHOLE[3:], (6, 4), (3, 0))]
    with pytest.raises(Invalid, match=r"and 'a/w' \(1 in all\) can change"):
        check_immutable(flatten({"a": {"w": Sharded(shards)}}))


@pytest.mark.parametrize("axis", [0, 1])
def test_many_shards_of_a_process_are_told_apart_quickly(axis: int) -> None:
    """To look at each pair of them in Python would take ten seconds and more."""
    shape, part = [2, 2], [2, 2]
    shape[axis], part[axis] = 2500, 1
    shards = [Shard(np.zeros(part), tuple(shape), (i, 0) if axis == 0 else (0, i)) for i in range(2500)]
    begin = time.process_time()
    assert len(flatten({"w": Sharded(shards)}).arrays) == 2500
    assert time.process_time() - begin < 4


def arrays_for(found: Any, whole: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {leaf.key: whole[leaf.box.slices()].copy() for leaf in found.leaves}


def test_like_says_which_boxes_come_back_and_in_what_form() -> None:
    structure = flatten({"w": WHOLE, "b": WHOLE}).structure
    like = {
        "w": Sharded([Shard(np.zeros((2, 4)), (6, 4), (4, 0), (2, 4)), Shard(np.zeros((0, 4)), (6, 4), (6, 0))]),
        "b": Shard(np.zeros((6, 1)), (6, 4), (0, 2)),
    }
    found = match(like, structure)
    assert [leaf.key for leaf in found.leaves] == [block_key("w", (4, 0)), block_key("b", (0, 2))]
    got: Any = found.build(arrays_for(found, WHOLE))
    assert [shard.array.tolist() for shard in got["w"].shards] == [WHOLE[4:].tolist(), []]
    assert [(shard.offset, shard.cut) for shard in got["w"].shards] == [((4, 0), (2, 4)), ((6, 0), None)]
    assert type(got["b"]) is Shard
    assert got["b"].array.tolist() == WHOLE[:, 2:3].tolist()


def test_a_shard_fits_an_array_of_its_global_shape_and_dtype_only() -> None:
    structure = flatten({"w": WHOLE}).structure
    for like in (Shard(np.zeros((2, 4)), (7, 4), (0, 0)), Shard(np.zeros((2, 4), "f4"), (6, 4), (0, 0))):
        with pytest.raises(Invalid, match=r"different: 'w'"):
            match({"w": like}, structure)


def test_part_of_a_step_fits_only_where_that_is_allowed() -> None:
    structure = flatten({"a": WHOLE, "deep": {"b": WHOLE, "c": [1, 2]}}).structure
    like = {"deep": {"b": Shard(WHOLE[:1], (6, 4), (0, 0))}}
    with pytest.raises(Invalid, match="3 only in the step: 'a', 'deep/c/0', 'deep/c/1'"):
        match(like, structure)
    found = match(like, structure, part=True)
    got: Any = found.build(arrays_for(found, WHOLE))
    assert list(got["deep"]) == ["b"]
    with pytest.raises(Invalid, match="1 missing from the step: 'x'"):
        match({"x": 1}, structure, part=True)


def test_without_like_what_was_saved_in_pieces_is_whole() -> None:
    flat = flatten({"w": Sharded([Shard(WHOLE[:3], (6, 4), (0, 0)), Shard(WHOLE[3:], (6, 4), (3, 0))])})
    got: Any = unflatten(flat.structure, {"w": WHOLE})
    assert got["w"] is WHOLE
