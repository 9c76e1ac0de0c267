"""Opens a store of several ranks: rank 0 scans the shared tiers, every rank its own RAM.

Rank 0 opens all tiers as a store of one rank does, with lease and scan, and sends what it finds to the other ranks,
which open the shared tiers without either. Every rank then lists the parts of steps in the RAM that it is responsible
for: its own, and folders of former ranks on its machine. A step counts as held by RAM if all its parts are there. Parts
of a step that can never be complete are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from tieredckpt.blobs.ram.find import FoundRam
from tieredckpt.blobs.ram.folder import RANK_FOLDER
from tieredckpt.blobs.ram.places import places_of
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.concurrency import in_thread
from tieredckpt.engine.keeping.evictor import Evictor
from tieredckpt.engine.opening.connect import connect
from tieredckpt.engine.opening.ram import find
from tieredckpt.engine.opening.stale import stale_steps
from tieredckpt.engine.ranks.commit.commit import Commits
from tieredckpt.engine.ranks.commit.parts import encode_own, whole_steps
from tieredckpt.engine.ranks.commit.vote import Votes
from tieredckpt.engine.ranks.group import Group, vote
from tieredckpt.engine.ranks.messages import Catalog, Opened
from tieredckpt.engine.ranks.node_ram import folders_of_ranks, look_into
from tieredckpt.engine.ranks.reopen import keep_open
from tieredckpt.engine.state.adoption import adopt_newest
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import StepOnTier, brief, decode, encode
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, TieredCkptError
from tieredckpt.format.manifest import StepId
from tieredckpt.format.marker import StoreMarker

__all__ = ["Opening", "adopt_catalog", "catalog_of"]

_log = logging.getLogger("tieredckpt")

Parts = dict[int, tuple[bytes, int]]
"""By the rank that saved it, each part of a step, encoded, and the rank that has it now."""


class _Found(msgspec.Struct, frozen=True):
    """Content of the shared tiers, as rank 0 found it."""

    marker: StoreMarker
    catalogs: tuple[Catalog, ...]


class _Part(msgspec.Struct, frozen=True):
    """A part in RAM."""

    serial: int
    step: int
    run: str
    rank: int
    part: bytes


class _InRam(msgspec.Struct, frozen=True):
    """The parts that a rank has in RAM, and a notice for people if that RAM is no ordinary shared memory."""

    parts: list[_Part]
    notice: str


class Opening:
    """Opens the store of one rank with all others. ``open_tiers`` opens all tiers as a store of one rank does."""

    def __init__(
        self,
        state: State,
        evictor: Evictor,
        group: Group,
        votes: Votes,
        commits: Commits,
        open_tiers: Callable[[Sequence[FoundRam]], Awaitable[None]],
    ) -> None:
        self._state = state
        self._evictor = evictor
        self._group = group
        self._votes = votes
        self._commits = commits
        self._open_tiers = open_tiers
        self._folders: dict[tuple[StepId, str], dict[int, Tier]] = {}
        """By step and run, the tier of each part that this rank has listed."""
        self.leftovers: list[Tier] = []
        """The RAM of former ranks of this machine, at the rank that is responsible for it."""

    async def open(self) -> None:
        """Open the store; a call of all ranks. If one rank fails, all raise its error."""
        group, state = self._group, self._state
        found: _Found = decode(await vote(group, "open/tiers", self._tell_ram(), self._open_all), _Found)
        verdict = await vote(group, "open/parts", self._follow(found), self._decide)
        opened: Opened = decode(verdict, Opened)
        whole = {record.id: record.run for record in opened.whole}
        first = state.tiers[0]
        listed = {step for (step, _), by_rank in self._folders.items() if first in by_rank.values()}
        for step in listed.union(first.steps.parts):  # rank 0 counts those of whole steps as held already
            of_another = step in whole and first not in self._folders.get((step, whole[step]), {}).values()
            if of_another or (step not in whole and tuple(step) not in opened.kept):
                _log.warning("%s: the part of rank %d in RAM is dropped, for others are gone", step, group.rank)
                await self._evictor.drop_part(step, first)
        for record in opened.whole:
            first.steps.agree(record)
        await self._let_leftovers_go({*whole, *(StepId(*kept) for kept in opened.kept)})
        state.branch.last_serial = opened.last_serial
        state.branch.adopt(opened.line, max(state.records(), default=None))

    async def close(self) -> None:
        """Disconnect from the RAM of former ranks."""
        while self.leftovers:
            await self.leftovers.pop().disconnect()

    # -- the shared tiers ---------------------------------------------------------------------------------

    async def _tell_ram(self) -> bytes:
        """List the RAM on this machine, before any is opened; one rank of each machine does it."""
        state = self._state
        state.identity.places = await places_of(state.config)
        found = await find(state.config, state.identity.places.values()) if state.membership.is_first_of_node else []
        return encode(found)

    async def _open_all(self, answers: dict[int, bytes]) -> bytes:
        """At rank 0: find out which store it is, open all tiers, and return what the shared ones hold."""
        state = self._state
        found: list[FoundRam] = []
        for data in answers.values():
            found += decode(data, list[FoundRam])
        await self._open_tiers(found)
        assert state.identity.marker is not None
        shared = [tier for tier in state.tiers if tier.shared]
        return encode(_Found(state.identity.marker, tuple(catalog_of(tier) for tier in shared)))

    async def _follow(self, found: _Found) -> bytes:
        """Open the tiers that rank 0 has found, and return the parts in this rank's RAM."""
        if not self._group.coordinates:
            await self._open_as_follower(found)
        return await self._own_parts()

    async def _open_as_follower(self, found: _Found) -> None:
        state = self._state
        state.identity.marker = found.marker
        for catalog in found.catalogs:
            tier = state.tier(catalog.tier)
            adopt_catalog(tier, catalog, state.identity.marker)
            await self._see(tier)
        self._group.start(keep_open(state), "shared tiers that fail")
        first = state.tiers[0]
        if first.in_memory:
            try:
                await connect(state, first)
            except (Conflict, Invalid):
                raise
            except TieredCkptError as error:
                state.report(first, error)

    async def _see(self, tier: Tier) -> None:
        """Open a shared tier, and check that it is the one that rank 0 sees."""
        try:
            seen = await tier.open()
        except TieredCkptError as error:
            _log.warning(
                "rank %d cannot open tier %r, and tries again when it needs it: %s", self._group.rank, tier.name, error
            )
            return
        if tier.marker is not None and (seen is None or seen.store != tier.marker.store):
            raise Conflict(
                f"tier {tier.name!r} at {tier.store.location} is not what rank 0 sees under that name: every tier but "
                f"RAM is shared by all ranks, so put it where all machines have the same"
            )

    # -- RAM ----------------------------------------------------------------------------------------------

    async def _own_parts(self) -> bytes:
        """The parts in the RAM that this rank is responsible for: its own, and that of former ranks on its machine."""
        state, group = self._state, self._group
        await self._collect_parts(state.tiers[0], tuple(state.tiers[0].steps.parts))
        if state.membership.is_first_of_node:
            for folder in await in_thread(partial(folders_of_ranks, state, but=group.local_ranks)):
                if (tier := await look_into(state, folder)) is not None:
                    self.leftovers.append(tier)
                    await self._collect_parts(tier, tuple(tier.steps.held))
        parts = []
        for (step, run), by_rank in self._folders.items():
            for rank, tier in by_rank.items():
                index = await step_index.load(tier, step)
                part = await in_thread(encode_own, index, pool=state.pool)
                parts.append(_Part(step.serial, step.step, run, rank, part))
        ram = state.tiers[0].ram
        return encode(_InRam(parts, "" if ram is None else ram.store.notice))

    async def _collect_parts(self, tier: Tier, steps: tuple[StepId, ...]) -> None:
        for step in steps:
            try:
                record = (await step_index.load(tier, step)).record
            except (Corrupt, NotFound) as error:
                _log.warning("%s of a former run cannot be read in RAM: %s", step, error)
                continue
            self._folders.setdefault((step, record.run), {}).setdefault(record.rank or 0, tier)

    async def _decide(self, answers: dict[int, bytes]) -> bytes:
        """At rank 0: the steps that are complete in the RAM of all ranks together, and the other parts to keep."""
        state = self._state
        found: dict[StepId, dict[str, Parts]] = {}
        told: dict[int, _InRam] = {rank: decode(data, _InRam) for rank, data in answers.items()}
        _tell_notices({rank: each.notice for rank, each in told.items() if each.notice})
        for rank, each in told.items():
            for part in each.parts:
                parts = found.setdefault(StepId(part.serial, part.step), {}).setdefault(part.run, {})
                if part.rank not in parts or part.rank == rank:  # its own before a copy of it
                    parts[part.rank] = part.part, rank
        encoded = {
            step: {run: {rank: part for rank, (part, _) in parts.items()} for run, parts in runs.items()}
            for step, runs in found.items()
        }
        records = {index.record.id: index.record async for index in whole_steps(encoded, state.pool)}
        stale = stale_steps(records.values(), state.tiers[1:])
        whole = []
        for step, record in records.items():
            if step in stale:
                del found[step]
                continue
            whole.append(brief(record))
            parts = found[step][record.run]
            self._votes.coordinator.parts[step] = {rank: part for rank, (part, _) in parts.items()}
            self._commits.homes[step] = {rank: home for rank, (_, home) in parts.items()}
        for record in whole:
            state.tiers[0].steps.agree(record)
        adopt_newest(state)
        held = {step for tier in state.tiers for step in tier.steps.held}
        last = max([state.branch.last_serial, *(step.serial for step in found)])
        kept = tuple((step.serial, step.step) for step in found if step in held)
        return encode(Opened(tuple(whole), kept, last, state.branch.line))

    async def _let_leftovers_go(self, kept: set[StepId]) -> None:
        """Release RAM of former ranks that holds no useful step; note which parts the rest holds."""
        runs = {step: record.run for step, record in self._state.records().items()}
        for (step, run), by_rank in self._folders.items():
            if step in kept and runs.get(step, run) == run:
                self._commits.folders[step] = by_rank
        await self._discard_unused(kept)

    def give_back(self) -> None:
        """Begin to release the RAM of former ranks that holds no step any more."""
        if self.leftovers:
            held = set(self._state.tiers[0].steps.held)
            self._group.start(self._discard_unused(held), "giving back of the RAM of former ranks")

    async def _discard_unused(self, kept: set[StepId]) -> None:
        """Release the RAM folders of former ranks that hold none of the ``kept`` steps."""
        for tier in tuple(self.leftovers):
            if tier in self.leftovers and not kept & tier.steps.held.keys() and not tier.steps.readers:
                self.leftovers.remove(tier)
                folder = Path(tier.store.location)
                await tier.disconnect()
                if folder.name.startswith(RANK_FOLDER):
                    try:
                        await in_thread(RamStore.discard, folder)
                    except TieredCkptError as error:
                        _log.info("the RAM of a former rank stays: %s", error)


def _tell_notices(notices: dict[int, str]) -> None:
    """Log a notice of several ranks once, at rank 0, in the words of the first of them."""
    if notices:
        first = min(notices)
        _log.warning("ranks %s: %s", ", ".join(map(str, sorted(notices))), notices[first])


def catalog_of(tier: Tier) -> Catalog:
    """Content of a shared tier, as rank 0 knows it."""
    return Catalog(
        tier.name,
        tier.marker is not None,
        tuple(StepOnTier.of(held.record, held.btree_key) for held in tier.steps.held.values()),
        tier.steps.damaged.told(),
    )


def adopt_catalog(tier: Tier, catalog: Catalog, marker: StoreMarker) -> None:
    """Take over what rank 0 knows of a shared tier."""
    tier.clear()
    tier.marker = marker if catalog.known else None
    tier.steps.held.update({held.id: Held(held.record, held.btree_key) for held in catalog.steps})
    tier.steps.damaged.adopt(catalog.damaged)
