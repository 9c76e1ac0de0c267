"""The marker at the root of every tier: which store it belongs to, and the version of its format."""

from __future__ import annotations

import msgspec

from tieredckpt._decoders import from_json
from tieredckpt.errors import Corrupt
from tieredckpt.format import digest as digests
from tieredckpt.format import layout
from tieredckpt.format.manifest import Uuid

__all__ = ["StoreMarker", "decode_marker", "encode_marker"]


class StoreMarker(msgspec.Struct, frozen=True, kw_only=True):
    """``tieredckpt.json`` at the root of every tier: its store and its format."""

    store: Uuid
    format_version: int = layout.FORMAT_VERSION
    """Of the tier: one of `layout.FORMAT_VERSIONS`."""
    digest: str = digests.NAME
    forked_from: tuple[Uuid, ...] | msgspec.UnsetType = msgspec.UNSET
    """The stores that this one was copied from before it got an identity of its own, the last first."""

    @property
    def ancestors(self) -> tuple[str, ...]:
        """``forked_from``, or nothing."""
        return () if self.forked_from is msgspec.UNSET else self.forked_from

    def owns(self, store: str | None) -> bool:
        """Whether steps of ``store`` belong to this one: its own steps, and those from before it was forked."""
        return store == self.store or store in self.ancestors

    def fork(self, store: str) -> StoreMarker:
        """The marker of a copy that gets another identity."""
        return StoreMarker(store=store, forked_from=(self.store, *self.ancestors))

    @property
    def of_store(self) -> StoreMarker:
        """The marker without the fields that concern its tier alone."""
        return self.at_version(layout.FORMAT_VERSION)

    def at_version(self, version: int) -> StoreMarker:
        """The same on a tier of another format version."""
        return self if version == self.format_version else msgspec.structs.replace(self, format_version=version)


def encode_marker(marker: StoreMarker) -> bytes:
    return msgspec.json.format(msgspec.json.encode(marker), indent=2) + b"\n"


def decode_marker(data: bytes, where: str) -> StoreMarker:
    """Raises `Corrupt` for anything but a marker of a format that this version reads."""
    marker = from_json(data, StoreMarker, f"{where}/{layout.MARKER} does not mark a tieredckpt store")
    if marker.format_version not in layout.FORMAT_VERSIONS or marker.digest != digests.NAME:
        raise Corrupt(
            f"{where} holds format {marker.format_version} with digest {marker.digest!r}; this version reads "
            f"formats {', '.join(map(str, layout.FORMAT_VERSIONS))} with {digests.NAME!r}: use a newer tieredckpt"
        )
    return marker
