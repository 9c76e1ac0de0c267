"""Sources of a step's bytes: reads each chunk from the nearest tier that has it intact."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.blobs.wrap import Overdue
from tieredckpt.engine.restoring.moved import unless_moved
from tieredckpt.engine.restoring.pieces import Piece
from tieredckpt.engine.state.state import MergedRam, Near, State, lossy_hint
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.chunk_reader import read_chunk
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import Chunk, StepId, StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["ChosenStep", "Damage", "SilentSource", "StepSource", "ask_again", "being_read", "report_silent"]

_log = logging.getLogger("tieredckpt")

Bytes = npt.NDArray[np.uint8]
Passing = Callable[["StepSource", list[Piece], dict[str, int]], Awaitable[list[Piece]]]
"""Takes pieces of a step, and the bytes by source to add to; returns those that did not come."""


class SilentSource(TierUnavailable):
    """No tier that answers has the bytes intact, and one that does not answer may have them."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged or missing chunk of a tier: which, where, and the error."""

    tier: Tier
    digest: bytes
    key: str
    error: TieredCkptError
    where: Extent | bytes | None = None
    """Its place there, or its bytes in the index; None if another process has found it."""


@dataclass(frozen=True, slots=True)
class ChosenStep(MergedRam):
    """The step that all ranks restore, as rank 0 has chosen it."""

    passing: Passing


@asynccontextmanager
async def being_read(tier: Tier, step: StepId) -> AsyncIterator[None]:
    """Keep a step on a tier while it is read from there, by this process or beside another."""
    if tier.remote.being_read is not None:
        async with tier.remote.being_read(step):
            yield
        return
    tier.steps.begin_read(step)
    try:
        with tier.chunks.kept(step.manifest_key):
            yield
    finally:
        tier.steps.end_read(step)


