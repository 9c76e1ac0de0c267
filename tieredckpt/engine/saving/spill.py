"""Streams a tree that RAM cannot hold: through the slab, a part at a time, to the nearest slower tier that works."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod

from tieredckpt._batches import batches
from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.engine import limits
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.full_tier import needing
from tieredckpt.engine.keeping.retention import evict_until
from tieredckpt.engine.promoting.pack_writer import Batch, Encoder, Payload, write_packs
from tieredckpt.engine.saving.copy_to_slab import SkipSave, copy_cells, has_room, wait_for_room
from tieredckpt.engine.saving.slower_tiers import SlowerTiers
from tieredckpt.engine.saving.snapshot import Copied, Located, Snapshot
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.packs import WrittenPacks
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.slab_index import SlabIndex, slab_size
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import NoSpace, TieredCkptError, TierUnavailable
from tieredckpt.format.manifest import Chunk
from tieredckpt.format.ocdbt import Extent
from tieredckpt.tree.leaf import ArrayLeaf
from tieredckpt.units import format_size

__all__ = ["Refused", "attributed", "may_fit", "stream", "usable_ram"]

_PACKS_UNDER_WAY = 4
"""Frames of a pack take at most this fraction of scratch memory: two are in flight, one is being filled."""


class Refused(Exception):
    """A tier did not take the tree; another one may."""

    def __init__(self, tier: Tier, error: TieredCkptError) -> None:
        super().__init__(error)
        self.tier = tier
        self.error = error


def usable_ram(first: Tier, refusals: Collection[str]) -> Ram | None:
    """The RAM that a save may be copied to; None if it does not work, or has refused."""
    return first.ram if first.healthy and first.name not in refusals else None


def may_fit(first: Tier, leaves: Iterable[ArrayLeaf]) -> bool:
    """Whether RAM works, and is large enough for the arrays even if no two are equal."""
    ram = usable_ram(first, ())
    return ram is not None and sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) <= ram.slab.capacity


@contextmanager
def attributed(tier: Tier) -> Iterator[None]:
    """Turn errors of a tier in the block into `Refused` by that tier."""
    try:
        yield
    except (TierUnavailable, NoSpace) as error:
        raise Refused(tier, error) from error


@dataclass(frozen=True, slots=True)
class _Passage:
    """The memory that the tree passes through: the slab, or scratch memory where that cannot serve."""

    slab: Slab
    index: SlabIndex
    ram: Tier | None


async def stream(
    state: State,
    collector: Collector,
    slower: SlowerTiers,
    snapshot: Snapshot,
    refusals: Mapping[str, TieredCkptError],
    until_committed: AsyncExitStack,
) -> tuple[Tier, Located, WrittenPacks]:
    """Write every chunk to a slower tier, ready to be committed there; returns tier, chunks, and the packs written.

    Args:
        state: of the engine.
        collector: makes room in RAM.
        slower: makes room on slower tiers, and tells what they have.
        snapshot: of which nothing was copied yet.
        refusals: what went wrong on tiers that are not to be tried again, by name.
        until_committed: holds the tier's packs, so that none is collected before the step refers to it.

    Raises:
        Refused: a tier failed.
        SkipSave: the slab has no room for a single chunk, and ``when_full`` says not to wait for that.
        NoSpace: no slower tier can take the tree.
    """
    problems = [f"tier {name!r} failed ({error})" for name, error in refusals.items()]
    for tier in sorted(state.tiers, key=lambda tier: tier.name in state.membership.failing):
        if tier.in_memory or tier.name in refusals:
            continue
        if not tier.healthy:
            problems.append(f"tier {tier.name!r} is not available ({tier.health.error})")
            continue
        need = sum(tier.chunks.encoding.stored_size(cell.nbytes) for cell in snapshot.pending)
        with attributed(tier):
            fits = await slower.make_room(tier, need)
        if not fits:
            problems.append(f"tier {tier.name!r} has no room for {format_size(need)}")
            continue
        passage = await _passage(state, collector, snapshot, refusals)
        with attributed(tier):
            await slower.hold_packs(tier, until_committed)
        until_committed.callback(tier.packs.streamed_to.clear)
        streaming = _Streaming(state, collector, slower, snapshot, tier, passage)
        return tier, await streaming.write_all(), streaming.written
    taken = (
        "does not fit into RAM, and nothing slower can take it" if state.tiers[0].in_memory else "is taken by no tier"
    )
    raise NoSpace(
        f"the tree of {format_size(snapshot.nbytes)} {taken}: "
        + ("; ".join(problems) or "there is no other tier; give the RAM tier a larger capacity, or add one")
    )


async def _passage(
    state: State, collector: Collector, snapshot: Snapshot, refusals: Mapping[str, TieredCkptError]
) -> _Passage:
    first = state.tiers[0]
    largest = max((slab_size(cell.nbytes) for cell in snapshot.pending), default=0)
    ram = usable_ram(first, refusals)
    if ram is not None and ram.slab.capacity >= largest:
        with attributed(first):
            # Before the packs of the next tier are held, for its promoter makes the room.
            await wait_for_room(state, collector, first, partial(has_room, ram.slab, largest))
        return _Passage(ram.slab, ram.index, first)
    return _through_scratch(state)


def _through_scratch(state: State) -> _Passage:
    return _Passage(state.scratch.slab, SlabIndex(state.scratch.slab), None)


@dataclass(slots=True)
class _Streaming:
    """A tree on its way to a slower tier, a part at a time."""

    state: State
    collector: Collector
    slower: SlowerTiers
    snapshot: Snapshot
    tier: Tier
    passage: _Passage
    written: WrittenPacks = field(default_factory=WrittenPacks)

    async def write_all(self) -> Located:
        """Write every chunk; where they lie. The packs are those of `written`."""
        located: Located = {}
        new_bytes, snapshot, stored_size = 0, self.snapshot, self.tier.chunks.encoding.stored_size
        while snapshot.pending:
            passage = self.passage
            try:
                await self._copy_some()
                if not snapshot.copied:
                    self.passage = _through_scratch(self.state)
                    continue
                left = (*(done.cell for done in snapshot.copied), *snapshot.pending)
                with attributed(self.tier):
                    async with needing(sum(stored_size(cell.nbytes) for cell in left)):
                        nbytes, extents = await self._write()
                new_bytes += nbytes
                for done in snapshot.copied:
                    located[done.cell.array, done.cell.ordinal] = Chunk(done.digest, extents[done.digest])
            finally:
                passage.index.drop([done.digest for done in snapshot.copied])
                snapshot.copied.clear()
                self.state.scratch.returned.notify()
        snapshot.new_bytes = new_bytes
        return located

    async def _copy_some(self) -> None:
        """Copy as many cells as find room; none when RAM has no room, for the system may refuse memory to its slab."""
        state, snapshot, passage, slab = self.state, self.snapshot, self.passage, self.passage.slab
        if passage.ram is not None:
            with attributed(passage.ram):
                await evict_until(state, self.collector, passage.ram, partial(has_room, slab, slab.capacity // 2))
        await copy_cells(state, snapshot, passage.index)
        while not snapshot.copied and passage.ram is None:
            if not slab.used:
                raise SkipSave(
                    f"the {format_size(slab.capacity)} of memory that it must pass through have no room for a single "
                    f"chunk; give the RAM tier a larger capacity"
                )
            await state.scratch.returned.wait()  # whoever has borrowed all of it gives it back
            await copy_cells(state, snapshot, passage.index)

    async def _write(self) -> tuple[int, Mapping[bytes, Extent]]:
        """Write the copied chunks that the tier lacks as packs; returns their bytes, and where all copied chunks lie.

        All that was written for this save is in `written`.
        """
        tier, snapshot, known = self.tier, self.snapshot, self.written.extents
        sizes = {done.digest: done.cell.nbytes for done in snapshot.copied}
        extents = {digest: known[digest] for digest in sizes.keys() & known.keys()}
        unknown = {digest: nbytes for digest, nbytes in sizes.items() if digest not in extents}
        extents |= await self.slower.find(tier, unknown)
        new = {done.digest: done for done in snapshot.copied if done.digest not in extents}
        waiting = sorted(new.values(), key=lambda done: done.offset)
        now = WrittenPacks()
        try:
            async with aclosing(self._batches(waiting)) as sealed:
                await write_packs(tier, sealed, now)
        finally:
            self.written.add(now)
            self.slower.add_packs(tier, now)
        return sum(done.cell.nbytes for done in waiting), extents | now.extents

    async def _batches(self, waiting: Sequence[Copied]) -> AsyncGenerator[Batch, None]:
        traits, encoding = self.tier.store.traits, self.tier.chunks.encoding
        encoder = Encoder(self.state, self.tier, encoding, lambda: True)  # the training waits
        limit = min(traits.object_size, limits.in_force.pack_size) if traits.ranged_get else 0
        if not encoding.raw:
            limit = min(limit, self.state.scratch.capacity // _PACKS_UNDER_WAY)
        for pack in batches(waiting, lambda done: encoding.stored_size(done.cell.nbytes), limit):
            yield await self._sealed(pack, encoder)

    async def _sealed(self, pack: Sequence[Copied], encoder: Encoder) -> Batch:
        state, slab, encoding = self.state, self.passage.slab, self.tier.chunks.encoding
        batch = Batch(compressed=not encoding.raw)
        self.tier.packs.streamed_to.add(batch.key)
        # Scratch memory that the tree passes through may be full of it.
        scratch = state.scratch if slab is not state.scratch.slab else None
        try:
            payloads: list[Payload] = []
            for done in pack:
                nbytes, itemsize = done.cell.nbytes, self.snapshot.grids[done.cell.array].itemsize
                try:
                    memory = slab.bytes_at(done.offset, encoding.stored_size(nbytes))
                except TierUnavailable as error:
                    raise Refused(state.tiers[0], error) from error
                need = encoding.room(nbytes, behind=True)
                room = await batch.carve(scratch, need) if need else None
                payloads.append(Payload(done.digest, nbytes, itemsize, memory, room))
            for encoded in await encoder.seal(payloads, state.config.copy_threads):
                if encoded is None:
                    raise TierUnavailable("a chunk changed in memory between its copy and its write; save again")
                batch.add(encoded)
        except BaseException:
            await batch.lent.aclose()
            raise
        return batch
