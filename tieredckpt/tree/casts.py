"""Cast saved values to another dtype of ``like``, also between scalars and arrays without dimensions."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tieredckpt.errors import Invalid
from tieredckpt.format.casts import rounded_to_odd
from tieredckpt.format.scalars import scalar_value
from tieredckpt.format.structure import ArrayNode, BoolNode, ComplexNode, FloatNode, IntNode, Node
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.tree.device_target import DeviceTarget, Filled

__all__ = ["as_array", "cast", "castable", "fits_array", "fits_scalar"]

_OF_ML_DTYPES = 2
"""`numpy.dtype.isbuiltin` of a dtype that is not NumPy's own."""
_SATURATING = {np.dtype(ml_dtypes.float4_e2m1fn): 7.0}
"""Dtypes that ml_dtypes saturates: the magnitude from which on a value becomes the largest one."""
_KINDS = {"bool": BoolNode, "int": IntNode, "float": FloatNode, "complex": ComplexNode}


def castable(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether `cast` makes arrays of ``wanted`` from those of ``stored``: of floats, integers or complex numbers."""
    kind = _kind(stored)
    return kind == _kind(wanted) and kind in ("int", "float", "complex")


def cast(key: str, array: Filled, dtype: np.dtype[Any]) -> Filled:
    """``array`` in ``dtype``, to which it is `castable`: floats rounded to the nearest, integers as they are.

    Raises `Invalid`, naming ``key``, for a value out of the range of ``dtype``.
    """
    if array.dtype == dtype:
        return array
    assert not isinstance(array, DeviceTarget), "arrays are cast on the host"
    stored = array.dtype
    if array.dtype.isbuiltin == dtype.isbuiltin == _OF_ML_DTYPES:  # between these, each cast counts as safe, or is none
        array = array.astype(np.int8 if _kind(dtype) == "int" else np.float32)
    made = _nearest(array, dtype)
    if np.can_cast(array.dtype, dtype, "safe") or not array.size:
        return made
    if _kind(dtype) == "int":
        fits = bool(np.all(made.astype(array.dtype) == array)) and bool(np.all((made < 0) == (array < 0)))
    else:
        fits = _same_class(array, made)
    if not fits:
        raise Invalid(f"leaf {key!r}: a value of {stored} is out of the range of {dtype}; restore it as it was")
    return made


def fits_array(stored: Node, dtype: np.dtype[Any], *, may_round: bool) -> str:
    """Why the scalar ``stored`` does not become an array of ``dtype`` without dimensions; empty if it does.

    An int becomes an array of integers, a float of floats, a complex of complex numbers and a bool of bool, if
    ``dtype`` holds the value; ``may_round``: a float may be rounded.
    """
    if not isinstance(stored, _KINDS.get(_kind(dtype), ())):
        return f"the step has one {stored.__struct_config__.tag}, which is no {dtype}"
    value: Any = scalar_value(stored)  # type: ignore[arg-type]  # of `_KINDS`
    if _kind(dtype) == "int":
        limits: Any = ml_dtypes.iinfo(dtype.newbyteorder("="))  # type: ignore[no-untyped-call]
        if limits.min <= value <= limits.max:
            return ""
        return f"the step has {_short(value)}, which is out of the range of {dtype}"
    double = np.array(value)
    made = _nearest(double, dtype)
    parts = zip(_parts(double), _parts(made.astype(double.dtype)), strict=True)
    same = all(one.tobytes() == other.tobytes() or (np.isnan(one) and np.isnan(other)) for one, other in parts)
    if same or (may_round and _same_class(double, made)):
        return ""
    if may_round:
        return f"the step has {value!r}, which is out of the range of {dtype}"
    return f"the step has {value!r}, which {dtype} holds only rounded; cast=True rounds it"


def as_array(stored: Node, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The scalar ``stored`` as a new array without dimensions; it `fits_array`."""
    return _nearest(np.array(scalar_value(stored)), dtype)  # type: ignore[arg-type]  # a scalar, as it fits


def fits_scalar(like: Node, stored: ArrayNode) -> bool:
    """Whether the array ``stored`` can become a scalar like ``like``: it is one number of that kind."""
    return not stored.shape and isinstance(like, _KINDS.get(_kind(dtype_from_name(stored.dtype)), ()))


def _kind(dtype: np.dtype[Any]) -> str:
    name = re.match(r"[a-z]*", dtype.name)
    assert name is not None
    return {"uint": "int", "bfloat": "float"}.get(name[0], name[0])


def _nearest(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``array`` in ``dtype``, each float rounded once, to the nearest, ties to even."""
    with np.errstate(all="ignore"):
        if array.dtype.kind != "f" or array.dtype.itemsize < 8 or dtype.isbuiltin != _OF_ML_DTYPES:
            return array.astype(dtype)
        # ml_dtypes would round a double to a float first, and that once more.
        return rounded_to_odd(array.astype(np.float64, copy=False)).astype(dtype)


def _same_class(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> bool:
    """Whether each number is finite, infinite or NaN in both arrays alike, and no number saturates."""
    for one, other in zip(_parts(before), _parts(after), strict=True):
        same = np.isfinite(one) == np.isfinite(other)
        same &= np.isnan(one) == np.isnan(other)
        if (beyond := _SATURATING.get(other.dtype)) is not None:
            same &= np.abs(one) < beyond
        if not same.all():
            return False
    return True


def _parts(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
    """The real numbers that an array consists of: one infinite part would make a complex number infinite."""
    return (array.real, array.imag) if array.dtype.kind == "c" else (array,)


def _short(value: int) -> str:
    text = hex(value) if value.bit_length() > 128 else str(value)
    return text if len(text) < 60 else f"{text[:40]}…"
