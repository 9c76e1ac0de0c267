"""Reads the catalogs of a tier, which list its packs and steps, so that an opening need not read all of them.

An entry is believed if it agrees with the tier's listing: for a pack, the size (names are given once, and bytes never
change); for a step, the sizes and times of change of its two files. If a store tells no times, no step is believed.
Packs and steps that are not believed are read. So an old, torn or missing catalog costs time, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredckpt.blobs.base import BlobInfo
from tieredckpt.engine.tier.catalog_cache import CatalogFile, Stamp
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.catalog import MAX_CATALOG, Catalog, CatalogStep, decode_catalog
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["Footers", "believed", "read_catalogs", "stamp_of"]

_log = logging.getLogger("tieredckpt")


@dataclass(slots=True)
class Footers:
    """Content of the footers of packs, one after the other."""

    paths: list[str] = field(default_factory=list)
    counts: list[NDArray[Any]] = field(default_factory=list)
    tables: list[NDArray[Any]] = field(default_factory=list)

    def add(self, paths: Sequence[str], counts: NDArray[Any], table: NDArray[Any]) -> None:
        self.paths += paths
        self.counts.append(counts)
        self.tables.append(table)


def stamp_of(btree: str, files: Mapping[str, BlobInfo]) -> Stamp | None:
    """The stamp of a step whose folder has these files; None if they are not enough for one."""
    manifest, nodes = files.get(layout.MANIFEST), files.get(btree)
    if manifest is None or nodes is None or not (manifest.modified and nodes.modified):
        return None
    return Stamp(manifest.size, manifest.modified, btree, nodes.size, nodes.modified)


async def read_catalogs(tier: Tier, store: str, listed: Iterable[BlobInfo]) -> list[tuple[str, Catalog]]:
    """The catalogs that can be read, by file; ``listed`` is what lies in their folder."""
    infos = [info for info in listed if layout.parse_catalog_key(info.key) is not None]
    # Until they are believed they vouch for nothing, and go with the next write.
    tier.steps.catalogued.files.update({info.key: CatalogFile(info.size) for info in infos})
    found: list[tuple[str, Catalog]] = []
    for info in infos:
        try:
            data = await tier.store.get(info.key, limit=min(info.size, MAX_CATALOG))
            catalog = await asyncio.to_thread(decode_catalog, data, info.key)
            if catalog.store != store:
                raise Corrupt(f"{info.key} is of store {catalog.store}")
        except (Corrupt, NotFound, TierUnavailable) as error:
            _log.warning("tier %r: a catalog is not used, and what it lists is read: %s", tier.name, error)
            if isinstance(error, TierUnavailable):
                break  # whether the tier is silent or that file alone, the steps show, after one wait and not many
            continue
        found.append((info.key, catalog))
    return found


def believed(
    tier: Tier, catalogs: Iterable[tuple[str, Catalog]], folders: Mapping[StepId, Mapping[str, BlobInfo]]
) -> tuple[Footers, dict[StepId, tuple[StepRecord, str]]]:
    """Footers, records and node keys from catalogs that agree with ``tier.packs.sizes`` and the files of steps."""
    footers = Footers()
    records: dict[StepId, tuple[StepRecord, str]] = {}
    known = tier.steps.catalogued
    for key, catalog in catalogs:
        sizes = zip(catalog.packs, catalog.sizes.tolist(), strict=True)
        wanted = [tier.packs.sizes.get(pack) == size and pack not in known.packs for pack, size in sizes]
        packs = [pack for pack, good in zip(catalog.packs, wanted, strict=True) if good]
        mask = np.array(wanted, bool)
        counts = catalog.counts.astype(np.int64)
        footers.add(packs, counts[mask], catalog.chunks if mask.all() else catalog.chunks[np.repeat(mask, counts)])
        known.packs.update(packs)
        steps: list[StepId] = []
        for said in catalog.steps:
            step = said.id
            stamp = stamp_of(said.btree, folders.get(step, {}))
            if stamp is None or step in records or stamp != _stamp(said):
                continue
            records[step] = said.record, step.folder + said.btree
            known.stamps[step] = stamp
            steps.append(step)
        known.steps.update(steps)
        listed = len(catalog.packs) + len(catalog.steps)
        known.files[key] = CatalogFile(known.files[key].nbytes, frozenset(packs), frozenset(steps), listed)
    return footers, records


def _stamp(said: CatalogStep) -> Stamp:
    return Stamp(said.manifest_nbytes, said.manifest_modified, said.btree, said.btree_nbytes, said.btree_modified)
