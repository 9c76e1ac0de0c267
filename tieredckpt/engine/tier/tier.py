"""A tier: a blob store, the steps and chunks that it holds, and its health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.blobs.wrap import Metered
from tieredckpt.concurrency import whole
from tieredckpt.config import TierConfig, TierKind
from tieredckpt.config.kinds import kind_of
from tieredckpt.engine import limits
from tieredckpt.engine.tier.catalog_cache import Catalogued
from tieredckpt.engine.tier.chunk_index import ChunkIndex
from tieredckpt.engine.tier.index_cache import RecentIndexes, packs_of
from tieredckpt.engine.tier.lease import Lease
from tieredckpt.engine.tier.slab_index import SlabIndex
from tieredckpt.engine.tier.steps import DamagedSteps, Held, HeldSteps, Sizes
from tieredckpt.engine.tier.written_packs import WrittenPacks
from tieredckpt.errors import Corrupt, NoSpace, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout, ocdbt
from tieredckpt.format.encoding import CRC32C, PLAIN, Encoding
from tieredckpt.format.manifest import (
    ArrayIndex,
    StepId,
    StepIndex,
    StepRecord,
    StoreMarker,
    decode_marker,
    decode_step,
    encode_marker,
)
from tieredckpt.format.ocdbt import Extent

__all__ = ["MARKER_MAX", "Held", "Tier"]

_log = logging.getLogger("tieredckpt")

MARKER_MAX = 64 << 10
"""Bytes of the largest marker that is read."""

_MANIFEST_MAX = 1 << 20
_BTREE_MAX = 1 << 30
_PARALLEL_READS = 16


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
    held: HeldSteps = field(default_factory=HeldSteps)
    parts: dict[StepId, Held] = field(default_factory=dict)
    """In the RAM of a rank: its parts of steps that are not known to be whole."""
    unread: list[tuple[SlabIndex, Callable[[], bool], list[bytes]]] = field(default_factory=list)
    """Steps retracted from RAM, by their chunks, that another process may still be reading: what tells, and where."""
    damaged: DamagedSteps = field(default_factory=DamagedSteps)
    chunks: ChunkIndex = field(default_factory=ChunkIndex)
    """The dedupe index of a durable tier: every chunk in its packs."""
    duplicates: dict[bytes, list[Extent]] = field(default_factory=dict)
    """Where packs hold a chunk once more, as after a repair: one of them may be damaged."""
    verified: set[bytes] = field(default_factory=set)
    """Chunks of earlier processes that are intact where ``chunks`` has them, read or vouched for by a step."""
    packs: Sizes[str] = field(default_factory=Sizes)
    """Size of every pack, by key; those of the slab are not counted."""
    unlisted: set[str] = field(default_factory=set)
    """Packs of which nobody knows what they hold."""
    catalogued: Catalogued = field(default_factory=Catalogued)
    orphans: dict[str, float] = field(default_factory=dict)
    """When packs that no step was known to use were last changed (epoch seconds)."""
    streamed_to: set[str] = field(default_factory=set)
    """Packs to which a save may refer that is streaming here: they stay, though beside other ranks it holds no lock."""
    pins: dict[StepId, int] = field(default_factory=dict)
    """How many readers each step has."""
    leaving: set[StepId] = field(default_factory=set)
    """Steps that are being retracted: held no more, for whoever looks for another copy."""
    tombstones: set[StepId] = field(default_factory=set)
    """Steps of other tiers that left this one, by policy or by hand: they come back by hand only."""
    stuck: dict[StepId, TieredCkptError] = field(default_factory=dict)
    """Steps that are due here and cannot come for now: what is wrong with their bytes elsewhere."""
    doubtful: set[StepId] = field(default_factory=set)
    """Steps whose last commit failed in a way that may have succeeded all the same."""
    lease: Lease | None = None
    error: Exception | None = None
    note: str = ""
    """What a person should know of it though it works."""
    retry_at: float = 0.0
    guards_packs: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while packs are written and committed, and while dead ones are collected."""
    promotions: int = 0
    """How many promotions to it are under way."""
    promotion_seconds: float | None = None
    """From a save to its commit here, a recent mean; None before the first."""
    used_elsewhere: int | None = None
    """Bytes in use, as whoever manages it has told; None where this process counts them."""
    bandwidth_elsewhere: float | None = None
    pin_elsewhere: Callable[[StepId], AbstractAsyncContextManager[None]] | None = None
    """Keeps a step on it while it is read here, where another process evicts."""
    _failures: int = 0
    index_bytes: Sizes[StepId] = field(default_factory=Sizes)
    indexes: RecentIndexes = field(default_factory=RecentIndexes)
    _packs_of: dict[StepId, frozenset[str]] = field(default_factory=dict)
    _turns: WeakValueDictionary[StepId, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    # -- what it is ---------------------------------------------------------------------------------------

    @property
    def kind(self) -> TierKind[Any]:
        return kind_of(self.config)

    @property
    def shared(self) -> bool:
        """Whether all ranks see it, as every tier but RAM."""
        return "all" in self.kind.scopes

    @property
    def store(self) -> BlobStore:
        """The blob store; `TierUnavailable` while there is none."""
        if self.blobs is None:
            raise TierUnavailable(f"tier {self.name!r} is not available: {self.error or 'it was not opened yet'}")
        return self.blobs

    @property
    def healthy(self) -> bool:
        return self.blobs is not None and self.error is None

    @property
    def responsive(self) -> bool:
        """Whether it answers, as far as its last call tells: nobody waits for a tier whose calls get lost."""
        return getattr(self.blobs, "responsive", True)

    @property
    def answers(self) -> bool:
        """Whether what it holds can be read and deleted: a full tier answers, though it is not healthy."""
        return self.blobs is not None and (self.error is None or isinstance(self.error, NoSpace))

    @property
    def is_unused(self) -> bool:
        """Whether it is RAM of which there is none: it was given back, or went with its machine."""
        return self.kind.in_memory and self.blobs is None and isinstance(self.error, NotFound)

    @property
    def encoding(self) -> Encoding:
        """How chunks are stored here; RAM does not pay for a checksum."""
        return CRC32C if self.ram is None else PLAIN

    @property
    def survives(self) -> Survives:
        return self.blobs.traits.survives if self.blobs is not None else Survives.NOTHING

    @property
    def used(self) -> int:
        """Bytes that the tier's packs, indexes and catalogs take."""
        if self.used_elsewhere is not None:
            return self.used_elsewhere
        packs = self.ram.slab.used if self.ram is not None else self.packs.total
        return packs + self.index_bytes.total + self.catalogued.nbytes

    @property
    def reserved(self) -> int:
        """Bytes of memory that its slab has; 0 without one."""
        return self.ram.slab.reserved if self.ram is not None else 0

    @property
    def capacity(self) -> int | None:
        if self.ram is not None:
            return self.ram.slab.capacity
        return self.config.capacity if isinstance(self.config.capacity, int) else None

    @property
    def write_bandwidth(self) -> float | None:
        """Bytes a second seen lately; None before the first write, and for RAM."""
        own = self.blobs.usage().write_bandwidth if isinstance(self.blobs, Metered) else None
        return self.bandwidth_elsewhere or own

    # -- health -------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> float:
        """Note a failure; returns the seconds until the next try."""
        self.error = error
        delay = min(limits.in_force.last_retry, limits.in_force.first_retry * 2.0**self._failures)
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
            await whole(self._connect())
        try:
            data = await self.store.get(layout.MARKER, limit=MARKER_MAX)
        except NotFound:
            return None
        try:
            return decode_marker(data, self.store.location)
        except Corrupt:
            if await self._never_used():
                return None  # a crash has torn the very first put
            raise

    async def _never_used(self) -> bool:
        """Whether a marker may be there in part, for the store puts in parts and nothing was put after it."""
        if self.store.traits.atomic_put:
            return False
        for prefix in (layout.PACKS, layout.STEPS):
            async for _ in self.store.list(prefix):
                return False
        return True

    async def _connect(self) -> None:
        self.blobs = await self.connect()
        if isinstance(self.blobs, RamStore):
            self.ram = self.blobs
            self.slab_index = SlabIndex(self.ram.slab) if self.ram.slab.writable else None

    async def disconnect(self) -> None:
        """Let go of the blob store, so that the next `open` makes a new one."""
        if self.blobs is not None:
            await self.blobs.close()
        self.blobs = self.marker = self.ram = self.slab_index = None
        self.clear()

    async def mark(self, marker: StoreMarker) -> None:
        """Write the marker of a tier that has none."""
        await self.store.put(layout.MARKER, [encode_marker(marker)])

    def clear(self) -> None:
        """Know nothing of what the tier holds, before that is found out anew."""
        steps = (self.held, self.parts, self.damaged, self.doubtful, self.index_bytes, self.indexes, self._packs_of)
        packs = (self.packs, self.chunks, self.duplicates, self.verified, self.unlisted, self.orphans, self.unread)
        for known in (*steps, *packs, self.catalogued):
            known.clear()

    # -- steps --------------------------------------------------------------------------------------------

    async def read_index(self, step: StepId) -> tuple[bytes, bytes, str]:
        """The manifest of a step, its index nodes and their key. Raises `NotFound`, `Corrupt`, `TierUnavailable`."""
        manifest = await self.store.get(layout.manifest_key(step.step, step.serial), limit=_MANIFEST_MAX)
        root = ocdbt.read_root(manifest)
        if not root.path.startswith(layout.step_folder(step.step, step.serial)):
            raise Corrupt(f"tier {self.name!r}, {step}: the manifest points to {root.path!r}, outside the step")
        # Not the most that any nodes take: others wait for what is said here, and so long is waited for an answer.
        nbytes = max(root.offset + root.length, root.tree_bytes)
        return manifest, await self.store.get(root.path, limit=min(nbytes, _BTREE_MAX)), root.path

    async def load_index(self, step: StepId) -> StepIndex:
        """The index of a step; recent ones are kept. Raises `NotFound`, `Corrupt`, `TierUnavailable`."""
        if not self.has_own(step):
            raise NotFound(f"tier {self.name!r} does not hold {step}")
        found = self.indexes.get(step)
        if found is None:
            try:
                found = await asyncio.to_thread(decode_step, *await self.read_index(step))
                if found.record.id != step:
                    raise Corrupt(f"tier {self.name!r}: the folder of {step} holds {found.record.id}")
            except Corrupt as error:
                if step in self.held and not self.held[step].whole:
                    self.quarantine(step, error)  # as if it had been read at opening
                raise
        self.indexes.remember(step, found)
        return found

    def has_own(self, step: StepId) -> bool:
        """Whether the step lies here, or a rank's part of it."""
        held = self.held.get(step) or self.parts.get(step)
        return held is not None and held.btree_key != ""

    def keeps(self, step: StepId) -> bool:
        """Whether the tier has the step, readable or not, and is not retracting it."""
        return (step in self.held or step in self.damaged) and step not in self.leaving

    def turn(self, step: StepId) -> asyncio.Lock:
        """Held by whoever puts or deletes the step's manifest, or two of them would not know who was last."""
        return self._turns.setdefault(step, asyncio.Lock())

    def set_apart(self) -> None:
        """Count no step as held: what lies here are parts of a rank, and the other ranks' are not known yet."""
        self.parts.update(self.held)
        self.held.clear()

    def agree(self, record: StepRecord) -> None:
        """Count a step as held: all ranks have their parts of it, whose record this is."""
        part = self.parts.pop(record.id, None) or self.held.get(record.id)
        self.held[record.id] = Held(record, part.btree_key if part is not None else "")

    async def packs_of(self, step: StepId) -> frozenset[str]:
        """The packs that a step refers to."""
        found = self._packs_of.get(step)
        if found is None:
            found = self._packs_of[step] = packs_of((await self.load_index(step)).arrays)
        return found

    def know(self, record: StepRecord, arrays: Mapping[str, ArrayIndex], btree_key: str, nbytes: int) -> None:
        """Count a step as held, for its commit has just been put: ``nbytes`` long with its nodes, which the key names.

        A rank's part counts as such.
        """
        step = record.id
        (self.held if record.rank is None else self.parts)[step] = Held(record, btree_key)
        self.damaged.pop(step, None)
        self.doubtful.discard(step)
        self.tombstones.discard(step)
        self.catalogued.forget(step)
        self.index_bytes[step] = nbytes
        self.indexes.remember(step, StepIndex(record, dict(arrays)))
        self._packs_of[step] = packs_of(arrays)
        for key in self._packs_of[step]:
            self.orphans.pop(key, None)

    def doubt(self, step: StepId) -> None:
        """Remember nothing of a step whose commit failed, perhaps after it had happened."""
        self.doubtful.add(step)
        self.indexes.pop(step, None)
        self._packs_of.pop(step, None)

    def drop(self, step: StepId) -> str | None:
        """Know no more of a step whose manifest is gone; returns the key of its index nodes, to be deleted."""
        part = self.parts.pop(step, None)
        held = self.held.pop(step, part)
        self.doubtful.discard(step)
        self.catalogued.forget(step)
        for known in (self.damaged, self.indexes, self.index_bytes, self._packs_of):
            known.pop(step, None)
        return held.btree_key if held is not None else None

    async def probe(self) -> bool:
        """Whether the tier answers and still is what it was, by its marker. Raises as a blob store does."""
        try:
            data = await self.store.get(layout.MARKER, limit=MARKER_MAX)
            return decode_marker(data, self.store.location) == self.marker
        except (Corrupt, NotFound):
            return False

    def quarantine(self, step: StepId, error: TieredCkptError) -> None:
        """Count a step as not held: its commit turned out unreadable."""
        if self.held.pop(step, None) is not None:
            packs = self._packs_of.pop(step, None)
            self.damaged.quarantine(step, error, self.packs if packs is None else packs, exactly=packs is not None)
            self.catalogued.forget(step)
            self.indexes.pop(step, None)

    def has(self, digest: bytes, nbytes: int) -> bool:
        """Whether a pack has a chunk of so many bytes; one that lists it with another length has something else."""
        extent = self.chunks.get(digest)
        return extent is not None and self.encoding.fits(extent.length, nbytes)

    def add_packs(self, written: WrittenPacks) -> None:
        """Know of packs that were just written; for whoever manages the tier, under ``guards_packs``."""
        for key, nbytes in written.sizes.items():
            self.packs[key] = nbytes
            self.unlisted.discard(key)
            self.orphans[key] = time.time()  # until a commit refers to it
        self.chunks.update(written.extents)

    def forget(self, digest: bytes) -> None:
        """Do not refer to a chunk's bytes here any more: they are lost or damaged. Under ``guards_packs``."""
        self.chunks.pop(digest, None)
        self.verified.discard(digest)
