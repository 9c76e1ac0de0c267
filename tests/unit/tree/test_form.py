"""A tree that is flattened by its form is flat as it would be without, whatever has changed in it."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import optree
import pytest
from hypothesis import given, settings
from support.trees import TREES, indexed, setting

from tieredckpt.engine.saving.plan import Plan
from tieredckpt.errors import Invalid
from tieredckpt.format import ocdbt
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C, PLAIN
from tieredckpt.format.manifest import StepRecord, encode_step
from tieredckpt.format.structure import encode_structure
from tieredckpt.tree import Flat, Shard, flatten
from tieredckpt.tree.containers import NAMESPACE
from tieredckpt.tree.form import Flattener

CHUNK = 1 << 14


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class State:
    params: Any
    step: Any


class Name(IntEnum):
    FIRST = 1


def same(found: Flat, expected: Flat) -> bool:
    """All is equal; sources are the same objects, but for what flattening made of a typed PRNG key."""
    if encode_structure(found.structure) != encode_structure(expected.structure):
        return False
    leaves = list(zip(found.arrays, expected.arrays, strict=True))
    return found.in_pieces == expected.in_pieces and all(
        (mine.source is its.source or mine.kind == "jax-key")
        and msgspec.structs.replace(mine, source=None) == msgspec.structs.replace(its, source=None)
        for mine, its in leaves
    )


def stored(flat: Flat, plan: Plan | None = None) -> list[ocdbt.Index]:
    """The index of a step in RAM and below it, whose larger chunks lie in the index too."""
    record = StepRecord(
        store="00000000-0000-0000-0000-000000000000",
        step=1,
        serial=1,
        line=((1, 1),),
        restored_from=None,
        saved_at=0.0,
        nbytes=0,
        metrics={},
        provenance={},
        policy={},
        structure=flat.structure,
    )
    arrays = indexed(flat, CHUNK, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: 1)
        return [encode_step(record, arrays, btree_path="steps/1/btree", encoding=each) for each in (PLAIN, CRC32C)]


def check(*trees: Any) -> list[object]:
    """Save trees one after the other, each by the form of the one before; returns the forms."""
    flattener, plans, forms = Flattener(), dict[int, Plan](), []
    for tree in trees:
        expected = flatten(tree)
        found = flattener.flatten(tree)
        assert same(found, expected)
        plan = plans.setdefault(id(found.form), Plan.of(found.arrays, CHUNK))
        assert stored(found, plan) == stored(expected)
        forms.append(found.form)
    return forms


def renewed(value: Any) -> Any:
    """The same tree with other values of the same form."""
    match value:
        case np.ndarray():
            return np.frombuffer(bytes(value.nbytes), value.dtype).reshape(value.shape)
        case np.generic():
            return type(value)(np.zeros((), value.dtype)[()]) if value.dtype.kind not in "mM" else value
        case dict():
            return {key: renewed(child) for key, child in value.items()}
        case list() | tuple():
            return type(value)(map(renewed, value))
        case str():
            return value + "!"
        case _:
            return value


@settings(deadline=None, max_examples=100)
@given(tree=TREES, other=TREES)
def test_any_tree_is_flat_as_without_a_form(tree: Any, other: Any) -> None:
    first, second, third, fourth = check(tree, renewed(tree), other, tree)
    assert first is second
    assert first is not None
    assert (third is second) == (fourth is third)


def tree_of() -> dict[Any, Any]:
    large = np.arange(CHUNK, dtype=np.float64)
    return {
        "w": {"a": np.ones((4, 3), np.float32), "b": np.zeros(2, np.int64), "large": large},
        "step": 3,
        "list": [np.ones(3), (np.float32(2), None), "text"],
        "point": Point(np.ones(1), {"x": np.zeros(2)}),
        "flags": np.array([True, False]),
        7: {1: np.ones(2), 2: np.zeros(2)},
        "at": Path("/a"),
        "last": collections.deque([np.ones(2), np.zeros(2)], maxlen=3),
        "ordered": collections.OrderedDict(a=np.ones(1), b=np.zeros(1)),
        "state": State(np.ones(2), Name.FIRST),
    }


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], bool]] = {
    "values": (lambda tree: tree["w"]["a"].__iadd__(1), True),
    "another array of that form": (setting("w", "a", to=np.zeros((4, 3), np.float32)), True),
    "another layout": (setting("w", "a", to=np.ones((3, 4), np.float32).T), True),
    "a scalar": (setting("step", to=4), True),
    "a scalar of another type": (setting("step", to="four"), True),
    "a small object": (setting("at", to=Path("/b")), True),
    "shape": (setting("w", "a", to=np.ones((3, 4), np.float32)), False),
    "axes": (setting("w", "a", to=np.ones((12,), np.float32)), False),
    "dtype": (setting("w", "a", to=np.ones((4, 3), np.int32)), False),
    "byte order": (setting("w", "a", to=np.ones((4, 3), ">f4")), False),
    "a large shape": (setting("w", "large", to=np.ones(CHUNK + 1)), False),
    "order of keys": (lambda tree: tree["w"].update(a=tree["w"].pop("a")), False),
    "a new key": (setting("w", "c", to=np.ones(1)), False),
    "a key less": (lambda tree: tree["w"].pop("a"), False),
    "another key": (lambda tree: tree["w"].update(z=tree["w"].pop("large")), False),
    "keys of another type": (setting(7, to={"1": np.ones(2), "2": np.zeros(2)}), False),
    "a bool among keys": (setting(7, to={True: np.ones(2), 2: np.zeros(2)}), False),
    "a longer list": (lambda tree: tree["list"].append(1), False),
    "a list as a tuple": (lambda tree: tree.update(list=tuple(tree["list"])), False),
    "another kind of dict": (lambda tree: tree.update(ordered=dict(tree["ordered"])), False),
    "another limit of a deque": (lambda tree: tree.update(last=collections.deque(tree["last"], 4)), False),
    "a namedtuple as a tuple": (lambda tree: tree.update(point=tuple(tree["point"])), False),
    "a scalar as an array": (setting("step", to=np.ones(())), False),
    "an array as a scalar": (setting("w", "b", to=1.0), False),
    "an array as a NumPy scalar": (setting("w", "b", to=np.float32(1)), False),
    "an array as a container": (setting("w", "b", to={"a": np.ones(2)}), False),
    "a container as an array": (setting("w", to=np.ones(2)), False),
    "an object of another kind": (setting("at", to=Name.FIRST), False),
    "a piece of an array": (setting("w", "b", to=Shard(np.zeros(2, np.int64), (2,), (0,))), False),
    "two leaves that are one array": (lambda tree: tree["list"].__setitem__(0, tree["w"]["a"]), False),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_found(what: str) -> None:
    change, keeps_form = CHANGES[what]
    before, after = tree_of(), tree_of()
    change(after)
    first, second, third = check(before, after, tree_of())
    assert first is not None
    assert (second is first) == keeps_form
    assert keeps_form == (third is first)


def test_one_array_at_two_places_is_stored_at_both() -> None:
    one = np.arange(6.0)
    first, second = check({"a": one, "b": np.zeros(6)}, {"a": one, "b": one})
    assert first is second


def test_a_tree_that_cannot_be_stored_is_refused_after_one_that_can() -> None:
    flattener = Flattener()
    flattener.flatten({"a": {"b": np.ones(2)}})
    cycle: dict[str, Any] = {}
    cycle["a"] = cycle
    for tree, why in (
        (cycle, "contains itself"),
        ({"a": {"b": np.array([object()])}}, "dtype"),
        ({"a": {"b": "\ud800"}}, "surrogate"),
        ({"a": {"b": object()}}, "cannot be stored"),
    ):
        with pytest.raises(Invalid, match=why):
            flattener.flatten(tree)


def test_no_value_of_a_tree_is_kept() -> None:
    flattener = Flattener()
    for _ in range(2):
        tree = {"a": np.ones(3), "b": [np.zeros(2)]}
        watched = [weakref.ref(tree["a"])]
        flattener.flatten(tree)
        del tree
        gc.collect()
        assert [each() for each in watched] == [None]


@pytest.mark.parametrize("make", [lambda dtype: np.zeros(2, dtype), lambda dtype: np.zeros((), dtype)[()]])
def test_times_of_another_unit_are_told_apart_though_their_dtypes_are_equal(make: Callable[[str], Any]) -> None:
    first, second = check({"a": make("M8[s]")}, {"a": make("M8[1000ms]")})
    assert first is not second


def test_scalars_of_a_tree_are_not_kept() -> None:
    flattener = Flattener()
    for number in range(2):
        values = [b"%d" % number * 1000, f"{number}" * 1000]
        before = [sys.getrefcount(value) for value in values]
        flat = flattener.flatten({"a": values[0], "b": [values[1], np.ones(2)]})
        del flat
        gc.collect()
        assert [sys.getrefcount(value) for value in values] == before


class Shuffled:
    """A container that opens to each of some dicts in turn."""

    def __init__(self, *openings: dict[str, Any]) -> None:
        self.openings = itertools.cycle(openings)

    def opened(self) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
        opening = next(self.openings)
        return tuple(opening.values()), None, tuple(opening)


register: Any = optree.register_pytree_node
"""Its annotations ask for collections."""

register(Shuffled, Shuffled.opened, lambda _, children: children, namespace=NAMESPACE)


@pytest.mark.parametrize(
    "other", [{"b": np.zeros(3), "a": np.ones(3)}, {"a": np.ones(3)}, {"a": 1, "b": [np.ones(3)]}], ids=repr
)
def test_a_container_that_opens_differently_each_time_is_stored_under_its_names(other: dict[str, Any]) -> None:
    first = {"a": np.ones(3), "b": np.zeros(3)}
    flattener = Flattener()
    for it, expected in ((Shuffled(first, other), first), (Shuffled(other), other), (Shuffled(first), first)):
        last = np.ones(1)
        assert same(flattener.flatten({"it": it, "last": last}), flatten({"it": Shuffled(expected), "last": last}))


def test_tensors_are_told_apart_by_all_that_is_looked_at() -> None:
    torch = pytest.importorskip("torch")

    def tree(tensor: Any) -> dict[str, Any]:
        return {"a": tensor, "b": torch.nn.Parameter(torch.ones(2)), "c": torch.ones(2, dtype=torch.bfloat16)}

    first, *others = check(*(tree(each) for each in (torch.ones(3, 2), torch.zeros(3, 2), torch.ones(2, 3).T)))
    assert others == [first] * 2
    for other in (torch.ones(3, 2).double(), torch.ones(2, 3), torch.nn.Parameter(torch.ones(3, 2)), np.ones((3, 2))):
        first, second = check(tree(torch.ones(3, 2)), tree(other))
        assert first is not second
    freed = torch.ones(3, 2)
    flattener = Flattener()
    flattener.flatten(tree(freed))
    freed.untyped_storage().resize_(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are called deprecated or a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        quantized = torch.quantize_per_tensor(torch.ones(3, 2), 1.0, 0, torch.qint8)
    for refused in (freed, torch.ones(3, 2, device="meta"), torch.eye(3, 2).to_sparse(), nested, quantized):
        with pytest.raises(Invalid, match="leaf 'a'"):
            flattener.flatten(tree(refused))


def test_jax_arrays_are_flattened_by_their_form_too() -> None:
    jax = pytest.importorskip("jax")
    trees = [{"a": jax.numpy.full(3, value), "key": jax.random.key(value)} for value in (1, 2)]
    first, second = check(*trees)
    assert first is second
    assert check(trees[0], {**trees[0], "a": jax.numpy.ones(4)})[1] is not first


def test_a_step_is_byte_for_byte_what_it_was() -> None:
    """The digest is of what a version wrote that planned every save anew."""
    flattener = Flattener()
    flattener.flatten(tree_of())
    flat = flattener.flatten(tree_of())
    files = [part for index in stored(flat, Plan.of(flat.arrays, CHUNK)) for part in (index.btree, index.manifest)]
    assert digest(b"".join(files)).hex() == "bf5e5938b7bcc0c121f09d241361fd2c"
