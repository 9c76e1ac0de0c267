"""Whatever a stored structure says, reading it ends in a structure that keeps the rules, or in `Corrupt`."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format import structure
from tieredckpt.format.structure import check_structure, decode_structure, encode_structure
from tieredckpt.tree import flatten

ARRAY: dict[str, Any] = {"type": "array", "key": "a", "dtype": "float32", "shape": [2, 3], "kind": "numpy"}
NONE = {"type": "none"}


def read(value: object) -> None:
    decode_structure(json.dumps(value).encode())


def nested(depth: int) -> object:
    value: object = 1
    for i in range(depth):
        value = {"value": value} if i % 2 else [value]
    return value


def in_dict(array: dict[str, Any]) -> dict[str, Any]:
    return {"type": "dict", "keys": ["a"], "children": [array]}


def test_the_json_of_a_tree_is_fixed() -> None:
    tree = {
        "a": np.zeros((2, 3), np.float32),
        3: [1, 2**53, -(2**53), -(2**53) - 1, -0.0, 1j, True, "é", b"\x00\xff", None],
        "t": (1,),
    }
    assert json.loads(encode_structure(flatten(tree).structure)) == {
        "type": "dict",
        "keys": ["a", 3, "t"],
        "children": [
            ARRAY,
            {
                "type": "list",
                "children": [
                    {"type": "int", "value": 1},
                    {"type": "int", "value": 2**53},
                    {"type": "int", "value": -(2**53)},
                    {"type": "int", "value": "-0x20000000000001"},
                    {"type": "float", "bits": "8000000000000000"},
                    {"type": "complex", "real": "0000000000000000", "imag": "3ff0000000000000"},
                    {"type": "bool", "value": True},
                    {"type": "str", "value": "é"},
                    {"type": "bytes", "value": "AP8="},
                    NONE,
                ],
            },
            {"type": "tuple", "children": [{"type": "int", "value": 1}]},
        ],
    }


def test_a_structure_beyond_the_limit_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "MAX_STRUCTURE_BYTES", len(VALID))
    assert encode_structure(decode_structure(VALID)) == VALID
    monkeypatch.setattr(structure, "MAX_STRUCTURE_BYTES", len(VALID) - 1)
    with pytest.raises(Corrupt, match="exceeds the limit"):
        decode_structure(VALID)
    with pytest.raises(Invalid, match="join small leaves"):
        encode_structure(flatten({"a": "b" * len(VALID)}).structure)


def test_a_valid_structure_is_read() -> None:
    read(in_dict(ARRAY))
    read(ARRAY | {"key": "leaf"})
    read(ARRAY | {"key": "leaf", "shape": [1] * 32})
    read(ARRAY | {"key": "leaf", "shape": [2**61 - 1]})
    read({"type": "dict", "keys": ["ü" * 2048], "children": [ARRAY | {"key": "ü" * 2048}]})
    read({"type": "object", "of": "some-thing", "value": nested(32)})
    read({"type": "typed", "of": "map", "keys": ["=1"], "children": [NONE], "about": nested(32)})


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"type": "pickle", "value": ""},
        {"type": "none", "class": "os.system"},
        {"type": "list", "children": [1]},
        {"type": "dict", "keys": ["a"], "children": []},
        {"type": "dict", "keys": ["a", "a"], "children": [NONE, NONE]},
        {"type": "dict", "keys": [1, "1"], "children": [NONE, NONE]},
        {"type": "dict", "keys": [1.5], "children": [NONE]},
        {"type": "dict", "keys": [2**53 + 1], "children": [NONE]},
        {"type": "int", "value": 2**53 + 1},
        {"type": "int", "value": "12"},
        {"type": "int", "value": "0x"},
        {"type": "int", "value": "0xff\n"},
        {"type": "float", "bits": "3ff"},
        {"type": "float", "bits": "3ff0000000000000\n"},
        {"type": "float", "bits": 1.0},
        {"type": "bytes", "value": "?"},
        {"type": "bool", "value": 1},
        ARRAY,
        in_dict(ARRAY | {"key": "b"}),
        in_dict(ARRAY | {"key": "../a"}),
        in_dict(ARRAY | {"dtype": "object"}),
        in_dict(ARRAY | {"dtype": "|O"}),
        in_dict(ARRAY | {"dtype": ""}),
        in_dict(ARRAY | {"shape": [-1]}),
        in_dict(ARRAY | {"shape": [2**62, 2]}),
        in_dict(ARRAY | {"shape": [2**61]}),
        in_dict(ARRAY | {"shape": [1.0]}),
        in_dict(ARRAY | {"shape": [1] * 33}),
        in_dict(ARRAY | {"kind": "pickle"}),
        in_dict(ARRAY | {"kind": "numpy-scalar"}),
        in_dict(ARRAY | {"kind": "jax-key"}),
        in_dict(ARRAY | {"prng": "threefry2x32"}),
        {"type": "object", "of": "path"},
        {"type": "object", "of": "os.system", "value": "rm"},
        {"type": "object", "of": "a" * 33, "value": 1},
        {"type": "object", "of": "path", "value": 1, "class": "os.system"},
        {"type": "object", "of": "path", "value": nested(33)},
        {"type": "object", "of": "range", "value": [2**53 + 1]},
        {"type": "object", "of": "range", "value": [0, 2**53 + 1, 1]},
        {"type": "typed", "of": "deque", "keys": [0], "children": []},
        {"type": "typed", "of": "map", "keys": ["=1", "=1"], "children": [NONE, NONE]},
        {"type": "typed", "of": "map", "keys": [1.5], "children": [NONE]},
        {"type": "typed", "of": "deque", "keys": [], "children": [], "about": nested(33)},
        {"type": "typed", "of": "deque", "keys": [], "children": [], "about": 2**53 + 1},
        {"type": "dict", "keys": ["ü" * 4096], "children": [ARRAY | {"key": "ü" * 4096}]},
    ],
)
def test_a_structure_that_breaks_a_rule_is_corrupt(value: object) -> None:
    with pytest.raises(Corrupt):
        read(value)


@pytest.mark.parametrize("opening", [b'{"type":"list","children":[', b'{"type":"dict","keys":["a"],"children":['])
@pytest.mark.parametrize("depth", [257, 400, 20_000, 1_000_000])
def test_a_structure_without_bottom_is_corrupt_and_no_recursion_error(opening: bytes, depth: int) -> None:
    with pytest.raises(Corrupt, match="nests deeper"):
        decode_structure(opening * depth + b'{"type":"none"}' + b"]}" * depth)


def test_a_structure_that_names_bytes_that_are_no_text_is_corrupt() -> None:
    for data in (
        b"",
        b"\xff",
        b'{"type":"str","value":"\xff"}',
        rb'{"type":"str","value":"\ud800"}',
        b'{"type":',
    ):
        with pytest.raises(Corrupt):
            decode_structure(data)


VALID = encode_structure(
    flatten(
        {
            "a": np.zeros((2, 3)),
            "b": [1, "x", 2.0, b"y", None, {"c": 2**80, "d": 1j}],
            5: (True,),
            "e": {1: Path("/a"), "1": {2.5, (1, b"z")}, None: deque([1], 2)},
        }
    ).structure
)


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_damaged_json_is_corrupt_or_keeps_the_rules(data: st.DataObject) -> None:
    damaged = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        end = at + data.draw(st.integers(0, 3))
        damaged[at:end] = data.draw(st.binary(max_size=3) | st.sampled_from([b"-", b"9" * 400, b"null", b'"']))
    try:
        structure = decode_structure(bytes(damaged))
    except Corrupt:
        return
    check_structure(structure)
    assert decode_structure(encode_structure(structure)) == structure


FIELDS = ("keys", "children", "key", "dtype", "shape", "kind", "prng", "value")
JSON = st.recursive(
    st.sampled_from(
        [None, "", "a", 0, 1, -1, 2**70, 1.5, True, "dict", "list", "array", "float32", "set", "map", NONE, ARRAY]
    ),
    lambda children: (
        st.lists(children, max_size=3)
        | st.fixed_dictionaries(
            {"type": st.sampled_from(["dict", "list", "tuple", "custom", "array", "int", "none", "object", "typed"])},
            optional=dict.fromkeys((*FIELDS, "of", "about"), children),
        )
    ),
    max_leaves=15,
)


@settings(deadline=None, max_examples=300)
@given(JSON)
def test_any_json_is_corrupt_or_keeps_the_rules(value: object) -> None:
    try:
        structure = decode_structure(json.dumps(value).encode())
    except Corrupt:
        return
    check_structure(structure)
