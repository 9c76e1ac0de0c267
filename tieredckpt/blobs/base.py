"""The contract of a blob store: named immutable byte strings, and nothing about steps.

A *blob* is a sequence of bytes under a *key*, a relative path of ``/``-separated components of the
characters ``[A-Za-z0-9._-]`` (none of them ``.`` or ``..``). The engine picks every key; a user's string
never becomes one. No key is also the folder of another: with ``a/b`` stored, ``a`` is no object.

Each verb is a Protocol of its own; `BlobStore` is all of them together. What a store can do beyond the verbs is stated
by its frozen `Traits`: code asks for traits, never for a type.

Errors (`tieredckpt.errors`), the same from every store:

- `NotFound`: the key does not exist. Only believed when the store can tell; a dead server is never "missing".
- `ShortRead`: the object exists and ends before the range.
- `NoSpace`: the device, quota or budget is full. Nothing of the put remains visible.
- `Conflict`: a create-only put found the key.
- `TierUnavailable`: anything else that went wrong below; the foreign error is its ``__cause__``.
- `Invalid`: a key outside the alphabet above, or a prefix that is neither empty nor a folder.
- `Closed`: the store was closed. Behind `tieredckpt.blobs.wrap.Retrying`, as every tier is, it is `TierUnavailable`,
  and so is any error that is none of these.

Cancelling any verb leaves the store usable; a cancelled put has happened wholly or not at all. A cancelled
verb ends when the store has let go of the caller's memory. Where that takes long, since a call hangs in the
device, a caller may leave a *put* behind: one that was cancelled before it had taken all its bytes never
becomes visible. What a read fills must not be reused before the read has ended.
All verbs may be called concurrently from one event loop, and none blocks it: what waits for a device runs on a thread
(`tieredckpt.concurrency.in_thread`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from tieredckpt.errors import Invalid, TierUnavailable

__all__ = [
    "ALIGNMENT",
    "BlobInfo",
    "BlobStore",
    "Buffer",
    "Delete",
    "Free",
    "Get",
    "GetDigested",
    "List",
    "ListAtOnce",
    "Outgrown",
    "Put",
    "PutStream",
    "Stat",
    "Stretch",
    "Survives",
    "Sweep",
    "Traits",
    "Unanswered",
    "check_key",
    "check_prefix",
    "check_stretches",
    "is_key",
    "span",
]

Buffer = bytes | bytearray | memoryview
"""Bytes in memory; a memoryview is one-dimensional, contiguous, of format ``B``."""

ALIGNMENT = 4096
"""Offsets, lengths and addresses that are multiples of this many bytes can use direct I/O everywhere."""

_KEY = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")


class Unanswered(TierUnavailable):
    """A server that the store needs does not answer; an immediate retry does not help, only time does."""


class Outgrown(Unanswered):
    """The servers have changed since the store was opened; its objects lie elsewhere, so it must be opened again."""


class Survives(enum.IntEnum):
    """The largest failure that data in a store outlives; ordered."""

    NOTHING = 0
    PROCESS = 1
    NODE = 2
    SITE = 3

    @classmethod
    def named(cls, name: Literal["process", "node", "site"]) -> Survives:
        """The failure of that name in a configuration."""
        return cls[name.upper()]

    @property
    def shown(self) -> Literal["process", "node", "site"]:
        """The name in a configuration or policy; "process" for NOTHING too."""
        return _SHOWN[self]


_SHOWN: dict[Survives, Literal["process", "node", "site"]] = {
    Survives.NOTHING: "process",
    Survives.PROCESS: "process",
    Survives.NODE: "node",
    Survives.SITE: "site",
}


@dataclass(frozen=True, slots=True)
class Traits:
    """Capabilities of a blob store."""

    survives: Survives
    durable: bool
    """A put returns only when the data is on stable media, or acknowledged by a store that says so."""
    atomic_put: bool
    """No reader ever sees part of an object."""
    create_only: bool
    """Ability: ``put(create_only=True)``, which has exactly one winner."""
    ranged_get: bool
    """A range costs its own bytes, not the whole object."""
    direct_io: bool
    """Aligned buffers (see `ALIGNMENT`) go to and from the device without a copy."""
    object_size: int
    """Preferred size of a large object, in bytes."""
    digested_reads: int = 0
    """How many calls of the ability `GetDigested` are best asked for at a time; 0 for a store without it."""
    remote: bool = False
    """A request takes as long as many bytes do, and costs money, so it pays to record what saves one."""
    parallel_puts: int = 2
    """How many large objects are best put at a time; with two, one is prepared while another is written."""


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """Name, size in bytes and time of last change (seconds since the epoch; 0.0 where unknown)."""

    key: str
    size: int
    modified: float


class Stretch(NamedTuple):
    """A range of an object, at least one byte, and the memory for its start."""

    offset: int
    nbytes: int
    into: memoryview
    """Writable, of any alignment, and at most as long."""


def span(stretches: Sequence[Stretch]) -> int:
    """Bytes from the first stretch to the end of the last."""
    return stretches[-1].offset + stretches[-1].nbytes - stretches[0].offset if stretches else 0


def check_stretches(key: str, stretches: Sequence[Stretch]) -> None:
    """Raise `Invalid` unless each stretch is behind those before it, and fills memory that it can fill."""
    end = 0
    for offset, nbytes, into in stretches:
        if offset < end or nbytes < 1:
            raise Invalid(f"{key} cannot be read: {nbytes} bytes from offset {offset} on are not behind {end}")
        if into.readonly or into.nbytes > nbytes:
            raise Invalid(f"{nbytes} bytes of {key} cannot fill {into.nbytes} bytes, or the memory is read-only")
        end = offset + nbytes
    if not stretches:
        raise Invalid(f"nothing of {key} was asked for")


class Get(Protocol):
    async def get(self, key: str, *, limit: int) -> bytes:
        """The whole object. One larger than ``limit`` bytes raises `Corrupt`: sizes are never trusted.

        Raises `NotFound`, `Corrupt`, `TierUnavailable`, `Closed`, `Invalid`.
        """

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` (writable) with the bytes from ``offset`` on, completely or raise.

        An aligned offset, address and length may be read by direct I/O. After an error the contents of
        ``into`` are undefined. Raises `NotFound`, `ShortRead`, `TierUnavailable`, `Closed`, `Invalid`.
        """


