"""Where the bytes of a step come from: chunk by chunk, from the nearest tier that has them intact."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.locks import let_go
from tieredckpt.blobs.settle import in_thread
from tieredckpt.blobs.slab import aligned
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.digest import digest_array
from tieredckpt.format.manifest import Chunk, StepId, StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["Damage", "SilentSource", "StepSource", "pinned"]

_log = logging.getLogger("tieredckpt")

Bytes = npt.NDArray[np.uint8]


class SilentSource(TierUnavailable):
    """No tier that answers has the bytes intact, and one that does not answer may have them."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk that a tier should have had: which, where, and what happened instead."""

    tier: Tier
    digest: bytes
    key: str
    error: TieredCkptError


@asynccontextmanager
async def pinned(tier: Tier, step: StepId) -> AsyncIterator[None]:
    """Keep a step on a tier while it is read from there, by this process or beside another."""
    tier.pins[step] = tier.pins.get(step, 0) + 1
    fd = -1
    try:
        if tier.ram is not None:
            fd = tier.ram.share(layout.manifest_key(step.step, step.serial))
        yield
    finally:
        if fd >= 0:
            let_go(fd)
        tier.pins[step] -= 1
        if not tier.pins[step]:
            del tier.pins[step]


@dataclass
class StepSource:
    """Reads one step from the tiers that hold it. Use `open`; the step is pinned on every tier it looks at."""

    state: State
    step: StepId
    tier: Tier
    """The nearest tier with a readable index."""
    index: StepIndex
    damage: list[Damage] = field(default_factory=list)
    unreadable: list[tuple[Tier, TieredCkptError]] = field(default_factory=list)
    """Tiers whose index of the step could not be read."""
    silence: TierUnavailable | None = None
    """Why a chunk could not be read, from a tier that may have it intact."""
    progress: Callable[[int], None] | None = None
    """Told the bytes of each part that was read; from any thread."""
    _indexes: dict[str, StepIndex] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def open(cls, state: State, step: StepId, *, only: Tier | None = None) -> AsyncIterator[StepSource]:
        """The step, from the nearest tier whose index of it can be read.

        Raises:
            NotFound: no tier holds it.
            Corrupt, TierUnavailable: every tier that should hold it failed; the last error.
        """
        unreadable: list[tuple[Tier, TieredCkptError]] = []
        for tier in [only] if only is not None else state.holders(step):
            if step in tier.leaving:  # nobody asks for pins any more
                continue
            async with AsyncExitStack() as stack:
                try:
                    await stack.enter_async_context(pinned(tier, step))
                    index = await tier.load_index(step)
                except (Corrupt, NotFound, TierUnavailable) as error:
                    _log.warning("%s cannot be opened on tier %r: %s", step, tier.name, error)
                    unreadable.append((tier, error))
                    _report_silent(state, tier, error)
                    continue
                yield cls(state, step, tier, index, unreadable=unreadable, _indexes={tier.name: index})
                return
        for tier, problem in unreadable:
            if isinstance(problem, TierUnavailable):
                raise SilentSource(
                    f"{step} cannot be read while tier {tier.name!r} does not answer: {problem}"
                ) from problem
        if unreadable:
            raise unreadable[-1][1]
        raise NotFound(f"no tier holds {step}")

    async def candidates(self, key: str, ordinal: int, digest: bytes) -> AsyncIterator[tuple[Tier, Extent | bytes]]:
        """Every place that should have a chunk: where the indexes of the step say, then any that has the digest."""
        tried: set[tuple[str, Extent]] = set()
        holders = [self.tier, *(tier for tier in self.state.holders(self.step) if tier is not self.tier)]
        for tier in holders:
            try:
                index = await self._index_on(tier)
            except TieredCkptError as error:
                self.unreadable.append((tier, error))
                _report_silent(self.state, tier, error)
                continue
            chunks = index.arrays[key].chunks if key in index.arrays else []
            chunk = chunks[ordinal] if ordinal < len(chunks) else None
            if chunk is not None and chunk.digest == digest:
                if isinstance(chunk.where, Extent):
                    tried.add((tier.name, chunk.where))
                yield tier, chunk.where
        for tier in self.state.tiers:
            found = [extent for extent in (tier.chunks.get(digest), *tier.spares.get(digest, ())) if extent is not None]
            for extent in found:
                if (tier.name, extent) not in tried and tier.blobs is not None and extent.path in tier.packs:
                    yield tier, extent  # of another step, or of this one after a repair

    async def _index_on(self, tier: Tier) -> StepIndex:
        found = self._indexes.get(tier.name)
        if found is None:
            found = self._indexes[tier.name] = await tier.load_index(self.step)
        return found

    async def read(self, key: str, ordinal: int, memory: Bytes, *, bad: Tier | None = None) -> Tier:
        """Fill ``memory`` with a chunk's bytes, verified, from the nearest tier that has them.

        Args:
            key: of the array.
            ordinal: of the chunk in its grid.
            memory: page-aligned, at least the chunk's size rounded up to pages.
            bad: a tier that was found not to have it where its index of the step says.

        Raises:
            Corrupt: no tier has the chunk intact; the message names the array.
            SilentSource: no tier that answers has it intact, and there is one that does not answer.
        """
        chunk = self.index.arrays[key].chunks[ordinal]
        nbytes = self.index.arrays[key].grid.cell_nbytes
        last: TieredCkptError | None = None
        silent = [tier.name for tier in self.state.tiers if tier.marker is None and tier.error is not None]
        async for tier, where in self.candidates(key, ordinal, chunk.digest):
            if tier is bad and where == self._indexes[bad.name].arrays[key].chunks[ordinal].where:
                continue
            try:
                await read_chunk(self.state, tier, chunk.digest, where, nbytes, memory)
            except (Corrupt, NotFound, TierUnavailable) as error:
                last = error
                self.note(tier, key, chunk, error)
                if isinstance(error, TierUnavailable):
                    silent.append(tier.name)
            else:
                return tier
        silent += [tier.name for tier, error in self.unreadable if isinstance(error, TierUnavailable)]
        if silent:
            raise SilentSource(
                f"array {key!r} of {self.step}: chunk {ordinal} is intact on no tier that answers, and "
                f"{', '.join(map(repr, dict.fromkeys(silent)))} may have it; try again when that works"
            )
        raise Corrupt(
            f"array {key!r} of {self.step} is lost: no tier has its chunk {ordinal} intact"
            + (f" (last: {last})" if last else "")
            + "; older steps may be whole, see `tieredckpt ls`"
        )

    def note(self, tier: Tier, key: str, chunk: Chunk, error: TieredCkptError) -> None:
        """Remember that a tier does not have a chunk that it should have; a silent tier is not damaged."""
        _log.warning("%s, array %r: tier %r does not have a chunk intact: %s", self.step, key, tier.name, error)
        _report_silent(self.state, tier, error)
        if isinstance(error, TierUnavailable):
            self.silence = error
        else:
            self.damage.append(Damage(tier, chunk.digest, key, error))


def _report_silent(state: State, tier: Tier, error: TieredCkptError) -> None:
    # Once: of many reads that fail together, each would lengthen the wait until the tier is tried again.
    if isinstance(error, TierUnavailable) and tier.error is None and not state.read_only:
        state.report(tier, error)


async def read_chunk(
    state: State, tier: Tier, digest: bytes, where: Extent | bytes, nbytes: int, memory: Bytes
) -> None:
    """Fill ``memory`` with one chunk from one tier and verify it. Raises as a blob store does, and `Corrupt`."""
    if isinstance(where, bytes):
        if len(where) != nbytes:
            raise Corrupt(f"tier {tier.name!r}: a chunk in the index has {len(where)} bytes, not {nbytes}")
        memory[:nbytes] = np.frombuffer(where, dtype=np.uint8)
    else:
        size = min(aligned(nbytes), where.length)
        await tier.store.get_into(where.path, where.offset, memoryview(memory[:size]))
    found = await in_thread(digest_array, memory[:nbytes], pool=state.pool)
    if found != digest:
        place = where.path if isinstance(where, Extent) else "the index"
        raise Corrupt(f"tier {tier.name!r}: a chunk in {place} has digest {found.hex()}, not {digest.hex()}")
