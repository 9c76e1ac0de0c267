"""The bytes layer: blob stores, their contract (`base`), and wrappers that add a behaviour (`wrap`).

A store is imported from its own module, so that none of them loads what another needs.
"""

from __future__ import annotations

from tieredckpt.blobs.base import ALIGNMENT, BlobInfo, BlobStore, Buffer, Survives, Traits, check_key, check_prefix

__all__ = [
    "ALIGNMENT",
    "BlobInfo",
    "BlobStore",
    "Buffer",
    "Survives",
    "Traits",
    "check_key",
    "check_prefix",
]
