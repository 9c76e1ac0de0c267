"""Messages between the store and its worker: one msgpack message per packet of their socket.

The store chooses the numbers of files and regions, so it can close a file even if it never saw the reply to its open. A
`Reply` carries the number of its request; its ``value`` depends on the command.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

__all__ = [
    "MORE",
    "PACKET",
    "CheckRing",
    "Close",
    "Command",
    "Connect",
    "Create",
    "ListFolder",
    "MakeFolder",
    "MapRegion",
    "Open",
    "Read",
    "Remove",
    "RemoveFolder",
    "Reply",
    "Request",
    "Span",
    "Stat",
    "UnmapRegion",
    "Write",
]

PACKET = 128 << 10
"""The most bytes of one message; below what a socket buffer takes by default."""

MORE = "more"
"""The code of a reply that others follow."""

Span: TypeAlias = tuple[int, int, int]
"""Bytes of a region: its number, offset and length."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Connect(_Frame, frozen=True):
    """Load libchfs and connect. Value: (version, path of the library, servers in the ring, their addresses)."""

    library: str
    server: str
    rpc_timeout_ms: int


class MapRegion(_Frame, frozen=True):
    """Map the file whose descriptor comes with this message, as the region of that number."""

    region: int
    size: int
    writable: bool


class UnmapRegion(_Frame, frozen=True):
    region: int


class CheckRing(_Frame, frozen=True):
    """Whether every server answers, and the ring is what it was."""


class Create(_Frame, frozen=True):
    """A new object to write to, open as the file of that number."""

    file: int
    path: str
    chunk_size: int


class Open(_Frame, frozen=True):
    """An object to read from, as an open file of that number."""

    file: int
    path: str


class Write(_Frame, frozen=True):
    """The bytes of all spans, one behind the other, from ``offset`` on."""

    file: int
    offset: int
    spans: list[Span]


class Read(_Frame, frozen=True):
    """Fill all spans, one behind the other, from ``offset`` on."""

    file: int
    offset: int
    spans: list[Span]


class Close(_Frame, frozen=True):
    """Close a file; one that is not open is no error."""

    file: int


class Stat(_Frame, frozen=True):
    """Value: (kind, size in bytes, mtime in nanoseconds, bytes of a CHFS chunk)."""

    path: str


class ListFolder(_Frame, frozen=True):
    """The entries of one folder, in several replies. Value: (name, kind, bytes of its first CHFS chunk, mtime in
    nanoseconds) of each.

    With ``replicas``, also those that a server holds and does not own, as in a ring of another size.
    """

    path: str
    replicas: bool = False


class Remove(_Frame, frozen=True):
    path: str


class RemoveFolder(_Frame, frozen=True):
    path: str


class MakeFolder(_Frame, frozen=True):
    path: str


Command: TypeAlias = (
    Connect
    | MapRegion
    | UnmapRegion
    | CheckRing
    | Create
    | Open
    | Write
    | Read
    | Close
    | Stat
    | ListFolder
    | Remove
    | RemoveFolder
    | MakeFolder
)


class Request(msgspec.Struct, frozen=True, array_like=True):
    number: int
    command: Command


class Reply(msgspec.Struct, frozen=True, array_like=True):
    number: int
    code: str = ""
    """Empty for success, `MORE` for a part of the answer, else that of a ``ChfsError``."""
    message: str = ""
    value: Any = None
