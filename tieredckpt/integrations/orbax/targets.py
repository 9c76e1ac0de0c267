"""Restores into the tree of an Orbax caller, leaf by leaf by path, whatever containers the step has.

Orbax identifies leaves only by the names on their paths, so a step with dicts fits a target with named tuples, and an
array is cast to the dtype of its target. The store keeps shapes, dtypes and containers as saved. So each target is
placed in the containers of the step for the restore, and the caller's containers are filled with the results.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from tieredckpt import AS_SAVED, ArraySpec, Invalid, SyncStore

__all__ = ["Path", "fill", "leaves_of", "restore_into", "restore_saved", "with_restore_args"]

Path: TypeAlias = tuple[str, ...]
_log = logging.getLogger("tieredckpt")
_SHOWN = 10
_MISSING = object()


def leaves_of(tree: Any) -> tuple[dict[Path, Any], Any]:
    """The leaves of a tree by the names on their paths, and a structure that makes the tree again of other leaves."""
    found, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(map(_name, path)): leaf for path, leaf in found}, treedef


def _name(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def restore_into(store: SyncStore, step: int, stored: Any, at: Path, target: Any, *, partial: bool, where: str) -> Any:
    """Restore the part of the step below ``at`` in the containers and kinds of arrays of ``target``.

    Args:
        stored: the tree of the step, with an `ArraySpec` for each array.
        partial: the step may have more than the target.
        where: its name in errors.

    Raises `Invalid`, naming leaves, where the target has other names or shapes than the step.
    """
    wanted, treedef = leaves_of(target)
    has = dict(_stored_leaves(_below(stored, at), ()))
    missing = [path for path, leaf in wanted.items() if leaf is not ... and path not in has]
    extra = [] if partial else [path for path, leaf in has.items() if path not in wanted and leaf is not None]
    if missing or extra:
        raise Invalid(f"{where} does not fit its target: " + "; ".join(_differences(missing, extra)))
    named = {path: f"{where}, {'/'.join(path)!r}" for path in wanted}
    wanted = {path: _settled(named[path], leaf, has.get(path)) for path, leaf in wanted.items()}
    _tell_of_unplaced(where, (_is_abstract(leaf) and _kind(has[path]) == "jax" for path, leaf in wanted.items()))
    likes = {
        at + path: _like(named[path], has[path], leaf)
        for path, leaf in wanted.items()
        if leaf is not ... and isinstance(has[path], ArraySpec)
    }
    arrays = _read(store, step, stored, likes)
    filled = []
    for path, leaf in wanted.items():
        value = arrays.get(at + path, has.get(path))
        filled.append(... if leaf is ... else _as_target(named[path], value, leaf))
    return jax.tree_util.tree_unflatten(treedef, filled)


def restore_saved(store: SyncStore, step: int, stored: Any, at: Path) -> Any:
    """Restore the part of the step below ``at`` in plain containers, each array of its saved kind."""
    below = _below(stored, at)
    leaves = _stored_leaves(below, ())
    _tell_of_unplaced(f"step {step}", (_kind(leaf) == "jax" for _, leaf in leaves))
    arrays = _read(store, step, stored, {at + path: AS_SAVED for path, leaf in leaves if isinstance(leaf, ArraySpec)})
    return _filled(below, at, arrays)


def _filled(node: Any, path: Path, arrays: Mapping[Path, Any]) -> Any:
    if isinstance(node, dict):
        return {key: _filled(value, (*path, str(key)), arrays) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)([_filled(value, (*path, str(at)), arrays) for at, value in enumerate(node)])
    return arrays.get(path, node)


def with_restore_args(stored: Any, at: Path, item: Any, restore_args: Any) -> Any:
    """The target for ``item`` and the `RestoreArgs` of its leaves; one of them may be None."""
    args, treedef = leaves_of(item if restore_args is None else restore_args)
    items = {} if item is None else leaves_of(item)[0]
    has = dict(_stored_leaves(_below(stored, at), ()))
    if restore_args is None:  # numbers in the place of arrays then say only where they are
        made = [AS_SAVED if _is_place(leaf, has.get(path)) else leaf for path, leaf in args.items()]
    else:
        made = [_target(items.get(path, AS_SAVED), arg, has.get(path)) for path, arg in args.items()]
    return jax.tree_util.tree_unflatten(treedef, made)


def _is_place(leaf: Any, stored: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex) and isinstance(stored, ArraySpec) and stored.shape != ()


def _target(item: Any, arg: Any, stored: Any) -> Any:
    """The target of a leaf that a `RestoreArgs` describes; open settings come from the item, or from the step."""
    kind: Any = getattr(arg, "restore_type", None)
    if item is ... or _is_key(item):
        return item
    if kind in (bool, int, float, str):
        return kind()
    shape: Any = getattr(arg, "global_shape", None) or getattr(arg, "shape", None) or getattr(stored, "shape", ())
    dtype: Any = getattr(arg, "dtype", None) or getattr(item, "dtype", None) or getattr(stored, "dtype", None)
    sharding: Any = getattr(arg, "sharding", None)
    if sharding is None and getattr(arg, "mesh", None) is not None:
        sharding = jax.sharding.NamedSharding(arg.mesh, arg.mesh_axes)
    if hasattr(sharding, "to_jax_sharding"):
        sharding = sharding.to_jax_sharding()
    if kind is np.ndarray and dtype is not None:
        return _numpy(shape, dtype)
    if (kind is jax.Array or sharding is not None) and dtype is not None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or getattr(item, "sharding", None))
    wanted = _wanted(item)
    if wanted is None or wanted.dtype == dtype:
        return item
    if isinstance(item, np.ndarray | np.generic):
        return _numpy(wanted.shape, dtype)
    return jax.ShapeDtypeStruct(wanted.shape, dtype, sharding=wanted.sharding)


def _differences(missing: Sequence[Path], extra: Sequence[Path]) -> list[str]:
    found = []
    for what, paths in (("the step lacks", missing), ("only the step has", extra)):
        if paths:
            names = ", ".join(repr("/".join(path)) for path in paths[:_SHOWN])
            found.append(f"{what} {names}" + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""))
    return found


# -- reading ----------------------------------------------------------------------------------------------


def _read(store: SyncStore, step: int, stored: Any, likes: Mapping[Path, Any]) -> dict[Path, Any]:
    """Restore the arrays of a step at these paths, each like its example."""
    if not likes:
        return {}
    every = all(path in likes for path, leaf in _stored_leaves(stored, ()) if isinstance(leaf, ArraySpec))
    keys: list[str] = []
    like = _examples(stored, (), likes, keys, whole=every)
    found = store.restore(step, keys=None if every else keys, like=like, resume=False)
    assert found is not None
    return {path: leaf for path, leaf in _stored_leaves(found.tree, ()) if path in likes}


def _examples(node: Any, path: Path, likes: Mapping[Path, Any], keys: list[str], *, whole: bool) -> Any:
    """The part of a stored tree to read: an example for each array, and nothing for the rest unless all is read."""
    if isinstance(node, ArraySpec) and path in likes:
        keys.append(node.key)
        return likes[path]
    if isinstance(node, dict):
        children = {key: _examples(each, (*path, str(key)), likes, keys, whole=whole) for key, each in node.items()}
        kept = {key: each for key, each in children.items() if each is not _MISSING}
        return kept if kept or whole else _MISSING
    if isinstance(node, list | tuple):
        below: list[str] = []
        items = [_examples(each, (*path, str(at)), likes, below, whole=whole) for at, each in enumerate(node)]
        if not below and not whole:
            return _MISSING
        if below:  # a list is read with all its items, or the store would make a dict of those that are
            keys.append("/".join(below[0].split("/")[: len(path)]))
        return type(node)([AS_SAVED if item is _MISSING else item for item in items])
    return AS_SAVED if whole else _MISSING


def _below(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _stored_leaves(tree: Any, path: Path) -> list[tuple[Path, Any]]:
    """The leaves of a stored tree, without empty containers."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in _stored_leaves(value, (*path, str(key)))]
    if isinstance(tree, list | tuple):
        return [leaf for at, value in enumerate(tree) for leaf in _stored_leaves(value, (*path, str(at)))]
    return [(path, tree)]


