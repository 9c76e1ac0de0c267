"""Packs and steps that the catalogs of a tier list, which the next opening need not read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tieredckpt.format.manifest import StepId

__all__ = ["CatalogFile", "Catalogued", "Stamp"]


class Stamp(NamedTuple):
    """Identifies the commit of a step in a listing."""

    manifest_nbytes: int
    manifest_modified: float
    btree: str
    btree_nbytes: int
    btree_modified: float


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """One catalog file, and the packs and steps that it listed rightly when it was read or written."""

    nbytes: int
    packs: frozenset[str] = frozenset()
    steps: frozenset[StepId] = frozenset()
    listed: int = 0
    """How many packs and steps are in it altogether; 0 for one that cannot be read."""


@dataclass(slots=True)
class Catalogued:
    """Content of all catalogs of a tier."""

    files: dict[str, CatalogFile] = field(default_factory=dict)
    packs: set[str] = field(default_factory=set)
    steps: set[StepId] = field(default_factory=set)
    stamps: dict[StepId, Stamp] = field(default_factory=dict)
    """The stamps of steps, as far as they were looked up since the commit."""
    timeless: bool = False
    """The store tells no times of change, so that no catalog can have its steps."""

    @property
    def nbytes(self) -> int:
        """Bytes that the files take."""
        return sum(file.nbytes for file in self.files.values())

    def forget(self, step: StepId) -> None:
        """Forget a step that was committed anew, or is gone."""
        self.steps.discard(step)
        self.stamps.pop(step, None)
