"""Packs written to a tier, for the process that manages it to record."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieredckpt.format.ocdbt import Extent

__all__ = ["WrittenPacks"]


@dataclass(frozen=True, slots=True)
class WrittenPacks:
    """Packs that are stored and to which no commit refers yet."""

    extents: dict[bytes, Extent] = field(default_factory=dict)
    """Place of each chunk, by digest."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each pack, by key."""

    def add(self, more: WrittenPacks) -> None:
        """Count these packs in, too."""
        self.extents.update(more.extents)
        self.sizes.update(more.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all packs."""
        return sum(self.sizes.values())
