"""Copies one step to one tier: the chunks that the tier lacks, then the commit. Promotes, repairs, repacks."""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass
from functools import partial

from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.concurrency import together
from tieredckpt.engine import limits
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.full_tier import check_room, evicting_older, needing
from tieredckpt.engine.keeping.policies import is_due
from tieredckpt.engine.promoting.dedupe import refer_to_intact
from tieredckpt.engine.promoting.pack_writer import Batch, Encoder, Need, Payload, write_packs
from tieredckpt.engine.promoting.room import expected, have_room, within_capacity
from tieredckpt.engine.restoring.deriving import DerivedSource, RoundedSource
from tieredckpt.engine.restoring.source import SilentSource, StepSource
from tieredckpt.engine.state.promotions import promoting, report_promoted
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.index_cache import located, unique_extents
from tieredckpt.engine.tier.packs import WrittenPacks
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.manifest import StepId
from tieredckpt.format.ocdbt import Extent

__all__ = ["batches", "check_wanted", "copy_step"]

_SCRATCH_PACKS = 4
"""A pack filled from scratch memory takes at most this fraction of it: two are in flight, one is being filled."""

_FIRST_PACK = 32 << 20
"""Bytes of the first pack on a device that takes the slab's own memory: the device idles until that pack is sealed."""
_FIRST_COMPRESSED_PACK = 8 << 20
_READS_AT_A_TIME = 8
"""Chunks of another tier than RAM: each request takes long there, or the device serves several at once."""
_MARGIN = 32
"""One part in so many of the expected size of compressed chunks is reserved besides."""
_GROWTH = 4
"""How many times as large the next pack may be, which one thread seals while the one before is being written."""
_COMPRESSED_GROWTH = 1.5
"""The same where that thread compresses: with the first pack, what gains most at 0.25 GB/s."""


async def copy_step(
    state: State,
    collector: Collector,
    step: StepId,
    tier: Tier,
    *,
    again: bool = False,
    without: AbstractSet[str] = frozenset(),
    lost: dict[bytes, Extent] | None = None,
    origin: State | None = None,
) -> int:
    """Copy a step to a durable tier, and return the bytes of the packs that it took.

    Args:
        state: of the engine.
        collector: makes room.
        step: held by some tier.
        tier: the target.
        again: commit anew although the tier holds the step; write the chunks anew that its index forgot. So it is with
            a step that lacks chunks there.
        without: packs of the tier that the step, committed anew, must no longer refer to.
        lost: chunks that are intact nowhere, with the extents that the step, committed anew, keeps for those that were
            not written since.
        origin: state of the store that the step is copied from, on the same loop; nothing is evicted for such a copy.
            None for this store.

    Raises:
        NotFound: no tier holds the step, or it was evicted from this one before it was committed anew.
        Corrupt: a chunk is intact nowhere; nothing was committed.
        Conflict: as `commit_file.commit`.
        NoSpace, TierUnavailable: of the target; nothing was committed.
    """
    await state.until_read(tier)
    again = again or (step in tier.steps.held and not tier.steps.has_good(step))
    if step in tier.steps.held and not again:
        return 0
    commit_file.check_no_deletion(tier, step)
    copy = partial(
        _copy, state, collector, step, tier, again=again, without=without, lost=lost or {}, origin=origin or state
    )
    with promoting(state, tier):
        return await (copy() if again or origin is not None else evicting_older(state, collector, step, tier, copy))


