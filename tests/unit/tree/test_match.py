"""A tree is restored in the image of ``like``, or every way in which it does not fit is said at once."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest

from tieredckpt.errors import Corrupt, Invalid, NotFound
from tieredckpt.tree import flatten, host_view, match, select, unflatten
from tieredckpt.tree.containers import NAMESPACE
from tieredckpt.tree.match import AS_SAVED


class Color(Enum):
    RED = "red"


class Moments(NamedTuple):
    mu: Any
    nu: Any


@dataclasses.dataclass
class Counter:
    value: Any
    doubled: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.value * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class Module:
    """A container whose registration calls ``name`` static."""

    def __init__(self, weight: Any, name: str) -> None:
        self.weight = weight
        self.name = name


def _module(name: str, parts: Any) -> Module:
    if parts[0] is None:
        raise ValueError("a module needs a weight")
    return Module(parts[0], name)


optree.register_pytree_node(
    Module, lambda module: ((module.weight,), module.name, ("weight",)), _module, namespace=NAMESPACE
)


def restore(saved: object, like: object) -> Any:
    flat = flatten(saved)
    arrays = {leaf.key: host_view(leaf).copy() for leaf in flat.arrays}
    return match(like, flat.structure).build(arrays)


def test_the_result_has_the_containers_of_like_and_the_values_of_the_step() -> None:
    def tree(number: float, name: str) -> dict[str, Any]:
        return {
            "ordered": OrderedDict(a=np.full(2, number), b=number),
            "default": defaultdict(list, {"x": np.float32(number)}),
            "moments": Moments(np.full(3, number), (number, None)),
            "counter": Counter(number),
            "frozen": Frozen([np.full((), number)]),
            "queue": deque([np.full(1, number)], maxlen=3),
            "module": Module(np.full(1, number), name),
        }

    got = restore(tree(5.0, "saved"), tree(1.0, "like"))
    assert {name: type(value) for name, value in got.items()} == {
        name: type(value) for name, value in tree(1.0, "").items()
    }
    assert list(got["ordered"]) == ["a", "b"]
    assert got["ordered"]["a"].tolist() == [5.0, 5.0]
    assert got["ordered"]["b"] == 5.0
    assert got["default"].default_factory is list
    assert type(got["default"]["x"]) is np.float32
    assert got["default"]["x"] == 5.0
    assert got["moments"].mu.tolist() == [5.0] * 3
    assert got["moments"].nu == (5.0, None)
    assert (got["counter"].value, got["counter"].doubled) == (5.0, 10.0)
    assert got["frozen"].value[0].tolist() == 5.0
    assert got["queue"].maxlen == 3
    assert got["module"].weight.tolist() == [5.0]
    assert got["module"].name == "like"


def test_like_itself_is_left_alone() -> None:
    like: dict[str, Any] = {"a": np.zeros(2), "c": Counter(1), "o": OrderedDict(x=1)}
    restore({"a": np.ones(2), "c": Counter(7), "o": OrderedDict(x=2)}, like)
    assert like["a"].tolist() == [0, 0]
    assert like["c"].value == 1
    assert like["o"]["x"] == 1


def test_children_are_matched_by_key_and_keep_the_order_of_like() -> None:
    saved = {"b": np.full(1, 2.0), "a": np.full(1, 1.0), 3: "three"}
    got = restore(saved, {"a": np.zeros(1), "3": "", "b": np.zeros(1)})
    assert list(got) == ["a", "3", "b"]
    assert (got["a"][0], got["b"][0], got["3"]) == (1.0, 2.0, "three")


def test_a_numpy_leaf_is_the_restored_memory() -> None:
    flat = flatten({"a": np.zeros(4)})
    memory = np.arange(4.0)
    got: Any = match({"a": np.zeros(4)}, flat.structure).build({"a": memory})
    assert got["a"] is memory


def test_a_bare_leaf_matches_a_bare_leaf() -> None:
    assert restore(np.arange(3), np.zeros(3, int)).tolist() == [0, 1, 2]
    assert restore(5, 1) == 5
    leaf, tree = np.zeros(1), {"leaf": np.zeros(1)}
    with pytest.raises(Invalid, match=r"does not fit the step: it is one dict of 1, the step one float64\[1\]"):
        restore(leaf, tree)
    with pytest.raises(Invalid, match=r"does not fit the step: it is one float64\[1\], the step one dict of 1"):
        restore(tree, leaf)


def test_every_difference_is_named_in_one_error() -> None:
    saved = {
        "params": {"w": np.zeros((3, 4), np.float32), "b": np.zeros(2)},
        "old": [1, np.zeros(1)],
        "list": [1],
        "flag": True,
        "gone": {},
    }
    like = {
        "params": {"w": np.zeros((4, 3), np.float32), "b": np.zeros(2, np.float16)},
        "new": {"x": 1, "y": {"z": np.zeros(1)}},
        "list": (1,),
        "flag": 1,
    }
    with pytest.raises(Invalid) as error:
        restore(saved, like)
    message = str(error.value)
    assert "2 missing from the step: 'new/x', 'new/y/z'" in message
    assert "3 only in the step: 'old/0', 'old/1', 'gone'" in message
    assert "4 different" in message
    assert "'params/w' (like: float32[4, 3], step: float32[3, 4])" in message
    assert "'params/b' (like: float16[2], step: float64[2]; cast=True converts it)" in message
    assert "'list' (like: tuple of 1, step: list of 1)" in message
    assert "'flag' (like: int, step: bool)" in message


def test_a_step_without_types_is_sent_to_what_restores_it_into_them() -> None:
    """As an import from Orbax gives it."""
    imported = {"opt": [{"mu": np.ones(2), "nu": 1}]}
    like = {"opt": (Moments(np.ones(2), 1),)}
    with pytest.raises(Invalid, match=r"imported from Orbax .* tieredckpt\.integrations\.orbax restores it"):
        restore(imported, like)
    for other in ({"opt": {"0": Moments(np.ones(2), 1)}}, {"opt": (Moments(np.ones(3), 1),)}, {"opt": ()}):
        with pytest.raises(Invalid) as error:
            restore(imported, other)
        assert "Orbax" not in str(error.value)


def test_a_long_list_of_differences_is_cut_and_counted() -> None:
    with pytest.raises(Invalid, match=r"50 missing.* and 30 more") as error:
        restore({}, {f"k{i}": i for i in range(50)})
    assert "'k19'" in str(error.value)
    assert "'k20'" not in str(error.value)
    assert "only in" not in str(error.value)
    with pytest.raises(Invalid, match=r"20 missing.*'k19'\. Change"):
        restore({}, {f"k{i}": i for i in range(20)})


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (1, 1.0),
        (None, np.zeros(1)),
        (np.zeros(()), 0),
        ("x", b"x"),
        ([], ()),
        ({}, []),
        ({"mu": 1, "nu": 2}, Moments(1, 2)),
        (Frozen(1), SimpleNamespace(value=1)),
        (np.zeros(1, ">f4"), np.zeros(1, "<f4")),
        ([1, 2], [1]),
        ([1], [1, 2]),
    ],
)
def test_a_leaf_or_container_of_another_type_does_not_match(saved: object, like: object) -> None:
    for wrap in (lambda tree: tree, lambda tree: {"a": tree}):
        with pytest.raises(Invalid, match="does not fit"):
            restore(wrap(saved), wrap(like))


def test_arrays_and_numpy_scalars_match_one_another() -> None:
    assert type(restore({"a": np.full((), 3.0)}, {"a": np.float64(0)})["a"]) is np.float64
    assert type(restore({"a": np.float64(3)}, {"a": np.zeros(())})["a"]) is np.ndarray


def test_a_container_that_refuses_its_children_is_named() -> None:
    tree = {"m": Module(None, "x")}
    found = match(tree, flatten(tree).structure)
    with pytest.raises(Invalid, match=r"'m'.*needs a weight"):
        found.build({})


def test_an_array_that_is_not_given_is_named() -> None:
    tree = {"m": Module(np.zeros(1), "x")}
    with pytest.raises(NotFound, match="'m/weight'"):
        match(tree, flatten(tree).structure).build({})


def test_an_array_of_another_shape_than_recorded_is_corrupt() -> None:
    found = match({"a": np.zeros(2)}, flatten({"a": np.zeros(2)}).structure)
    with pytest.raises(Corrupt, match="'a'"):
        found.build({"a": np.zeros(3)})


def test_the_leaves_of_a_match_are_those_of_like() -> None:
    like = {"b": np.zeros(2), "a": [np.float32(1), 3]}
    found = match(like, flatten({"a": [np.float32(1), 3], "b": np.ones(2)}).structure)
    assert [leaf.key for leaf in found.leaves] == ["b", "a/0"]
    assert found.leaves[0].source is like["b"]


def test_what_a_restore_without_like_gives_is_a_like_itself() -> None:
    saved = {
        "color": Color.RED,
        "moments": Moments(np.arange(3), 2),
        "counter": Counter(np.ones(2)),
        "module": Module(np.zeros(4), "m"),
    }
    flat = flatten(saved)
    plain = unflatten(flat.structure, {leaf.key: host_view(leaf) for leaf in flat.arrays})
    again = restore(saved, plain)
    kinds = {"color": str, "moments": dict, "counter": dict, "module": dict}
    assert {name: type(part) for name, part in again.items()} == kinds
    np.testing.assert_array_equal(again["module"]["weight"], np.zeros(4))
    with pytest.raises(Invalid, match="different"):
        restore(plain, saved)


def test_what_like_leaves_open_comes_back_as_it_was_saved() -> None:
    saved = {"known": Moments(np.ones(2), 1), "open": [np.arange(3), {"x": (np.float32(2), None)}], "number": 5}
    got = restore(saved, {"known": Moments(np.zeros(2), 0), "open": AS_SAVED, "number": AS_SAVED})
    assert type(got["known"]) is Moments
    assert got["known"].mu.tolist() == [1, 1]
    assert got["open"][0].tolist() == [0, 1, 2]
    assert got["open"][1] == {"x": (2.0, None)}
    assert got["number"] == 5
    found = match({"known": AS_SAVED, "open": AS_SAVED, "number": 0}, flatten(saved).structure)
    assert [node.key for node in found.as_saved] == ["known/mu", "open/0", "open/1/x/0"]
    assert found.leaves == ()


@pytest.mark.parametrize(
    ("saved", "like", "keys", "got"),
    [
        ({"a": 1, (0, 1): 2}, {}, None, {}),
        ({"a": 1, (0, 1): 2}, {"a": 0}, None, {"a": 1}),
        ({"a": 1, (0, 1): 2}, {"a": 0}, ["d/a"], {"a": 1}),
        ({"a": 1}, {"a": 0, (0, 1): 0}, ["d/a"], {"a": 1, (0, 1): 0}),
    ],
)
def test_a_part_of_a_dict_is_restored_whatever_the_keys_of_the_rest_are(
    saved: Any, like: Any, keys: list[str] | None, got: Any
) -> None:
    whole = flatten({"d": saved}).structure
    wanted = whole if keys is None else select(whole, keys)
    assert match({"d": like}, wanted, part=True, keys=keys, whole=whole).build({}) == {"d": got}


def test_a_copy_of_a_pattern_leaves_the_same_open() -> None:
    saved = {"a": [1, np.ones(2)], "b": 2}
    assert restore(saved, copy.deepcopy({"a": AS_SAVED, "b": 0}))["a"][0] == 1


def test_what_is_left_open_must_be_there_and_nothing_else_may_be() -> None:
    structure = flatten({"a": {"b": 1}, "c": 2}).structure
    with pytest.raises(Invalid, match="1 missing from the step: 'd'; 1 only in the step: 'c'"):
        match({"a": AS_SAVED, "d": AS_SAVED}, structure)
    with pytest.raises(Invalid, match="_AsSaved cannot be stored"):
        flatten({"a": AS_SAVED})
