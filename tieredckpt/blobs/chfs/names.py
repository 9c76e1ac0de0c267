"""The names below a store's root in CHFS: those of keys, and those of the data that links lead to.

An object that was created exclusively is a symbolic link, which has one creator, to its data beside it,
``<key>~<random>``. Names with a ``~`` are no keys.
"""

from __future__ import annotations

import re
import secrets

__all__ = ["data_for", "data_of", "name_of"]

_DATA = re.compile(r"([A-Za-z0-9._-]+)~[0-9a-f]{16}")


def data_for(path: str) -> str:
    """A path that nobody has used for the data of a link at ``path``."""
    return f"{path}~{secrets.token_hex(8)}"


def data_of(path: str, target: str) -> str | None:
    """Where the data of a link at ``path`` lies; None where the link leads anywhere else."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{target}" if name_of(target) == name else None


def name_of(entry: str) -> str | None:
    """The name of the link that an entry is the data of; None for any other entry."""
    match = _DATA.fullmatch(entry)
    return None if match is None else match[1]
