"""Sizes by key with their sum, which is kept up to date."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, MutableMapping
from typing import TypeVar

__all__ = ["Sizes"]

K = TypeVar("K")


class Sizes(MutableMapping[K, int]):
    """Bytes by key, and how many those are together."""

    def __init__(self) -> None:
        self._of: dict[K, int] = {}
        self.total = 0

    def __getitem__(self, key: K) -> int:
        return self._of[key]

    def __setitem__(self, key: K, nbytes: int) -> None:
        self.total += nbytes - self._of.get(key, 0)
        self._of[key] = nbytes

    def __delitem__(self, key: K) -> None:
        self.total -= self._of.pop(key)

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def __iter__(self) -> Iterator[K]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def keys(self) -> KeysView[K]:
        """As of a dictionary, whose set operations are not written in Python."""
        return self._of.keys()
