"""The key of a leaf: its path in the tree, escaped so that it is unambiguous and safe as a zarr path.

A key is the components of the path joined by ``/``: ``params/dense/kernel``, ``layers/0/bias``. A component
is a dict key, field name or decimal index. Letters of every script stay readable; percent escapes of the
UTF-8 bytes (upper case, as in RFC 3986) stand for

- ``%`` and ``/``,
- control characters and the invisible characters that steer the direction of text,
- each full stop of a component of nothing but full stops, and the one of ``zarr.json``,
- the ``t`` of ``tieredckpt`` as first component, which names the step's own records.

The empty component is a lone ``%``. A tree that is one bare leaf has the key `LEAF_KEY`.

Distinct components have distinct escapes, and a leaf never lies inside a leaf, so no two arrays of a tree
share a name below ``<key>/``.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["LEAF_KEY", "MAX_KEY_BYTES", "ROOT", "child_key", "show_key"]

ROOT = ""
"""Path of the tree's root."""

LEAF_KEY = "leaf"
"""Key of the only leaf of a tree without containers."""

MAX_KEY_BYTES = 4096
"""Longest key of an array, in bytes of UTF-8."""

_RESERVED = "tieredckpt"

# A fixed set and not str.isprintable(): that follows the Unicode version of the interpreter, and the key
# of a leaf must not.
_UNSAFE = re.compile("[\x00-\x1f%/\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_ONLY_STOPS = re.compile(r"\.+")


def child_key(parent: str, name: str | int) -> str:
    """Path of the child ``name`` of the container at path ``parent`` (`ROOT` for the outermost)."""
    part = _escape(name) if isinstance(name, str) else str(name)
    if parent:
        return f"{parent}/{part}"
    return "%74ieredckpt" if part == _RESERVED else part


def show_key(key: str) -> str:
    """``key`` for messages, where the root has no name of its own."""
    return repr(key) if key else "the tree's root"


def _escape(name: str) -> str:
    if name.isidentifier() and name.isascii():  # as most names are
        return name
    return _escaped(name)


@lru_cache(maxsize=8192)
def _escaped(name: str) -> str:
    if not name:
        return "%"
    if _ONLY_STOPS.fullmatch(name):
        return "%2E" * len(name)
    if name == "zarr.json":
        return "zarr%2Ejson"
    return _UNSAFE.sub(_percent, name)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match.group().encode())
