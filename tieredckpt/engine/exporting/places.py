"""Where exports go: a folder, or a place in an object store. An export there is whole, or readers do not find it.

Each is a folder ``step-STEP`` with the files of the format and `RECORD`, which names the store that made the export. A
folder is written under another name and renamed. In an object store the format's last file commits the others, and a
record that is not `complete` announces them before the first is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from tieredckpt._decoders import from_json
from tieredckpt.blobs.posix.stream import Blocks
from tieredckpt.config.formats import Files
from tieredckpt.errors import Conflict

__all__ = ["RECORD", "Place", "Record", "Writing", "decode", "encode", "folder_name", "number_of", "other_than"]

RECORD = "tieredckpt.json"
"""The file of an export that names its store."""
LARGEST_RECORD = 16 << 20
"""Bytes."""

_NAME = "step-"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an export: its step, its store and its files."""

    export: str
    """Its name in the configuration."""
    format: str
    store: str
    """Identity of the store, a UUID."""
    step: int
    serial: int
    saved_at: float
    """Seconds since the epoch."""
    nbytes: int
    """Of the step's arrays."""
    metrics: dict[str, float | str]
    files: tuple[str, ...] = ()
    """In the order in which they were written."""
    complete: bool = False
    format_version: int = 1


class Writing(Protocol):
    """An export that is being written."""

    @property
    def files(self) -> Files:
        """What a format streams to."""

    @property
    def path(self) -> Path | None:
        """A path at which nothing is yet, for formats that write it themselves; None in an object store."""

    @property
    def written(self) -> Sequence[str]:
        """The files so far."""

    def give_up(self) -> None:
        """Make whatever still writes raise."""

    async def commit(self, record: Record) -> int:
        """Make it appear, with its record; the bytes of its files. Raises `TieredCkptError`."""


class Place(Protocol):
    """Where the exports of one table ``[exports.NAME]`` are. Lives on the engine's loop; raises `TieredCkptError`."""

    async def exported(self) -> Mapping[int, Record]:
        """The exports there, by step, of any store, in an object store also those that are not complete.

        A folder loses what this store left unfinished.
        """

    def writing(self, record: Record, before: Record | None, blocks: Blocks) -> AbstractAsyncContextManager[Writing]:
        """Write an export in the block, in place of ``before`` if that is given; nothing is left if the block raises.

        In an object store, files may be left then, but readers do not find them. ``blocks`` is memory for files.
        """

    async def delete(self, record: Record) -> None:
        """Delete an export, so that readers find all of it or nothing."""

    async def close(self) -> None:
        """Release what it holds."""


def folder_name(step: int) -> str:
    """Folder name of the export of a step."""
    return f"{_NAME}{step}"


def number_of(name: str) -> int | None:
    """The step of an export whose folder has that name; None if the name is of no export."""
    number = name.removeprefix(_NAME)
    fits = name.startswith(_NAME) and number.isascii() and number.isdecimal() and len(number) <= 18
    return int(number) if fits and str(int(number)) == number else None


def encode(record: Record) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def decode(data: bytes, where: str) -> Record:
    """Raises `Corrupt` for anything but the record of an export."""
    return from_json(data, Record, f"{where} is not the record of an export")


def other_than(where: str) -> Conflict:
    """The error for a place that holds something else than an export of this store."""
    return Conflict(f"{where} exists and is no export of this store; move it away, or give the export another place")
