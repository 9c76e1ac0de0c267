"""What trainers hand over besides arrays and scalars is stored without its class, and comes back."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
from collections import Counter, deque
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from support.frameworks import need_modules
from support.objects import (
    TREES,
    TREES_OF_CLASSES,
    Access,
    Colour,
    Level,
    Point,
    Word,
    again,
    bits_of,
    by,
    stored,
)

from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.structure import (
    MAX_INLINE_BYTES,
    CustomNode,
    DictNode,
    IntNode,
    ObjectNode,
    TypedNode,
    decode_structure,
    encode_structure,
    walk,
)
from tieredckpt.tree import flatten, match, select, unflatten


@settings(deadline=None, max_examples=300)
@given(TREES)
def test_a_tree_of_them_comes_back_without_like(tree: object) -> None:
    assert bits_of(again(tree)) == bits_of(tree)


@settings(deadline=None, max_examples=200)
@given(TREES_OF_CLASSES)
def test_a_tree_of_the_programs_classes_comes_back_with_like(tree: object) -> None:
    assert bits_of(by(tree, tree)) == bits_of(tree)


@settings(deadline=None, max_examples=100)
@given(TREES)
def test_the_same_tree_is_the_same_json(tree: object) -> None:
    """Ranks compare what each of them has at a path."""
    assert encode_structure(flatten(again(tree)).structure) == encode_structure(flatten(tree).structure)


def test_the_json_of_objects_is_fixed() -> None:
    tree = {
        "enum": Colour.BLUE,
        "path": Path("/data/größe"),
        "set": {3, "b", (1, None)},
        "slice": slice(True, -(2**53), 2**53 + 1),
        "queue": deque([1], maxlen=4),
        "options": argparse.Namespace(rate=0.5),
        "odd": {1: True, "1": False, (0, "x"): None, 1.5: 1, b"x": 2, "=": 3},
    }
    objects = {path: node for path, node in walk(stored(tree)[0]) if isinstance(node, ObjectNode | TypedNode)}
    assert json.loads(json.dumps({path: [node.of, _said(node)] for path, node in objects.items()})) == {
        "enum": ["enum", ["BLUE", [0.0, 0.5, {"type": "bytes", "value": "eA=="}]]],
        "path": ["path", "/data/größe"],
        "set": ["set", ["b", 3, [1, None]]],
        "slice": ["slice", [True, -(2**53), {"type": "int", "value": "0x20000000000001"}]],
        "queue": ["deque", 4],
        "options": ["namespace", None],
        "odd": ["map", None],
    }
    (odd,) = [node for path, node in objects.items() if path == "odd"]
    assert isinstance(odd, TypedNode)
    assert odd.keys == ["=1", "1", '=[0,"x"]', "=1.5", '={"type":"bytes","value":"eA=="}', '="="']


def _said(node: ObjectNode | TypedNode) -> object:
    return node.value if isinstance(node, ObjectNode) else node.about


def test_what_could_be_stored_before_is_stored_as_before() -> None:
    class Integer(int):
        pass

    tree = {1: {Level.LOW: 1, Integer(5): 2}, "a": {Word.YES: 1, "b": Point(1, 2)}}
    nodes = [node for _, node in walk(flatten(tree).structure)]
    assert not any(isinstance(node, TypedNode | ObjectNode) for node in nodes)


@pytest.mark.parametrize("limit", [None, 2, 2**53 + 1, sys.maxsize])
def test_a_deque_of_any_length_comes_back(limit: int | None) -> None:
    assert bits_of(again([deque([1, 2], limit)])) == bits_of([deque([1, 2], limit)])


def test_a_deque_fits_one_of_another_limit_and_like_has_the_limit() -> None:
    assert bits_of(by([deque([0], maxlen=5)], [deque([7], maxlen=2)])) == bits_of([deque([7], maxlen=5)])


def test_a_deque_of_a_step_of_before_fits_a_deque() -> None:
    before = DictNode(["q"], [CustomNode([0, 1], [IntNode(1), IntNode(2)])])
    assert match({"q": deque([0, 0], maxlen=3)}, before).build({}) == {"q": deque([1, 2], maxlen=3)}
    assert unflatten(before, {}) == {"q": {0: 1, 1: 2}}
    with pytest.raises(Invalid, match="like: counter of 2, step: custom of 2"):
        match({"q": Counter({0: 0, 1: 0})}, before)


def test_no_class_of_the_program_is_written_and_a_plain_value_stands_in_for_it() -> None:
    tree = {"c": Colour.GREEN, "l": Level.HIGH, "p": Point(Access.READ, 2), "s": {Level.LOW}, (Colour.RED,): 1}
    data = encode_structure(flatten(tree).structure)
    for word in (b"Colour", b"Level", b"Point", b"Access", b"support"):
        assert word not in data
    assert again(tree) == {"c": "green", "l": 2, "p": {"x": 1, "y": 2}, "s": {1}, (1,): 1}
    assert type(again(tree)["l"]) is int


@pytest.mark.parametrize(
    ("saved", "like", "why"),
    [
        (Colour.RED, Level.LOW, "Level of `like` has no member 'RED' of the value 1"),
        (Level.HIGH, Colour.RED, "Colour of `like` has no member 'HIGH'"),
        ({Level.HIGH}, {Word.YES}, "Word of `like` has no member 'HIGH'"),
        (Colour.RED, [1], "like: list of 1, step: enum"),
        ({1}, frozenset({1}), "like: frozenset, step: set"),
        (Path("a"), "a", "like: str, step: path"),
        (deque([1]), [1], "like: list of 1, step: deque of 1"),
        (argparse.Namespace(a=1), types.SimpleNamespace(a=1), "like: simple-namespace of 1, step: namespace of 1"),
        (Counter(a=1), {"a": 1}, "like: dict of 1, step: counter of 1"),
        ({1: 1, "1": 2}, {1: 1}, "'x/='?1"),
    ],
)
def test_what_does_not_fit_like_is_named(saved: object, like: object, why: str) -> None:
    structure, _ = stored({"x": saved})
    with pytest.raises(Invalid, match=r"'x['/]") as refused:
        match({"x": like}, structure)
    assert why.replace("'?", "") in str(refused.value)


def test_objects_take_their_values_from_the_step_and_their_classes_from_like() -> None:
    like = {"e": Colour.RED, "p": Path("other"), "s": {Level.LOW, Word.YES}, "d": {Colour.RED: 0}}
    got = by(like, {"e": Colour.BLUE, "p": Path("mine"), "s": {Level.HIGH}, "d": {Colour.RED: 5}})
    assert got == {"e": Colour.BLUE, "p": Path("mine"), "s": {Level.HIGH}, "d": {Colour.RED: 5}}


def test_typed_containers_take_their_children_from_the_step_and_leave_like_as_it_is() -> None:
    def tree(value: int) -> list[Any]:
        namespaces = argparse.Namespace(rate=value), types.SimpleNamespace(rate=value)
        return [*namespaces, deque([value], maxlen=3), Counter(a=value), {1: value, "1": value}]

    like = tree(0)
    assert by(like, tree(5)) == tree(5)
    assert like == tree(0)


@pytest.mark.parametrize("clash", [{Colour.RED: "a", 1: "b"}, {Colour.RED, 1}], ids=["dict", "set"])
def test_members_that_would_be_equal_without_their_class_are_lost_by_nobody(clash: Any) -> None:
    with pytest.raises(Invalid, match=r"'x'.*`like`"):
        again({"x": clash})
    assert by({"x": clash}, {"x": clash}) == {"x": clash}


def test_a_key_that_makes_no_dict_is_named() -> None:
    with pytest.raises(Invalid, match="'x' has two keys that are 1 without"):
        again({"x": {Colour.RED: "a", 1: "b"}})
    key = '={"type":"object","of":"set","value":[]}'
    structure = decode_structure(encode_structure(DictNode(["x"], [TypedNode([key], [IntNode(1)], "map")])))
    with pytest.raises(Corrupt, match=r"'x' has the key .*set"):
        unflatten(structure, {})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")), "time zone"),
        ({object()}, "object"),
        (np.dtype([("a", "f4")]), "without fields"),
        (np.dtype(("f4", (2,))), "without fields"),
        (np.dtypes.StringDType(na_object=None), "cannot be stored"),
        ({np.int64(1)}, "int64"),
        (Path("\udcff"), "surrogate"),
        (frozenset(range(MAX_INLINE_BYTES)), "inline"),
        (range(1 << (8 * MAX_INLINE_BYTES)), "np.frombuffer"),
    ],
    ids=["zone", "set", "fields", "shape", "strings", "scalar", "surrogate", "large set", "large range"],
)
def test_an_object_that_cannot_be_stored_is_refused_by_key(value: object, why: str) -> None:
    with pytest.raises(Invalid, match="'a/0'") as refused:
        flatten({"a": [value]})
    assert why in str(refused.value)


@pytest.mark.parametrize(("around", "least"), [(lambda value: (value,), 20), (lambda value: frozenset({value}), 10)])
def test_tuples_and_objects_in_objects_nest_as_deep_as_they_are_read(around: Any, least: int) -> None:
    def nested(depth: int) -> object:
        value: object = float("nan")
        for _ in range(depth):
            value = around(value)
        return value

    deepest = next(depth for depth in range(100) if not _storable({nested(depth + 1)}))
    assert deepest > least
    assert bits_of(again({nested(deepest)})) == bits_of({nested(deepest)})
    assert bits_of(again({nested(deepest): 1})) == bits_of({nested(deepest): 1})


def _storable(tree: object) -> bool:
    try:
        flatten(tree)
    except Invalid:
        return False
    return True


@pytest.mark.parametrize(
    "node",
    [
        ObjectNode("set", 1),
        ObjectNode("set", [[[]], {"type": "object", "of": "set", "value": []}]),
        ObjectNode("set", {"type": "object", "of": "range", "value": [0, 1 << 53, 1]}),
        ObjectNode("range", {"type": "object", "of": "range", "value": [0, 1 << 53, 1]}),
        ObjectNode("timedelta", {"type": "object", "of": "range", "value": [0, 1 << 53, 1]}),
        ObjectNode("set", "abc"),
        ObjectNode("enum", []),
        ObjectNode("enum", ["RED"]),
        ObjectNode("path", 3),
        ObjectNode("path", ["a", "b"]),
        ObjectNode("date", "yesterday"),
        ObjectNode("datetime", ["2026-01-01T00:00:00", 7]),
        ObjectNode("datetime", "2026-01-01"),
        ObjectNode("timedelta", [1 << 50, 0, 0]),
        ObjectNode("timedelta", [[], 0, 0]),
        ObjectNode("range", [0, 1, 0]),
        ObjectNode("range", [0, 1, 1, 1]),
        ObjectNode("slice", []),
        ObjectNode("numpy-dtype", "os.system"),
        ObjectNode("numpy-dtype", "f4,(2,3)f8"),
        ObjectNode("numpy-dtype", "|V999999999999"),
        ObjectNode("numpy-dtype", "finfo"),
        ObjectNode("numpy-dtype", None),
        ObjectNode("path", {"type": "list", "children": []}),
        ObjectNode("path", {"type": "int", "value": "12"}),
        ObjectNode("path", {}),
        TypedNode([0], [IntNode(1)], "deque", 0),
        TypedNode([0], [IntNode(1)], "deque", "4"),
        TypedNode([0], [IntNode(1)], "deque", True),
        TypedNode([0], [IntNode(1)], "deque", {"type": "int", "value": "0x8000000000000000"}),
        TypedNode([1], [IntNode(1)], "deque"),
        TypedNode(["=["], [IntNode(1)], "map"),
        TypedNode(["=" + "[" * 2000 + "]" * 2000], [IntNode(1)], "map"),
        TypedNode(["={}"], [IntNode(1)], "map"),
        TypedNode(["=9007199254740993"], [IntNode(1)], "map"),
        TypedNode(["=" + "[" * 40 + "]" * 40], [IntNode(1)], "map"),
        TypedNode(['={"type":"object","of":"set","value":[]}'], [IntNode(1)], "map"),
    ],
)
def test_what_makes_no_object_is_corrupt(node: Any) -> None:
    structure = decode_structure(encode_structure(DictNode(["x"], [node])))
    with pytest.raises(Corrupt, match="'x"):
        unflatten(structure, {})


@pytest.mark.parametrize("node", [ObjectNode("tomorrow", 1), TypedNode([], [], "tomorrow"), ObjectNode("torch-x", 1)])
def test_a_kind_of_a_later_version_is_named_and_the_rest_can_be_read(node: Any) -> None:
    if node == ObjectNode("torch-x", 1):
        need_modules("torch")  # whose objects are read by a module of their own
    structure = decode_structure(encode_structure(DictNode(["x", "y"], [node, IntNode(3)])))
    with pytest.raises(Invalid, match=r"'x' is a '.*keys="):
        unflatten(structure, {})
    assert unflatten(select(structure, ["y"]), {}) == {"y": 3}


def test_a_part_of_a_typed_container_is_one_or_a_dict() -> None:
    tree = {"q": deque([1, 2, 3]), "n": argparse.Namespace(a=1, b=2), "d": {1: 1, "1": 2, None: 3}}
    structure, arrays = stored(tree)
    part = unflatten(select(structure, ["q/1", "n/b", "d/=1", "d/=null"]), arrays)
    assert part == {"q": {1: 2}, "n": argparse.Namespace(b=2), "d": {1: 1, None: 3}}
    assert unflatten(select(structure, ["q"]), arrays) == {"q": tree["q"]}


@dataclasses.dataclass
class Spec:
    size: int


class Planet(Spec, Enum):
    EARTH = 1
    MARS = 2


def test_a_member_of_an_enum_of_dataclasses_is_refused_and_not_overwritten() -> None:
    with pytest.raises(Invalid, match=r"'p'.*Spec"):
        by({"p": Planet.MARS}, {"p": Planet.EARTH})
    assert [member.size for member in Planet] == [1, 2]


def test_a_namespace_with_a_name_that_every_object_has_is_no_more_than_that() -> None:
    node = TypedNode(["__class__", "__dict__", "a b"], [IntNode(1), IntNode(2), IntNode(3)], "namespace")
    made = unflatten(decode_structure(encode_structure(node)), {})
    assert type(made) is argparse.Namespace
    assert vars(made) == {"__class__": 1, "__dict__": 2, "a b": 3}