@dataclass
class StepSource:
    """Reads one step from the tiers that hold it. Use `open`; the step stays on every tier it looks at."""

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
    near: Near | None = None
    """Of a step of several ranks: places of its chunks in the RAM of this machine, which the index may not name."""
    passing: Passing | None = None
    """With several ranks: gets chunks that are not near from other ranks, and returns those that did not come."""
    _bad: dict[tuple[str, Extent | bytes], TieredCkptError] = field(default_factory=dict)
    """Places, by tier, that turned out not to have their chunk intact."""
    _refused: set[tuple[str, Extent | bytes]] = field(default_factory=set)
    """Places, by tier, whose bytes did not come, though the tier answered in time: they may be intact."""
    _overdue: set[str] = field(default_factory=set)
    """Tiers whose last read was not answered in time."""
    _digests: dict[str, dict[bytes, Extent]] = field(default_factory=dict)
    _indexes: dict[str, StepIndex] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        state: State,
        step: StepId,
        *,
        only: Tier | None = None,
        anew: bool = False,
        chosen: ChosenStep | None = None,
    ) -> AsyncIterator[StepSource]:
        """The step, from the nearest tier whose index of it can be read.

        Args:
            state: of the engine.
            step: which.
            only: the one tier to read it from.
            anew: read the index from there though this process may know it.
            chosen: of several ranks, what they restore together.

        Raises:
            NotFound: no tier holds it.
            Corrupt, TierUnavailable: every tier that should hold it failed; the last error.
        """
        async with unless_moved(state, step):
            if step in state.deleting:
                raise NotFound(f"{step} is being deleted")
            merged = chosen or (state.left_by_ranks(step) if only is None else None)
            if merged is not None:
                passing = None if chosen is None else chosen.passing
                async with merged.near() as near:
                    indexes = {merged.tier.name: merged.index}
                    yield cls(state, step, merged.tier, merged.index, near=near, passing=passing, _indexes=indexes)
                return
            unreadable: list[tuple[Tier, TieredCkptError]] = []
            asked = [only] if only is not None else state.holders(step)
            for tier in asked:
                if step in tier.steps.leaving:  # no read of it begins any more
                    continue
                if only is None and state.membership.size > 1 and not tier.shared:  # which has a part of it
                    continue
                async with AsyncExitStack() as stack:
                    try:
                        await stack.enter_async_context(being_read(tier, step))
                        index = await (step_index.load_anew if anew else step_index.load)(tier, step)
                    except (Corrupt, NotFound, TierUnavailable) as error:
                        _log.log(_level(state, error), "%s cannot be opened on tier %r: %s", step, tier.name, error)
                        unreadable.append((tier, error))
                        report_silent(state, tier, error)
                        ask_again(asked, tier, error)
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

    @property
    def in_slab(self) -> Slab | None:
        """The slab in which the chunks lie as they are to be written; None if they are elsewhere."""
        return None if self.tier.ram is None or self.near is not None else self.tier.ram.slab

    async def candidates(self, key: str, ordinal: int, digest: bytes) -> AsyncIterator[tuple[Tier, Extent | bytes]]:
        """Yield the places of a chunk: in ``near``, by the index on ``tier``, on each of `State.holders`, any other."""
        tried: set[tuple[str, Extent]] = set()
        if self.near is not None and (here := self.near.get(digest)) is not None:
            yield here
        holders = [self.tier]
        if not self.tier.derived:
            holders += [tier for tier in self.state.holders(self.step) if tier is not self.tier]
        for tier in holders:
            if self.near is not None and not tier.shared:
                continue
            try:
                index = await self._index_on(tier)
            except TieredCkptError as error:
                self.unreadable.append((tier, error))
                report_silent(self.state, tier, error)
                continue
            where = self._where(tier, index, key, ordinal, digest)
            if where is not None:
                if isinstance(where, Extent):
                    tried.add((tier.name, where))
                yield tier, where
        for tier in self.state.tiers:
            # A derived chunk is no copy of an exact one, whatever tells so.
            if tier.derived != self.tier.derived or (self.near is not None and not tier.shared):
                continue
            for extent in tier.chunks.locate(digest):
                if (tier.name, extent) not in tried:
                    yield tier, extent  # of another step, or of this one after a repair

    def _where(self, tier: Tier, index: StepIndex, key: str, ordinal: int, digest: bytes) -> Extent | bytes | None:
        """Place of a chunk in a tier's index of the step; parts of ranks may have another grid than the whole step."""
        array = index.arrays.get(key)
        if array is not None and ordinal < len(array.chunks) and array.chunks[ordinal].digest == digest:
            return array.chunks[ordinal].where
        return None if self.state.membership.size == 1 else self._extents_on(tier, index).get(digest)

    def _extents_on(self, tier: Tier, index: StepIndex) -> dict[bytes, Extent]:
        if tier.name not in self._digests:
            self._digests[tier.name] = unique_extents(index.arrays)
        return self._digests[tier.name]

    def near_ones(self, pieces: list[Piece]) -> tuple[list[tuple[Tier, list[Piece]]], list[Piece]]:
        """The pieces that are in RAM of this machine, by the RAM that has them, and the others."""
        if self.near is None:
            return [], pieces
        found: dict[int, tuple[Tier, list[Piece]]] = {}
        rest: list[Piece] = []
        for piece in pieces:
            here = self.near.get(piece.chunk.digest)
            if here is None:
                rest.append(piece)
            else:
                tier, where = here
                chunk = Chunk(piece.chunk.digest, where)
                found.setdefault(id(tier), (tier, []))[1].append(dataclasses.replace(piece, chunk=chunk))
        return list(found.values()), rest

    async def on_one_tier(self, pieces: list[Piece]) -> tuple[Tier, list[Piece], list[Piece]]:
        """The tier to read from, the pieces with their places there, and the pieces that it lacks."""
        if self.near is None:
            return self.tier, pieces, []
        tier, index = await self._shared()
        if tier is None or index is None:
            return self.tier, [], pieces
        extents = self._extents_on(tier, index)
        return tier, *_placed(pieces, lambda piece: extents.get(piece.chunk.digest))

    async def on_another_tier(self, tier: Tier, pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
        """The pieces with their places in packs of a tier, by its index of the step, and the pieces that it lacks."""
        try:
            index = await self._index_on(tier)
        except TieredCkptError:
            return [], pieces  # which `candidates` finds, too, and tells

        def sound(piece: Piece) -> Extent | None:
            where = self._where(tier, index, piece.key, piece.ordinal, piece.chunk.digest)
            if not isinstance(where, Extent) or (tier.name, where) in self._bad:
                return None
            return where if tier.encoding_of(where, piece.nbytes).fits(where.length, piece.nbytes) else None

        return _placed(pieces, sound)

    async def _shared(self) -> tuple[Tier | None, StepIndex | None]:
        """The nearest shared tier that holds the step, and its index there."""
        for tier in (self.tier, *self.state.holders(self.step)):
            if tier.shared:
                try:
                    return tier, await self._index_on(tier)
                except TieredCkptError as error:
                    self.unreadable.append((tier, error))
                    report_silent(self.state, tier, error)
        return None, None

    async def _index_on(self, tier: Tier) -> StepIndex:
        found = self._indexes.get(tier.name)
        if found is None:
            found = self._indexes[tier.name] = await step_index.load(tier, self.step)
        return found

    async def read(self, key: str, ordinal: int, memory: Bytes, *, bad: Tier | None = None) -> Tier:
        """Fill ``memory`` with a chunk's bytes, verified, from the nearest tier that has them.

        Args:
            key: of the array.
            ordinal: of the chunk in its grid.
            memory: page-aligned, at least as long as the chunk.
            bad: a tier that lacks the chunk at the place that its index of the step names.

        Raises:
            Corrupt: no tier has the chunk intact; the message names the array.
            SilentSource: no tier that answers has it intact, and there is one that does not answer.
        """
        chunk = self.index.arrays[key].chunks[ordinal]
        nbytes = self.index.arrays[key].grid.cell_nbytes
        last: TieredCkptError | None = None
        unread = (tier for tier in self.state.tiers if tier.marker is None and not self.state.is_unused(tier))
        silent = [tier.name for tier in unread if tier.health.error is not None]
        async for tier, where in self._in_turn(key, ordinal, chunk.digest, bad):
            try:
                await read_chunk(tier, where, chunk.digest, memory[:nbytes], self.state.pool)
            except (Corrupt, NotFound, TierUnavailable) as error:
                last = error
                self.note(tier, key, Chunk(chunk.digest, where), error)
                if isinstance(error, TierUnavailable):
                    silent.append(tier.name)
            else:
                if (wrong := self._bad.pop((tier.name, where), None)) is not None:  # it came wrong just once
                    self.damage = [each for each in self.damage if (each.digest, each.error) != (chunk.digest, wrong)]
                return tier
        silent += [tier.name for tier, error in self.unreadable if isinstance(error, TierUnavailable)]
        if silent:
            raise SilentSource(
                f"array {layout.array_key(key)!r} of {self.step}: chunk {ordinal} is intact on no tier that answers, "
                f"and {', '.join(map(repr, dict.fromkeys(silent)))} may have it; try again when that works"
                + (f" ({self.silence})" if self.silence else "")
            )
        raise Corrupt(
            f"array {layout.array_key(key)!r} of {self.step} is lost: no tier has its chunk {ordinal} intact"
            + (f" (last: {last})" if last else "")
            + "; older steps may be whole, see `tieredckpt ls`"
            + lossy_hint(self.state.derived, self.step.step)
        )

    async def _in_turn(
        self, key: str, ordinal: int, digest: bytes, bad: Tier | None
    ) -> AsyncIterator[tuple[Tier, Extent | bytes]]:
        """Yield `candidates` without those that ``bad`` lacks; then those that were late; then those with wrong bytes.

        Each late one comes as often as the ``retries`` of its tier say; what ``bad`` did not deliver, once more. Wrong
        bytes may have come just once, as over a network, and the chunk is lost if no other place has it.
        """
        late: list[tuple[Tier, Extent | bytes]] = []
        wrong: list[tuple[Tier, Extent | bytes]] = []
        async for tier, where in self.candidates(key, ordinal, digest):
            listed = tier is bad and bad.name in self._indexes and where == self._listed(bad.name, key, ordinal)
            place = tier.name, where
            if place in self._refused or (not listed and place not in self._bad):
                yield tier, where
            elif isinstance(self._bad.get(place), Corrupt):
                wrong.append((tier, where))
            if tier.name in self._overdue:
                late.append((tier, where))
        for tier, where in late:
            for _ in range(tier.config.retries):
                if tier.name in self._overdue:
                    yield tier, where
        for found in wrong:
            yield found

    def _listed(self, name: str, key: str, ordinal: int) -> Extent | bytes | None:
        array = self._indexes[name].arrays.get(key)
        return None if array is None else array.chunks[ordinal].where

    def note(self, tier: Tier, key: str, chunk: Chunk, error: TieredCkptError) -> None:
        """Record that a tier lacks a chunk that it should have; a silent tier is not damaged."""
        self.note_all(tier, [(key, chunk)], error)

    def note_all(self, tier: Tier, lacking: Sequence[tuple[str, Chunk]], error: TieredCkptError) -> None:
        """`note` chunks of arrays, by key, that one read should have brought; they are told in one line."""
        arrays = [*dict.fromkeys(layout.array_key(key) for key, _ in lacking)]
        where = f"array {arrays[0]!r}" + (f" and {len(arrays) - 1} more" if len(arrays) > 1 else "")
        what = "a chunk" if len(lacking) == 1 else f"{len(lacking)} chunks"
        level = _level(self.state, error)
        _log.log(level, "%s, %s: tier %r does not have %s intact: %s", self.step, where, tier.name, what, error)
        report_silent(self.state, tier, error)
        (self._overdue.add if isinstance(error, Overdue) else self._overdue.discard)(tier.name)
        places = {(tier.name, chunk.where) for _, chunk in lacking}
        if isinstance(error, TierUnavailable):
            self.silence = error
            if not isinstance(error, Overdue):
                self._refused |= places
            return
        self._refused -= places
        self._bad |= dict.fromkeys(places, error)
        for key, chunk in lacking:
            if isinstance(chunk.where, Extent):
                tier.chunks.distrust(chunk.digest, chunk.where)
            self.damage.append(Damage(tier, chunk.digest, layout.array_key(key), error, chunk.where))


def _placed(pieces: list[Piece], place: Callable[[Piece], Extent | None]) -> tuple[list[Piece], list[Piece]]:
    """The pieces that have a ``place``, there, and the others."""
    there: list[Piece] = []
    absent: list[Piece] = []
    for piece in pieces:
        if (where := place(piece)) is None:
            absent.append(piece)
        else:
            there.append(dataclasses.replace(piece, chunk=Chunk(piece.chunk.digest, where)))
    return there, absent


def _level(state: State, error: TieredCkptError) -> int:
    """Log level for a missing copy: only INFO in a reader, beside which a writer may evict steps at any time."""
    return logging.INFO if state.read_only and isinstance(error, NotFound) else logging.WARNING


def ask_again(asked: list[Tier], tier: Tier, error: TieredCkptError) -> None:
    """Append a tier that missed its deadline to ``asked``: it is asked again last, ``retries`` times at most."""
    if isinstance(error, Overdue) and asked.count(tier) <= tier.config.retries:
        asked.append(tier)


def report_silent(state: State, tier: Tier, error: TieredCkptError) -> None:
    """Report a tier that does not answer, so that it is left alone for a while."""
    # Once: of many reads that fail together, each would lengthen the wait until the tier is tried again.
    if isinstance(error, TierUnavailable) and tier.health.error is None and not state.read_only:
        state.report(tier, error)
