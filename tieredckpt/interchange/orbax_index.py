"""The arrays of an Orbax folder: zarr 3 in one OCDBT database, over files that hold the chunks.

The chunks of an array lie in packs of the store that are linked into the folder, or in a file that is written here.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tieredckpt.errors import Corrupt
from tieredckpt.format import ocdbt
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.grid import cell_key, cells, plan
from tieredckpt.format.ocdbt import Extent, Value
from tieredckpt.format.zarr import array_metadata
from tieredckpt.interchange.linked_packs import ENTRY

__all__ = ["COPIES", "INDEX", "LINKS", "MANIFEST", "add_array", "read_back", "summary", "write"]

MANIFEST = "manifest.ocdbt"
INDEX = "d/index"
"""The nodes of the database."""
COPIES = "d/arrays"
"""Chunks that were copied."""
LINKS = "packs"
"""The folder of linked packs."""
_CHUNK = 16 << 20
_INLINE = 4096
"""Most bytes of a chunk that lies in the database itself, as the only one of its array."""
_CHECKSUM = 4


def add_array(array: npt.NDArray[Any], file: BinaryIO, digests: dict[Extent, bytes]) -> dict[bytes, Value]:
    """Append the chunks of an array to ``file``, and their digests to ``digests``, to compare with `read_back`.

    Returns the entries of the array, by key without its name.
    """
    grid = plan(array.shape, array.dtype.itemsize, _CHUNK)
    entries: dict[bytes, Value] = {b"zarr.json": array_metadata(grid.shape, array.dtype, grid.cell, CRC32C)}
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for cell in cells(grid):
        chunk = data[cell.start : cell.start + cell.nbytes]
        if cell.nbytes < grid.cell_nbytes:
            chunk = np.concatenate([chunk, np.zeros(grid.cell_nbytes - cell.nbytes, np.uint8)])
        checksum = crc32c(chunk).to_bytes(_CHECKSUM, "little")
        key = cell_key(cell.index)
        if grid.size == 1 and chunk.size <= _INLINE:
            entries[key] = chunk.tobytes() + checksum
            continue
        entries[key] = extent = Extent(COPIES, file.tell(), chunk.size + _CHECKSUM)
        digests[extent] = digest(chunk) + checksum
        file.write(memoryview(chunk))
        file.write(checksum)
    return entries


def write(folder: Path, arrays: dict[str, dict[bytes, Value]]) -> None:
    """Write the database of arrays, given by name; a tree that is one array has the empty name, at the root."""
    folders = {name: f"{name}/".encode() if name else b"" for name in arrays}
    entries = [(folders[name] + key, value) for name, found in arrays.items() for key, value in found.items()]
    index = ocdbt.encode(
        sorted(entries, key=lambda entry: entry[0]), INDEX, uuid=uuid.uuid4().bytes, commit_time_ns=time.time_ns()
    )
    (folder / INDEX).write_bytes(index.btree)
    (folder / MANIFEST).write_bytes(index.manifest)


def summary(entries: dict[bytes, Value], copies: Callable[[Extent], bytes]) -> bytes:
    """The digest of an array's entries in the database, and of its copied chunks, whose digests are in ``copies``.

    Linked packs are the store's own files, which `tieredckpt verify` reads: only their extents are digested.
    """
    parts = []
    for key, value in sorted(entries.items()):
        if isinstance(value, bytes):
            parts += [key, digest(value)]
        else:
            parts += [key, f"{value.path}:{value.offset}:{value.length}".encode()]
            parts += [copies(value)] if value.path == COPIES else []
    return digest(b"\0".join(parts))


def read_back(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The summary of each array in a folder, by name. Raises `Corrupt`."""
    manifest, nodes = (folder / MANIFEST).read_bytes(), (folder / INDEX).read_bytes()
    arrays: dict[str, dict[bytes, Value]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for key, value in ocdbt.decode(manifest, nodes, INDEX):
        found = ENTRY.fullmatch(key) or ENTRY.fullmatch(b"/" + key)
        if found is None:
            raise Corrupt(f"{folder / INDEX} has the key {key[:100]!r}, which is of no array")
        arrays[found[1].decode()][found[2]] = value
        if isinstance(value, Extent):
            if value.path not in sizes:
                sizes[value.path] = (folder / value.path).stat().st_size
            if value.offset + value.length > sizes[value.path]:
                raise Corrupt(f"{folder / value.path} ends before a chunk of {found[1].decode()!r}")
    with (folder / COPIES).open("rb") as file:

        def copied(extent: Extent) -> bytes:
            file.seek(extent.offset)
            stored = file.read(extent.length)
            return digest(stored[:-_CHECKSUM]) + stored[-_CHECKSUM:]

        for name, entries in arrays.items():
            yield name, summary(entries, copied)
