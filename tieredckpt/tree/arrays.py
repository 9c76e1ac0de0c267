"""The arrays of a tree: what they are, their bytes on the host, and how they are made again.

NumPy is handled here; `torch_leaves` and `jax_leaves` are imported when a program has loaded torch or jax: by
`load_frameworks`, or when it hands over the first of their arrays.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tieredckpt.devices.base import Device, DeviceArray
from tieredckpt.errors import Invalid
from tieredckpt.format.boxes import Box
from tieredckpt.format.structure import ArrayNode, Kind
from tieredckpt.tree import shards
from tieredckpt.tree.device_target import DeviceTarget, Filled
from tieredckpt.tree.leaf import ArrayLeaf, Pieces, checked_dtype, storage_key
from tieredckpt.tree.shards import Shard, Sharded

__all__ = [
    "ArrayLeaf",
    "MadeAs",
    "as_array_leaf",
    "as_template",
    "device_view",
    "host_reader",
    "host_view",
    "load_frameworks",
    "load_kinds",
    "looks",
    "made",
    "made_as",
    "restored",
    "restored_pieces",
    "row_major_bytes",
    "small_bytes",
    "writable_arrays",
    "writable_part",
    "writable_view",
]

_Family = Literal["numpy", "numpy-scalar", "numpy-subclass", "torch", "jax", "shards", "device"]

_LOOK = attrgetter("dtype", "shape")
_FILLABLE = attrgetter("flags.carray")
"""Whether an array is writable, aligned and C-contiguous."""

MadeAs = Literal["saved", "numpy", "torch", "jax"]
"""Kind of array that a restore without ``like`` makes: the saved kind of each, or one kind for all."""


def load_frameworks() -> None:
    """Import the modules for torch and jax arrays if their framework is loaded: later a descriptor may be missing."""
    if "torch" in sys.modules:
        from tieredckpt.tree import torch_leaves, torch_shards  # noqa: F401
    if "jax" in sys.modules:
        from tieredckpt.tree import jax_leaves, jax_shards  # noqa: F401


def as_array_leaf(key: str, value: object) -> ArrayLeaf | Pieces | None:
    """``value`` as an array to save, or the pieces of one, or None when it is no array.

    Pieces are `Shard` and `Sharded`, torch's distributed tensors, and jax arrays of several processes. Raises
    `Invalid`, naming key and type, for an array that cannot be stored: an unsupported dtype or layout, one
    without data, or one already donated or deleted.
    """
    match _family(value):
        case "shards":
            return shards.pieces(key, value, as_array_leaf)
        case "torch":
            from tieredckpt.tree import torch_leaves

            return torch_leaves.as_array_leaf(key, value)
        case "jax":
            from tieredckpt.tree import jax_leaves

            return jax_leaves.as_array_leaf(key, value)
        case family:
            return _numpy_leaf(key, value, family)


def as_template(key: str, value: object, mesh: Any = None) -> ArrayLeaf | Pieces | None:
    """``value`` as an example of an array to restore, or of pieces of one, or None when it is no array.

    As `as_array_leaf`, but the data may be absent: torch meta tensors, `jax.ShapeDtypeStruct`, and jax arrays
    that were donated or deleted are examples too. A sharding of an abstract mesh takes the devices of ``mesh``.
    """
    match _family(value):
        case "shards":
            return shards.pieces(key, value, as_template)
        case "torch":
            from tieredckpt.tree import torch_leaves

            return torch_leaves.as_template(key, value)
        case "jax":
            from tieredckpt.tree import jax_leaves

            return jax_leaves.as_template(key, value, mesh)
        case family:
            return _numpy_leaf(key, value, family)


def looks(kind: Kind, values: Sequence[object]) -> Iterator[object]:
    """The properties that `as_array_leaf` reads of NumPy arrays or torch tensors: equal for arrays of equal leaves."""
    if kind == "torch":
        from tieredckpt.tree import torch_leaves

        return map(torch_leaves.look, values)
    return map(_LOOK, values)


def device_view(leaf: ArrayLeaf) -> tuple[Device, Any] | None:
    """The device in whose memory an array lies, and a view of it there; None for one whose bytes `host_view` has.

    Devices are those of `tieredckpt.devices`: CUDA tensors, and arrays of a `DeviceArray`.
    """
    if leaf.kind == "torch":
        from tieredckpt.tree import torch_leaves

        return torch_leaves.device_view(leaf)
    source = leaf.source
    if isinstance(source, DeviceArray):
        return source.device, source if leaf.part is None else source[leaf.part]
    return None


def host_view(leaf: ArrayLeaf) -> npt.NDArray[Any]:
    """The array on the host, of the leaf's shape and dtype.

    Arrays in CPU memory are not copied, in any layout. Arrays of a device that has no `device_view` are copied by their
    framework. The view of a mutable leaf follows its changes. Raises `Invalid` when a jax array was donated or deleted
    since the leaf was made.
    """
    match leaf.kind:
        case "torch":
            from tieredckpt.tree import torch_leaves

            return torch_leaves.host_view(leaf)
        case "jax" | "jax-key":
            from tieredckpt.tree import jax_leaves

            return jax_leaves.host_view(leaf)
        case _:
            view = np.asarray(leaf.source)
            return view if leaf.part is None else view[leaf.part]


def host_reader(leaf: ArrayLeaf) -> Callable[[tuple[slice, ...]], npt.NDArray[Any]] | None:
    """A function that reads one box of an array to the host, where `host_view` would copy all of it; else None.

    Such arrays are jax arrays on other devices than CPUs, or on several devices. Any thread may call the function; it
    raises as `host_view`.
    """
    if leaf.kind not in ("jax", "jax-key"):
        return None
    from tieredckpt.tree import jax_leaves

    return jax_leaves.host_reader(leaf)


def small_bytes(leaves: Sequence[ArrayLeaf]) -> list[bytes]:
    """The row-major bytes of each of many small arrays, none of which is a part of its source.

    Tensors of one form leave their device together, in one copy. Raises `Invalid` as `host_view` does.
    """
    found: list[bytes] = []
    tensors: list[int] = []
    for i, leaf in enumerate(leaves):
        source: Any = leaf.source
        if leaf.kind == "torch":
            tensors.append(i)
            found.append(b"")
        else:
            found.append((source if leaf.kind == "numpy" else host_view(leaf)).tobytes())
    if tensors:
        from tieredckpt.tree import torch_leaves

        values = torch_leaves.small_bytes([leaves[i] for i in tensors])
        for i, value in zip(tensors, values, strict=True):
            found[i] = value
    return found


def row_major_bytes(view: npt.NDArray[Any]) -> npt.NDArray[np.uint8] | None:
    """The bytes of ``view`` as a 1-D uint8 view of the same memory, or None when it is not C-contiguous."""
    if not view.flags.c_contiguous:
        return None
    return view.reshape(-1).view(np.uint8)


def writable_view(key: str, value: object) -> npt.NDArray[Any]:
    """A C-contiguous, writable NumPy array over the memory of ``value``, for restoring into it.

    Args:
        key: of the leaf, for messages.
        value: a NumPy array or torch CPU tensor.

    Raises `Invalid`, naming the key, for anything else, and for what is read-only or not C-contiguous.
    """
    family = _family(value)
    if family == "torch":
        from tieredckpt.tree import torch_leaves

        return torch_leaves.writable_view(key, value)
    if not isinstance(value, np.ndarray) or family != "numpy":
        raise Invalid(
            f"leaf {key!r}: a {type(value).__name__} cannot be restored into; "
            f"`into` takes NumPy arrays, and torch tensors on the CPU and on CUDA devices (use `like` for the rest)"
        )
    checked_dtype(key, value.dtype, value.ndim)
    if not value.flags.writeable:
        raise Invalid(f"leaf {key!r}: the array is read-only and cannot be restored into; copy it first")
    if not value.flags.c_contiguous:
        raise Invalid(
            f"leaf {key!r}: the array is not C-contiguous and cannot be restored into; "
            f"give one that is (np.ascontiguousarray), or use `like`"
        )
    return np.asarray(value)


def writable_part(leaf: ArrayLeaf) -> npt.NDArray[Any]:
    """A `writable_view` of a leaf's memory, which may be a piece of what the tree holds."""
    view = writable_view(leaf.array, leaf.source)
    part = view if leaf.part is None else view[leaf.part]
    if not part.flags.c_contiguous:
        raise Invalid(f"leaf {leaf.array!r}: a piece of it is not contiguous in memory; use `like`")
    return part


