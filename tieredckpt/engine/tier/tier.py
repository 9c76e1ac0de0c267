"""A tier: a blob store, the steps and packs that it holds, and its health."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.concurrency import whole
from tieredckpt.config import TierConfig
from tieredckpt.config.kinds import kind_of
from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.health import Health
from tieredckpt.engine.tier.lease import Lease
from tieredckpt.engine.tier.packs import Packs
from tieredckpt.engine.tier.slab_index import SlabIndex
from tieredckpt.engine.tier.steps import Steps
from tieredckpt.errors import NoSpace, TierUnavailable
from tieredckpt.format.encoding import PLAIN, Encoding
from tieredckpt.format.manifest import StepId, StoreMarker

__all__ = ["Remote", "Tier"]


@dataclass
class Remote:
    """What another process, which manages a tier, tells of it; nothing where this one does."""

    used: int | None = None
    """Bytes in use."""
    bandwidth: float | None = None
    """Bytes a second that it saw when it wrote."""
    pin: Callable[[StepId], AbstractAsyncContextManager[None]] | None = None
    """Keeps a step on the tier while it is read here."""


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
    health: Health = field(default_factory=Health)
    steps: Steps = field(default_factory=Steps)
    packs: Packs = field(default_factory=Packs)
    """Of RAM there are none."""
    ram: RamStore | None = None
    slab_index: SlabIndex | None = None
    unread: list[tuple[SlabIndex, Callable[[], bool], list[bytes]]] = field(default_factory=list)
    """Steps retracted from RAM, by their chunks, that another process may still be reading: what tells, and where."""
    lease: Lease | None = None
    remote: Remote = field(default_factory=Remote)

    @property
    def shared(self) -> bool:
        """Whether all ranks see it, as every tier but RAM."""
        return "all" in kind_of(self.config).scopes

    @property
    def store(self) -> BlobStore:
        """The blob store; `TierUnavailable` while there is none."""
        if self.blobs is None:
            why = self.health.error or "it was not opened yet"
            raise TierUnavailable(f"tier {self.name!r} is not available: {why}")
        return self.blobs

    @property
    def healthy(self) -> bool:
        return self.blobs is not None and self.health.error is None

    @property
    def responsive(self) -> bool:
        """Whether it answers, as far as its last call tells: nobody waits for a tier whose calls get lost."""
        return getattr(self.blobs, "responsive", True)

    @property
    def answers(self) -> bool:
        """Whether what it holds can be read and deleted: a full tier answers, though it is not healthy."""
        return self.blobs is not None and (self.health.error is None or isinstance(self.health.error, NoSpace))

    @property
    def encoding(self) -> Encoding:
        """How chunks are stored here; RAM does not pay for a checksum."""
        return self.packs.encoding if self.ram is None else PLAIN

    @property
    def survives(self) -> Survives:
        return self.blobs.traits.survives if self.blobs is not None else Survives.NOTHING

    @property
    def used(self) -> int:
        """Bytes that the tier's packs, indexes and catalogs take."""
        if self.remote.used is not None:
            return self.remote.used
        packs = self.ram.slab.used if self.ram is not None else self.packs.sizes.total
        return packs + self.steps.indexes.nbytes.total + self.steps.catalogued.nbytes

    @property
    def capacity(self) -> int | None:
        if self.ram is not None:
            return self.ram.slab.capacity
        return self.config.capacity if isinstance(self.config.capacity, int) else None

    async def open(self) -> StoreMarker | None:
        """Connect and read the marker; None when the tier is empty."""
        if self.blobs is None:
            await whole(self._connect())
        return await marker_file.read_unless_empty(self.store)

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

    def clear(self) -> None:
        """Know nothing of what the tier holds, before that is found out anew."""
        self.steps.clear()
        self.packs.clear()
        self.unread.clear()
