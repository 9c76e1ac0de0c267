"""Trees of every kind of leaf and container, for properties, and what tells two of them apart."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tieredckpt.engine.saving.plan import Plan
from tieredckpt.engine.saving.snapshot import Snapshot
from tieredckpt.format.manifest import ArrayIndex, Chunk
from tieredckpt.tree import Flat


def setting(*path: Any, to: Any) -> Callable[[Any], object]:
    """What sets an item of a tree."""

    def change(tree: Any) -> None:
        *above, name = path
        for part in above:
            tree = tree[part]
        tree[name] = to

    return change


def fingerprint(value: Any) -> object:
    """Type, order and bits, in a form that ``==`` compares exactly."""
    match value:
        case np.ndarray() | np.generic():
            return (type(value), value.dtype.str, value.dtype.name, value.shape, value.tobytes())
        case float():
            return ("float", struct.pack(">d", value))
        case complex():
            return ("complex", struct.pack(">dd", value.real, value.imag))
        case dict():
            return ("dict", [(type(key), key, fingerprint(child)) for key, child in value.items()])
        case list() | tuple():
            return (type(value), [fingerprint(child) for child in value])
        case _:
            return (type(value), value)


DTYPES = [
    *("?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"),
    *(">i4", ">f8", "<M8[ns]", "<m8[s]", ">M8[D]"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
]


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Any dtype, any bits, any layout: strided, reversed, transposed, 0-d, empty, or a scalar."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    count = math.prod(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    return _laid_out(draw, _of_bits(raw, dtype).reshape(shape))


@st.composite
def large_arrays(draw: st.DrawFn, nbytes: int) -> Any:
    """As `arrays`, of about ``nbytes`` at most: several chunks where those are small."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    count = draw(st.integers(1, nbytes // dtype.itemsize))
    raw = np.random.default_rng(draw(st.integers(0, 9))).bytes(count * dtype.itemsize)
    rows = draw(st.integers(1, min(count, 9)))
    return _laid_out(draw, _of_bits(raw, dtype)[: count // rows * rows].reshape(rows, -1))


def _of_bits(raw: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes(byte & 1 for byte in raw) if dtype == np.bool_ else raw, dtype)


def _laid_out(draw: st.DrawFn, array: np.ndarray[Any, Any]) -> Any:
    layout = draw(st.sampled_from(["C", "F", "reversed", "strided", "scalar"]))
    if layout == "F":
        return np.asfortranarray(array) if array.ndim else array
    if layout == "reversed" and array.ndim:
        return array[::-1]
    if layout == "strided" and array.ndim:
        return np.repeat(array, 2, axis=0)[::2]
    if layout == "scalar" and not array.ndim:
        return array[()]
    return array


SCALARS = st.one_of(
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0]),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, complex(-0.0, math.nan)]),
    st.complex_numbers(),
    st.booleans(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
    st.none(),
)
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.sampled_from(["", "/", "%", "%2F", ".", "..", "...", "tieredckpt", "zarr.json", "c", "\x00", "größe", "層"]),
    st.integers(-3, 12),
    st.integers(-(2**53), 2**53),
)


def keyed(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # 1 and "1" together are refused; a test of its own says so.
    return st.lists(st.tuples(NAMES, children), max_size=4, unique_by=lambda item: str(item[0])).map(dict)


def trees(leaves: st.SearchStrategy[Any], *, max_leaves: int = 12) -> st.SearchStrategy[Any]:
    """Trees of dicts, lists and tuples over ``leaves``; also a bare leaf."""
    return st.recursive(
        leaves,
        lambda children: st.one_of(
            keyed(children), st.lists(children, max_size=4), st.lists(children, max_size=4).map(tuple)
        ),
        max_leaves=max_leaves,
    )


TREES = trees(arrays() | SCALARS)


def indexed(flat: Flat, chunk_size: int, plan: Plan | None = None) -> dict[str, ArrayIndex]:
    """What a save of a tree stores by storage key, with the bytes of every chunk in place of where they lie."""
    snapshot = Snapshot.of(flat.arrays, chunk_size, {}, plan)
    located = {}
    for cell in snapshot.pending:
        memory = np.zeros(cell.nbytes, np.uint8)
        located[cell.array, cell.ordinal] = Chunk(cell.copy_to(memory), memory.tobytes())
    return snapshot.index(located)