# -- one leaf ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """An array as the caller wants it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any
    """Sharding of JAX; None for an uncommitted array on the default device."""


def _settled(where: str, target: Any, stored: Any) -> Any:
    """Complete the target of a leaf: the devices of its mesh, and whether it is a NumPy array."""
    if _is_abstract(target):
        as_numpy = (_kind(stored) or "").startswith("numpy")
        return _numpy(tuple(target.shape), np.dtype(target.dtype)) if as_numpy else target
    sharding: Any = getattr(target, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or isinstance(mesh, jax.sharding.Mesh):
        return target
    current = jax.sharding.get_mesh()
    if dict(current.shape) != dict(mesh.shape):
        raise Invalid(
            f"{where} has the sharding of an abstract mesh {dict(mesh.shape)} in the target, which has no devices; "
            f"restore inside of `with jax.set_mesh(mesh):` of such a mesh, or give a NamedSharding of a concrete one"
        )
    return target.update(sharding=jax.sharding.NamedSharding(current, sharding.spec, memory_kind=sharding.memory_kind))


def _is_abstract(target: Any) -> bool:
    """Whether a target says shape and dtype alone."""
    return isinstance(target, jax.ShapeDtypeStruct) and target.sharding is None and not _is_key(target)


def _kind(stored: Any) -> str | None:
    return stored.kind if isinstance(stored, ArraySpec) else None


def _tell_of_unplaced(where: str, unplaced: Iterable[bool]) -> None:
    """Warn of JAX arrays without a sharding, for which Orbax would use the sharding that it stored."""
    if (devices := jax.device_count()) > 1 and (count := sum(unplaced)):
        _log.warning(
            "%s: %d arrays have no sharding in the target, and come onto one of %d devices: a store does not keep the "
            "shardings of what it saves; give them in the target, as jax.ShapeDtypeStruct(..., sharding=...)",
            *(where, count, devices),
        )


def _like(where: str, spec: ArraySpec, target: Any) -> Any:
    """The example with which the store restores an array for this target: of the stored dtype, if possible."""
    if _is_key(target):
        if spec.prng is None:
            raise Invalid(f"{where} is a PRNG key in the target, and the step has an array")
        return target
    if spec.prng is not None:
        return AS_SAVED  # the key itself, or the data of one where that is wanted
    wanted = _wanted(target)
    if wanted is None:
        if isinstance(target, bool | int | float | complex) and spec.shape != ():
            raise Invalid(f"{where} is a number in the target, and has the shape {spec.shape} in the step")
        return AS_SAVED if target is AS_SAVED else _numpy(spec.shape, spec.dtype)
    if wanted.shape != spec.shape:
        raise Invalid(f"{where} has the shape {wanted.shape} in the target, and {spec.shape} in the step")
    if isinstance(target, np.ndarray | np.generic):
        return _numpy(spec.shape, spec.dtype)
    if wanted.dtype == spec.dtype:
        return (
            target
            if isinstance(target, jax.Array)
            else jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=wanted.sharding)
        )
    if wanted.sharding is None or wanted.sharding.is_fully_addressable:
        return _numpy(spec.shape, spec.dtype)  # JAX may not have the stored dtype
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=wanted.sharding)


