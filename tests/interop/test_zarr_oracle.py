"""Stock TensorStore opens what `tieredckpt.format.zarr` and `grid` describe, bit for bit, in every dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.format.crc import crc32c
from tieredckpt.format.encoding import CRC32C, PLAIN
from tieredckpt.format.grid import Grid, cell_key, cells, plan
from tieredckpt.format.zarr import array_metadata, dtype_from_name, dtype_name, parse_array_metadata

BUILTIN = ["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))]
BUILTIN += ["float16", "float32", "float64", "complex64", "complex128"]
ML_DTYPES = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
]
ML_DTYPES += ["float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int4", "int2"]
TIMES = ["datetime64[ns]", "timedelta64[25s]"]
BIG = ["uint16:big", "int64:big", "float32:big", "complex128:big", "bfloat16:big", "datetime64[us]:big"]


def read_by_stock(metadata: bytes, chunks: dict[str, bytes]) -> np.ndarray[Any, Any]:
    context = ts.Context()
    base = ts.KvStore.open("memory://", context=context).result()
    base.write("a/zarr.json", metadata).result()
    for key, chunk in chunks.items():
        base.write(f"a/{key}", chunk).result()
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory", "path": "a/"}}
    return ts.open(spec, context=context, open=True).result().read().result()


def chunks_of(grid: Grid, leaf: bytes, *, checksum: bool) -> dict[str, bytes]:
    chunks = {}
    for cell in cells(grid):
        chunk = leaf[cell.start : cell.start + cell.nbytes].ljust(grid.cell_nbytes, b"\0")
        chunks[cell_key(cell.index).decode()] = chunk + (crc32c(chunk).to_bytes(4, "little") if checksum else b"")
    return chunks


def native_order(leaf: bytes, dtype: np.dtype[Any]) -> bytes:
    """The leaf's bytes with the lowest byte of every number first."""
    if dtype.byteorder != ">":
        return leaf
    width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    return np.frombuffer(leaf, np.uint8).reshape(-1, width)[:, ::-1].tobytes()


@pytest.mark.parametrize("name", [*BUILTIN, *ML_DTYPES, *TIMES, *BIG])
def test_every_dtype_is_read_bit_for_bit(name: str) -> None:
    if name in ML_DTYPES and not hasattr(ml_dtypes, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    dtype = dtype_from_name(name)
    leaf = np.random.default_rng(0).bytes(256 * dtype.itemsize)
    if dtype.itemsize == 1:
        # Every byte that is a value of the type; sub-byte integers are sign-extended, bool is 0 or 1.
        bits = {"bool": 1, "int2": 2, "int4": 4, "float4_e2m1fn": 4}.get(name, 8)
        values = np.arange(256) % (1 << bits)
        if name in ("int2", "int4"):
            values -= 1 << bits - 1
        leaf = values.astype(np.int16).astype(np.uint8).tobytes()
    grid = plan((256,), dtype.itemsize, 100 * dtype.itemsize)
    metadata = array_metadata(grid.shape, dtype, grid.cell, PLAIN)
    found = read_by_stock(metadata, chunks_of(grid, leaf, checksum=False))
    assert found.tobytes() == native_order(leaf, dtype)
    if not name.startswith(("datetime64", "timedelta64")):
        assert found.dtype == dtype_from_name(name.removesuffix(":big"))
        assert parse_array_metadata(metadata) == (Grid((256,), (86,), dtype.itemsize), dtype, PLAIN)
    assert dtype_name(dtype) == name


@settings(max_examples=80)
@given(
    shape=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    name=st.sampled_from(["int8", "float32", "complex64"]),
    target=st.integers(1, 400),
    checksum=st.booleans(),
)
def test_every_grid_is_read_bit_for_bit(shape: tuple[int, ...], name: str, target: int, checksum: bool) -> None:
    dtype = dtype_from_name(name)
    grid = plan(shape, dtype.itemsize, target)
    array = np.random.default_rng(0).integers(0, 256, grid.nbytes, np.uint8).view(dtype).reshape(shape)
    metadata = array_metadata(shape, dtype, grid.cell, CRC32C if checksum else PLAIN)
    found = read_by_stock(metadata, chunks_of(grid, array.tobytes(), checksum=checksum))
    assert (found.shape, found.dtype) == (shape, dtype)
    assert found.tobytes() == array.tobytes()
