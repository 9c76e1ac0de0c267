"""A tier: a blob store, the steps and chunks that it holds, and its health."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from tieredckpt.blobs.base import ALIGNMENT, BlobStore, Survives
from tieredckpt.blobs.ram import RamStore
from tieredckpt.blobs.wrap import Metered
from tieredckpt.config import TierConfig
from tieredckpt.engine.lease import Lease
from tieredckpt.engine.slab_index import SlabIndex
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout, ocdbt, pack
from tieredckpt.format.manifest import (
    ArrayIndex,
    StepId,
    StepIndex,
    StepRecord,
    StoreMarker,
    decode_marker,
    decode_step,
    encode_marker,
    encode_step,
    find_record,
)
from tieredckpt.format.ocdbt import Extent
from tieredckpt.units import format_size

__all__ = ["Held", "Tier", "unique_extents"]

_log = logging.getLogger("tieredckpt")

_SMALL = 64 << 10
_MANIFEST_MAX = 1 << 20
_BTREE_MAX = 1 << 32
_INDEXES_KEPT = 8
_PARALLEL_READS = 16
_FIRST_RETRY = 0.5
_LAST_RETRY = 60.0


@dataclass(frozen=True, slots=True)
class Held:
    """A step as one tier holds it."""

    record: StepRecord
    btree_key: str


@dataclass
class Tier:
    """One rung of the ladder. All methods run on the engine's loop.

    ``connect`` makes the blob store; it may fail, and be called again.
    """

    name: str
    index: int
    config: TierConfig
    connect: Callable[[], Awaitable[BlobStore]]
    blobs: BlobStore | None = None
    marker: StoreMarker | None = None
    """Set once the tier is open and its content known."""
    ram: RamStore | None = None
    slab_index: SlabIndex | None = None
    held: dict[StepId, Held] = field(default_factory=dict)
    damaged: dict[StepId, TieredCkptError] = field(default_factory=dict)
    """Steps whose commit is there and cannot be read."""
    chunks: dict[bytes, Extent] = field(default_factory=dict)
    """The dedupe index of a durable tier: every chunk in its packs."""
    packs: dict[str, int] = field(default_factory=dict)
    """Size of every pack, by key; those of the slab are not counted."""
    orphans: dict[str, float] = field(default_factory=dict)
    """When packs that no step was known to use were last changed (epoch seconds)."""
    pins: dict[StepId, int] = field(default_factory=dict)
    lease: Lease | None = None
    error: Exception | None = None
    retry_at: float = 0.0
    guards_packs: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while packs are written and committed, and while dead ones are collected."""
    _failures: int = 0
    _index_bytes: dict[StepId, int] = field(default_factory=dict)
    _indexes: OrderedDict[StepId, StepIndex] = field(default_factory=OrderedDict)
    _packs_of: dict[StepId, frozenset[str]] = field(default_factory=dict)

    # -- what it is ---------------------------------------------------------------------------------------

    @property
    def store(self) -> BlobStore:
        """The blob store; `TierUnavailable` while there is none."""
        if self.blobs is None:
            raise TierUnavailable(
                f"tier {self.name!r} is not available: {self.error or 'it was not opened yet'}"
            )
        return self.blobs

    @property
    def healthy(self) -> bool:
        return self.blobs is not None and self.error is None

    @property
    def checksum(self) -> bool:
        """Whether chunks carry zarr's CRC-32C here; RAM does not pay for it."""
        return self.ram is None

    @property
    def survives(self) -> Survives:
        return self.blobs.traits.survives if self.blobs is not None else Survives.NOTHING

    @property
    def used(self) -> int:
        """Bytes that the tier's packs and indexes take."""
        packs = self.ram.slab.used if self.ram is not None else sum(self.packs.values())
        return packs + sum(self._index_bytes.values())

    @property
    def capacity(self) -> int | None:
        if self.ram is not None:
            return self.ram.slab.capacity
        return self.config.capacity if isinstance(self.config.capacity, int) else None

    @property
    def write_bandwidth(self) -> float | None:
        """Bytes a second seen lately; None before the first write, and for RAM."""
        return self.blobs.usage().write_bandwidth if isinstance(self.blobs, Metered) else None

    # -- health -------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> float:
        """Note a failure; returns the seconds until the next try."""
        self.error = error
        delay = min(_LAST_RETRY, _FIRST_RETRY * 2.0**self._failures)
        self._failures += 1
        self.retry_at = time.monotonic() + delay
        return delay

    def recover(self) -> bool:
        """Note a success; True when the tier had failed before."""
        failed, self.error, self._failures = self.error is not None, None, 0
        return failed

    # -- opening ------------------------------------------------------------------------------------------

    async def open(self) -> StoreMarker | None:
        """Connect and read the marker; None when the tier is empty."""
        if self.blobs is None:
            self.blobs = await self.connect()
            if isinstance(self.blobs, RamStore):
                self.ram = self.blobs
                self.slab_index = SlabIndex(self.ram.slab) if self.ram.slab.writable else None
        try:
            data = await self.store.get(layout.MARKER, limit=_SMALL)
        except NotFound:
            return None
        return decode_marker(data, self.store.location)

    async def mark(self, marker: StoreMarker) -> None:
        """Write the marker of a tier that has none."""
        await self.store.put(layout.MARKER, [encode_marker(marker)])

    async def wipe(self) -> None:
        """Delete every step: those of another store that used the same RAM folder."""
        async for info in self.store.list(layout.STEPS):
            await self.store.delete(info.key)

    async def load(self) -> None:
        """Find what the tier holds: steps by their manifests, chunks by the footers of the packs."""
        self.held.clear()
        self.damaged.clear()
        self.packs.clear()
        self.chunks.clear()
        self.orphans.clear()
        manifests: dict[StepId, str] = {}
        async for info in self.store.list(layout.STEPS):
            folder, _, name = info.key.rpartition("/")
            parsed = layout.parse_step_folder(folder + "/")
            if parsed is None:
                continue
            step = StepId(serial=parsed[1], step=parsed[0])
            self._index_bytes[step] = self._index_bytes.get(step, 0) + info.size
            if name == "manifest.ocdbt":
                manifests[step] = info.key
        limit = asyncio.Semaphore(_PARALLEL_READS)
        async with asyncio.TaskGroup() as group:
            for step in manifests:
                group.create_task(self._load_step(step, limit))
        for step in set(self._index_bytes) - set(manifests):
            del self._index_bytes[step]
        if self.slab_index is not None:
            await self._claim_extents()
        elif self.ram is None:
            await self._load_packs(limit)

    async def _load_step(self, step: StepId, limit: asyncio.Semaphore) -> None:
        async with limit:
            try:
                manifest, btree, btree_key = await self._read_index(step)
                record = await asyncio.to_thread(find_record, manifest, btree, btree_key)
                if record.id != step:
                    raise Corrupt(f"tier {self.name!r}: the folder of {step} holds {record.id}")
            except (Corrupt, NotFound) as error:
                self.damaged[step] = error
                _log.warning("tier %r: %s cannot be read there: %s", self.name, step, error)
            else:
                self.held[step] = Held(record, btree_key)

    async def _read_index(self, step: StepId) -> tuple[bytes, bytes, str]:
        manifest = await self.store.get(layout.manifest_key(step.step, step.serial), limit=_MANIFEST_MAX)
        btree_key = ocdbt.read_root(manifest).path
        if not btree_key.startswith(layout.step_folder(step.step, step.serial)):
            raise Corrupt(
                f"tier {self.name!r}, {step}: the manifest points to {btree_key!r}, outside the step"
            )
        size = (await self.store.stat(btree_key)).size
        if size > _BTREE_MAX:
            raise Corrupt(f"tier {self.name!r}, {step}: an index of {format_size(size)} cannot be right")
        return manifest, await self.store.get(btree_key, limit=size), btree_key

    async def _claim_extents(self) -> None:
        assert self.ram is not None
        for step in sorted(self.held):
            index = await self.load_index(step)
            if not self.adopt(index):
                error = Corrupt(f"tier {self.name!r}: the extents of {step} do not fit the slab")
                self.damaged[step] = error
                del self.held[step]
        for step in self.damaged:
            self.ram.retire(layout.manifest_key(step.step, step.serial))
            _log.warning("tier %r: %s was dropped from RAM, it cannot be read", self.name, step)
        self.damaged.clear()

    def adopt(self, index: StepIndex) -> bool:
        """Count the step's use of its chunks in the slab; False, and nothing counted, if they do not fit."""
        assert self.slab_index is not None
        assert self.ram is not None
        taken: list[bytes] = []
        for digest, extent in unique_extents(index.arrays).items():
            fits = extent.path == self.ram.slab_key and self.slab_index.adopt(
                digest, extent.offset, extent.length
            )
            if not fits:
                self.slab_index.drop(taken)
                return False
            taken.append(digest)
        return True

    async def _load_packs(self, limit: asyncio.Semaphore) -> None:
        async def read_footer(key: str, size: int) -> None:
            async with limit:
                try:
                    entries = await self._pack_entries(key, size)
                except (Corrupt, NotFound) as error:
                    _log.warning("tier %r: pack %s has no readable footer: %s", self.name, key, error)
                    return
            for entry in entries:
                self.chunks[entry.digest] = Extent(key, entry.offset, entry.length)

        async with asyncio.TaskGroup() as group:
            async for info in self.store.list(layout.PACKS):
                if layout.parse_pack_key(info.key) is None:
                    continue
                self.packs[info.key] = info.size
                self.orphans[info.key] = info.modified
                group.create_task(read_footer(info.key, info.size))

    async def _pack_entries(self, key: str, size: int) -> list[pack.PackEntry]:
        tail = bytearray(min(size, ALIGNMENT))
        await self.store.get_into(key, size - len(tail), memoryview(tail))
        offset, length = pack.footer_range(bytes(tail), size)
        footer = bytearray(length)
        await self.store.get_into(key, offset, memoryview(footer))
        return pack.decode_footer(bytes(footer), size)

    # -- steps --------------------------------------------------------------------------------------------

    async def load_index(self, step: StepId) -> StepIndex:
        """The index of a step; recent ones are kept. Raises `NotFound`, `Corrupt`, `TierUnavailable`."""
        if step not in self.held:
            raise NotFound(f"tier {self.name!r} does not hold {step}")
        found = self._indexes.get(step)
        if found is None:
            manifest, btree, btree_key = await self._read_index(step)
            found = await asyncio.to_thread(decode_step, manifest, btree, btree_key)
            if found.record.id != step:
                raise Corrupt(f"tier {self.name!r}: the folder of {step} holds {found.record.id}")
        self.remember(step, found)
        return found

    def remember(self, step: StepId, index: StepIndex) -> None:
        self._indexes[step] = index
        self._indexes.move_to_end(step)
        while len(self._indexes) > _INDEXES_KEPT:
            self._indexes.popitem(last=False)

    async def packs_of(self, step: StepId) -> frozenset[str]:
        """The packs that a step refers to."""
        found = self._packs_of.get(step)
        if found is None:
            extents = unique_extents((await self.load_index(step)).arrays).values()
            found = self._packs_of[step] = frozenset(extent.path for extent in extents)
        return found

    async def commit(self, record: StepRecord, arrays: Mapping[str, ArrayIndex]) -> None:
        """Write the index of a step whose packs are written, its manifest last.

        A step that is committed already is replaced: its new nodes lie beside the old ones until the manifest
        points to them.
        """
        step = record.id
        before = self.held.get(step)
        folder = layout.step_folder(step.step, step.serial)
        btree_key = layout.btree_key(step.step, step.serial)
        if before is not None or step in self.damaged:
            btree_key = f"{folder}btree-{secrets.token_hex(4)}"
        index = await asyncio.to_thread(
            encode_step, record, arrays, btree_path=btree_key, checksum=self.checksum
        )
        await self.store.put(btree_key, [index.btree])
        await self.store.put(layout.manifest_key(step.step, step.serial), [index.manifest])
        self.held[step] = Held(record, btree_key)
        self.damaged.pop(step, None)
        self._index_bytes[step] = len(index.btree) + len(index.manifest)
        self.remember(step, StepIndex(record, dict(arrays)))
        self._packs_of[step] = frozenset(extent.path for extent in unique_extents(arrays).values())
        for key in self._packs_of[step]:
            self.orphans.pop(key, None)
        if before is not None:
            await self.store.delete(before.btree_key)

    async def retract(self, step: StepId) -> None:
        """Take a step's commit back, the manifest first. Its packs are left to the collector."""
        await self.store.delete(layout.manifest_key(step.step, step.serial))
        held = self.held.pop(step, None)
        self.damaged.pop(step, None)
        self._indexes.pop(step, None)
        self._index_bytes.pop(step, None)
        self._packs_of.pop(step, None)
        if held is not None:
            await self.store.delete(held.btree_key)

    async def probe(self) -> None:
        """Find out whether the tier answers, by reading its marker. Raises as a blob store does."""
        await self.store.get(layout.MARKER, limit=_SMALL)

    def condemn(self, step: StepId, error: TieredCkptError) -> None:
        """Count a step as not held: its commit turned out unreadable."""
        if self.held.pop(step, None) is not None:
            self.damaged[step] = error
            self._indexes.pop(step, None)

    def forget(self, digest: bytes) -> None:
        """Do not refer to a chunk's bytes here any more: they are lost or damaged."""
        self.chunks.pop(digest, None)


def unique_extents(arrays: Mapping[str, ArrayIndex]) -> dict[bytes, Extent]:
    """The extents of a step by digest; inline chunks have none."""
    return {
        chunk.digest: chunk.where
        for array in arrays.values()
        for chunk in array.chunks
        if isinstance(chunk.where, Extent)
    }
