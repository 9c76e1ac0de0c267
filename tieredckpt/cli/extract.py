"""Writes arrays to files that need no tieredckpt: one ``.npz``, or a folder of ``.npy`` files.

The files appear under their final name when all is written, or not at all, and nothing that exists is
replaced. The names of an ``.npz`` are the keys, and no member leads out of the folder where it is extracted. The
files of a folder are named by keys, percent-escaped (RFC 3986): ``urllib.parse.unquote`` gives the key back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np

from tieredckpt.cli.arrays import Arrays
from tieredckpt.errors import Conflict, Invalid

__all__ = ["INDEX", "extract", "file_name", "member_name"]

INDEX = "index.json"
"""Lists key, dtype and shape of each file of a folder: NumPy has no names for bfloat16 and its like."""

_LONGEST = 200
"""Characters of a file's name; file systems end at 255 bytes."""

# The format escapes these in a key, but for backslashes and drives; here no archive depends on that.
_LEADS_OUT = re.compile(r"\0|^[A-Za-z]:|(?:^|[/\\])(?:\.*[/\\]|\.*$)")
"""A path with a root, a drive, or a component that is empty or of full stops alone; for Windows too."""


def extract(arrays: Arrays, to: Path) -> int:
    """Write ``arrays`` to the new file ``to`` if that ends in ``.npz``, else to the new folder; how many.

    Raises `Conflict` when ``to`` exists (a folder may, if it is empty), `Invalid` when it cannot be written.
    """
    with _errors(to):
        if os.path.lexists(to) and (to.suffix == ".npz" or not to.is_dir() or any(to.iterdir())):
            raise Conflict(f"{to} exists already; choose another name, nothing is replaced")
        to.parent.mkdir(parents=True, exist_ok=True)
        return _to_archive(arrays, to) if to.suffix == ".npz" else _to_folder(arrays, to)


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


def _to_archive(arrays: Arrays, to: Path) -> int:
    count = 0
    descriptor, temporary = tempfile.mkstemp(prefix=".tieredckpt-", suffix=".tmp", dir=to.parent)
    try:
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for info, array in arrays:
                with archive.open(member_name(info.key), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
                count += 1
        os.link(temporary, to)  # unlike a rename, it refuses to replace a file that came meanwhile
    finally:
        os.unlink(temporary)
    return count


def _to_folder(arrays: Arrays, to: Path) -> int:
    index = []
    temporary = Path(tempfile.mkdtemp(prefix=".tieredckpt-", dir=to.parent))
    try:
        for info, array in arrays:
            name = file_name(info.key)
            with (temporary / name).open("xb") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
            index.append({"file": name, "key": info.key, "dtype": info.dtype, "shape": info.shape})
        (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        temporary.rename(to)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return len(index)


@contextmanager
def _errors(to: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Invalid(f"{to} cannot be written: {error.strerror or error}") from error
