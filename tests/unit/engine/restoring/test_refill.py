"""A restore into a tree whose form is known does what one into an unknown tree does, whatever has changed in it."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from support.agents import eventually
from support.scenes import config, folder, ram
from support.trees import TREES, fingerprint, setting

from tieredckpt import AS_SAVED, CheckpointStore, Shard
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.structure import array_nodes, decode_structure, encode_structure
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.sync import SyncStore
from tieredckpt.tree import flatten, match
from tieredckpt.tree import form as forms
from tieredckpt.tree.form import Flattener


def outcome(work: Callable[[], Any]) -> object:
    """What comes out, with all bits, or the error."""
    try:
        return fingerprint(work())
    except (Invalid, Corrupt) as error:
        return type(error), str(error)


def other_values(value: Any) -> Any:
    """A tree of the same form; scalars keep their types, and objects and times are the same."""
    match value:
        case np.ndarray():
            return np.frombuffer(bytes(value.nbytes), value.dtype).reshape(value.shape)
        case dict():
            return {key: other_values(child) for key, child in value.items()}
        case list() | tuple():
            return type(value)(map(other_values, value))
        case str() | bytes():
            return value + value[:1]  # type: ignore[operator]  # both of one type
        case _:
            return value


@settings(deadline=None, max_examples=150)
@given(saved=TREES, other=TREES, again=TREES)
def test_any_tree_is_filled_as_one_of_an_unknown_form(saved: Any, other: Any, again: Any) -> None:
    flattener = Flattener()
    structure = decode_structure(encode_structure(flatten(saved).structure))
    arrays = {node.key: np.ones(node.shape, dtype_from_name(node.dtype)) for node in array_nodes(structure)}
    for into in (saved, other_values(saved), other, again, other_values(saved)):
        expected = outcome(lambda into=into: match(into, structure, fills=True).build(arrays))  # type: ignore[misc]
        refill = flattener.refill(into, structure)
        if refill is None:
            assert into is other or into is again
            continue
        assert [id(leaf.source) for leaf in refill.leaves] == [id(leaf.source) for leaf in flatten(into).arrays]
        assert fingerprint(refill.build(arrays)) == expected


class Point(NamedTuple):
    x: Any
    y: Any


class Name(StrEnum):
    """Keys that equal texts and are none."""

    A = "a"
    B = "b"
    LARGE = "large"


def tree_of(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "w": {"a": rng.random((4, 3), np.float32), "b": rng.integers(9, size=2), "large": rng.random(5000)},
        "step": seed,
        "list": [rng.random(3), (None, rng.random(()))],
        "point": Point(rng.random(1), {"x": rng.random(2)}),
        "flags": rng.random(3) > 0.5,
        "at": Path(f"/{seed}"),
        "times": rng.integers(9, size=3).astype("M8[s]"),
        "last": collections.deque([rng.random(2)], maxlen=3),
        "ordered": collections.OrderedDict(a=rng.random(1), b=rng.random(1)),
        "none": np.empty((0, 3)),
    }


def read_only(tree: Any) -> None:
    tree["w"]["a"].flags.writeable = False


def sharing(tree: Any) -> None:
    memory = np.zeros(4)
    tree["ordered"]["a"], tree["ordered"]["b"] = memory[1:2], memory[1:2]


CHANGES: dict[str, Callable[[Any], object]] = {
    "values": lambda tree: tree["w"]["a"].__iadd__(1),
    "a scalar": setting("step", to=77),
    "a scalar of another type": setting("step", to="four"),
    "a small object": setting("at", to=Path("/b")),
    "an object of another kind": setting("at", to={1}),
    "an object as a scalar": setting("at", to=1j),
    "a scalar as an object": setting("step", to=Path("/c")),
    "shape": setting("w", "a", to=np.ones((3, 4), np.float32)),
    "dtype": setting("w", "a", to=np.ones((4, 3), np.int32)),
    "byte order": setting("w", "a", to=np.ones((4, 3), ">f4")),
    "another unit of time": setting("times", to=np.zeros(3, "M8[ms]")),
    "a large shape": setting("w", "large", to=np.ones(5001)),
    "order of keys": lambda tree: tree["w"].update(a=tree["w"].pop("a")),
    "keys of an enum": lambda tree: tree.update(w={Name(key): child for key, child in tree["w"].items()}),
    "a new key": setting("w", "c", to=np.ones(1)),
    "a key less": lambda tree: tree["w"].pop("a"),
    "a longer list": lambda tree: tree["list"].append(1),
    "a list as a tuple": lambda tree: tree.update(list=tuple(tree["list"])),
    "a namedtuple as a dict": lambda tree: tree.update(point=tree["point"]._asdict()),
    "another limit of a deque": lambda tree: tree.update(last=collections.deque(tree["last"], 4)),
    "a scalar as an array": setting("step", to=np.ones((), np.int64)),
    "an array as a scalar": setting("list", 1, to=(None, 1.0)),
    "an array as a NumPy scalar": setting("list", 1, to=(None, np.float64(1))),
    "a container as an array": setting("w", to=np.ones(2)),
    "whatever is there": setting("w", to=AS_SAVED),
    "a piece of an array": setting("w", "b", to=Shard(np.zeros(2, np.int64), (2,), (0,))),
    "read-only": read_only,
    "not contiguous": setting("w", "a", to=np.ones((3, 4), np.float32).T),
    "a view": setting("w", "a", to=np.ones((8, 3), np.float32)[4:]),
    "not aligned": setting("w", "large", to=np.zeros(40_001, np.uint8)[1:].view(np.float64)),
    "one array at two places": lambda tree: tree["ordered"].update(a=tree["ordered"]["b"]),
    "one memory at two places": sharing,
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SyncStore, Callable[[], SyncStore]]]:
    """A store with one step, and what opens it anew, to read."""
    disk = folder(tmp_path_factory.mktemp("stores") / "disk")
    with CheckpointStore.open(config({"disk": disk})).sync() as store:
        store.save(1, tree_of(1)).reached("disk")
        yield store, lambda: CheckpointStore.open(config({"disk": disk}), read_only=True).sync()


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_between_two_restores_is_found(
    what: str, stores: tuple[SyncStore, Callable[[], SyncStore]]
) -> None:
    store, anew = stores
    assert restored_into(store, tree_of(2)) == [fingerprint(plain(tree_of(1)))] * 2
    changed, same = tree_of(3), tree_of(3)
    CHANGES[what](changed)
    CHANGES[what](same)
    with anew() as fresh:
        assert restored_into(store, changed) == restored_into(fresh, same)
    assert restored_into(store, tree_of(4)) == [fingerprint(plain(tree_of(1)))] * 2


def restored_into(store: SyncStore, tree: dict[str, Any]) -> list[object]:
    """The tree that comes back, or the error; and what is in the one that was given, but for what is no array."""

    def restore() -> Any:
        found = store.restore(into=tree, resume=False)
        assert found is not None
        return plain(found.tree)

    came = outcome(restore)
    tree |= {name: value for name, value in tree_of(1).items() if name in ("step", "at") and name in tree}
    return [came, fingerprint(plain(tree))]


def plain(value: Any) -> Any:
    """With what `fingerprint` takes in the place of deques and shards."""
    match value:
        case dict():
            return {key: plain(child) for key, child in value.items()}
        case collections.deque():
            return [value.maxlen, *value]
        case Shard():
            return value.array
        case _:
            return value


@pytest.mark.parametrize(("saved", "into"), [(Path("a"), {1}), (Path("a"), 1), (1, Path("a")), ({1}, frozenset({1}))])
def test_an_object_that_does_not_fit_is_not_filled(saved: object, into: object) -> None:
    structure = flatten({"at": saved}).structure
    with pytest.raises(Invalid, match="1 different: 'at'"):
        match({"at": into}, structure, fills=True)
    assert Flattener().refill({"at": into}, structure) is None


def test_a_restore_into_a_known_tree_is_not_planned_anew(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointStore.open(config({"ram": ram(shared_memory, retain="all")}, name="alone")).sync() as store:
        store.save(1, tree_of(1))
        store.save(2, tree_of(2))
        monkeypatch.setattr(forms, "skeleton", None)
        for step in (1, 2):
            into = tree_of(3)
            found = store.restore(step, into=into, resume=False)
            assert found is not None
            assert fingerprint(plain(found.tree)) == fingerprint(plain(tree_of(step)))
            assert found.tree["w"]["a"] is into["w"]["a"]
            assert found.tree["w"] is not into["w"]


def test_no_array_that_was_restored_into_is_kept(stores: tuple[SyncStore, Callable[[], SyncStore]]) -> None:
    watched = []
    for _ in range(2):
        into = tree_of(2)
        watched.append(weakref.ref(into["w"]["a"]))
        stores[0].restore(into=into, resume=False)
        del into

    def none_is_left() -> bool:
        gc.collect()
        return not any(each() is not None for each in watched)

    eventually(none_is_left, "an array is kept")  # at once, but for a thread that has filled it just now


def test_tensors_are_filled_by_their_form_too() -> None:
    torch = pytest.importorskip("torch")

    def tree(fill: float) -> dict[str, Any]:
        return {"a": torch.full((2, 3), fill), "b": torch.nn.Parameter(torch.full((2,), fill)), "step": int(fill)}

    flattener = Flattener()
    structure = flatten(tree(1.0)).structure
    for _ in range(2):
        into = tree(2.0)
        refill = flattener.refill(into, structure)
        assert refill is not None
        found: Any = refill.build({leaf.key: np.full(leaf.shape, 1, np.float32) for leaf in refill.leaves})
        assert torch.equal(found["a"], tree(1.0)["a"])
        assert type(found["b"]) is torch.nn.Parameter
        assert found["step"] == 1
    assert flattener.refill(tree(2.0) | {"a": torch.ones(3, 2)}, structure) is None
