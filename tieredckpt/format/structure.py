"""The structure of a tree as a step stores it: containers, the names of arrays, and inline scalars.

A structure is JSON of tagged objects and says only what data is: no class path, no repr, nothing to execute. A
namedtuple, dataclass or custom container keeps its field names; the reader's ``like`` gives its class. An `ObjectNode`
or a `TypedNode` names a kind of the list in ``docs/reference/format.md``, never a class of the program.

Containers nest at most `MAX_DEPTH` deep. The key of every array is the path that leads to it (see
`tieredckpt.format.keys`). Floats are the 16 hexadecimal digits of their IEEE 754 bits, so that -0.0 and the
payload of a NaN survive; integers beyond 2**53 are hexadecimal strings, bytes are base64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from tieredckpt._decoders import UNREADABLE, json_decoder
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.keys import LEAF_KEY, MAX_KEY_BYTES, ROOT, child_key, show_key
from tieredckpt.format.zarr import dtype_from_name

__all__ = [
    "CONTAINERS",
    "MAP",
    "MAX_DEPTH",
    "MAX_INLINE_BYTES",
    "MAX_JSON_INT",
    "MAX_PLAIN_DEPTH",
    "MAX_RANK",
    "MAX_STRUCTURE_BYTES",
    "ArrayNode",
    "BoolNode",
    "BytesNode",
    "ComplexNode",
    "ContainerNode",
    "CustomNode",
    "DataclassNode",
    "DictNode",
    "FloatNode",
    "IntNode",
    "Kind",
    "ListNode",
    "NamedTupleNode",
    "Node",
    "NoneNode",
    "ObjectNode",
    "ScalarNode",
    "StrNode",
    "TupleNode",
    "TypedNode",
    "array_nodes",
    "check_structure",
    "container",
    "decode_structure",
    "encode_structure",
    "is_dict",
    "names_of",
    "walk",
    "with_children",
]

MAX_DEPTH: Final = 256
"""Containers inside containers, the outermost counted."""

MAX_INLINE_BYTES: Final = 1 << 20
"""Largest inline str, bytes or int, in bytes; larger data belongs in an array."""

MAX_JSON_INT: Final = 1 << 53
"""Largest magnitude of an int that is a JSON number, and of an int that is a dict key."""

MAX_PLAIN_DEPTH: Final = 32
"""Lists and objects inside one another in the ``value`` of an `ObjectNode` and the ``about`` of a `TypedNode`."""

MAX_RANK: Final = 32
"""Most dimensions of an array: what stock TensorStore opens."""

MAX_STRUCTURE_BYTES: Final = 256 << 20
"""Largest structure, in bytes of JSON."""

Kind = Literal["numpy", "numpy-scalar", "torch", "jax", "jax-key"]
"""Kind of an array in the saved tree."""

_Small = Annotated[int, msgspec.Meta(ge=-MAX_JSON_INT, le=MAX_JSON_INT)]
_Bits = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
_Hex = Annotated[str, msgspec.Meta(pattern=r"\A-?0x[0-9a-f]+\Z", max_length=2 * MAX_INLINE_BYTES + 4)]
_Name = _Small | Annotated[str, msgspec.Meta(max_length=MAX_KEY_BYTES)]
_Of = Annotated[str, msgspec.Meta(pattern=r"\A[a-z]+(-[a-z]+)*\Z", max_length=32)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Sequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    children: list[Node]


class ListNode(_Sequence, frozen=True, tag="list"):
    """A list."""


class TupleNode(_Sequence, frozen=True, tag="tuple"):
    """A tuple without field names."""


class _Keyed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[_Name]
    children: list[Node]


class DictNode(_Keyed, frozen=True, tag="dict"):
    """A dict; its keys keep their type and order."""


class NamedTupleNode(_Keyed, frozen=True, tag="namedtuple"):
    """A namedtuple, by field names."""


class DataclassNode(_Keyed, frozen=True, tag="dataclass"):
    """A dataclass instance, by field names."""


class CustomNode(_Keyed, frozen=True, tag="custom"):
    """A container of a type registered with a pytree library, by the names it gives its children."""


class TypedNode(_Keyed, frozen=True, omit_defaults=True, tag="typed"):
    """A container of a kind that has a name in the format, such as a deque; see `tieredckpt.tree.typed`."""

    of: _Of
    about: Any = None
    """Data of the node besides its children, as JSON."""


class ObjectNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="object"):
    """A small object of a kind that has a name in the format, such as a path; see `tieredckpt.tree.objects`."""

    of: _Of
    value: Any
    """Data that makes the value, as JSON."""


class ArrayNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False, tag="array"):
    """An array: key, and dtype and shape as stored; of a typed PRNG key those of its data, and ``prng``."""

    key: str
    dtype: str
    shape: tuple[_Length, ...]
    kind: Kind
    prng: str | None = None


class IntNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="int"):
    value: _Small | _Hex


class FloatNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="float"):
    bits: _Bits


class ComplexNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="complex"):
    real: _Bits
    imag: _Bits


class BoolNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bool"):
    value: bool


class StrNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="str"):
    value: Annotated[str, msgspec.Meta(max_length=MAX_INLINE_BYTES)]


class BytesNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bytes"):
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_INLINE_BYTES)]


class NoneNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="none"):
    pass


ContainerNode: TypeAlias = DictNode | ListNode | TupleNode | NamedTupleNode | DataclassNode | CustomNode | TypedNode
ScalarNode: TypeAlias = IntNode | FloatNode | ComplexNode | BoolNode | StrNode | BytesNode | NoneNode
Node: TypeAlias = ContainerNode | ArrayNode | ScalarNode | ObjectNode

MAP: Final = "map"
"""The kind of a dict with keys that a `DictNode` cannot store."""

CONTAINERS: Final = (DictNode, ListNode, TupleNode, NamedTupleNode, DataclassNode, CustomNode, TypedNode)


def container(
    kind: type[ContainerNode], names: Sequence[str | int], children: list[Node], of: str = "", about: object = None
) -> ContainerNode:
    """A container of ``kind``; the names of a list or tuple are its indices and are not stored.

    ``of`` and ``about`` are those of a `TypedNode`.
    """
    if issubclass(kind, TypedNode):
        return kind(list(names), children, of, about)
    if issubclass(kind, _Sequence):
        return kind(children)
    return kind(list(names), children)


def with_children(node: ContainerNode, names: Sequence[str | int], children: list[Node]) -> ContainerNode:
    """A container of the kind of ``node``, with other children."""
    if isinstance(node, TypedNode):
        return msgspec.structs.replace(node, keys=list(names), children=children)
    return container(type(node), names, children)


def names_of(node: ContainerNode) -> Sequence[str | int]:
    """Names of the children of ``node``, in their order."""
    return range(len(node.children)) if isinstance(node, _Sequence) else node.keys


def is_dict(node: Node) -> bool:
    """Whether ``node`` is a dict, of whatever keys."""
    return isinstance(node, DictNode) or (isinstance(node, TypedNode) and node.of == MAP)


def walk(structure: Node, path: str = ROOT) -> Iterator[tuple[str, Node]]:
    """Path and node of everything in ``structure``, at ``path``, parents first; a bare leaf comes with `LEAF_KEY`."""
    stack = [(path if path or isinstance(structure, CONTAINERS) else LEAF_KEY, structure)]
    while stack:
        path, node = stack.pop()
        yield path, node
        if isinstance(node, CONTAINERS):
            children = zip(reversed(names_of(node)), reversed(node.children), strict=True)
            stack += [
                (child.key if type(child) is ArrayNode else child_key(path, name), child) for name, child in children
            ]


def array_nodes(structure: Node) -> Iterator[ArrayNode]:
    """The arrays of ``structure``, in order."""
    return (node for _, node in walk(structure) if isinstance(node, ArrayNode))


def encode_structure(structure: Node) -> bytes:
    """``structure`` as JSON; `decode_structure` is the inverse. `Invalid` beyond `MAX_STRUCTURE_BYTES`."""
    data = msgspec.json.encode(structure)
    if len(data) > MAX_STRUCTURE_BYTES:
        raise Invalid(
            f"the structure of the tree takes {len(data)} bytes of JSON, more than {MAX_STRUCTURE_BYTES}; "
            f"join small leaves into arrays"
        )
    return data


def decode_structure(data: bytes) -> Node:
    """Decode a structure. Raises `Corrupt` for anything wrong with it."""
    if len(data) > MAX_STRUCTURE_BYTES:
        raise Corrupt(f"a tree structure of {len(data)} bytes exceeds the limit of {MAX_STRUCTURE_BYTES}")
    try:
        structure: Node = _DECODER.decode(data)
    except RecursionError:
        raise Corrupt(f"a tree structure nests deeper than the limit of {MAX_DEPTH}") from None
    except UNREADABLE as error:
        raise Corrupt(f"a tree structure is malformed: {error}") from error
    check_structure(structure)
    return structure


def check_structure(structure: Node) -> None:
    """Raise `Corrupt` unless a decoded ``structure`` keeps the rules that its types cannot state.

    `decode_structure` calls this; code that decodes a structure as part of a larger record must call it too.
    """
    stack = [(ROOT if isinstance(structure, CONTAINERS) else LEAF_KEY, structure, 1)]
    while stack:
        path, node, depth = stack.pop()
        if isinstance(node, CONTAINERS):
            if depth > MAX_DEPTH:
                raise Corrupt(f"a tree structure nests deeper than the limit of {MAX_DEPTH}")
            names = names_of(node)
            if len(names) != len(node.children):
                raise Corrupt(f"container {show_key(path)} has {len(names)} keys for {len(node.children)}")
            keys = [child_key(path, name) for name in names]
            if len(set(keys)) != len(keys):
                raise Corrupt(f"container {show_key(path)} has two children of one key")
            stack.extend((key, child, depth + 1) for key, child in zip(keys, node.children, strict=True))
        elif isinstance(node, ArrayNode):
            _check_array(path, node)
        if isinstance(node, TypedNode | ObjectNode):
            _check_plain(path, node.about if isinstance(node, TypedNode) else node.value)


def _check_plain(path: str, value: object) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_PLAIN_DEPTH + 1):
        if any(isinstance(item, int) and abs(item) > MAX_JSON_INT for item in level):
            raise Corrupt(f"the object {show_key(path)} has an integer beyond 2**53 that is no text")
        nested = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        if not (level := [child for children in nested for child in children]):
            return
    raise Corrupt(f"the object {show_key(path)} nests deeper than the limit of {MAX_PLAIN_DEPTH}")


def _check_array(path: str, node: ArrayNode) -> None:
    if node.key != path:
        raise Corrupt(f"array {show_key(path)} is stored under the key {node.key!r}")
    if len(path.encode()) > MAX_KEY_BYTES:
        raise Corrupt(f"array {path[:64]!r}… has a key of more than {MAX_KEY_BYTES} bytes")
    try:
        dtype = dtype_from_name(node.dtype)
    except Invalid as error:
        raise Corrupt(f"array {path!r} has the unknown dtype {node.dtype[:64]!r}") from error
    if len(node.shape) > MAX_RANK or math.prod(node.shape) * dtype.itemsize >= 1 << 63:
        raise Corrupt(f"array {path!r} has an impossible shape: {node.shape}")
    if node.kind == "numpy-scalar" and node.shape:
        raise Corrupt(f"array {path!r} is a scalar of shape {node.shape}")
    if (node.prng is not None) != (node.kind == "jax-key"):
        raise Corrupt(f"array {path!r} of kind {node.kind!r} has the PRNG {node.prng!r}")


_DECODER = json_decoder(Node)
