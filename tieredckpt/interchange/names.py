"""Names of leaves in a format that has full stops where keys have slashes, and maps from keys to other names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from tieredckpt.errors import Invalid

__all__ = ["Names"]

_WILDCARDS = re.compile(r"\*\*|\*")


class Names:
    """What leaves are called: their keys with full stops, or as a map says.

    Args:
        renamed: patterns over whole keys, ``**`` for anything and ``*`` for anything but slashes, and the name of each,
            in which the same signs in the same order stand for what they matched: ``params/*/**`` to ``model.*.**``.
            The first pattern that matches a key counts.

    Raises `Invalid` for a name whose signs are not those of its pattern.
    """

    def __init__(self, renamed: Mapping[str, str]) -> None:
        self._renamed = [(pattern, _compiled(pattern), name) for pattern, name in renamed.items()]
        self._used: set[str] = set()
        for pattern, name in renamed.items():
            if _WILDCARDS.findall(pattern) != _WILDCARDS.findall(name):
                raise Invalid(
                    f"rename: {name!r} should have the signs * and ** of {pattern!r}, in the same order, as in "
                    f"'params/**' to 'model.**'"
                )

    def __call__(self, path: Sequence[str]) -> str:
        """The name of the leaf at a path."""
        key = "/".join(path)
        for pattern, compiled, name in self._renamed:
            if (found := compiled.fullmatch(key)) is not None:
                self._used.add(pattern)
                return _filled(name, [part.replace("/", ".") for part in found.groups()])
        return ".".join(path)

    def check(self) -> None:
        """Raise `Invalid` if a pattern has matched no leaf."""
        if unused := [pattern for pattern, _, _ in self._renamed if pattern not in self._used]:
            raise Invalid(f"rename: {unused[0]!r} matches no array, or only those that a pattern before it matches")


def _compiled(pattern: str) -> re.Pattern[str]:
    text = "".join(
        {"**": "(.*)", "*": "([^/]*)"}.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern)
    )
    return re.compile(text, re.DOTALL)


def _filled(name: str, parts: Sequence[str]) -> str:
    between = _WILDCARDS.split(name)
    return "".join(text for pair in zip_longest(between, parts, fillvalue="") for text in pair)
