"""The ``zarr.json`` of an array, and the names of dtypes, both ways.

zarr version 3 (https://zarr-specs.readthedocs.io) as TensorStore reads it: a regular grid, the default chunk
key encoding, the codec ``bytes``, and after it those of the tier's `tieredckpt.format.encoding.Encoding`.

There are two kinds of names. A *zarr data type* is the name in the metadata (``float32``, ``bfloat16``). A *dtype name*
adds what zarr keeps elsewhere or cannot express: a byte order that is not little as a suffix (``float32:big``), and
time units (``datetime64[ns]``, ``timedelta64[25s]``), whose arrays are zarr ``int64``. Sub-byte types (``int4``,
``float4_e2m1fn``) take a byte per item, as in ml_dtypes.
"""

from __future__ import annotations

import json
import re
import sys
from functools import lru_cache
from typing import Any, Final

import ml_dtypes
import numpy as np

from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.encoding import ENCODINGS, Encoding
from tieredckpt.format.grid import Grid, check

__all__ = ["array_metadata", "dtype_from_name", "dtype_name", "parse_array_metadata", "stored_as", "zarr_type"]

_BUILTIN = (
    "bool",
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
# These dtypes of ml_dtypes are left out, since TensorStore 0.1.86 does not open them as zarr3: uint2, uint4,
# float6_e2m3fn, float6_e3m2fn, float8_e4m3, bcomplex32, complex32.
_EXTENDED = (
    *("bfloat16", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int4", "int2"),
)
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _BUILTIN},
    # int2 came to ml_dtypes later than the rest.
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENDED if hasattr(ml_dtypes, name)},
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_BIG = ":big"
# NumPy's own parser is not for names out of a file: it divides by zero in "datetime64[s/0]", and the process ends.
_TIME = re.compile(r"(?:datetime|timedelta)64\[(?:[1-9][0-9]{0,9})?(?:[YMWDhms]|[munpfa]s)\]")
_MAX_METADATA = 1 << 16


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name under which a dtype is stored; `dtype_from_name` is its inverse.

    Raises:
        Invalid: a dtype that zarr cannot hold: object, strings, structured, long double, and the like.
    """
    return _name(dtype, dtype.str if dtype.kind in "mM" else "")


@lru_cache(maxsize=1024)
def _name(dtype: np.dtype[Any], _text: str) -> str:
    """`dtype_name`; the text keeps times of different units apart, since M8[1000ms] equals M8[s]."""
    name = zarr_type(dtype)
    if dtype.kind in "mM":
        name = dtype.newbyteorder("<").name
    return name + (_BIG if _endian(dtype) == "big" else "")


@lru_cache(maxsize=1024)
def dtype_from_name(name: str) -> np.dtype[Any]:
    """The dtype that `dtype_name` calls ``name``.

    Raises:
        Invalid: a name that it never gives.
    """
    base = name.removesuffix(_BIG)
    dtype: np.dtype[Any] | None = _DTYPES.get(base)
    if _TIME.fullmatch(base):
        try:
            dtype = np.dtype(base).newbyteorder("<")
        except TypeError:  # more than 2**31 - 1 units
            dtype = None
    if dtype is not None and base != name:
        dtype = dtype.newbyteorder(">")
    # Aliases ("datetime64[1ns]"), and byte orders of types without one, would give one dtype two names.
    if dtype is None or dtype_name(dtype) != name:
        raise Invalid(f"{name!r} names no dtype that a checkpoint can hold")
    return dtype


def stored_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that zarr knows: times are stored as integers."""
    return np.dtype(np.int64).newbyteorder(dtype.byteorder) if dtype.kind in "mM" else dtype


@lru_cache(maxsize=4096)
def array_metadata(shape: tuple[int, ...], dtype: np.dtype[Any], cell: tuple[int, ...], encoding: Encoding) -> bytes:
    """The ``zarr.json`` of an array.

    Args:
        shape: of the array.
        dtype: of the array; its byte order is that of the chunks.
        cell: shape of a chunk, as `tieredckpt.format.grid.plan` chose it.
        encoding: of its chunks.

    Raises:
        Invalid: a dtype that zarr cannot hold.
    """
    return json.dumps(_metadata(shape, dtype, cell, encoding), separators=(",", ":")).encode()


@lru_cache(maxsize=4096)
def parse_array_metadata(data: bytes) -> tuple[Grid, np.dtype[Any], Encoding]:
    """Grid, dtype and encoding from a ``zarr.json`` that `array_metadata` wrote.

    Times come back as the int64 that they are stored as; the byte order is that of the chunks.

    Raises:
        Corrupt: anything else, including valid zarr that this library never writes.
    """
    if len(data) > _MAX_METADATA:
        raise Corrupt(f"zarr.json of {len(data)} bytes: more than any array needs")
    try:
        metadata = json.loads(data)
        shape = tuple(metadata["shape"])
        cell = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        codecs = metadata["codecs"]
        big = codecs[0].get("configuration") == {"endian": "big"}
        dtype = dtype_from_name(metadata["data_type"] + (_BIG if big else ""))
        grid = check(Grid(shape, cell, dtype.itemsize))
        (encoding,) = (each for each in ENCODINGS.values() if each.codecs(dtype.itemsize) == codecs[1:])
        # json.dumps tells 1 from True and 1.0, which compare equal.
        found = json.dumps(metadata, sort_keys=True)
        expected = json.dumps(_metadata(shape, dtype, cell, encoding), sort_keys=True)
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"zarr.json is not one that tieredckpt writes: {error!r:.200}") from error
    if found != expected:
        raise Corrupt(f"zarr.json is not one that tieredckpt writes: {data[:200]!r}")
    return grid, dtype, encoding


def _metadata(
    shape: tuple[int, ...], dtype: np.dtype[Any], cell: tuple[int, ...], encoding: Encoding
) -> dict[str, Any]:
    data_type = zarr_type(dtype)
    codec: dict[str, Any] = {"name": "bytes"}
    if (endian := _endian(dtype)) is not None:
        codec["configuration"] = {"endian": endian}
    fill: object = False if dtype.kind == "b" else [0.0, 0.0] if dtype.kind == "c" else 0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [int(axis) for axis in shape],
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [int(axis) for axis in cell]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [codec, *encoding.codecs(dtype.itemsize)],
        "attributes": {},
    }


def zarr_type(dtype: np.dtype[Any]) -> str:
    """The zarr data type that holds a dtype's bytes. Raises `Invalid` if none does."""
    if dtype.kind in "mM" and np.datetime_data(dtype)[0] != "generic":
        return "int64"
    try:
        name = _NAMES.get(dtype.newbyteorder("<"))
    except TypeError:  # for NumPy's strings of variable length, and other new-style dtypes
        name = None
    if name is None:
        raise Invalid(
            f"an array of dtype {dtype} cannot be stored: convert the array to a number, bool or time type with a "
            f"unit; zarr holds {', '.join(_DTYPES)}"
        )
    return name


def _endian(dtype: np.dtype[Any]) -> str | None:
    """``little``, ``big``, or None where a single byte has no order."""
    if dtype.itemsize == 1:
        return None
    order = dtype.byteorder
    return "big" if order == ">" or (order == "=" and sys.byteorder == "big") else "little"