def writable_arrays(leaves: Sequence[ArrayLeaf]) -> dict[str, npt.NDArray[Any]] | None:
    """The `writable_part` of all leaves, by key, where each is a NumPy array that can be filled as it is."""
    sources: list[Any] = [leaf.source for leaf in leaves]
    plain = {*map(type, sources)} <= {np.ndarray} and all(map(_FILLABLE, sources))
    if not plain or any(leaf.part is not None for leaf in leaves):
        return None
    return {leaf.key: source for leaf, source in zip(leaves, sources, strict=True)}


def restored(template: ArrayLeaf, array: Filled) -> object:
    """``array`` as the kind of array that ``template`` is an example of.

    A `DeviceTarget`, which was filled, becomes the memory of the result.

    NumPy arrays and torch CPU tensors share the memory of ``array``, and jax arrays may share it, so the result owns it
    from here on. A read-only ``array`` is copied for torch and jax, which know no read-only memory.
    """
    if template.kind == "torch":
        from tieredckpt.tree import torch_leaves

        return torch_leaves.restored(template, array)
    if isinstance(array, DeviceTarget):
        return array.array
    match template.kind:
        case "jax" | "jax-key":
            from tieredckpt.tree import jax_leaves

            return jax_leaves.restored(template, array)
        case "numpy-scalar":
            return array[()]
        case _:
            return array


