"""The public border: what `tieredckpt` exports is all that its users meet, and the rest is private by name."""

from __future__ import annotations

import ast
import collections.abc
import inspect
import types
import typing
from pathlib import Path
from typing import Any

import pytest

import tieredckpt
from tieredckpt import Checkpoint, CheckpointStore, Restored, SyncCheckpoint, SyncRestored, SyncStore, events

ROOT = Path(tieredckpt.__file__).parent

FACES = [CheckpointStore, SyncStore, Checkpoint, SyncCheckpoint, Restored, SyncRestored]

PUBLIC_MODULES = {
    "checkpoint",
    "concurrency",
    "errors",
    "events",
    "preempt",
    "settings",
    "store",
    "sync",
    "units",
}


OF_FRAMEWORKS = {"JaxCommunicator", "MpiCommunicator", "TorchCommunicator"}
"""They import theirs, so that `from tieredckpt import *` leaves them out."""


def test_every_exported_name_can_be_imported() -> None:
    for name in tieredckpt.__all__:
        assert getattr(tieredckpt, name) is not None, name
    assert {*tieredckpt.__all__, *OF_FRAMEWORKS} <= set(dir(tieredckpt))
    for module, names in tieredckpt._HOMES.items():  # also of the modules that are not imported here
        path = ROOT.parent / f"{module.replace('.', '/')}.py"
        source = path if path.exists() else path.with_suffix("") / "__init__.py"
        assert all(f'"{name}"' in source.read_text() for name in names.split()), module
    with pytest.raises(AttributeError, match="no attribute 'engin'"):
        tieredckpt.engin  # noqa: B018


def test_type_checkers_see_the_names_where_they_are_imported_from_at_run_time() -> None:
    (seen,) = (
        node
        for node in ast.parse((ROOT / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {
        node.module: {each.name for each in node.names} for node in seen.body if isinstance(node, ast.ImportFrom)
    }
    assert imported == {module: set(names.split()) for module, names in tieredckpt._HOMES.items()}
    errors = {name for name in tieredckpt.__all__ if isinstance(vars(tieredckpt).get(name), type)} & set(
        tieredckpt.errors.__all__
    )
    named = {name for names in imported.values() for name in names}
    assert set(tieredckpt.__all__) == (named - OF_FRAMEWORKS) | errors | {"__version__"}
    assert set(tieredckpt.errors.__all__) == errors


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_whatever_a_user_is_handed_or_asked_for_is_exported(face: type) -> None:
    """Every class of ours in a signature can be imported from `tieredckpt`."""
    names = {
        **{name: getattr(tieredckpt, name) for name in tieredckpt.__all__},
        **{module.__name__: module for module in (typing, types, collections.abc)},
        **vars(typing),
        **vars(collections.abc),
        **vars(types),
        "os": __import__("os"),
        "StoreLife": Any,  # of the constructors, which nobody calls
        "Engine": Any,
        "EngineLoop": Any,
        "asyncio": __import__("asyncio"),
    }
    for name, member in inspect.getmembers(face):
        if name.startswith("_"):
            continue
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) or inspect.ismethod(function):
            typing.get_type_hints(getattr(function, "__func__", function), names, names)  # raises NameError


def test_every_event_is_exported() -> None:
    classes = {
        name for name, value in vars(events).items() if isinstance(value, type) and issubclass(value, events.Event)
    }
    assert classes <= set(tieredckpt.__all__)


@pytest.mark.parametrize(
    "face", [CheckpointStore, SyncStore, Checkpoint, SyncCheckpoint], ids=lambda face: face.__name__
)
def test_a_store_shows_nothing_of_its_inside(face: type) -> None:
    inside = {"engine", "engine_loop", "captures", "open_blocking", "close_blocking", "store", "checkpoint"}
    assert inside.isdisjoint(dir(face))


def test_modules_beside_the_packages_are_public_or_private_by_name() -> None:
    modules = {path.stem for path in ROOT.glob("*.py") if not path.stem.startswith("_")}
    assert modules == PUBLIC_MODULES
