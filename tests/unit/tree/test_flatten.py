"""A tree comes back bit for bit from its structure (through JSON) and the bytes of its arrays."""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
from hypothesis import given, settings
from support.trees import NAMES, TREES, fingerprint

from tieredckpt.errors import Corrupt, Invalid, NotFound
from tieredckpt.format.keys import LEAF_KEY, child_key
from tieredckpt.format.structure import (
    MAX_DEPTH,
    MAX_INLINE_BYTES,
    array_nodes,
    decode_structure,
    encode_structure,
    walk,
)
from tieredckpt.tree import flatten, host_view, unflatten
from tieredckpt.tree.containers import NAMESPACE


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    params: Any
    step: Any = 0


class Box:
    def __init__(self, content: Any, label: str = "") -> None:
        self.content = content
        self.label = label


register: Any = optree.register_pytree_node
"""Its annotations ask for collections."""

register(
    Box,
    lambda box: ((box.content,), box.label, ("content",)),
    lambda label, parts: Box(parts[0], label),
    namespace=NAMESPACE,
)


def stored(tree: object) -> object:
    """What a checkpoint gives back without ``like``: structure through JSON, arrays through their bytes."""
    flat = flatten(tree)
    arrays = {}
    for leaf in flat.arrays:
        view = host_view(leaf)
        assert (view.shape, view.dtype) == (leaf.shape, leaf.dtype)
        arrays[leaf.key] = np.frombuffer(view.tobytes(), leaf.dtype).reshape(leaf.shape)
    assert len(arrays) == len(flat.arrays)
    return unflatten(decode_structure(encode_structure(flat.structure)), arrays)


@settings(deadline=None, max_examples=150)
@given(TREES)
def test_a_plain_tree_comes_back_bit_for_bit(tree: object) -> None:
    assert fingerprint(stored(tree)) == fingerprint(tree)


@settings(deadline=None, max_examples=150)
@given(TREES)
def test_keys_are_distinct_safe_and_never_inside_one_another(tree: object) -> None:
    flat = flatten(tree)
    keys = {leaf.key for leaf in flat.arrays}
    assert len(keys) == len(flat.arrays)
    assert [node.key for node in array_nodes(flat.structure)] == [leaf.key for leaf in flat.arrays]
    for key in keys:
        parts = key.split("/")
        assert parts[0] != "tieredckpt"
        assert "zarr.json" not in parts
        assert all(part.strip(".") for part in parts)
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in key)
        assert not any("/".join(parts[:i]) in keys for i in range(1, len(parts)))


@given(NAMES, NAMES)
def test_two_names_share_a_key_only_when_they_read_the_same(one: str | int, other: str | int) -> None:
    assert (child_key("p", one) == child_key("p", other)) == (str(one) == str(other))
    assert (child_key("", one) == child_key("", other)) == (str(one) == str(other))


@pytest.mark.parametrize(
    ("names", "key"),
    [
        (("params", "dense", "kernel"), "params/dense/kernel"),
        (("größe", "層"), "größe/層"),
        (("a/b", "50%"), "a%2Fb/50%25"),
        (("", ".", ".."), "%/%2E/%2E%2E"),
        (("tieredckpt", "tieredckpt"), "%74ieredckpt/tieredckpt"),
        (("zarr.json", "c"), "zarr%2Ejson/c"),
        (("a\nb", "\u202ex"), "a%0Ab/%E2%80%AEx"),
        ((7, -1), "7/-1"),
    ],
)
def test_the_spelling_of_keys_is_fixed(names: tuple[str | int, ...], key: str) -> None:
    tree: object = np.zeros(1)
    for name in reversed(names):
        tree = {name: tree}
    assert [leaf.key for leaf in flatten(tree).arrays] == [key]


def test_a_bare_leaf_has_its_fixed_key() -> None:
    assert [leaf.key for leaf in flatten(np.zeros(2)).arrays] == [LEAF_KEY] == ["leaf"]
    assert [path for path, _ in walk(flatten(3.0).structure)] == [LEAF_KEY]