class Put(Protocol):
    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        """Store the concatenation of ``parts`` under ``key``, replacing what was there.

        The parts are not copied where the store can avoid it, so they must not change until this returns.
        On return the object is visible to every reader and as durable as the traits say, its name
        included. Raises `NoSpace`, `TierUnavailable`, `Closed`, `Invalid`; with ``create_only`` `Conflict`
        where the object exists, and `Invalid` from a store without that trait.
        """


class Stat(Protocol):
    async def stat(self, key: str) -> BlobInfo:
        """Size and time of an object. Raises `NotFound`, `TierUnavailable`, `Closed`, `Invalid`."""


class List(Protocol):
    def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        """Every object whose key starts with the folder ``prefix`` (``""`` or ``"a/b/"``), recursively,
        in any order. Complete or an error, never silently shorter; a missing folder is empty. Objects put
        or deleted meanwhile may or may not appear; those of unfinished puts never do. Raises
        `TierUnavailable`, `Closed`, `Invalid`.
        """


class Delete(Protocol):
    async def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error. The removal is as durable as a put."""


@runtime_checkable
class GetDigested(Protocol):
    """Optional ability: read and digest in one pass. Wrappers that count or limit verbs treat it as `get_into`."""

    async def get_digested(self, key: str, stretches: Sequence[Stretch]) -> Sequence[bytes]:
        """Read stretches of an object, in order and without overlap; returns the digest of each.

        The digest is that of `tieredckpt.format.digest.copy_start_and_digest`: bytes that go to memory count as they
        arrived there. The store may also read the bytes between the stretches. Raises as `get_into`; the contents of
        all memory are undefined then.
        """


@runtime_checkable
class PutStream(Protocol):
    """Optional ability: write an object that is larger than the memory."""

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], *, nbytes: int | None = None) -> None:
        """Write the bytes of ``pieces``, in order. If ``pieces`` raises, nothing is written and its error is raised.

        ``nbytes`` is the most bytes that come, if known. Raises `Invalid` if more come than the store can take for that
        number.

        The store owns each piece and copies none: nobody may change it, also after a cancellation. Raises as `Put.put`.
        """
        ...


@runtime_checkable
class ListAtOnce(Protocol):
    """Optional ability of stores whose requests cost more than their listings."""

    async def list_at_once(self, prefix: str) -> Sequence[BlobInfo] | None:
        """As `List.list`, by one request; None where one request cannot list them all."""
        ...


@runtime_checkable
class Free(Protocol):
    """An ability that some stores have beyond the verbs."""

    async def free(self) -> int | None:
        """Free bytes, as far as the medium tells. Raises `TierUnavailable`, `Closed`."""


@runtime_checkable
class Sweep(Protocol):
    """An ability that some stores have beyond the verbs."""

    async def sweep(self, age: float) -> int:
        """Remove the remains of unfinished puts that are unchanged for ``age`` seconds; returns how many.

        An age shorter than a live put takes would end that put with an error. Raises `TierUnavailable`, `Closed`.
        """


@runtime_checkable
class BlobStore(Get, Put, Stat, List, Delete, Protocol):
    """All verbs of a store, its traits, and its end."""

    @property
    def traits(self) -> Traits: ...

    @property
    def location(self) -> str:
        """Location of the data for people: a path or URL."""

    async def close(self) -> None:
        """Release what the store holds. Idempotent; verbs called afterwards raise `Closed`."""


def check_key(key: str) -> str:
    """``key`` itself if it obeys the alphabet, else `Invalid`."""
    if not _KEY.fullmatch(key) or any(part in (".", "..") for part in key.split("/")):
        raise Invalid(f"{key!r} is not a blob key: components of [A-Za-z0-9._-], no '.' or '..'")
    return key


def is_key(name: str) -> bool:
    """Whether ``name`` obeys the alphabet."""
    try:
        check_key(name)
    except Invalid:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """``prefix`` itself if it is ``""`` or a folder of keys that ends in ``/``, else `Invalid`."""
    if prefix:
        if not prefix.endswith("/"):
            raise Invalid(f"{prefix!r} is not a folder of keys: it must end in '/'")
        check_key(prefix[:-1])
    return prefix
