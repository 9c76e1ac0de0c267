"""Remembers the last save: which chunks were the same as before, and which arrays need not be read again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tieredckpt.tree.changes import stamp
from tieredckpt.tree.leaf import ArrayLeaf, Place
from tieredckpt.tree.select import choose

__all__ = ["LastSave", "Sighting"]


class Sighting(NamedTuple):
    """An array as a save found it, without a reference that keeps it."""

    source: weakref.ref[object] | None
    """Of an array that nobody can write to."""
    cut: tuple[Place | None, tuple[slice, ...] | None]
    """Which part of its array it is; the same array may be divided among ranks in another way."""
    stamp: object
    """Of an array that is declared frozen: `tieredckpt.tree.changes.stamp`, and the number of restores into arrays so
    far, which the stamp does not show."""


class LastSave:
    """The digests of the last save, by storage key, of arrays whose chunks take pages."""

    def __init__(self, frozen: Sequence[str]) -> None:
        """``frozen`` are paths and patterns as `tieredckpt.tree.select` takes them; some may choose nothing."""
        self._frozen = frozen
        self._asked: list[str] = []
        self._chosen: set[str] = set()
        """Which of the arrays of a tree are declared frozen; for the next save of such a tree."""
        self._seen: dict[str, Sighting] = {}
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

    def look(self, leaves: Sequence[ArrayLeaf], frozen: set[str], fills: int) -> dict[str, Sighting]:
        """Sightings of the arrays that a later save may recognise as unchanged, by storage key.

        ``fills`` counts the restores into arrays of the program so far.
        """
        found = {}
        for leaf in leaves:
            if leaf.immutable:
                found[leaf.key] = Sighting(weakref.ref(leaf.source), (leaf.place, leaf.part), None)
            elif leaf.key in frozen and (now := stamp(leaf)) is not None:
                found[leaf.key] = Sighting(None, (leaf.place, leaf.part), (now, fills))
        return found

    def same(self, leaves: Sequence[ArrayLeaf], seen: Mapping[str, Sighting]) -> dict[str, list[bytes]]:
        """The digests of those of ``leaves`` that have the bytes of the last save, by storage key.

        An array that nobody can write to has them if it is the same object. A frozen one counts as having them if its
        address and version are unchanged; a check in the background confirms that.
        """
        return {
            leaf.key: self.digests[leaf.key]
            for leaf in leaves
            if leaf.key in self.digests and leaf.key in seen and self._is_same(leaf, seen[leaf.key])
        }

    def _is_same(self, leaf: ArrayLeaf, now: Sighting) -> bool:
        last = self._seen.get(leaf.key)
        if last is None or last.cut != now.cut:
            return False
        if now.source is not None:
            return last.source is not None and last.source() is leaf.source
        return last.source is None and last.stamp == now.stamp

    def forget(self, key: str) -> None:
        """Make the saves that come read the array ``key``, whatever it looks like."""
        self._seen.pop(key, None)
        self._forgotten.add(key)

    def learn(self, seen: dict[str, Sighting], digests: dict[str, list[bytes]]) -> None:
        """Remember a save that was committed."""
        before = self.digests
        self.unchanged = {
            key: [digest if digest == last else None for digest, last in zip(now, before[key], strict=True)]
            for key, now in digests.items()
            if key in before and len(before[key]) == len(now)
        }
        for key in self._forgotten:  # the save may have begun before
            seen.pop(key, None)
        self._forgotten.clear()
        self._seen, self.digests = seen, digests