def _numpy(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """An example that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _wanted(target: Any) -> _Wanted | None:
    if not hasattr(target, "shape") or not hasattr(target, "dtype") or target.dtype is None:
        return None
    sharding = getattr(target, "sharding", None)
    committed = getattr(target, "committed", True)
    sharding = sharding if isinstance(sharding, jax.sharding.Sharding) and committed else None
    return _Wanted(tuple(target.shape), np.dtype(target.dtype), sharding)


def _is_key(value: Any) -> bool:
    return (
        hasattr(value, "dtype") and value.dtype is not None and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    )


def _as_target(where: str, value: Any, target: Any) -> Any:
    """Convert a restored leaf to the kind of its target."""
    if target is AS_SAVED or _is_key(target):
        return value
    if _is_key(value):
        value = jax.random.key_data(value)
    wanted = _wanted(target)
    if wanted is None:
        return type(target)(np.asarray(value).item()) if isinstance(target, bool | int | float | complex) else value
    if isinstance(value, bool | int | float | complex):
        if wanted.shape != ():
            raise Invalid(f"{where} has the shape {wanted.shape} in the target, and is a number in the step")
        value = np.asarray(value, wanted.dtype)
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        raise Invalid(f"{where} is an array in the target, and {type(value).__name__} in the step")
    if isinstance(target, np.ndarray | np.generic):
        array = np.asarray(value).astype(wanted.dtype, copy=False)
        return array if isinstance(target, np.ndarray) else array[()]
    return fill(value, wanted.dtype, wanted.sharding)


def fill(value: Any, dtype: Any, sharding: Any) -> jax.Array:
    """Convert an array to a JAX array of that dtype and sharding."""
    if isinstance(value, jax.Array) and value.dtype == dtype:
        return value
    if isinstance(value, jax.Array):
        return jax.jit(lambda array: array.astype(dtype), out_shardings=sharding)(value)
    data = np.asarray(value).astype(dtype, copy=False)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(data, sharding)
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
