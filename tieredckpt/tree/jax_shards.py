"""jax arrays of several processes as pieces. `tieredckpt.tree.jax_leaves` imports this for one of them only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tieredckpt.format.boxes import Box
from tieredckpt.tree.leaf import ArrayLeaf, Pieces, Place, array_node, nothing, storage_key

__all__ = ["pieces", "restored", "templates"]

_AsLeaf: TypeAlias = Callable[[str, object], ArrayLeaf]


def pieces(key: str, array: jax.Array, as_leaf: _AsLeaf, as_template: _AsLeaf) -> Pieces:
    """The shards of ``array`` that this process can address, each box once, as pieces.

    Args:
        key: of the leaf.
        array: of which this process may have a part only; also of typed PRNG keys.
        as_leaf: looks at an array of one device.
        as_template: looks at a `jax.ShapeDtypeStruct` without a sharding.
    """
    whole = as_template(key, jax.ShapeDtypeStruct(array.shape, array.dtype))
    local: dict[Box, jax.Array] = {}
    for shard in array.addressable_shards:
        local.setdefault(_box(shard.index, whole.shape), shard.data)
    found = _pieces(key, array, whole, local)
    leaves = [replace(leaf, source=as_leaf(key, local[leaf.box]).source) for leaf in found.leaves if local]
    return found if not all(whole.shape) else dataclasses.replace(found, leaves=tuple(leaves))


def templates(key: str, like: jax.Array | jax.ShapeDtypeStruct, as_template: _AsLeaf) -> Pieces:
    """The boxes that this process would address of an array such as ``like``, as pieces without data."""
    assert like.sharding is not None
    whole = as_template(key, jax.ShapeDtypeStruct(like.shape, like.dtype))
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    return _pieces(key, like, whole, {_box(index, whole.shape): None for index in indices})


def restored(
    pieces: Pieces, arrays: Mapping[str, npt.NDArray[Any]], wrap: Callable[[npt.NDArray[Any]], Any]
) -> jax.Array:
    """A jax array with the sharding of the one that ``pieces`` are an example of.

    Args:
        pieces: as `templates` or `pieces` made them.
        arrays: by storage key.
        wrap: makes of a piece what jax puts on a device.
    """
    like: Any = pieces.source
    node = pieces.node
    used = set()
    parts = []
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
        box = _box(index, node.shape)
        name = storage_key(node.key, node.shape, box)
        data = arrays[name] if box.size else np.empty(box.shape, pieces.leaves[0].dtype)
        # On a CPU, jax may use the memory itself, and may write to it once the array is donated.
        if name in used or not data.flags.writeable:
            data = data.copy()
        used.add(name)
        parts.append(jax.device_put(wrap(data), device))
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts, dtype=like.dtype)


def _pieces(key: str, like: jax.Array | jax.ShapeDtypeStruct, whole: ArrayLeaf, boxes: Iterable[Box]) -> Pieces:
    node = array_node(whole)
    if not all(whole.shape):
        return Pieces(node, like, (nothing(node, whole.dtype),))
    sharding: Any = like.sharding
    cut = (*sharding.shard_shape(like.shape), *whole.shape[len(like.shape) :])
    holders = _holders(sharding, tuple(like.shape))
    leaves = []
    for box in boxes:
        replicas = holders[box.offset[: len(like.shape)]]
        place = Place(key, whole.shape, box.offset, cut, replicas=replicas)
        alone = box.shape == whole.shape and not replicas
        name = storage_key(key, whole.shape, box)
        leaves.append(replace(whole, key=name, shape=box.shape, place=None if alone else place))
    return Pieces(node, like, tuple(leaves))


@lru_cache(maxsize=1024)
def _holders(sharding: Any, shape: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The processes that hold each box, by its offset; () for a box that one process holds."""
    processes: dict[tuple[int, ...], set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        processes.setdefault(_box(index, shape).offset, set()).add(device.process_index)
    return {offset: tuple(sorted(found)) if len(found) > 1 else () for offset, found in processes.items()}


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box that ``index`` selects; ``shape`` may have more axes, those of the data of PRNG keys."""
    bounds = [part.indices(full)[:2] for part, full in zip(index, shape, strict=False)]
    bounds += [(0, full) for full in shape[len(index) :]]
    return Box(tuple([start for start, _ in bounds]), tuple([stop - start for start, stop in bounds]))
