"""The files of NumPy: one ``.npz``, or a folder of ``.npy`` files.

Members of an ``.npz`` are named by keys, and none leads out of the folder where it is extracted. The files of a folder
are named by keys, percent-escaped (RFC 3986): ``urllib.parse.unquote`` gives the key back.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from tieredckpt.config.formats import Files
from tieredckpt.engine.exporting.content import StepContent
from tieredckpt.engine.inventory import ArrayInfo
from tieredckpt.errors import Corrupt
from tieredckpt.interchange.base import Content, Format, content

__all__ = ["INDEX", "NPY", "NPZ", "file_name", "member_name"]

INDEX = "index.json"
"""Lists key, dtype and shape of each file of a folder: NumPy has no names for bfloat16 and its like."""

_AROUND = 64 << 10
"""Most bytes of an archive for the name and headers of an array, and at its end."""

_LONGEST = 200
"""Longest file name, in characters; file systems end at 255 bytes."""

# The format escapes these in keys, except backslashes and drives; here no archive depends on that.
_LEADS_OUT = re.compile(r"\0|^[A-Za-z]:|(?:^|[/\\])(?:\.*[/\\]|\.*$)")
"""A path with a root, a drive, or a component that is empty or only full stops; also on Windows."""


def file_name(key: str) -> str:
    """The file of an array in a folder; a long one ends in a digest of the key."""
    name = quote(key, safe="")
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 33]}~{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    return f"{name}.npy"


def member_name(key: str) -> str:
    """The member of an array in a ``.npz``: its key, or if that could lead out of a folder, its escaped key."""
    return ("/".join(map(_component, key.split("/"))) if _LEADS_OUT.search(key) else key) + ".npy"


def _component(part: str) -> str:
    name = quote(part, safe="")
    return name if name.strip(".") else name.replace(".", "%2E") or "%"


def _stream_archive(step: StepContent, files: Files) -> dict[str, bytes]:
    """One ``.npz``."""
    written = {}
    nbytes = _AROUND + sum(info.nbytes + _AROUND for info in step.arrays)
    with (
        files.open("arrays.npz", nbytes=nbytes) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,  # type: ignore[call-overload]
    ):
        for info, pieces in groupby(step.pieces(), itemgetter(0)):
            name = member_name(step.name(info))
            found = Content()
            with archive.open(name, "w", force_zip64=True) as member:
                for at, (_, piece) in enumerate(pieces):
                    if not at:
                        _write_header(member, info, piece.dtype)
                    member.write(found.add(piece))
            written[name] = found.value()
    return written


def _write_header(file: IO[bytes], info: ArrayInfo, dtype: np.dtype[Any]) -> None:
    """Write the header of ``.npy``, https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html."""
    described = np.lib.format.header_data_from_array_1_0(np.empty(0, _named(dtype))) | {"shape": info.shape}
    np.lib.format.write_array_header_1_0(file, described)


def _named(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that a header names: bytes for one of ml_dtypes, whose own name NumPy may refuse to read."""
    return np.dtype(f"V{dtype.itemsize}") if dtype.isbuiltin == 2 else dtype


def _read_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                yield name, content(_array(path, name, member))


def _write_folder(step: StepContent, to: Path) -> dict[str, bytes]:
    """A folder of ``.npy``, and its index."""
    index, written = [], {}
    to.mkdir()
    for info, array in step.read():
        name = file_name(step.name(info))
        with (to / name).open("xb") as file:
            np.lib.format.write_array(file, array.view(_named(array.dtype)), allow_pickle=False)
        index.append({"file": name, "key": step.name(info), "dtype": info.dtype, "shape": info.shape})
        written[name] = content(array)
    (to / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return written


def _read_folder(path: Path) -> Iterator[tuple[str, bytes]]:
    for file in path.glob("*.npy"):
        with file.open("rb") as opened:
            yield file.name, content(_array(path, file.name, opened))


def _array(path: Path, name: str, file: IO[bytes]) -> npt.NDArray[Any]:
    try:
        found: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, zipfile.BadZipFile) as error:
        raise Corrupt(f"{path}: {name!r} is no array: {error}") from error
    return found


NPZ = Format(stream=_stream_archive, read_back=_read_archive, suffix=".npz", one_file=True)
NPY = Format(write=_write_folder, read_back=_read_folder)
