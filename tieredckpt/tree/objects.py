"""Small Python objects as leaves: the JSON that a step has of each, and the object again.

One `Codec` per type says what makes an object: a scalar, another small object, or a tuple of them. JSON holds a tuple
as a list, and whatever it has no form of its own for (bytes, NaN, a path inside a tuple) as the node that would store
it as a leaf. Nothing is imported, looked up or called by a name that a step has, except in the tables of this module
and of `tieredckpt.tree.torch_objects`. The class of an enum comes from the caller; without it, the value comes back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from functools import lru_cache
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final, TypeAlias

import ml_dtypes
import msgspec
import numpy as np

from tieredckpt._decoders import converted
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.scalars import scalar_node, scalar_value
from tieredckpt.format.structure import (
    MAX_INLINE_BYTES,
    MAX_JSON_INT,
    MAX_PLAIN_DEPTH,
    ObjectNode,
    ScalarNode,
)
from tieredckpt.tree.codec import Codec

__all__ = ["ENUM", "Plain", "enums_in", "from_plain", "json_of", "object_node", "restored_object", "to_plain"]

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""Values for which JSON has a form of its own."""

ENUM: Final = "enum"
"""Name of an enum member in the format, whatever its class."""

_DEPTH: Final = MAX_PLAIN_DEPTH - 2
"""Deepest nesting of tuples and objects: the scalar at the bottom may be a JSON object itself."""


def object_node(key: str, value: object) -> ObjectNode | None:
    """``value`` as a small object, or None when it is none.

    Raises `Invalid`, naming ``key``, for one with parts that cannot be stored, and one that takes more than
    `MAX_INLINE_BYTES`.
    """
    codec = _codec_of(value)
    if codec is None:
        return None
    node = ObjectNode(codec.of, _parts(key, codec, value, _DEPTH))
    if (size := len(json_of(node.value))) > MAX_INLINE_BYTES:
        raise Invalid(
            f"leaf {key!r}: a {type(value).__name__} of {size} bytes exceeds the limit of {MAX_INLINE_BYTES} for "
            f"inline values; store what it holds as an array"
        )
    return node


def restored_object(key: str, node: ObjectNode, like: object = None) -> Any:
    """The object of ``node``; the classes of enums, and the device of a generator, are those of ``like``.

    Raises `Corrupt`, naming ``key``, for a malformed object, and `Invalid` for an object of a later version of this
    library, and for a member that no enum of ``like`` has.
    """
    return _made(key, node, enums_in(like), like)


def to_plain(key: str, value: object, depth: int = _DEPTH) -> Plain:
    """``value``, a scalar, a small object or a tuple of them, as JSON has it. Raises `Invalid`, naming ``key``."""
    if depth < 0:
        raise Invalid(f"leaf {key!r}: its parts nest deeper than {MAX_PLAIN_DEPTH}")
    if type(value) is tuple:
        return [to_plain(key, item, depth - 1) for item in value]
    if value is None or type(value) is bool or (type(value) is int and abs(value) <= MAX_JSON_INT):
        return value
    scalar = scalar_node(key, value)
    if scalar is not None:
        if isinstance(value, str) or (isinstance(value, float) and np.isfinite(value)):
            return value
        plain: Plain = msgspec.to_builtins(scalar)
        return plain
    codec = _codec_of(value)
    if codec is None:
        raise Invalid(f"leaf {key!r}: a part of it is a {type(value).__name__}, which cannot be stored")
    return {"type": "object", "of": codec.of, "value": _parts(key, codec, value, depth - 1)}


def from_plain(key: str, plain: object, classes: Sequence[type[Enum]] = (), depth: int = MAX_PLAIN_DEPTH) -> Any:
    """Decode what `to_plain` encoded; members of enums are those of ``classes``, or their values where there are none.

    Raises as `restored_object`.
    """
    if not depth:
        raise Corrupt(f"leaf {key!r} nests deeper than {MAX_PLAIN_DEPTH}")
    if isinstance(plain, list):
        return tuple([from_plain(key, item, classes, depth - 1) for item in plain])
    if isinstance(plain, dict):
        try:
            node = converted(plain, ScalarNode | ObjectNode)
        except (msgspec.ValidationError, RecursionError) as error:
            raise Corrupt(f"leaf {key!r} is malformed: {error}") from error
        return _made(key, node, classes, depth=depth - 1) if isinstance(node, ObjectNode) else scalar_value(node)
    if isinstance(plain, int) and abs(plain) > MAX_JSON_INT:
        raise Corrupt(f"leaf {key!r} is malformed: a number that is no JSON of ours")
    return plain


def json_of(plain: object) -> bytes:
    """The JSON text of ``plain``; equal values have equal texts."""
    return msgspec.json.encode(plain, order="sorted")


def enums_in(value: object) -> tuple[type[Enum], ...]:
    """The enum classes of the members that ``value`` is or holds in sets and tuples."""
    if isinstance(value, Enum):
        return (type(value),)
    if isinstance(value, set | frozenset | tuple):
        return tuple(dict.fromkeys(cls for item in value for cls in enums_in(item)))
    return ()


def _parts(key: str, codec: Codec, value: object, depth: int) -> Plain:
    try:
        parts = codec.parts(value)
    except (ValueError, TypeError) as error:
        raise Invalid(f"leaf {key!r}: a {type(value).__name__} cannot be stored: {error}") from error
    plain = to_plain(key, parts, depth)
    if isinstance(plain, list) and codec.of in _UNORDERED:
        plain.sort(key=json_of)  # the order of a set is another one in every process
    return plain


