"""Decoders of msgspec, made one at a time.

Two threads that make decoders of one type at the same time, or decode by it for the first time, crash the process:
one thread sees what the other has not completed. Everything that decodes by a type asks for its decoder here.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar, overload

import msgspec

from tieredckpt.errors import Corrupt

__all__ = ["UNREADABLE", "converted", "from_json", "from_msgpack", "json_decoder", "msgpack_decoder"]

T = TypeVar("T")

UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoders raise for data that they cannot read. For text that is no UTF-8 this is a ValueError."""

_guards_types = threading.Lock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...


@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of JSON that makes a ``kind``, a type or a union."""
    if (found := _json.get(kind)) is None:
        with _guards_types:
            found = _json[kind] = msgspec.json.Decoder(kind)
    return found


@overload
def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]: ...


@overload
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of MessagePack that makes a ``kind``, a type or a union."""
    if (found := _msgpack.get(kind)) is None:
        with _guards_types:
            found = _msgpack[kind] = msgspec.msgpack.Decoder(kind)
    return found


def from_json(data: Any, kind: type[T], flaw: str) -> T:
    """Decode JSON. Raises `Corrupt`, with ``flaw`` and the reason, for data that are no ``kind``."""
    return _decoded(json_decoder(kind), data, flaw)


def from_msgpack(data: Any, kind: type[T], flaw: str) -> T:
    """As `from_json`, of MessagePack."""
    return _decoded(msgpack_decoder(kind), data, flaw)


def _decoded(decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], data: Any, flaw: str) -> T:
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise Corrupt(f"{flaw}: {error}") from error


def converted(value: Any, kind: Any) -> Any:
    """``value``, of plain containers and scalars, as a ``kind``; raises as `msgspec.convert`."""
    json_decoder(kind)  # which completes what msgspec knows of the type
    return msgspec.convert(value, kind)
