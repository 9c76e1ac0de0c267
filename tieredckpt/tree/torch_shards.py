"""torch's distributed tensors as pieces. `tieredckpt.tree.torch_leaves` imports this for one of them only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import msgspec
import numpy as np
import torch

from tieredckpt.errors import Invalid
from tieredckpt.format.boxes import Box
from tieredckpt.tree.device_target import DeviceTarget, Filled
from tieredckpt.tree.leaf import ArrayLeaf, Pieces, Place, array_node, nothing, storage_key
from tieredckpt.tree.meshes import Cut, common_step, spans

__all__ = ["pieces", "restored"]


def pieces(key: str, value: Any, as_leaf: Callable[[str, object], ArrayLeaf]) -> Pieces:
    """The ``DTensor`` ``value`` as the boxes of it that this process has; ``as_leaf`` looks at its local tensor.

    Raises `Invalid` for one that is not reduced yet (`Partial`), and one whose local tensor is not of the shape
    that mesh and placements make.
    """
    shape = tuple(value.shape)
    local = as_leaf(key, _local(value))
    node = array_node(msgspec.structs.replace(local, place=Place(key, shape, (0,) * len(shape))))
    if not all(shape):
        return Pieces(node, value, (nothing(node, local.dtype),))
    coordinates = value.device_mesh.get_coordinate()
    if coordinates is None:
        return Pieces(node, value, ())
    cuts, places = _cuts(key, value)
    mine = [spans(n, c, [coordinates[i] for i in p]) for n, c, p in zip(shape, cuts, places, strict=True)]
    expected = tuple(sum(span.size for span in axis) for axis in mine)
    if local.shape != expected:
        raise Invalid(
            f"leaf {key!r}: the local tensor of the DTensor has shape {list(local.shape)}, and its placements "
            f"{list(value.placements)} make {list(expected)} of {list(shape)} here; make it with distribute_tensor"
        )
    cut = tuple(common_step(n, c) for n, c in zip(shape, cuts, strict=True))
    replicas = _replicas(value, coordinates, {i for p in places for i in p})
    leaves = []
    for some in product(*mine):
        box = Box(tuple(span.start for span in some), tuple(span.size for span in some))
        alone = box.shape == shape and not replicas
        place = None if alone else Place(key, shape, box.offset, cut, replicas=replicas)
        leaves.append(msgspec.structs.replace(local, key=storage_key(key, shape, box), shape=box.shape, place=place))
    parts = [_within_local(axis) for axis in mine]
    if len(leaves) > 1:
        leaves = [msgspec.structs.replace(leaf, part=part) for leaf, part in zip(leaves, product(*parts), strict=True)]
    return Pieces(node, value, tuple(leaves))


def restored(
    pieces: Pieces,
    arrays: Mapping[str, Filled],
    as_leaf: Callable[[str, object], ArrayLeaf],
    as_tensor: Callable[[ArrayLeaf, Filled], torch.Tensor],
) -> torch.Tensor:
    """A ``DTensor`` on the mesh and with the placements of the one that ``pieces`` are an example of."""
    like: Any = pieces.source
    example = as_leaf(pieces.node.key, _local(like))
    local: Filled
    if len(pieces.leaves) == 1 and pieces.leaves[0].shape == example.shape:
        local = arrays[pieces.leaves[0].key]
    elif any(isinstance(array, DeviceTarget) for array in arrays.values()):
        assert isinstance(like, torch.Tensor)
        return like  # whose pieces were filled where they lie
    else:
        local = np.empty(example.shape, example.dtype)
        if local.size:
            for leaf in pieces.leaves:
                local[leaf.part or ()] = arrays[leaf.key]
    tensor = as_tensor(example, local).detach()
    whole: torch.Tensor = type(like).from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(whole, requires_grad=like.requires_grad)
    return whole.requires_grad_(like.requires_grad)


def _local(value: Any) -> torch.Tensor:
    with torch.no_grad():
        local = value.to_local()
    assert isinstance(local, torch.Tensor)
    return local.detach()


def _cuts(key: str, value: Any) -> tuple[list[tuple[Cut, ...]], list[list[int]]]:
    """How each axis of the tensor is cut, and by which axes of the mesh."""
    cuts: list[list[Cut]] = [[] for _ in value.shape]
    places: list[list[int]] = [[] for _ in value.shape]
    for i, placement in enumerate(value.placements):
        if placement.is_replicate():
            continue
        axis = getattr(placement, "dim", None)
        if axis is None:
            raise Invalid(
                f"leaf {key!r}: a DTensor placed as {placement} is not reduced yet; redistribute it to Shard or "
                f"Replicate before the save"
            )
        cuts[axis].append(Cut(value.device_mesh.size(i), getattr(placement, "split_factor", 1)))
        places[axis].append(i)
    return [tuple(axis) for axis in cuts], places


def _replicas(value: Any, coordinates: list[int], cutting: set[int]) -> tuple[int, ...]:
    """The ranks that have the same local tensor as this process, if it is not the only one."""
    if len(cutting) == len(coordinates):
        return ()
    mesh = value.device_mesh.mesh
    same = mesh[tuple(at if i in cutting else slice(None) for i, at in enumerate(coordinates))]
    ranks = tuple(sorted(same.reshape(-1).tolist()))
    return ranks if len(ranks) > 1 else ()


def _within_local(axis: list[Any]) -> list[slice]:
    found = []
    start = 0
    for span in axis:
        found.append(slice(start, start + span.size))
        start += span.size
    return found