def _made(
    key: str, node: ObjectNode, classes: Sequence[type[Enum]], like: Any = None, depth: int = MAX_PLAIN_DEPTH
) -> Any:
    codecs = _codecs(node.of)
    # A range of a few bytes in the step could become a set, or arguments, of any number of items.
    if (codecs is None or node.of in codecs) and type(node.value) is not (str if node.of in _TEXTS else list):
        raise Corrupt(f"leaf {key!r} is a malformed {node.of}: {type(node.value).__name__} is not what makes one")
    parts = from_plain(key, node.value, classes, depth)
    if codecs is None:
        return parts
    if node.of not in codecs:
        raise Invalid(
            f"leaf {key!r} is a {node.of!r}, which this version of tieredckpt does not know; use a later one, or "
            f"restore the rest with keys="
        )
    try:
        if node.of == _ENUM.of:
            return _member(key, parts, classes)
        if node.of == "torch-generator" and like is not None:
            parts = (str(like.device), parts[1])
        made = codecs[node.of].make(parts)
    except Invalid:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
        raise Corrupt(f"leaf {key!r} is a malformed {node.of}: {error}") from error
    if node.of in _UNORDERED and len(made) != len(parts):
        raise Invalid(
            f"leaf {key!r}: items of a set are equal without the classes of their enums; restore it with `like`"
        )
    return made


def _member(key: str, parts: Any, classes: Sequence[type[Enum]]) -> object:
    name, value = parts
    for cls in classes:
        try:
            member = cls(value)
        except Exception:  # noqa: S112  # of the program, which may look its members up in any way
            continue
        if member.name == name:
            return member
    if classes:
        known = ", ".join(cls.__name__ for cls in classes)
        raise Invalid(
            f"leaf {key!r}: {known} of `like` has no member {name!r} of the value {value!r}, which the step has"
        )
    return value


def _datetime_parts(value: datetime) -> object:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise ValueError("its time zone is no fixed offset; convert it with astimezone(timezone.utc)")
    offset = value.utcoffset()
    return (
        value.replace(tzinfo=None).isoformat(),
        value.fold,
        None if offset is None else offset // timedelta(microseconds=1),
    )


def _datetime(parts: tuple[str, int, int | None]) -> datetime:
    text, fold, offset = parts
    zone = None if offset is None else timezone(timedelta(microseconds=offset))
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _dtype_parts(dtype: np.dtype[Any]) -> object:
    name = dtype.name if dtype.type in _ML_DTYPES else dtype.str
    if _dtype(name) != dtype:
        raise ValueError("only dtypes without fields, shape and metadata can be")
    return name


def _dtype(name: str) -> np.dtype[Any]:
    if name in _ML_NAMES:
        name = getattr(ml_dtypes, name)
    elif not _PLAIN_DTYPE.fullmatch(name):
        raise ValueError(f"{name[:40]!r} names no dtype")
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


_PLAIN_DTYPE = re.compile(r"[<>|=][?biufcmMOSUVT]\d{0,9}(\[\d{0,9}[a-zA-Zμ]{1,7}\])?")
_ML_NAMES = frozenset(
    name for name in dir(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type) and name not in ("finfo", "iinfo")
)
_ML_DTYPES = frozenset(getattr(ml_dtypes, name) for name in _ML_NAMES)

_UNORDERED = ("set", "frozenset")
_TEXTS = frozenset(
    ("path", "pure-posix-path", "pure-windows-path", "date", "numpy-dtype", "torch-dtype", "torch-device")
)
"""The types that a text makes; all others are made of several parts."""
_ENUM = Codec(ENUM, lambda member: (member.name, member.value), lambda parts: parts)
_DTYPE = Codec("numpy-dtype", _dtype_parts, _dtype)
_PATH = Codec("path", str, Path)

_CODECS: dict[type, Codec] = {
    set: Codec("set", tuple, set),
    frozenset: Codec("frozenset", tuple, frozenset),
    range: Codec("range", lambda value: (value.start, value.stop, value.step), lambda parts: range(*parts)),
    slice: Codec("slice", lambda value: (value.start, value.stop, value.step), lambda parts: slice(*parts)),
    date: Codec("date", date.isoformat, date.fromisoformat),
    datetime: Codec("datetime", _datetime_parts, _datetime),
    timedelta: Codec(
        "timedelta", lambda value: (value.days, value.seconds, value.microseconds), lambda parts: timedelta(*parts)
    ),
    PosixPath: _PATH,
    WindowsPath: _PATH,
    PurePosixPath: Codec("pure-posix-path", str, PurePosixPath),
    PureWindowsPath: Codec("pure-windows-path", str, PureWindowsPath),
}
_BY_NAME = {codec.of: codec for codec in (*_CODECS.values(), _ENUM, _DTYPE)}


def _codec_of(value: object) -> Codec | None:
    return _codec_of_class(type(value))  # type: ignore[arg-type]  # mypy takes the instances' __hash__


@lru_cache(maxsize=1024)
def _codec_of_class(cls: type) -> Codec | None:
    if issubclass(cls, Enum):
        return _ENUM
    if issubclass(cls, np.dtype):
        return _DTYPE
    if "torch" in sys.modules and str(cls.__module__).partition(".")[0] == "torch":
        from tieredckpt.tree import torch_objects

        return torch_objects.CODECS.get(cls)
    return _CODECS.get(cls)


def _codecs(of: str) -> Mapping[str, Codec] | None:
    """The table of codecs that a type of this name is in; None for torch's where torch cannot be imported."""
    if not of.startswith("torch-"):
        return _BY_NAME
    try:
        from tieredckpt.tree import torch_objects
    except ImportError:
        return None
    return {codec.of: codec for codec in torch_objects.CODECS.values()}