def load_kinds(nodes: Iterable[ArrayNode], kind: MadeAs) -> None:
    """Import the frameworks that `made` needs for ``nodes``. Raises `Invalid`, naming a leaf, if one is missing."""
    for wanted, key in {made_as(node, kind): node.key for node in nodes}.items():
        try:
            if wanted == "torch":
                from tieredckpt.tree import torch_leaves  # noqa: F401
            elif wanted in ("jax", "jax-key"):
                from tieredckpt.tree import jax_leaves  # noqa: F401
        except ImportError as error:
            raise Invalid(
                f"leaf {key!r}: as_={kind!r} makes it an array of {wanted.removesuffix('-key')}, which cannot be "
                f"imported ({error}); install that, or restore with as_='numpy'"
            ) from error


def made(node: ArrayNode, array: npt.NDArray[Any], kind: MadeAs) -> object:
    """The stored ``array`` of ``node`` as an array of ``kind``, on the framework's default device.

    NumPy scalars stay NumPy scalars. In NumPy and torch, a typed PRNG key becomes its data. Memory is shared as by
    `restored`. Raises `Invalid`, naming the key, for a dtype that the framework does not have.
    """
    match made_as(node, kind):
        case "torch":
            from tieredckpt.tree import torch_leaves

            return torch_leaves.made(node.key, array)
        case "jax" | "jax-key":
            from tieredckpt.tree import jax_leaves

            return jax_leaves.made(node.key, array, node.prng)
        case "numpy-scalar":
            return array[()]
        case _:
            return array


def made_as(node: ArrayNode, kind: MadeAs) -> Kind:
    """The kind of array that `made` makes."""
    if kind == "saved" or node.kind == "numpy-scalar" or (kind == "jax" and node.kind == "jax-key"):
        return node.kind
    return kind


def restored_pieces(pieces: Pieces, arrays: Mapping[str, Filled]) -> object:
    """The arrays that ``pieces`` are an example of, with the values of ``arrays`` by storage key; see `restored`."""
    value = pieces.source
    if _family(value) == "torch":
        from tieredckpt.tree import torch_leaves

        return torch_leaves.restored_pieces(pieces, arrays)
    if _family(value) == "jax":
        from tieredckpt.tree import jax_leaves

        on_host = {key: array for key, array in arrays.items() if not isinstance(array, DeviceTarget)}
        return jax_leaves.restored_pieces(pieces, on_host)
    made = [_restored_shard(pieces, shard, arrays) for shard in shards.shards_of(value) or ()]
    return made[0] if isinstance(value, Shard) else Sharded(made)


def _restored_shard(pieces: Pieces, shard: Shard, arrays: Mapping[str, Filled]) -> Shard:
    template = as_template(pieces.node.key, shard.array)
    assert isinstance(template, ArrayLeaf)
    box = Box(tuple(shard.offset), template.shape)
    array: Filled
    if box.size:
        array = arrays[storage_key(pieces.node.key, pieces.node.shape, box)]
    else:
        array = np.empty(template.shape, template.dtype)
    return dataclasses.replace(shard, array=restored(template, array))


def _family(value: object) -> _Family | None:
    return _family_of_class(type(value))  # type: ignore[arg-type]  # mypy takes the instances' __hash__


@lru_cache(maxsize=1024)
def _family_of_class(cls: type) -> _Family | None:
    """The library of arrays of class ``cls``. A class of torch or jax exists only where that is loaded."""
    if cls is np.ndarray or cls is np.memmap:
        return "numpy"
    if issubclass(cls, np.ndarray):
        return "numpy-subclass"
    if issubclass(cls, np.generic):
        return "numpy-scalar"
    if cls is Shard or cls is Sharded:
        return "shards"
    if issubclass(cls, DeviceArray):
        return "device"
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None and issubclass(cls, tensor):
        return "torch"
    jax = sys.modules.get("jax")
    if jax is not None:
        # A tracer poses as a jax.Array for isinstance alone.
        tracer = getattr(getattr(jax, "core", None), "Tracer", None)
        known = (getattr(jax, "Array", None), getattr(jax, "ShapeDtypeStruct", None), tracer)
        if any(base is not None and issubclass(cls, base) for base in known):
            return "jax"
    return None


def _numpy_leaf(key: str, value: Any, family: _Family | None) -> ArrayLeaf | None:
    if family is None:
        return None
    if family == "numpy-subclass":
        raise Invalid(
            f"leaf {key!r}: a {type(value).__name__} holds more than an array and would not come back; "
            f"store what it holds as plain arrays, each under a key (np.asarray; of a masked array np.ma.getdata and "
            f"np.ma.getmaskarray)"
        )
    dtype = checked_dtype(key, value.dtype, len(value.shape))
    if family in ("numpy", "device"):
        return ArrayLeaf(key, value, "numpy", value.shape, dtype, False, None)
    return ArrayLeaf(key, value, "numpy-scalar", (), dtype, True, None)
