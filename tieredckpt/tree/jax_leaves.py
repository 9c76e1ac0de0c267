"""jax arrays and nodes. Imports jax; `tieredckpt.tree` imports this only in a program that has loaded jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from tieredckpt.errors import Invalid, NoSpace
from tieredckpt.format.structure import Kind
from tieredckpt.tree.jax_parts import parts
from tieredckpt.tree.leaf import ArrayLeaf, Pieces, checked_dtype

__all__ = [
    "Level",
    "as_array_leaf",
    "as_template",
    "copies",
    "host_reader",
    "host_view",
    "made",
    "one_level",
    "restored",
    "restored_pieces",
]


class Level(NamedTuple):
    """An opened node of jax's registry: its children by name, and a function that makes it again with others."""

    names: list[str | int]
    children: list[object]
    make: Callable[[Sequence[Any]], object]


def as_array_leaf(key: str, value: object) -> ArrayLeaf | Pieces:
    """The jax array ``value`` as a leaf; of a typed PRNG key, its data."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise Invalid(f"leaf {key!r}: a ShapeDtypeStruct has no data to save; it can only be given as `like`")
    array = _concrete(key, value)
    if array.is_deleted():
        raise Invalid(f"leaf {key!r}: the jax array was donated or deleted before the save; save the new one")
    if not array.is_fully_addressable:
        from tieredckpt.tree import jax_shards

        return jax_shards.pieces(key, array, _array_leaf, _template)
    return _array_leaf(key, array)


def _array_leaf(key: str, array: Any) -> ArrayLeaf:
    if not _is_key(array):
        return ArrayLeaf(key, array, "jax", array.shape, _dtype(key, array), True, None)
    data = jax.random.key_data(array)
    return ArrayLeaf(key, data, "jax-key", data.shape, _dtype(key, data), True, _prng(key, array))


def as_template(key: str, value: object, mesh: Any = None) -> ArrayLeaf | Pieces:
    """The jax array or `jax.ShapeDtypeStruct` ``value`` as an example; its data is not looked at.

    Raises `Invalid` for a sharding that its shape cannot have, or of an abstract mesh that is not that of ``mesh``.
    """
    like = _placed(key, value, mesh) if isinstance(value, jax.ShapeDtypeStruct) else _concrete(key, value)
    if like.sharding is not None and not like.sharding.is_fully_addressable:
        from tieredckpt.tree import jax_shards

        return jax_shards.templates(key, like, _template)
    return _template(key, like)


def _placed(key: str, like: jax.ShapeDtypeStruct, mesh: Any) -> jax.ShapeDtypeStruct:
    """``like``, on the devices of ``mesh`` if its own mesh is abstract, as `jax.eval_shape` has it."""
    sharding: Any = like.sharding
    if sharding is None:
        return like
    try:
        sharding.shard_shape(like.shape)
    except ValueError as error:
        raise Invalid(f"leaf {key!r}: `like` has a sharding that its shape cannot have: {error}") from error
    wanted = getattr(sharding, "mesh", None)
    if wanted is None or isinstance(wanted, jax.sharding.Mesh):
        return like
    axes = dict(wanted.shape)
    if mesh is None or dict(mesh.shape) != axes:
        there = "no mesh is set" if mesh is None else f"the mesh that is set has {dict(mesh.shape)}"
        raise Invalid(
            f"leaf {key!r}: its sharding in `like` is of an abstract mesh {axes}, which has no devices, and {there}; "
            f"restore inside of `with jax.set_mesh(mesh):`, or give a NamedSharding of a concrete mesh"
        )
    placed = jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return like.update(sharding=placed)


def _template(key: str, like: Any) -> ArrayLeaf:
    if not _is_key(like):
        return ArrayLeaf(key, like, "jax", like.shape, _dtype(key, like), True, None)
    prng = []

    def traced(keys: jax.Array) -> jax.Array:
        prng.append(_prng(key, keys))
        return jax.random.key_data(keys)

    # Tracing sees the implementation and the shape of the data without needing either key or data.
    data = jax.eval_shape(traced, jax.ShapeDtypeStruct(like.shape, like.dtype))
    return ArrayLeaf(key, like, "jax-key", data.shape, _dtype(key, data), True, prng[0])


def host_view(leaf: ArrayLeaf) -> npt.NDArray[Any]:
    """The array as jax shows it to NumPy: a read-only view on a CPU, else a copy by jax."""
    array = leaf.source
    assert isinstance(array, jax.Array)
    with _reading(leaf):
        view = np.asarray(array)
        return view if leaf.part is None else view[leaf.part]


def host_reader(leaf: ArrayLeaf) -> Callable[[tuple[slice, ...]], npt.NDArray[Any]] | None:
    """A function that reads one box of the array to the host, if jax has no view of it there; else None.

    jax caches no copy for it. Any thread may call the function; it raises as `host_view`.
    """
    if (found := parts(leaf)) is None:
        return None

    def read(box: tuple[slice, ...]) -> npt.NDArray[Any]:
        with _reading(leaf):
            return found.read(box)

    return read


@contextmanager
def _reading(leaf: ArrayLeaf) -> Iterator[None]:
    """Map what jax raises when an array is read."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # the latter where it makes an array of one that was deleted
        source: Any = leaf.source
        if source.is_deleted():
            raise Invalid(
                f"leaf {leaf.array!r}: the jax array was donated or deleted while its capture was pending; "
                f'save with capture="copy", "device" or "pinned_host", or await reached("ram") before donating'
            ) from error
        raise Invalid(f"leaf {leaf.array!r}: jax could not copy the array to the host: {error}") from error


