"""The cost of a long history: opening a directory that holds many steps and chunks, and saving one more.

The history is written as the library writes it, but without the chunks' bytes: packs are holes with a footer. Opening
and saving do not read chunks.

``python -m tieredckpt.bench.catalog`` reads a `CatalogSpec` from stdin as JSON, and writes its figures to a file.
"""

from __future__ import annotations

import gc
import os
import secrets
import statistics
import time
from pathlib import Path

import msgspec
import numpy as np

from tieredckpt.bench.isolate import IsolatedSpec, measure_what_is_asked
from tieredckpt.bench.workloads import change
from tieredckpt.config import PosixTier, RamTier, StoreConfig
from tieredckpt.format import layout
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepIndex, decode_step, encode_step
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.pack import PackEntry, encode_footer
from tieredckpt.policy.base import Retention, parse
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncStore

__all__ = ["CatalogSpec", "measure_catalog"]

_CHUNK = 8192
"""Bytes; more than what lies in the index itself."""
_DISK = "disk"


class CatalogSpec(IsolatedSpec, frozen=True, kw_only=True):
    """Length of the history."""

    steps: int
    chunks: int
    """Chunks of each step; no two are equal."""


def measure_catalog(spec: CatalogSpec) -> dict[str, float]:
    """Seconds to open a directory with that history, and the extra time of a save to it over one to an empty directory.

    The first opening knows nothing of the directory and reads all of it; later ones do not.
    """
    tree = {f"array{number:04}": np.full(_CHUNK, number % 251, dtype=np.uint8) for number in range(spec.chunks)}
    large, empty = (_config(spec, name) for name in ("large", "empty"))
    with CheckpointStore.open(large).sync() as store:
        store.save(0, tree).reached(_DISK)
    _lengthen(Path(spec.folder, "large"), spec.steps)
    first_opened, long = _open(large)
    opened: list[float] = []
    for _ in range(spec.repeats):
        long.close()
        seconds, long = _open(large)
        opened.append(seconds)
    took: dict[str, list[float]] = {"large": [], "empty": []}
    try:
        with CheckpointStore.open(empty).sync() as short:
            for step in range(spec.steps + 1, spec.steps + spec.repeats + 3):
                for name, store in (("large", long), ("empty", short)):
                    change(tree, list(tree))
                    begin = time.perf_counter()
                    store.save(step, tree).reached(_DISK)
                    took[name].append(time.perf_counter() - begin)
    finally:
        long.close()
    first, later = took["large"][1:], took["empty"][1:]
    return {
        "open_large_s": statistics.median(opened),
        "open_large_first_s": first_opened,
        "save_large_extra_s": max(0.0, statistics.median(first) - statistics.median(later)),
        "save_empty_s": statistics.median(later),
    }


def _open(config: StoreConfig) -> tuple[float, SyncStore]:
    gc.collect()  # else the garbage of the store before would be collected meanwhile
    begin = time.perf_counter()
    store = CheckpointStore.open(config).sync()
    store.__enter__()
    return time.perf_counter() - begin, store


def _config(spec: CatalogSpec, name: str) -> StoreConfig:
    ram = RamTier(name="ram", path=Path(spec.shared, name), on_close="release")
    disk = PosixTier(name=_DISK, path=Path(spec.folder, name), retain=parse(Retention, "all"))
    return StoreConfig(tiers=(ram, disk))


def _lengthen(root: Path, steps: int) -> None:
    """Add saves to a directory that holds one step, each with chunks of its own."""
    first = _only_step(root)
    for serial in range(2, steps + 1):
        key = layout.pack_key(layout.new_pack_id())
        arrays: dict[str, ArrayIndex] = {}
        entries: list[PackEntry] = []
        end = 0
        for name, array in first.arrays.items():
            entry = PackEntry(secrets.token_bytes(16), end, _CHUNK + CRC32C.overhead)
            entries.append(entry)
            chunk = Chunk(entry.digest, Extent(key, entry.offset, entry.length))
            arrays[name] = ArrayIndex(array.grid, array.dtype, [chunk])
            end += CRC32C.stored_size(_CHUNK)
        _write_hole(root / key, end, encode_footer(entries, end))
        record = msgspec.structs.replace(first.record, step=serial - 1, serial=serial, line=((1, serial),))
        btree_key = layout.btree_key(record.step, serial)
        index = encode_step(record, arrays, btree_path=btree_key, encoding=CRC32C)
        (root / btree_key).parent.mkdir()
        (root / btree_key).write_bytes(index.btree)
        (root / layout.manifest_key(record.step, serial)).write_bytes(index.manifest)


def _only_step(root: Path) -> StepIndex:
    key = layout.btree_key(0, 1)
    return decode_step((root / layout.manifest_key(0, 1)).read_bytes(), (root / key).read_bytes(), key)


def _write_hole(path: Path, end: int, footer: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.pwrite(fd, footer, end)
    finally:
        os.close(fd)


if __name__ == "__main__":
    measure_what_is_asked(CatalogSpec, measure_catalog)