async def _copy(
    state: State,
    collector: Collector,
    step: StepId,
    tier: Tier,
    *,
    again: bool,
    without: AbstractSet[str],
    lost: dict[bytes, Extent],
    origin: State,
) -> int:
    begin = time.monotonic()
    was_there, lacking = again or step in tier.steps.damaged, tier.steps.lacking(step)
    async with _source(origin, step, tier, again=again) as source:
        encoding = await _encoding_of(step, tier) if again else tier.packs.encoding
        needs = _missing(source, tier, lost, encoding, tier.packs.doubted)
        need = await expected(tier, needs, encoding)
        room = min(need + need // _MARGIN, sum(encoding.stored_size(each.nbytes) for each in needs))
        if origin is state:
            await have_room(state, collector, step, tier, room)
        else:
            await check_room(step, tier, room)
        async with needing(need), tier.packs.guard:
            tier.check_known()
            if step in tier.steps.held and not again:
                return 0
            if again:
                await _keep_own_extents(step, tier, without, lacking)
            await refer_to_intact(state, tier, step, _sizes(source), encoding)
            needs = _missing(source, tier, lost, encoding)
            record, written, encoded = source.index.record, WrittenPacks(), None

            async def encode(placed: dict[bytes, Extent]) -> None:
                nonlocal encoded
                arrays = located(source.index.arrays, ChainMap(placed, tier.packs.index, lost))
                encoded = await commit_file.encode(tier, record, arrays, commit_file.free_btree_key(tier, step))

            if needs:
                try:
                    async with (
                        aclosing(batches(state, source, tier, needs, encoding)) as found,
                        aclosing(within_capacity(tier, found, needs, encoding)) as fitting,
                    ):
                        await write_packs(tier, fitting, written, None if was_there else encode)
                finally:
                    tier.packs.add(written)  # also those before a failure: the next try refers to them
            # As it was encoded: chunks may be added or forgotten meanwhile, and packs that others refer to stay.
            arrays = encoded.arrays if encoded else located(source.index.arrays, ChainMap(tier.packs.index, lost))
            if not was_there:
                check_wanted(step, tier)
            await commit_file.commit(tier, record, arrays, encoded, only_anew=was_there)
            tier.steps.mend(step, lacking.difference(each for each in lost if each not in tier.packs.index))
            # Before anybody can tell that it was evicted again.
            report_promoted(state, source.index.record, tier, written.nbytes, begin, again=again)
        return written.nbytes


def _source(origin: State, step: StepId, tier: Tier, *, again: bool) -> AbstractAsyncContextManager[StepSource]:
    """Open the step as the tier is to have it, exact or derived."""
    if not tier.derived:
        return StepSource.open(origin, step)
    # A step that is committed anew stays the same, even if the rules have changed, or no exact copy is left.
    return DerivedSource.open(origin, step, only=tier) if again else RoundedSource.rounding(origin, step, tier)


def check_wanted(step: StepId, tier: Tier) -> None:
    """Raise `NotFound` before the first commit of a step that was deleted while it was copied."""
    if step in tier.steps.tombstones:
        raise NotFound(f"{step} was deleted while it was on its way to tier {tier.name!r}")


async def _keep_own_extents(
    step: StepId, tier: Tier, without: AbstractSet[str], lacking: AbstractSet[bytes | str]
) -> None:
    """Keep the step's references to the bytes that it has now, except those that it lacks or that were forgotten.

    Another pack may have a copy of a chunk that was found damaged and repaired once; its footer lists that still.
    """
    with suppress(TieredCkptError):  # an index that cannot be read vouches for nothing
        for digest, extent in unique_extents((await step_index.load(tier, step)).arrays).items():
            there = digest in tier.packs.index and extent.path in tier.packs.sizes
            if there and digest not in lacking and extent.path not in without:
                if (known := tier.packs.index[digest]) != extent:
                    tier.packs.duplicates.setdefault(digest, []).append(known)
                tier.packs.index[digest] = extent


async def _encoding_of(step: StepId, tier: Tier) -> Encoding:
    """Encoding of a step that is committed again, so that its arrays stay in one encoding."""
    with suppress(TieredCkptError):  # an index that cannot be read is made from nothing
        found = map(tier.packs.encoding_of_array, (await step_index.load(tier, step)).arrays.values())
        return next((encoding for encoding in found if encoding is not tier.packs.encoding), tier.packs.encoding)
    return tier.packs.encoding


def _sizes(source: StepSource) -> dict[bytes, int]:
    return {chunk.digest: array.grid.cell_nbytes for array in source.index.arrays.values() for chunk in array.chunks}


def _missing(
    source: StepSource,
    tier: Tier,
    lost: Mapping[bytes, Extent],
    encoding: Encoding,
    doubted: AbstractSet[bytes] = frozenset(),
) -> list[Need]:
    """The chunks that the tier lacks, with those that are ``doubted``, and that are not lost, each once."""
    needs: dict[bytes, Need] = {}
    for key, array in source.index.arrays.items():
        nbytes = array.grid.cell_nbytes
        for ordinal, chunk in enumerate(array.chunks):
            if not isinstance(chunk.where, Extent) or chunk.digest in lost:
                continue
            if chunk.digest in doubted or not tier.packs.has(chunk.digest, nbytes, encoding):
                needs[chunk.digest] = Need(chunk.digest, key, ordinal, nbytes)
    return [*needs.values()]


async def batches(
    state: State, source: StepSource, target: Tier, needs: Sequence[Need], encoding: Encoding | None = None
) -> AsyncGenerator[Batch, None]:
    """The missing chunks, sealed, a pack's worth at a time, in ``encoding`` or that of the target.

    From RAM they are the slab's own memory, in its order, so that neighbours are written in one go; from other
    tiers they pass through scratch memory. So do the checksums of a slab that another process writes.
    """
    slab, encoding = source.in_slab, encoding or target.packs.encoding
    encoder = Encoder(state, target, encoding, partial(_is_overtaken, state, source.step, target))
    from_slab, behind = slab is not None, slab is None or slab.writable
    packing = _Packing(state, source, encoder, behind)
    traits = target.store.traits
    room_limit = state.scratch.capacity // _SCRATCH_PACKS
    if not (from_slab or encoding.raw):
        room_limit //= 2  # chunks and frames of a pack both take scratch memory
    limit = min(traits.object_size, limits.in_force.pack_size if from_slab else room_limit)
    if from_slab and not encoding.raw:
        first = _FIRST_COMPRESSED_PACK
    else:
        first = _FIRST_PACK if from_slab and traits.direct_io else limit
    threads = state.config.copy_threads  # until the device has work; from then on one keeps ahead of it
    ordered = _in_storage_order(source, needs)
    for some in _packs(ordered, first, limit if traits.ranged_get else 0, room_limit, encoding, behind=behind):
        batch = Batch(compressed=not encoding.raw)
        try:
            if slab is not None:
                await packing.add_from_slab(slab, batch, some, threads)
                threads = 1
            else:
                await packing.add_reads(batch, some)
        except BaseException:
            await batch.lent.aclose()
            raise
        yield batch


def _is_overtaken(state: State, step: StepId, tier: Tier) -> bool:
    """Whether a newer step waits for the tier while this one is copied there."""
    nearer = {other for each in state.tiers[: tier.index] for other in each.steps.held if other > step}
    return any(is_due(state, other, tier) for other in nearer)


def _packs(
    needs: Iterable[Need], first: int, limit: int, room_limit: int, encoding: Encoding, *, behind: bool
) -> Iterator[list[Need]]:
    """Chunks that become one pack each, of at most ``limit`` bytes, the first pack of at most ``first``.

    No pack may be larger than the one before allows, nor need more memory to encode than
    ``room_limit``; ``behind`` as `Encoding.room` takes it.
    """
    pack: list[Need] = []
    most: float = min(first, limit)
    left, room_left = most, room_limit
    growth = _GROWTH if encoding.raw else _COMPRESSED_GROWTH
    for need in needs:
        size, room = encoding.stored_size(need.nbytes), encoding.room(need.nbytes, behind=behind)
        if pack and (size > left or room > room_left):
            yield pack
            most = min(limit, most * growth)
            pack, left, room_left = [], most, room_limit
        pack.append(need)
        left -= size
        room_left -= room
    if pack:
        yield pack


@dataclass(frozen=True, slots=True)
class _Packing:
    """Adds the chunks of a step to packs."""

    state: State
    source: StepSource
    encoder: Encoder
    behind: bool
    """As `Encoding.room` takes it."""

    async def add_from_slab(self, slab: Slab, batch: Batch, some: Sequence[Need], threads: int) -> None:
        """Add chunks where they lie in RAM, encoded by so many threads.

        Chunks that are damaged in RAM are read from another tier.
        """
        payloads: list[Payload] = []
        source, encoding = self.source, self.encoder.encoding
        for need in some:
            if (mapped := slab.mapped) is None:
                raise SilentSource(f"{source.step}: RAM went away while the step was copied from there")
            array = source.index.arrays[need.key]
            where = array.chunks[need.ordinal].where
            assert isinstance(where, Extent)
            memory = mapped[where.offset : where.offset + encoding.stored_size(need.nbytes)]
            more = encoding.room(need.nbytes, behind=self.behind)
            room = await batch.carve(self.state.scratch, more) if more else None
            payloads.append(Payload(need.digest, need.nbytes, array.grid.itemsize, memory, room))
        sealed = await self.encoder.seal(payloads, threads)
        for encoded, need in zip(sealed, some, strict=True):
            if encoded is not None:
                batch.add(encoded)
                continue
            why = Corrupt(f"{source.step}: a chunk of {layout.array_key(need.key)!r} changed in RAM")
            source.note(source.tier, need.key, source.index.arrays[need.key].chunks[need.ordinal], why)
            await self._add_sealed(batch, [await self._read(batch, need, bad=source.tier)])

    async def add_reads(self, batch: Batch, some: Sequence[Need]) -> None:
        """Add chunks that are read, a few at a time, in their order."""
        found: dict[bytes, Payload] = {}

        async def read(need: Need) -> None:
            found[need.digest] = await self._read(batch, need)

        await together(map(read, some), _READS_AT_A_TIME)
        await self._add_sealed(batch, [found[need.digest] for need in some])

    async def _read(self, batch: Batch, need: Need, bad: Tier | None = None) -> Payload:
        """A chunk that is read into scratch memory, from any tier but ``bad``, and room for what is stored of it."""
        encoding, scratch = self.encoder.encoding, self.state.scratch
        memory = await batch.borrow(scratch, encoding.stored_size(need.nbytes))
        await self.source.read(need.key, need.ordinal, memory, bad=bad)
        more = encoding.room(need.nbytes, behind=True)
        room = await batch.borrow(scratch, more) if more else None
        return Payload(need.digest, need.nbytes, self.source.index.arrays[need.key].grid.itemsize, memory, room)

    async def _add_sealed(self, batch: Batch, payloads: Sequence[Payload]) -> None:
        for encoded in await self.encoder.seal(payloads, 1):
            if encoded is None:
                raise TierUnavailable("a chunk changed in memory between its verification and its write; try again")
            batch.add(encoded)


def _in_storage_order(source: StepSource, needs: Iterable[Need]) -> list[Need]:
    def place(need: Need) -> tuple[str, int]:
        where = source.index.arrays[need.key].chunks[need.ordinal].where
        assert isinstance(where, Extent)
        return where.path, where.offset

    return sorted(needs, key=place)
