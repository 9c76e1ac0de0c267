"""Items of a step, as Orbax's arguments name them, and the tree that a store keeps of them.

A step without item names is its tree itself, as a training without Orbax saves it. A step of several items is a dict of
them by name, with the kind of each under `ITEMS`: a tree, JSON, or the files that the item's own handler wrote, such as
the state of a data loader.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import args as orbax_args

from tieredckpt import ArraySpec, Invalid, NotFound, SyncStore
from tieredckpt.integrations.orbax.targets import leaves_of, restore_into, restore_saved, with_restore_args
from tieredckpt.interchange.orbax_folders import CUSTOM, DEFAULT, ITEMS, METRICS

__all__ = ["by_name", "handlers_by_name", "kinds_of", "older_restore", "older_save", "restored", "tree_of"]

_TREES = (orbax_args.StandardSave, orbax_args.PyTreeSave, orbax_args.ArraySave)
_TARGETS = (orbax_args.StandardRestore, orbax_args.PyTreeRestore, orbax_args.ArrayRestore)


def by_name(args: Any) -> dict[str, Any]:
    """The arguments of each item; those of a step without names are of the item `DEFAULT`."""
    if not isinstance(args, orbax_args.Composite):
        return {DEFAULT: args}
    reserved = {ITEMS, CUSTOM, METRICS} & set(args)
    if reserved:
        raise Invalid(f"an item cannot be called {min(reserved)!r}: the store keeps something else there")
    return dict(args.items())


# -- saving -----------------------------------------------------------------------------------------------


def tree_of(args: Any, handlers: Mapping[str, Any], notes: Mapping[str, Any]) -> Any:
    """The tree that a store saves for the arguments of a step, and for its JSON ``notes`` by their keys.

    Raises `Invalid`, naming an item that cannot be saved.
    """
    items = {name: _saved(name, each, handlers.get(name)) for name, each in by_name(args).items()}
    if not isinstance(args, orbax_args.Composite) and not notes and items[DEFAULT][0] == "tree":
        return items[DEFAULT][1]
    kinds = {name: kind for name, (kind, _) in items.items()}
    more = {key: _plain(key, note) for key, note in notes.items()}
    return {**{name: value for name, (_, value) in items.items()}, ITEMS: kinds, **more}


def _saved(name: str, args: Any, handler: Any) -> tuple[str, Any]:
    if isinstance(args, _TREES):
        return "tree", _cast(args.item, args.save_args)
    if isinstance(args, orbax_args.JsonSave):
        return "json", _plain(name, args.item)
    handler = _handler(name, args, handler)
    with tempfile.TemporaryDirectory(prefix="tieredckpt-") as folder:
        handler.save(epath.Path(folder), args=args)
        if hasattr(handler, "finalize"):
            handler.finalize(epath.Path(folder))
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return "files", {path: np.frombuffer(data, np.uint8) for path, data in found.items()}


def _cast(item: Any, save_args: Any) -> Any:
    """Cast the item to the dtypes in its ``save_args``; their file settings are ignored."""
    if save_args is None:
        return item
    dtypes = {path: getattr(each, "dtype", None) for path, each in leaves_of(save_args)[0].items()}
    if not any(dtype is not None for dtype in dtypes.values()):
        return item
    leaves, treedef = leaves_of(item)
    cast = [leaf if dtypes.get(path) is None else _astype(leaf, dtypes[path]) for path, leaf in leaves.items()]
    return jax.tree_util.tree_unflatten(treedef, cast)


def _astype(leaf: Any, dtype: Any) -> Any:
    return leaf.astype(dtype) if hasattr(leaf, "astype") else np.asarray(leaf, dtype)


def _plain(name: str, item: Any) -> Any:
    """Convert as a JSON round trip does: keys become text, tuples become lists."""
    try:
        return json.loads(json.dumps(item))
    except (TypeError, ValueError) as error:
        raise Invalid(f"item {name!r} is no JSON: {error}") from error


def _handler(name: str, args: Any, handler: Any) -> Any:
    if handler is not None:
        return handler
    try:
        registered = orbax_args.get_registered_handler_cls(type(args))
    except (TypeError, ValueError) as error:
        raise Invalid(
            f"item {name!r}: no handler is known for {type(args).__name__}; give one in item_handlers, or arguments of "
            f"Orbax's such as StandardSave, PyTreeSave or JsonSave"
        ) from error
    return registered()


# -- restoring --------------------------------------------------------------------------------------------


def kinds_of(stored: Any) -> dict[str, str] | None:
    """The kind of each item of a step; None for a step without names. ``stored`` has an `ArraySpec` for each array."""
    kinds = stored.get(ITEMS) if isinstance(stored, dict) else None
    return None if kinds is None else {str(name): str(kind) for name, kind in kinds.items()}


def restored(store: SyncStore, step: int, stored: Any, name: str, args: Any, handler: Any) -> Any:
    """Restore an item of a step by its arguments. Raises `NotFound` if the step does not have it."""
    kinds = kinds_of(stored)
    if name not in ({DEFAULT: "tree"} if kinds is None else kinds):
        has = ", ".join(kinds or [DEFAULT])
        raise NotFound(f"step {step} has no item {name!r}; it has {has}")
    kind, at = ("tree", ()) if kinds is None else (kinds[name], (name,))
    if kind == "json":
        return stored[name]
    if kind == "files":
        return _by_handler(store, step, stored, name, args, handler)
    where = f"step {step}" if kinds is None else f"step {step}, item {name!r}"
    if args is not None and not isinstance(args, _TARGETS):
        raise Invalid(f"{where} is a tree; restore it with StandardRestore or PyTreeRestore, not {type(args).__name__}")
    target, partial = _target(stored, at, args, where)
    if target is None:
        return restore_saved(store, step, stored, at)
    return restore_into(store, step, stored, at, target, partial=partial, where=where)


def _target(stored: Any, at: tuple[str, ...], args: Any, where: str) -> tuple[Any, bool]:
    """The target to restore into (None: as saved), and whether the step may have more than it."""
    if args is None or isinstance(args, orbax_args.StandardRestore):
        return (None if args is None else args.item), False
    if isinstance(args, orbax_args.ArrayRestore):
        given = args.restore_args
        return args.item if given is None else with_restore_args(stored, at, args.item, given), False
    if args.transforms or args.legacy_transform_fn is not None:
        raise Invalid(f"{where}: transforms run on folders of Orbax alone; restore the step and change the tree")
    if args.item is None and args.restore_args is None:
        return None, False
    partial = args.partial_restore or args.transforms is not None
    return with_restore_args(stored, at, args.item, args.restore_args), partial


def _by_handler(store: SyncStore, step: int, stored: Any, name: str, args: Any, handler: Any) -> Any:
    files = {path: spec for path, spec in stored[name].items() if isinstance(spec, ArraySpec)}
    handler = _handler(name, args, handler)
    values = restore_saved(store, step, stored, (name,)) if files else {}
    with tempfile.TemporaryDirectory(prefix="tieredckpt-") as folder:
        for path, data in values.items():
            file = Path(folder, path)
            if ".." in file.parts or not file.is_relative_to(folder):
                raise Invalid(f"step {step}, item {name!r}: the file {path!r} is no path in its folder")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(np.asarray(data).tobytes())
        return handler.restore(epath.Path(folder), args=args)


# -- Orbax's older interface -------------------------------------------------------------------------------


def handlers_by_name(checkpointers: Any, item_handlers: Any) -> dict[str, Any]:
    """Handlers by the names of their items."""
    given = checkpointers if item_handlers is None else item_handlers
    by_name = given if isinstance(given, Mapping) else {} if given is None else {DEFAULT: given}
    return {name: getattr(each, "handler", each) for name, each in by_name.items()}


def older_save(items: Any, save_kwargs: Any, handlers: Mapping[str, Any]) -> Any:
    """Translate the older interface to arguments: trees, by name if the manager has handlers by name."""
    if items is None:
        raise Invalid("there is nothing to save; give args, such as ocp.args.StandardSave(state)")
    kwargs = save_kwargs or {}
    if not isinstance(items, Mapping) or not handlers.keys() - {DEFAULT}:
        return orbax_args.PyTreeSave(items, save_args=kwargs.get("save_args"))
    each = {name: orbax_args.PyTreeSave(item, **kwargs.get(name, {})) for name, item in items.items()}
    return orbax_args.Composite(**each)


def older_restore(items: Any, restore_kwargs: Any, handlers: Mapping[str, Any]) -> Any:
    """As `older_save`, for targets; None for everything as it was saved."""
    if items is None and restore_kwargs is None:
        return None
    kwargs = restore_kwargs or {}
    if not isinstance(items, Mapping) or not handlers.keys() - {DEFAULT}:
        return orbax_args.PyTreeRestore(items, **kwargs)
    each = {name: orbax_args.PyTreeRestore(item, **kwargs.get(name, {})) for name, item in items.items()}
    return orbax_args.Composite(**each)
