"""A tier: a blob store, the steps and packs that it holds, and its health."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.codecs import CODECS, encoding_of
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.concurrency import whole
from tieredckpt.config import TierConfig
from tieredckpt.config.kinds import kind_of
from tieredckpt.engine import limits
from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.lease import Lease
from tieredckpt.engine.tier.packs import Packs
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.steps import IndeterminateDelete, Steps
from tieredckpt.errors import Conflict, NoSpace, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.manifest import StepId
from tieredckpt.format.marker import StoreMarker
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.rounding import Bound

__all__ = ["Health", "Remote", "RoundedChunk", "Tier", "ToRound"]


class ToRound(NamedTuple):
    """A chunk whose values are to be rounded; arrays of other dtypes may have the same bytes."""

    digest: bytes
    dtype: np.dtype[Any]
    bound: Bound


class RoundedChunk(NamedTuple):
    """Result of rounding a chunk."""

    digest: bytes
    worst: float
    """The largest error that was found; see `tieredckpt.format.rounding.round_values`."""
    exact: bool = False
    """Whether it was left as it was."""


@dataclass
class Health:
    """Last failure of a tier, until an operation succeeds."""

    error: Exception | None = None
    answered: bool = False
    """Whether the tier has answered since, and what it holds is known, though nothing has succeeded yet."""
    note: str = ""
    """Note for people about a tier that works."""
    retry_at: float = 0.0
    """Not to be tried before, on the monotonic clock."""
    unavailable_here: bool = False
    """Whether a call found a tier that another process manages unavailable, since it was opened here."""
    failed_here: int = 0
    """How often a call failed here of a tier that another process manages."""
    freed: int = 0
    """Bytes of older steps that have left a full device since it took a new step."""
    lacked: int = 0
    """The most bytes for which it had no room since then."""
    _failures: int = 0

    def fail(self, error: Exception) -> float:
        """Note a failure; returns the seconds until the next try."""
        self.error, self.answered = error, False
        delay = limits.backoff(limits.in_force.first_retry, limits.in_force.last_retry, self._failures)
        self._failures += 1
        self.retry_at = time.monotonic() + delay
        return delay

    def recover(self) -> bool:
        """Note a success; True when the tier had failed before."""
        failed, self.error, self._failures = self.error is not None, None, 0
        return failed

    def fail_here(self, error: Exception) -> None:
        """Note a failure here of a tier that another process manages."""
        self.unavailable_here |= isinstance(error, TierUnavailable)
        self.failed_here += 1

    def took_step(self) -> None:
        """Note that the device took a new step, after whatever evictions."""
        self.freed = self.lacked = 0


@dataclass
class Remote:
    """Figures of a tier that another process manages and reports; empty where this process manages it."""

    used: int | None = None
    """Bytes in use."""
    bandwidth: float | None = None
    """Bytes a second of its recent writes."""
    being_read: Callable[[StepId], AbstractAsyncContextManager[None]] | None = None
    """Keeps a step on the tier while it is read here."""


@dataclass
class Tier:
    """One tier of a store. All methods run on the engine's loop.

    ``connect`` makes the blob store; it may fail, and be called again. Three questions are not the same: whether the
    tier is RAM (``in_memory``), whether that RAM is connected (``ram`` is not None), and whether all ranks see the tier
    (``shared``).
    """

    name: str
    index: int
    """Position among the tiers of its `State`, nearest first."""
    config: TierConfig
    connect: Callable[[], Awaitable[BlobStore]]
    blobs: BlobStore | None = None
    marker: StoreMarker | None = None
    """Set once the tier is open and its content known."""
    health: Health = field(default_factory=Health)
    steps: Steps = field(default_factory=Steps)
    packs: Packs = field(default_factory=Packs)
    """Packs; none in RAM."""
    ram: Ram | None = None
    """RAM that is connected; None for every other tier."""
    lease: Lease | None = None
    remote: Remote = field(default_factory=Remote)
    place: int = 0
    """Position in the configuration."""
    rounded: dict[ToRound, RoundedChunk] = field(default_factory=dict)
    """Results of rounding the chunks of the last step that was derived for the tier."""

    def __post_init__(self) -> None:
        self.packs.encoding = CODECS[self.config.codec]

    async def confirm_lease(self, *, deleting: bool = False) -> None:
        """Raise where others may have been there, as `check_known` and `Lease.confirm`."""
        if self.lease is not None:
            await self.lease.confirm(deleting=deleting)
        self.check_known()

    @property
    def outdated(self) -> bool:
        """Whether it is to be read before it is changed, as after a failure: others may have been there."""
        return self.marker is None and not self.in_memory

    @property
    def comes_back(self) -> bool:
        """Whether it is `outdated`, and is being opened again just now."""
        return self.outdated and self.health.error is not None and time.monotonic() >= self.health.retry_at

    def check_known(self) -> None:
        """Raise `TierUnavailable` if it is `outdated`."""
        if self.outdated:
            raise TierUnavailable(
                f"tier {self.name!r} is not changed before it is read again, for others may have been there: "
                f"{self.health.error or 'it was not read yet'}; try again when it works"
            )

    async def now(self) -> float:
        """The time by the clock that its files are stamped with, or a little earlier (epoch seconds)."""
        return time.time() if self.lease is None else await self.lease.now()

    @property
    def lacks_lease(self) -> bool:
        """Whether a full device had no room for the lease: steps may leave without it, but no packs."""
        return self.lease is not None and not self.lease.was_taken

    @property
    def derived(self) -> bool:
        """Whether it holds derived steps alone, and no exact one; such a tier is not among `State.tiers`."""
        return bool(self.config.lossy)

    @property
    def format_version(self) -> int:
        """Format version for the marker: it says whether the tier has derived steps or may hold compressed chunks."""
        if self.derived:
            return layout.DERIVED_VERSION
        return layout.ENCODED_VERSION if self.packs.compressed or not self.packs.encoding.raw else layout.FORMAT_VERSION

    @property
    def in_memory(self) -> bool:
        """Whether it is RAM, connected or not."""
        return kind_of(self.config).in_memory

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
        """Whether it answers, judged by its last call; no save waits for a tier that does not."""
        return getattr(self.blobs, "responsive", True)

    @property
    def works(self) -> bool:
        """Whether it is healthy and `responsive`: what may come there at once."""
        return self.healthy and self.responsive

    @property
    def hanging(self) -> int:
        """How many abandoned calls still hang in the device."""
        return getattr(self.blobs, "hanging", 0)

    @property
    def answers(self) -> bool:
        """Whether what it holds can be read and deleted: a full tier answers, though it is not healthy."""
        error, answered = self.health.error, self.health.answered
        return self.blobs is not None and (error is None or answered or isinstance(error, NoSpace))

    @property
    def never_read(self) -> bool:
        """Whether it failed before it told what it holds."""
        return self.marker is None and self.health.error is not None

    @property
    def chunks(self) -> Packs | Ram:
        """The chunk store of the tier: RAM or packs, for questions that both answer."""
        return self.packs if self.ram is None else self.ram

    def encoding_of(self, extent: Extent, nbytes: int) -> Encoding:
        """How a chunk of so many bytes is stored at an extent."""
        return encoding_of(extent.length, nbytes) if self.ram is None else self.ram.encoding

    @property
    def survives(self) -> Survives:
        return self.blobs.traits.survives if self.blobs is not None else Survives.NOTHING

    @property
    def used(self) -> int:
        """Bytes that the tier's packs, indexes and catalogs take."""
        if self.remote.used is not None:
            return self.remote.used
        return self.chunks.used + self.steps.indexes.nbytes.total + self.steps.catalogued.nbytes

    @property
    def capacity(self) -> int | None:
        if self.ram is not None:
            return self.ram.slab.capacity
        return self.config.capacity if isinstance(self.config.capacity, int) else None

    async def open(self) -> StoreMarker | None:
        """Connect and read the marker; None when the tier is empty."""
        if self.blobs is None:
            await whole(self._connect())
        marker = await marker_file.read_unless_empty(self.store)
        if marker is not None and (marker.format_version == layout.DERIVED_VERSION) != self.derived:
            raise self.of_other_kind()
        return marker

    def of_other_kind(self) -> Conflict:
        """Error for exact steps in place of derived ones, or the reverse."""
        return Conflict(
            f"tier {self.name!r} at {self.store.location} "
            + ("holds exact steps where derived ones belong" if self.derived else "is a root of derived steps")
            + "; a tier with `lossy` rules has its root in the folder `derived` of its place: let it name the"
            " folder above, and an exact tier another one"
        )

    async def _connect(self) -> None:
        self.blobs = await self.connect()
        self.steps.commits_come_late = self.blobs.traits.remote
        if isinstance(self.blobs, RamStore):
            self.ram = Ram(self.blobs)

    async def disconnect(self) -> None:
        """Drop the blob store; the next `open` makes a new one."""
        if self.blobs is not None:
            await self.blobs.close()
        self.blobs = self.marker = self.ram = None
        self.clear()

    def quarantine(self, step: StepId, error: TieredCkptError) -> None:
        """Count a step as not held, for its commit turned out unreadable."""
        self.steps.quarantine(step, error, self.packs.sizes)

    def clear(self) -> None:
        """Forget the content of the tier."""
        self.exchange(Steps(), Packs())

    def exchange(self, steps: Steps, packs: Packs) -> None:
        """Replace what is known of the content of the tier by what was read into tables of its own."""
        self.steps.exchange(steps)
        self.packs.exchange(packs)
        for step, lacking in tuple(self.steps.impaired.items()):
            self.packs.doubt(each for each in lacking if isinstance(each, bytes))
            problem = self.steps.damaged.get(step)
            held = problem.held if isinstance(problem, IndeterminateDelete) else self.steps.held.get(step)
            was_read = held is None or held.whole
            self.steps.mend(step, (lacking & packs.sizes.keys()) | ({step.manifest_key} if was_read else set()))
