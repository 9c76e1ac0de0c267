"""Small JSON files of a RAM tier's folder: read without trust, and replaced in one step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from tieredckpt._decoders import from_json
from tieredckpt.blobs.posix.files import open_regular, skip_unreadable
from tieredckpt.errors import Corrupt

__all__ = ["read_json", "replace_json"]

S = TypeVar("S", bound=msgspec.Struct)


def read_json(path: Path, kind: type[S], *, limit: int) -> S | None:
    """Read the value of a regular file of at most ``limit`` bytes; None if there is no usable one. Blocking.

    Raises `TierUnavailable` if no file can be opened now.
    """
    with contextlib.suppress(Corrupt), skip_unreadable(path):
        fd = open_regular(path, os.O_RDONLY, follow_symlinks=False)
        with os.fdopen(fd, "rb") as file:
            return from_json(file.read(limit + 1), kind, str(path))
    return None


def replace_json(path: Path, new: Path, value: msgspec.Struct) -> None:
    """Replace the content of a file by a value, by way of the file ``new``. Blocking; raises `OSError`."""
    new.unlink(missing_ok=True)  # of a process that died here
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(value))
    new.replace(path)
