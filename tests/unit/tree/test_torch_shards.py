"""Distributed tensors: every process's part, under the key of where it lies; the replicas known; back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.trees import indexed

from tieredckpt.errors import Invalid
from tieredckpt.format.boxes import tile
from tieredckpt.format.joining import join
from tieredckpt.format.manifest import ArrayIndex
from tieredckpt.format.structure import array_nodes
from tieredckpt.tree import flatten, host_view, match
from tieredckpt.tree.arrays import writable_part
from tieredckpt.tree.shards import check_whole

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
dtensor = pytest.importorskip("torch.distributed.tensor")
fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
Shard, Replicate = dtensor.Shard, dtensor.Replicate
StridedShard = dtensor.placement_types._StridedShard

Make = Callable[[np.ndarray[Any, Any]], Any]


@contextmanager
def rank_of(rank: int, mesh: tuple[int, ...]) -> Iterator[Any]:
    """A device mesh as that rank of a job sees it that has no other process."""
    size = int(np.prod(mesh))
    dist.init_process_group("fake", rank=rank, world_size=size, store=fake.FakeStore())
    try:
        yield dtensor.DeviceMesh("cpu", torch.arange(size).reshape(mesh))
    finally:
        dist.destroy_process_group()


def part(whole: np.ndarray[Any, Any], mesh: Any, placements: list[Any]) -> np.ndarray[Any, Any]:
    """What a process has, cut by ``torch.chunk`` itself."""
    local = torch.from_numpy(whole)
    for at, size, placement in zip(mesh.get_coordinate(), mesh.shape, placements, strict=True):
        if placement.is_replicate():
            continue
        parts = local.split(-(-local.size(placement.dim) // getattr(placement, "split_factor", 1)), placement.dim)
        mine = []
        for one in parts:
            each = -(-one.size(placement.dim) // size)
            begin = min(at * each, one.size(placement.dim))
            mine.append(one.narrow(placement.dim, begin, min(each, one.size(placement.dim) - begin)))
        local = torch.cat(mine, placement.dim)
    return local.contiguous().numpy()


def distributed(whole: np.ndarray[Any, Any], mesh: Any, placements: list[Any]) -> Any:
    local = torch.from_numpy(part(whole, mesh, placements).copy())
    stride = tuple(n // whole.itemsize for n in whole.strides)
    return dtensor.DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(whole.shape), stride=stride
    )


LAYOUTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 3), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(1), Shard(0)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(-1), Replicate()]),
    ((2, 2), [StridedShard(0, split_factor=2), Shard(0)]),
    ((3, 2), [StridedShard(0, split_factor=2), Shard(1)]),
    ((2, 2, 2), [Replicate(), Shard(1), Shard(0)]),
]


@pytest.mark.parametrize(("shape", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", [12, 7, 3])
def test_the_pieces_of_all_ranks_join_to_the_tensor_each_item_once_per_replica(
    shape: tuple[int, ...], placements: list[Any], rows: int
) -> None:
    whole = np.arange(rows * 10.0).reshape(rows, 10)
    boxes: dict[int, list[Any]] = {}
    arrays: dict[str, ArrayIndex] = {}
    for rank in range(int(np.prod(shape))):
        with rank_of(rank, shape) as mesh:
            flat = flatten({"w": distributed(whole, mesh, placements)})
            (node,) = array_nodes(flat.structure)
            assert (node.key, node.shape, node.dtype, node.kind) == ("w", whole.shape, "float64", "torch")
            arrays |= indexed(flat, 1 << 20)
            for leaf in flat.arrays:
                assert host_view(leaf).tolist() == whole[leaf.box.slices()].tolist()
                replicas = leaf.place.replicas if leaf.place is not None else ()
                assert not replicas or rank in replicas
                if rank == min(replicas, default=rank):
                    boxes.setdefault(rank, []).append(leaf.box)
    assert tile(whole.shape, [box for found in boxes.values() for box in found])
    assert join(flat.structure, arrays).keys() == {"w"}
    assert len(boxes) <= np.prod([n for n, p in zip(shape, placements, strict=True) if not p.is_replicate()])


@pytest.mark.parametrize(("shape", "placements"), LAYOUTS, ids=str)
def test_a_tensor_comes_back_on_its_mesh_with_its_placements(shape: tuple[int, ...], placements: list[Any]) -> None:
    whole = np.arange(70, dtype=np.float32).reshape(7, 10)
    for rank in (0, int(np.prod(shape)) - 1):
        with rank_of(rank, shape) as mesh:
            like = distributed(np.zeros_like(whole), mesh, placements)
            found = match({"w": like}, flatten({"w": whole}).structure)
            got: Any = found.build({leaf.key: whole[leaf.box.slices()].copy() for leaf in found.leaves})
            tensor = got["w"]
            assert type(tensor) is dtensor.DTensor
            assert (tensor.shape, tensor.stride()) == (like.shape, like.stride())
            assert (tensor.placements, tensor.device_mesh, tensor.requires_grad) == (like.placements, mesh, False)
            assert tensor.to_local().tolist() == part(whole, mesh, placements).tolist()


def test_a_parameter_comes_back_as_one() -> None:
    whole = np.arange(15.0)
    with rank_of(3, (5,)) as mesh:
        like = torch.nn.Parameter(distributed(np.zeros(15), mesh, [Shard(0)]))
        found = match(like, flatten(whole).structure)
        got: Any = found.build({leaf.key: whole[leaf.box.slices()].copy() for leaf in found.leaves})
        assert isinstance(got, torch.nn.Parameter)
        assert isinstance(got, dtensor.DTensor)
        assert got.requires_grad
        assert got.to_local().tolist() == [9, 10, 11]


def test_a_tensor_without_data_says_what_is_wanted_and_cannot_be_saved() -> None:
    whole = np.arange(12.0).reshape(6, 2)
    with rank_of(1, (2,)) as mesh:
        local = torch.empty(3, 2, dtype=torch.float64, device="meta")
        like = dtensor.DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        found = match(like, flatten(whole).structure)
        got: Any = found.build({leaf.key: whole[leaf.box.slices()].copy() for leaf in found.leaves})
        assert got.to_local().tolist() == whole[3:].tolist()
        with pytest.raises(Invalid, match="meta"):
            flatten(like)


def test_what_fills_a_distributed_tensor_is_in_its_local_one() -> None:
    with rank_of(1, (2,)) as mesh:
        tensor = distributed(np.zeros((5, 2)), mesh, [Shard(0)])
        found = match({"w": tensor}, flatten({"w": np.zeros((5, 2))}).structure)
        (leaf,) = found.leaves
        writable_part(leaf)[...] = 7
        assert tensor.to_local().tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize("axis", [0, 1])
def test_of_a_tensor_in_several_boxes_those_that_lie_in_one_piece_are_filled_and_others_refused(axis: int) -> None:
    with rank_of(0, (2,)) as mesh:
        tensor = distributed(np.zeros((16, 16)), mesh, [StridedShard(axis, split_factor=2)])
        leaves = flatten({"a": {"w": tensor}}).arrays
        assert len(leaves) == 2
        if axis == 1:
            with pytest.raises(Invalid, match=r"'a/w'.*not contiguous.*`like`"):
                writable_part(leaves[0])
            return
        for value, leaf in enumerate(leaves, 1):
            writable_part(leaf)[...] = value
        assert tensor.to_local().unique_consecutive(dim=0)[:, 0].tolist() == [1, 2]


def test_a_shard_shorter_than_its_siblings_is_planned_as_they_are() -> None:
    cuts = set()
    for rank in range(4):
        with rank_of(rank, (4,)) as mesh:
            for leaf in flatten({"w": distributed(np.zeros((10, 2)), mesh, [Shard(0)])}).arrays:
                assert leaf.place is not None
                cuts.add(leaf.place.cut)
    assert cuts == {(3, 2)}


def test_a_rank_outside_of_the_mesh_has_no_piece_and_knows_the_array() -> None:
    dist.init_process_group("fake", rank=3, world_size=4, store=fake.FakeStore())
    try:
        mesh = dtensor.DeviceMesh("cpu", [0, 1])
        local = torch.zeros(0)
        tensor = dtensor.DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size([6]), stride=(1,)
        )
        flat = flatten({"w": tensor})
    finally:
        dist.destroy_process_group()
    assert flat.arrays == ()
    assert [node.shape for node in array_nodes(flat.structure)] == [(6,)]


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_tensor_without_items_is_one_array_on_every_rank(shape: tuple[int, ...]) -> None:
    for rank in range(2):
        with rank_of(rank, (2,)) as mesh:
            flat = flatten({"w": distributed(np.zeros(shape), mesh, [Shard(0)])})
            assert [(leaf.key, leaf.shape) for leaf in flat.arrays] == [("w", shape)]
            check_whole(flat.structure, flat.arrays)


def test_what_is_not_reduced_or_not_cut_as_it_says_is_refused_by_key() -> None:
    with rank_of(0, (2,)) as mesh:
        partial = dtensor.DTensor.from_local(torch.zeros(3), mesh, [dtensor.Partial()], run_check=False)
        with pytest.raises(Invalid, match=r"'a/b'.*redistribute"):
            flatten({"a": {"b": partial}})
        odd = dtensor.DTensor.from_local(
            torch.zeros(5), mesh, [Shard(0)], run_check=False, shape=torch.Size([6]), stride=(1,)
        )
        with pytest.raises(Invalid, match=r"'a/b'.*shape \[5\].*make \[3\]"):
            flatten({"a": {"b": odd}})
