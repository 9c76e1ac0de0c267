"""NumPy arrays: their bytes without a copy, whatever the layout, and views to restore into."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tieredckpt.errors import Invalid
from tieredckpt.tree import as_array_leaf, host_view, row_major_bytes, writable_view

BASE = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
LAYOUTS = {
    "C": BASE,
    "F": np.asfortranarray(BASE),
    "strided": BASE[:, :, ::2],
    "reversed": BASE[::-1, ::-1],
    "broadcast": np.broadcast_to(BASE[0], (5, 3, 4)),
    "0-d": np.array(7, np.int16),
    "empty": np.zeros((3, 0, 2)),
    "bfloat16": BASE.astype(ml_dtypes.bfloat16),
    "times": BASE.astype("datetime64[s]"),
}


def view_of(value: object) -> np.ndarray[Any, Any]:
    leaf = as_array_leaf("k", value)
    assert leaf is not None
    return host_view(leaf)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_host_view_is_the_array_itself_and_no_copy(name: str) -> None:
    array = LAYOUTS[name]
    view = view_of(array)
    assert (view.shape, view.dtype, view.strides) == (array.shape, array.dtype, array.strides)
    assert view.ctypes.data == array.ctypes.data


@pytest.mark.parametrize("name", LAYOUTS)
def test_row_major_bytes_alias_a_contiguous_array_and_are_none_for_others(name: str) -> None:
    array = LAYOUTS[name]
    found = row_major_bytes(array)
    if name in ("F", "strided", "reversed", "broadcast"):
        assert found is None
    else:
        assert found is not None
        assert (found.dtype, found.ndim) == (np.dtype(np.uint8), 1)
        assert found.tobytes() == array.tobytes()
        assert not found.size or np.shares_memory(found, array)


def test_a_memory_map_is_viewed_and_restored_into_as_an_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "map", np.uint8, "w+", shape=(8,))
    view = writable_view("k", mapped)
    assert type(view) is type(view_of(mapped)) is np.ndarray
    view[:] = 3
    assert mapped.tolist() == [3] * 8


def test_only_numpy_scalars_are_immutable() -> None:
    leaves = [as_array_leaf("k", value) for value in (np.float32(1), np.zeros(3), np.zeros(()))]
    assert [(leaf.kind, leaf.immutable) for leaf in leaves if leaf] == [
        ("numpy-scalar", True),
        ("numpy", False),
        ("numpy", False),
    ]


@pytest.mark.parametrize("value", [1, 1.0, "x", None, [1], object(), np.dtype("f4"), np.float32])
def test_what_is_no_array_is_no_leaf(value: object) -> None:
    assert as_array_leaf("k", value) is None


@given(hnp.arrays(hnp.integer_dtypes(), hnp.array_shapes(min_dims=0, min_side=0)), st.data())
def test_what_is_written_to_a_writable_view_is_in_the_array(array: Any, data: st.DataObject) -> None:
    new = data.draw(hnp.arrays(array.dtype, array.shape))
    view = row_major_bytes(writable_view("k", array))
    assert view is not None
    view[:] = np.frombuffer(new.tobytes(), np.uint8)
    assert array.tobytes() == new.tobytes()


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (read_only(), "read-only"),
        (np.zeros((4, 4))[:, ::2], "C-contiguous"),
        (np.zeros((4, 4)).T[1:], "C-contiguous"),
        (np.array([object()]), "object"),
        (np.float32(1), "float32 cannot be restored into"),
        (np.ma.masked_array([1]), "MaskedArray"),
        ([1.0], "list"),
        (None, "NoneType"),
    ],
)
def test_what_cannot_be_restored_into_is_refused_by_key(value: object, why: str) -> None:
    with pytest.raises(Invalid, match=r"'a/b'") as error:
        writable_view("a/b", value)
    assert why in str(error.value)


def test_trees_of_numpy_import_neither_torch_nor_jax() -> None:
    program = (
        "import sys, numpy as np\n"
        "from tieredckpt.tree import flatten, host_view, match\n"
        "tree = {'a': np.zeros(2), 'b': [np.float32(1), 1, None]}\n"
        "flat = flatten(tree)\n"
        "match(tree, flat.structure).build({leaf.key: host_view(leaf) for leaf in flat.arrays})\n"
        "assert 'torch' not in sys.modules and 'jax' not in sys.modules, 'a framework was imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