def copies(leaves: Sequence[ArrayLeaf], memory: Literal["device", "pinned_host"]) -> list[jax.Array]:
    """Copies of the leaves' arrays; jax makes them asynchronously, before a donation reuses the arrays' memory.

    Raises `Invalid` if the devices have no such memory, and `NoSpace` if it has no room.
    """
    of: dict[int, Any] = {id(leaf.source): leaf.source for leaf in leaves}
    for name, array in of.items():
        if array.is_fully_replicated:  # one of its replicas suffices
            of[name] = array.addressable_data(0)
    try:
        where = [array.sharding for array in of.values()]  # what was offloaded to the host stays there
        if memory == "pinned_host":
            where = [sharding.with_memory_kind(memory) for sharding in where]
        # An alias, such as of an array in pinned memory, would be donated together with the array.
        made = jax.device_put(list(of.values()), where, may_alias=False)
    except (ValueError, NotImplementedError) as error:
        raise Invalid(f"capture={memory!r}: jax has no such memory on these devices: {error}") from error
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        nbytes = sum(array.nbytes for array in of.values())
        raise NoSpace(f"the memory {memory!r} of the jax devices has no room for {nbytes} bytes: {error}") from error
    by_source = dict(zip(of, made, strict=True))
    return [by_source[id(leaf.source)] for leaf in leaves]


def restored(template: ArrayLeaf, array: npt.NDArray[Any]) -> jax.Array:
    """``array`` as a jax array with the template's sharding; uncommitted if the template was."""
    like = template.source
    assert isinstance(like, jax.Array | jax.ShapeDtypeStruct)
    # On a CPU, jax may use the memory itself, and may write to it once the array is donated.
    data = array if array.flags.writeable else array.copy()
    where = like.sharding if getattr(like, "committed", True) else None
    if template.kind == "jax-key":
        keys = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=template.prng)
        return jax.device_put(keys, where)
    result = jax.device_put(data, where)
    if result.dtype != template.dtype:
        raise Invalid(f"leaf {template.array!r}: jax would make {result.dtype} of {template.dtype}; set jax_enable_x64")
    return _as_weak(like, result)


def _as_weak(like: jax.Array | jax.ShapeDtypeStruct, array: jax.Array) -> jax.Array:
    """``array``, weakly typed if ``like`` is, such as a counter that began as Python's 0: jax would compile again."""
    if not getattr(like, "weak_type", False):
        return array
    # What jax makes of Python's numbers is weakly typed, and stays so when it is overwritten.
    number = array.dtype.type(0).item()
    weak = jax.numpy.full(array.shape, number).at[...].set(array)
    if weak.dtype != array.dtype:
        return array
    return jax.device_put(weak, like.sharding if getattr(like, "committed", True) else None)


def made(key: str, array: npt.NDArray[Any], prng: str | None) -> jax.Array:
    """``array`` as a jax array on the default device, or as a typed key of the PRNG ``prng``.

    Raises `Invalid`, naming ``key``, for a dtype or PRNG that jax does not have.
    """
    data = array.astype(array.dtype.newbyteorder("="), copy=False)
    like = jax.ShapeDtypeStruct(data.shape, np.uint8)  # which says only that no sharding is wanted
    kind: Kind = "jax" if prng is None else "jax-key"
    try:
        return restored(ArrayLeaf(key, like, kind, data.shape, data.dtype, True, prng), data)
    except Invalid:
        raise
    except (TypeError, ValueError) as error:
        what = array.dtype if prng is None else f"a key of the PRNG {prng!r}"
        raise Invalid(f"leaf {key!r}: jax cannot hold {what}: {error}; restore it with as_='numpy'") from error


def restored_pieces(pieces: Pieces, arrays: Mapping[str, npt.NDArray[Any]]) -> jax.Array:
    """The array of several processes that ``pieces`` are an example of, with ``arrays`` by storage key."""
    from tieredckpt.tree import jax_shards

    prng = pieces.node.prng
    if prng is None:
        like: Any = pieces.source
        return _as_weak(like, jax_shards.restored(pieces, arrays, lambda data: data))
    return jax_shards.restored(pieces, arrays, lambda data: jax.random.wrap_key_data(data, impl=prng))


def one_level(value: object) -> Level | None:
    """The node ``value``, opened, if its type is registered with jax; None for a leaf."""
    # Only the root is opened: its children are leaves, whatever they are.
    seen_root = iter((False,))
    children, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda _: next(seen_root, True))
    if len(children) == 1 and not children[0][0]:
        return None
    names = [_name(path[0]) for path, _ in children]
    return Level(names, [child for _, child in children], treedef.unflatten)


def _name(entry: Any) -> str | int:
    for attribute in ("name", "idx", "key"):
        name = getattr(entry, attribute, None)
        if type(name) is str or type(name) is int:
            return name
    return str(entry)


def _concrete(key: str, value: object) -> jax.Array:
    if isinstance(value, jax.core.Tracer):
        raise Invalid(f"leaf {key!r}: a traced value has no data; save and restore outside of jit")
    assert isinstance(value, jax.Array)
    return value


def _is_key(value: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def _prng(key: str, keys: jax.Array) -> str:
    prng = jax.random.key_impl(keys)
    if not isinstance(prng, str):
        raise Invalid(f"leaf {key!r}: the PRNG {prng!r} has no registered name; store its key_data")
    return prng


def _dtype(key: str, array: jax.Array | jax.ShapeDtypeStruct) -> np.dtype[Any]:
    return checked_dtype(key, np.dtype(array.dtype), len(array.shape))