def test_every_container_becomes_plain_and_keeps_its_order() -> None:
    a = np.arange(3)
    tree = {
        "z": OrderedDict(b=1, a=2),
        "d": defaultdict(list, {2: "x", 1: None}),
        "p": Point(a, 2.0),
        "s": State({"w": a}, 7),
        "box": Box([a, None], "kept by like alone"),
        "q": deque([1, 2], maxlen=5),
    }
    expected = {
        "z": {"b": 1, "a": 2},
        "d": {2: "x", 1: None},
        "p": {"x": a, "y": 2.0},
        "s": {"params": {"w": a}, "step": 7},
        "box": {"content": [a, None]},
        "q": deque([1, 2], maxlen=5),
    }
    assert fingerprint(stored(tree)) == fingerprint(expected)
    assert [leaf.key for leaf in flatten(tree).arrays] == ["p/x", "s/params/w", "box/content/0"]


def test_nothing_of_the_program_is_written() -> None:
    data = encode_structure(flatten({"p": Point(1, 2), "s": State(3), "b": Box(4, "label")}).structure)
    for word in (b"Point", b"State", b"Box", b"label", __name__.encode()):
        assert word not in data


def test_an_integer_of_any_size_comes_back() -> None:
    for value in (2**53, 2**53 + 1, -(2**53) - 1, 2**64, -(10**5000)):
        assert stored([value]) == [value]


def test_the_payload_and_sign_of_a_nan_come_back() -> None:
    odd = struct.unpack(">d", bytes.fromhex("fff8dead0000beef"))[0]
    assert fingerprint(stored({"x": odd, "y": complex(odd, odd)})) == fingerprint({"x": odd, "y": complex(odd, odd)})


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (object(), "object"),
        (len, "builtin_function_or_method"),
        (UserDict(), "UserDict"),
        (State, "type"),
        (bytearray(b"x"), "bytearray"),
    ],
)
def test_an_unknown_object_is_refused_by_key_and_type(value: object, type_name: str) -> None:
    with pytest.raises(Invalid, match=rf"'a/0'.*\b{type_name}\b"):
        flatten({"a": [value]})


@pytest.mark.parametrize("base", [dict, list, set, str])
def test_a_dataclass_with_content_besides_its_fields_is_refused(base: type) -> None:
    both: Any = dataclasses.dataclass(eq=False)(type("Both", (base,), {"__annotations__": {"x": int}, "x": 1}))
    with pytest.raises(Invalid, match=r"leaf 'a': a .*Both cannot be stored"):
        flatten({"a": both()})


def test_what_has_a_state_of_its_own_is_refused_with_the_way_to_it() -> None:
    """As a module or an optimizer of torch."""

    class Stateful:
        def state_dict(self) -> dict[str, int]:
            return {}

    with pytest.raises(Invalid, match=r"leaf 'model': a .*Stateful cannot be stored; give its state_dict\(\)"):
        flatten({"model": Stateful()})


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (np.array([object()]), "object"),
        (np.array(["x"]), "<U1"),
        (np.str_("x"), "<U1"),
        (np.zeros(2, [("a", "f4")]), "'a'"),
        (np.ma.masked_array([1]), "np.ma.getmaskarray"),
        (np.zeros((1,) * 33), "33 dimensions"),
        ("\ud800", "surrogate"),
        ("ü" * (MAX_INLINE_BYTES // 2 + 1), "np.frombuffer"),
        (b"x" * (MAX_INLINE_BYTES + 1), "np.frombuffer"),
        pytest.param(1 << (8 * MAX_INLINE_BYTES), "np.frombuffer", id="large int"),
    ],
)
def test_a_leaf_that_cannot_be_stored_is_refused_by_key(value: object, word: str) -> None:
    with pytest.raises(Invalid, match="'a/b'") as error:
        flatten({"a": {"b": value}})
    assert word in str(error.value)


