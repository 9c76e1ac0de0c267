"""zarr.json and dtype names: both ways without loss, and nothing else is accepted."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.encoding import CRC32C, PLAIN
from tieredckpt.format.grid import plan
from tieredckpt.format.zarr import array_metadata, dtype_from_name, dtype_name, parse_array_metadata

NAMES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "int4"),
    *("float32:big", "bfloat16:big", "datetime64[ns]", "datetime64[D]:big", "timedelta64[25s]"),
]
numbers = st.sampled_from([name for name in NAMES if "64[" not in name])


@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_name_leads_back_to_its_dtype(name: str) -> None:
    dtype = dtype_from_name(name)
    assert dtype_name(dtype) == name
    assert dtype_from_name(dtype_name(dtype)) == dtype
    assert (dtype.byteorder == ">") == name.endswith(":big")


def test_the_same_type_under_several_numpy_codes_has_one_name() -> None:
    assert {dtype_name(np.dtype(code)) for code in ("q", "l", "<i8", "int64")} == {"int64"}
    assert dtype_name(np.dtype(">M8[ns]")) == "datetime64[ns]:big"
    assert dtype_from_name("datetime64[ns]") == np.dtype("<M8[ns]")


def test_times_of_one_length_in_another_unit_keep_their_own_names() -> None:
    names = ["timedelta64[1000us]", "timedelta64[ms]", "datetime64[1000ms]", "datetime64[s]"]
    assert [dtype_name(np.dtype(name)) for name in names] == names
    assert [str(dtype_from_name(name)) for name in names] == names


@pytest.mark.parametrize(
    "name",
    [
        *("", "object", "float128", "f4", "<f4", "float32:little", "float32:big:big", "int8:big", "bool:big"),
        *(
            "datetime64",
            "datetime64[generic]",
            "datetime64[1ns]",
            "datetime64[zz]",
            "timedelta64[",
            "str",
            "V4",
        ),
        *(f"datetime64[{count}s]" for count in (2**31, "9" * 10, "9" * 50)),
    ],
)
def test_a_name_that_no_dtype_has_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="names no dtype"):
        dtype_from_name(name)


@pytest.mark.parametrize(
    "dtype",
    [
        *(np.dtype(code) for code in ("O", "S3", "U2", "V4", "M8", "m8", "longdouble", "clongdouble")),
        np.dtype([("a", "<f4")]),
        np.dtype(("<f4", (2,))),
        *(np.dtype(getattr(ml_dtypes, name)) for name in ("uint4", "float6_e2m3fn", "float8_e4m3")),
    ],
    ids=str,
)
def test_dtypes_that_zarr_cannot_hold_are_refused_by_name(dtype: np.dtype[Any]) -> None:
    with pytest.raises(Invalid, match="convert the array"):
        dtype_name(dtype)
    with pytest.raises(Invalid, match="convert the array"):
        array_metadata((2,), dtype, (2,), PLAIN)


@given(
    shape=st.lists(st.integers(0, 1000), max_size=4).map(tuple),
    name=numbers,
    target=st.integers(1, 10_000),
    checksum=st.booleans(),
)
def test_metadata_leads_back_to_shape_dtype_and_cell(
    shape: tuple[int, ...], name: str, target: int, checksum: bool
) -> None:
    dtype = dtype_from_name(name)
    grid = plan(shape, dtype.itemsize, target)
    metadata = array_metadata(shape, dtype, grid.cell, CRC32C if checksum else PLAIN)
    assert parse_array_metadata(metadata) == (grid, dtype, CRC32C if checksum else PLAIN)
    assert parse_array_metadata(json.dumps(json.loads(metadata), indent=4).encode())[1] == dtype


def test_times_are_stored_as_int64_in_their_byte_order() -> None:
    for code, expected in (("<M8[ns]", "<i8"), (">m8[s]", ">i8")):
        assert parse_array_metadata(array_metadata((3,), np.dtype(code), (3,), CRC32C))[1] == np.dtype(expected)


CHANGES: list[tuple[str, Any]] = [
    ("shape", [4]),
    ("shape", [4, 4.0]),
    ("shape", [True, 4]),
    ("shape", [-4, 4]),
    ("shape", [4, 1 << 80]),
    ("shape", [10**400, 1.5]),
    ("shape", "44"),
    ("shape", None),
    ("data_type", "float64"),
    ("data_type", "float32:big"),
    ("data_type", "datetime64[ns]"),
    ("data_type", "r32"),
    ("data_type", ["float32"]),
    ("data_type", 3),
    ("zarr_format", 2),
    ("zarr_format", 3.0),
    ("zarr_format", True),
    ("node_type", "group"),
    ("fill_value", 1),
    ("fill_value", False),
    ("fill_value", float("nan")),
    ("attributes", {"a": 1}),
    ("extra", 1),
    ("codecs", []),
    ("codecs", {}),
    ("codecs", ["bytes"]),
    ("codecs", [{"name": "gzip"}]),
    ("codecs", [{"name": "bytes"}]),
    ("codecs", [{"name": "bytes", "configuration": {"endian": "middle"}}]),
    ("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}]),
    ("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}, *[{"name": "crc32c"}] * 2]),
    ("chunk_key_encoding", {"name": "default", "configuration": {"separator": "."}}),
    ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [0, 4]}}),
    ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [2]}}),
    ("chunk_grid", {"name": "rectilinear", "configuration": {"chunk_shape": [2, 4]}}),
    ("chunk_grid", []),
]


def original() -> dict[str, Any]:
    metadata = json.loads(array_metadata((4, 4), np.dtype("<f4"), (2, 4), PLAIN))
    assert isinstance(metadata, dict)
    return metadata


@pytest.mark.parametrize(("field", "value"), CHANGES, ids=lambda value: str(value)[:40])
def test_metadata_with_any_other_field_value_is_corrupt(field: str, value: Any) -> None:
    metadata = original() | {field: value}
    if field == "data_type" and value == "float64":  # a valid change: another dtype
        assert parse_array_metadata(json.dumps(metadata).encode())[1] == np.dtype("<f8")
        return
    with pytest.raises(Corrupt):
        parse_array_metadata(json.dumps(metadata).encode())


@pytest.mark.parametrize("field", sorted(original()))
def test_metadata_without_a_field_is_corrupt(field: str) -> None:
    metadata = original()
    del metadata[field]
    with pytest.raises(Corrupt):
        parse_array_metadata(json.dumps(metadata).encode())


@pytest.mark.parametrize("name", ["bool", "int8", "uint8", "float8_e4m3fn", "int4"])
def test_single_bytes_have_no_order(name: str) -> None:
    metadata = json.loads(array_metadata((2,), dtype_from_name(name), (2,), CRC32C))
    assert metadata["codecs"] == [{"name": "bytes"}, {"name": "crc32c"}]


def test_metadata_larger_than_any_array_needs_is_corrupt() -> None:
    sound = json.dumps(original()).encode()
    assert parse_array_metadata(sound + b" " * 60_000)[0].shape == (4, 4)
    with pytest.raises(Corrupt, match="more than any"):
        parse_array_metadata(sound + b" " * 70_000)


@given(
    data=st.one_of(
        st.binary(max_size=100),
        st.recursive(
            st.none() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(sorted(original())), inner),
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_other_bytes_are_corrupt_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_array_metadata(data)


@pytest.mark.parametrize(
    "data",
    [b"[" * 60_000, b'{"shape":' * 7000, b"9" * 60_000, b" " * (1 << 17)],
    ids=["list", "dict", "int", "long"],
)
def test_hostile_json_is_corrupt_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_array_metadata(data)
