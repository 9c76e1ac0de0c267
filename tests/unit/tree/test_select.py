"""A part of a tree is chosen by path or pattern, keeps its keys, and a miss is said with near misses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import Invalid, NotFound
from tieredckpt.format.structure import array_nodes, check_structure
from tieredckpt.tree import flatten, host_view, select, unflatten
from tieredckpt.tree.select import choose

TREE: dict[str, Any] = {
    "params": {"dense": {"kernel": np.full(1, 1.0), "bias": np.full(1, 2.0)}, "scale": np.full(1, 3.0)},
    "params2": {"kernel": np.full(1, 4.0)},
    "layers": [{"kernel": np.full(1, 5.0)}, {"kernel": np.full(1, 6.0)}, {"bias": np.full(1, 7.0)}],
    "pair": (np.full(1, 8.0), "text"),
    "kernel": np.full(1, 9.0),
    "step": 10,
    "empty": {"inside": []},
    "odd[1]": 11,
}
FLAT = flatten(TREE)
ARRAYS = {leaf.key: host_view(leaf) for leaf in FLAT.arrays}


def part(*keys: str) -> Any:
    structure = select(FLAT.structure, keys)
    check_structure(structure)
    return unflatten(structure, ARRAYS)


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("params", ["params/dense/kernel", "params/dense/bias", "params/scale"]),
        ("params/", ["params/dense/kernel", "params/dense/bias", "params/scale"]),
        ("params/scale", ["params/scale"]),
        ("params/*", ["params/scale"]),
        ("params/**", ["params/dense/kernel", "params/dense/bias", "params/scale"]),
        ("*/kernel", ["params2/kernel"]),
        ("*/*/kernel", ["params/dense/kernel", "layers/0/kernel", "layers/1/kernel"]),
        ("**/bias", ["params/dense/bias", "layers/2/bias"]),
        ("**kernel", [key for key in ARRAYS if key.endswith("kernel")]),
        ("**/kernel", [key for key in ARRAYS if key.endswith("kernel")]),
        ("layers/[01]/*", ["layers/0/kernel", "layers/1/kernel"]),
        ("layers/[!01]/*", ["layers/2/bias"]),
        ("layers/?/b??s", ["layers/2/bias"]),
        ("par*/k*", ["params2/kernel"]),
        ("**", [node.key for node in array_nodes(FLAT.structure)]),
    ],
)
def test_a_pattern_chooses_the_keys_it_says(pattern: str, keys: list[str]) -> None:
    assert [node.key for node in array_nodes(select(FLAT.structure, [pattern]))] == keys


@pytest.mark.parametrize("pattern", ["params/k*", "*kernel/*", "params[!x]*", "layers[/]0/kernel", "layers?0/kernel"])
def test_a_pattern_does_not_cross_a_slash(pattern: str) -> None:
    with pytest.raises(NotFound, match="the step has no leaf that matches"):
        select(FLAT.structure, [pattern])


def test_what_is_chosen_keeps_its_containers_and_values() -> None:
    assert part("layers/1", "step", "empty") == {
        "layers": {1: {"kernel": np.full(1, 6.0)}},
        "step": 10,
        "empty": {"inside": []},
    }


def test_a_list_that_loses_a_child_becomes_a_dict_by_index_and_a_whole_one_stays() -> None:
    assert part("layers/*/kernel") == {"layers": {0: {"kernel": [5.0]}, 1: {"kernel": [6.0]}}}
    assert part("pair/1") == {"pair": {1: "text"}}
    assert part("layers/*/bias", "layers/*/kernel")["layers"][2] == {"bias": [7.0]}
    assert type(part("layers")["layers"]) is list
    assert type(part("pair")["pair"]) is tuple


def test_a_key_that_looks_like_a_pattern_is_found_by_its_name() -> None:
    assert part("odd[1]") == {"odd[1]": 11}


def test_a_list_stays_one_if_only_its_children_lose_some() -> None:
    structure = flatten({"a": [{"x": 1, "y": 2}, ({"x": 3},)], "b": 4}).structure
    assert unflatten(select(structure, ["**/x"]), {}) == {"a": [{"x": 1}, ({"x": 3},)]}


def test_a_path_is_no_pattern_where_something_lies_below_it() -> None:
    structure = flatten({"a*": {"x": 1}, "ab": 2, "a*b": 3}).structure
    assert unflatten(select(structure, ["a*"]), {}) == {"a*": {"x": 1}}


def test_everything_chosen_is_the_structure_itself() -> None:
    assert select(FLAT.structure, ["**"]) is FLAT.structure
    assert select(flatten(3).structure, ["leaf"]) == flatten(3).structure


def test_a_miss_names_near_misses() -> None:
    with pytest.raises(NotFound, match=r"'params/dense/kernels'.*'params/dense/kernel'"):
        part("params/dense/kernels")
    with pytest.raises(NotFound, match=r"'param'.*'params'"):
        part("step", "param")


@pytest.mark.parametrize("keys", [[], "params", ["[]"], ["x[!]y"]])
def test_what_is_no_choice_is_refused(keys: Any) -> None:
    with pytest.raises(Invalid, match="keys"):
        select(FLAT.structure, keys)


@given(st.sets(st.sampled_from(sorted(ARRAYS)), min_size=1))
def test_exactly_the_named_arrays_come_with_their_keys(keys: set[str]) -> None:
    structure = select(FLAT.structure, sorted(keys))
    check_structure(structure)
    assert {node.key for node in array_nodes(structure)} == keys
    assert keys == {leaf.key for leaf in flatten(unflatten(structure, ARRAYS)).arrays}


class Counted(str):
    """A key that counts how often it is looked at."""

    __slots__ = ()
    looks = 0

    def __lt__(self, other: str) -> bool:
        Counted.looks += 1
        return super().__lt__(other)

    def startswith(self, *arguments: Any) -> bool:
        Counted.looks += 1
        return super().startswith(*arguments)


def test_thousands_of_paths_are_chosen_without_a_look_at_every_key_for_each() -> None:
    keys = [Counted(f"layers/{i}/{name}") for i in range(1000) for name in ("kernel", "bias")]
    Counted.looks = 0
    chosen = dict(choose([f"layers/{i}" for i in range(1000)], keys))
    assert Counted.looks < 100 * len(keys)
    assert all(set(found) == {f"{path}/kernel", f"{path}/bias"} for path, found in chosen.items())


@given(st.lists(st.text("a/0.é", min_size=1, max_size=5), unique=True), st.text("a/0.é", max_size=4))
def test_a_path_chooses_the_key_of_its_name_and_those_below(keys: list[str], path: str) -> None:
    [(_, chosen)] = choose([path], keys)
    plain = path.rstrip("/")
    below = {key for key in keys if key == plain or key.startswith(plain + "/")}
    assert sorted(chosen) == sorted({path} if path in keys else below)
