"""The arrays of a tree: what they are, their bytes on the host, and how they are made again.

NumPy is handled here; `torch_leaves` and `jax_leaves` are imported when a program that has loaded torch or
jax hands over one of their arrays.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tieredckpt.errors import Invalid
from tieredckpt.tree.leaf import ArrayLeaf, checked_dtype

__all__ = [
    "ArrayLeaf",
    "as_array_leaf",
    "as_template",
    "host_view",
    "restored",
    "row_major_bytes",
    "writable_view",
]

_Family = Literal["numpy", "numpy-scalar", "numpy-subclass", "torch", "jax"]


def as_array_leaf(key: str, value: object) -> ArrayLeaf | None:
    """``value`` as an array to save, or None when it is no array.

    Raises `Invalid`, naming key and type, for an array that cannot be stored: an unsupported dtype or layout,
    an array of which this process has only a part, one without data, or one already donated or deleted.
    """
    match _family(value):
        case "torch":
            from tieredckpt.tree import torch_leaves

            return torch_leaves.as_array_leaf(key, value)
        case "jax":
            from tieredckpt.tree import jax_leaves

            return jax_leaves.as_array_leaf(key, value)
        case family:
            return _numpy_leaf(key, value, family)


def as_template(key: str, value: object) -> ArrayLeaf | None:
    """``value`` as an example of an array to restore, or None when it is no array.

    As `as_array_leaf`, but the data may be absent: torch meta tensors, `jax.ShapeDtypeStruct`, and jax arrays
    that were donated or deleted are examples too.
    """
    match _family(value):
        case "torch":
            from tieredckpt.tree import torch_leaves

            return torch_leaves.as_template(key, value)
        case "jax":
            from tieredckpt.tree import jax_leaves

            return jax_leaves.as_template(key, value)
        case family:
            return _numpy_leaf(key, value, family)


def host_view(leaf: ArrayLeaf) -> npt.NDArray[Any]:
    """The array on the host, of the leaf's shape and dtype.

    No copy of what lies in CPU memory, in whatever layout it lies; arrays of a device come through their
    framework's copy. The view of a mutable leaf follows its changes. Raises `Invalid` when a jax array was
    donated or deleted since the leaf was made.
    """
    match leaf.kind:
        case "torch":
            from tieredckpt.tree import torch_leaves

            return torch_leaves.host_view(leaf)
        case "jax" | "jax-key":
            from tieredckpt.tree import jax_leaves

            return jax_leaves.host_view(leaf)
        case _:
            return np.asarray(leaf.source)


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
            f"`into` takes NumPy arrays and torch CPU tensors (use `like` for the rest)"
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


def restored(template: ArrayLeaf, array: npt.NDArray[Any]) -> object:
    """``array`` as the kind of array that ``template`` is an example of.

    NumPy arrays and torch CPU tensors share the memory of ``array``, jax arrays may, so it belongs to the
    result from here on. A read-only ``array`` is copied for torch and jax, which know no read-only memory.
    """
    match template.kind:
        case "torch":
            from tieredckpt.tree import torch_leaves

            return torch_leaves.restored(template, array)
        case "jax" | "jax-key":
            from tieredckpt.tree import jax_leaves

            return jax_leaves.restored(template, array)
        case "numpy-scalar":
            return array[()]
        case _:
            return array


def _family(value: object) -> _Family | None:
    return _family_of_class(type(value))  # type: ignore[arg-type]  # mypy takes the instances' __hash__


@lru_cache(maxsize=1024)
def _family_of_class(cls: type) -> _Family | None:
    """Whose array an instance of ``cls`` is. A class of torch or jax exists only where that is loaded."""
    if cls is np.ndarray or cls is np.memmap:
        return "numpy"
    if issubclass(cls, np.ndarray):
        return "numpy-subclass"
    if issubclass(cls, np.generic):
        return "numpy-scalar"
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
            f"store what it holds as plain arrays (np.asarray)"
        )
    dtype = checked_dtype(key, value.dtype, value.ndim)
    if family == "numpy":
        return ArrayLeaf(key, value, "numpy", value.shape, dtype, False, None)
    return ArrayLeaf(key, value, "numpy-scalar", (), dtype, True, None)
