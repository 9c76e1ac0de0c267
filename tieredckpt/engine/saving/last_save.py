"""Remembers the last save: which chunks were the same as before, and which arrays need not be read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tieredckpt.tree.changes import Identity, stamp
from tieredckpt.tree.leaf import ArrayLeaf
from tieredckpt.tree.select import choose

__all__ = ["Fingerprint", "LastSave", "take_fingerprints"]

Fingerprint: TypeAlias = tuple[object, ...]
"""What shows a change of an array from one save to the next; it keeps no array."""


def take_fingerprints(leaves: Sequence[ArrayLeaf], frozen: set[str], fills: int) -> dict[str, Fingerprint]:
    """Fingerprints of the arrays that nobody can write to and of the ``frozen`` ones, by storage key.

    ``fills`` counts the restores into arrays of the program so far, which a stamp does not show.
    """
    found: dict[str, Fingerprint] = {}
    for leaf in leaves:
        part = leaf.place, leaf.part  # the same array may be divided among ranks in another way
        if leaf.immutable:
            found[leaf.key] = part, Identity(leaf.source)
        elif leaf.key in frozen and (now := stamp(leaf)) is not None:
            found[leaf.key] = part, now, fills
    return found


class LastSave:
    """The digests of the last save, by storage key, of arrays whose chunks take pages."""

    def __init__(self, frozen: Sequence[str]) -> None:
        """``frozen`` are paths and patterns as `tieredckpt.tree.select` takes them; some may choose nothing."""
        self._frozen = frozen
        self._asked: list[str] = []
        self._chosen: set[str] = set()
        """Which of the arrays of a tree are declared frozen; for the next save of such a tree."""
        self._fingerprints: dict[str, Fingerprint] = {}
        self._forgotten: set[str] = set()
        """Since the last save."""
        self.digests: dict[str, list[bytes]] = {}
        self.unchanged: dict[str, list[bytes | None]] = {}
        """The same, with None for chunks that differed in the save before."""

    def frozen(self, leaves: Sequence[ArrayLeaf]) -> set[str]:
        """The storage keys of those of ``leaves`` that are declared frozen and are writable."""
        if not self._frozen:
            return set()
        arrays = [leaf.array for leaf in leaves]
        if arrays != self._asked:
            self._asked, self._chosen = arrays, {key for _, keys in choose(self._frozen, arrays) for key in keys}
        return {leaf.key for leaf in leaves if leaf.array in self._chosen and not leaf.immutable}

    def same(self, now: Mapping[str, Fingerprint]) -> dict[str, list[bytes]]:
        """The digests of the arrays with the fingerprints of the last save, by storage key.

        Their bytes are the same; of a frozen array, a check in the background confirms that.
        """
        last = self._fingerprints
        return {key: self.digests[key] for key in now if key in self.digests and last.get(key) == now[key]}

    def forget(self, key: str) -> None:
        """Make the saves that come read the array ``key``, whatever it looks like."""
        self._fingerprints.pop(key, None)
        self._forgotten.add(key)

    def learn(self, fingerprints: dict[str, Fingerprint], digests: dict[str, list[bytes]]) -> None:
        """Remember a save that was committed."""
        before = self.digests
        self.unchanged = {
            key: [digest if digest == last else None for digest, last in zip(now, before[key], strict=True)]
            for key, now in digests.items()
            if key in before and len(before[key]) == len(now)
        }
        for key in self._forgotten:  # the save may have begun before
            fingerprints.pop(key, None)
        self._forgotten.clear()
        self._fingerprints, self.digests = fingerprints, digests