def test_the_largest_inline_values_are_stored() -> None:
    tree = ["ü" * (MAX_INLINE_BYTES // 2), b"x" * MAX_INLINE_BYTES, (1 << (8 * MAX_INLINE_BYTES)) - 1]
    assert unflatten(decode_structure(encode_structure(flatten(tree).structure)), {}) == tree


@pytest.mark.parametrize("key", ["\ud800", np.int64(3), (1, np.int64(3)), (1, "\ud800"), len])
def test_a_dict_key_that_cannot_be_stored_is_refused(key: object) -> None:
    for others in ({}, {1.5: 2}):  # beside which the keys of all are stored in another form
        with pytest.raises(Invalid, match=r"'a'.*dict key"):
            flatten({"a": {key: 1, **others}})


def test_two_children_of_one_key_are_refused_by_name() -> None:
    class Twice:
        pass

    register(Twice, lambda _: ((1, 2), None, (1, "1")), lambda _, parts: Twice(), namespace=NAMESPACE)
    try:
        with pytest.raises(Invalid, match=r"'a'.*1 and '1'.*'a/1'"):
            flatten({"a": Twice()})
    finally:
        optree.unregister_pytree_node(Twice, namespace=NAMESPACE)


def test_whatever_a_registered_container_names_its_children_they_have_keys() -> None:
    class Odd:
        pass

    register(Odd, lambda _: ((1, 2, 3, 4), None, (True, 1.5, 7, "a")), lambda _, parts: parts, namespace=NAMESPACE)
    try:
        structure = flatten({"odd": Odd()}).structure
        assert unflatten(structure, {}) == {"odd": {"True": 1, "1.5": 2, 7: 3, "a": 4}}
    finally:
        optree.unregister_pytree_node(Odd, namespace=NAMESPACE)


def test_a_key_beyond_the_limit_is_refused() -> None:
    assert flatten({"ü" * 2048: np.zeros(1)}).arrays
    with pytest.raises(Invalid, match="4096 bytes"):
        flatten({"ü" * 2048 + "x": np.zeros(1)})


@pytest.mark.parametrize("child", [1, "text", None, {}, {"a": 1}, [], Path("a"), Counter()], ids=repr)
@pytest.mark.parametrize("name", ["x" * 4097, "ü" * 2049])
def test_whatever_lies_under_a_dict_key_its_step_can_be_read_or_it_is_refused(name: str, child: object) -> None:
    fits = name[:2048]
    structure = flatten({fits: child}).structure
    assert unflatten(decode_structure(encode_structure(structure)), {}) == {fits: child}
    with pytest.raises(Invalid, match="4096 bytes"):
        flatten({name: child})


def test_a_cycle_is_refused_and_a_shared_child_is_not() -> None:
    shared = [np.zeros(1)]
    assert [leaf.key for leaf in flatten([shared, shared]).arrays] == ["0/0", "1/0"]
    cyclic: list[object] = []
    cyclic.append({"x": cyclic})
    with pytest.raises(Invalid, match=r"'0/x'.*contains itself"):
        flatten(cyclic)


def nested(depth: int) -> object:
    tree: object = 1
    for i in range(depth):
        tree = [tree] if i % 2 else {"k": tree}
    return tree


def test_depth_is_bounded_on_save_and_read_alike() -> None:
    assert stored(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(Invalid, match="nests deeper"):
            flatten(nested(depth))


def test_a_registered_type_that_fails_to_open_is_named() -> None:
    class Broken:
        pass

    def flatten_broken(broken: Broken) -> Any:
        raise RuntimeError("out of order")

    register(Broken, flatten_broken, lambda _, parts: Broken(), namespace=NAMESPACE)
    try:
        with pytest.raises(Invalid, match=r"'a'.*Broken.*out of order"):
            flatten({"a": Broken()})
    finally:
        optree.unregister_pytree_node(Broken, namespace=NAMESPACE)


def test_an_array_that_is_missing_or_different_is_an_error() -> None:
    structure = flatten({"a": np.zeros((2, 3), np.float32)}).structure
    with pytest.raises(NotFound, match="'a'"):
        unflatten(structure, {})
    for wrong in (np.zeros((3, 2), np.float32), np.zeros((2, 3), np.int32), np.zeros((2, 3))):
        with pytest.raises(Corrupt, match="'a'"):
            unflatten(structure, {"a": wrong})


@pytest.mark.parametrize("dtype", ["<M8[ns]", ">m8[s]"])
def test_times_come_back_from_the_integers_that_zarr_keeps(dtype: str) -> None:
    times = np.array([1, -5], dtype)
    structure = flatten({"t": times}).structure
    restored = unflatten(structure, {"t": times.view(f"{dtype[0]}i8")})
    assert fingerprint(restored) == fingerprint({"t": times})
