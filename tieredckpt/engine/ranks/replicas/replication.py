"""Keeps the newest step in the RAM of several nodes, behind the training: orders the copies, and makes them.

Rank 0 knows which rank has which part, in its own RAM or as a copy for another rank. When a newer step was committed,
or parts are missing where they should be, it orders the copies of one step, and every rank sends and receives its share
of them. Older copies are dropped when all copies of a newer step are complete, so one complete step is always there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from tieredckpt.blobs.memory import memory_limit
from tieredckpt.blobs.ram.folder import RANK_FOLDER
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.blobs.wrap import Pace
from tieredckpt.concurrency import in_thread
from tieredckpt.config.tiers import RamTier
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.retention import evict_until
from tieredckpt.engine.opening.scan import scan_tier
from tieredckpt.engine.ranks.commit.commit import Commits
from tieredckpt.engine.ranks.communicator import COORDINATOR, exchange, gather
from tieredckpt.engine.ranks.group import Group, vote
from tieredckpt.engine.ranks.messages import Replicate, Replicated
from tieredckpt.engine.ranks.replicas.copy_part import Refused, Transfer, receive_part, send_part
from tieredckpt.engine.ranks.replicas.ledger import Ledger
from tieredckpt.engine.ranks.replicas.placement import copies_possible, place_ranks
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import Failure, decode, encode
from tieredckpt.errors import Invalid, RanksUnavailable, TieredCkptError, TierUnavailable
from tieredckpt.events import Event, ReplicationFailed, StepEvicted, StepReplicated
from tieredckpt.format.manifest import StepId
from tieredckpt.units import format_size

__all__ = ["Replication", "replica_folder"]

_log = logging.getLogger("tieredckpt")

_SUFFIX = ".replica"
_LACKING = b"lacking"
"""The answer of a rank that has no memory for replicas."""


def replica_folder(own: Path, rank: int) -> Path:
    """The folder for the parts of another ``rank``, of a rank whose own RAM folder is ``own``."""
    return own.parent / f"{RANK_FOLDER}{rank}{_SUFFIX}"


class _Has(msgspec.Struct, array_like=True, frozen=True):
    """The steps that a rank has parts of: its own parts, and those of other ranks, by rank."""

    own: list[StepId]
    kept: dict[int, list[StepId]]


class _Copied(msgspec.Struct, frozen=True):
    """Result of a rank's part of a request."""

    sent: int = 0
    failure: Failure | None = None
    ranks: tuple[int, ...] = ()
    """The ranks that caused the failure."""


class Replication:
    """Keeps copies of parts on other nodes, as one rank does; rank 0 orders them. Lives on the engine's loop."""

    def __init__(
        self,
        state: State,
        collector: Collector,
        group: Group,
        commits: Commits,
        config: RamTier,
    ) -> None:
        self._state = state
        self._collector = collector
        self._group = group
        self._config = config
        self._commits = commits
        """Knows where the parts of former runs are."""
        self._pace = Pace(config.rate_limit)
        self._placed: tuple[tuple[int, ...], ...] = ()
        self.kept: dict[int, Tier] = {}
        """The tiers that hold the parts of other ranks, by rank."""
        self._ledger = Ledger(state, group.size)
        self._unsubscribe: Callable[[], None] = lambda: None

    @property
    def copies(self) -> int:
        """On how many nodes every part lies; fewer than configured if there are not enough nodes."""
        return 1 + max((len(holders) for holders in self._placed), default=0)

    # -- life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Choose which rank holds which parts, and reserve memory for them. A call of all ranks: all succeed or none.

        Raises:
            Invalid, NoSpace: the memory for the replicas is not there, with the numbers.
            RanksUnavailable: a rank does not answer.
        """
        group = self._group
        racks = await self._racks()
        standing = [racks[node] if racks is not None else node for node in dict.fromkeys(group.nodes)]
        possible = copies_possible(standing, self._config.replicas)
        if not group.communicator.bulk:
            possible = 1
            _log.warning(
                "parts are not replicated, for these ranks send nothing in bulk: use torch.distributed or MPI for that"
            )
        elif possible < self._config.replicas:
            _log.warning(
                "parts are kept on %d nodes and not on %d: the %d ranks run on %d nodes in %d places",
                *(possible, self._config.replicas, group.size, len(standing), len(set(standing))),
            )
        self._placed = place_ranks(group.nodes, possible, racks)
        self._unsubscribe = self._state.events.subscribe(self._hear)
        if await vote(group, "replicas/open", self._open_all(), self._learn) == _LACKING:
            self._placed = ()
            _log.warning("parts are not replicated until the store is opened again: a rank has no memory for them")

    async def _racks(self) -> dict[str, str] | None:
        """The rack of every node; None if no node names one, else a node without a name is a rack of its own."""
        mine = encode(self._state.config.rack or os.environ.get("TIEREDCKPT_RACK"))
        racks = await exchange(self._group.communicator, "replicas/rack", mine, timeout=self._group.deadline)
        named: dict[str, str | None] = {}
        for node, data in zip(self._group.nodes, racks, strict=True):
            named[node] = decode(data, str | None)
        if not any(named.values()):
            return None
        return {node: name or f"rack of {node}" for node, name in named.items()}

    async def _open_all(self) -> bytes:
        self._check_fits()
        own = self._own
        try:
            for owner in [rank for rank, holders in enumerate(self._placed) if self._group.rank in holders]:
                await self._open_kept(owner)
        except TierUnavailable as error:
            _log.warning("rank %d keeps no replicas: %s", self._group.rank, error)
            return _LACKING
        has = _Has(
            [step for step in {*own.steps.held, *own.steps.parts} if own.steps.has_own(step)],
            {owner: [*tier.steps.parts] for owner, tier in self.kept.items()},
        )
        return encode(has)

    def _check_fits(self) -> None:
        """Raise `Invalid` if this machine lacks the memory for its own parts and those of other nodes."""
        capacity, ranks = self._config.capacity, len(self._group.local_ranks)
        limit, source = memory_limit()
        if isinstance(capacity, int) and self.copies > 1 and capacity * ranks * self.copies > limit:
            raise Invalid(
                f"{self.copies} replicas of {ranks} ranks on {self._group.communicator.node} with a capacity of "
                f"{format_size(capacity)} each take {format_size(capacity * ranks * self.copies)}, and {source} is "
                f"{format_size(limit)}; lower `capacity` or `replicas` of tier {self._own.name!r}"
            )

    async def _learn(self, answers: dict[int, bytes]) -> bytes:
        """At rank 0: note which rank has which parts; if one rank has no memory for replicas, none keeps any."""
        if _LACKING in answers.values():
            return _LACKING
        for rank, data in answers.items():
            has: _Has = decode(data, _Has)
            for part, steps in ({rank: has.own} | has.kept).items():
                for step in steps:
                    self._ledger.note(step, part, rank)
        for step, homes in self._commits.homes.items():
            for part, rank in homes.items():
                self._ledger.note(step, part, rank)
        return b""

    async def _open_kept(self, owner: int) -> None:
        own = self._own
        if own.ram is None:
            raise TierUnavailable(f"tier {own.name!r} could not be opened there")
        folder = replica_folder(Path(own.ram.store.location), owner)
        capacity = self._config.capacity if isinstance(self._config.capacity, int) else None
        sharers = len(self._group.local_ranks) * self._config.replicas

        async def connect() -> RamStore:
            return await in_thread(partial(RamStore.open, folder, capacity, sharers=sharers))

        tier = self.kept[owner] = Tier(own.name, own.index, self._config, connect)
        marker = await tier.open()
        assert self._state.identity.marker is not None
        if marker != self._state.identity.marker:
            await marker_file.write(tier.store, self._state.identity.marker)
        await scan_tier(tier)
        tier.steps.set_apart()
        tier.marker = self._state.identity.marker

    @property
    def _own(self) -> Tier:
        return self._state.tiers[0]

    async def close(self, *, remove: bool) -> None:
        """Release the parts of other ranks: for the next process or, with ``remove``, for good."""
        self._unsubscribe()
        for tier in self.kept.values():
            if remove and tier.ram is not None:
                await asyncio.to_thread(tier.ram.store.remove)
            if tier.blobs is not None:
                await tier.blobs.close()
        self.kept.clear()

    # -- rank 0 ---------------------------------------------------------------------------------------

    def saved(self, step: StepId) -> None:
        """Note that a step was committed, so each rank has its own part of it."""
        self._ledger.saved(step)

    async def lead(self) -> None:
        """At rank 0: request copies whenever some are missing, until cancelled."""
        if self.copies == 1:
            return
        while True:
            request = self._ledger.missing(self._placed, self.copies)
            if request is None:
                await self._state.changed.wait()
                continue
            await self._replicate_on_all(request)

    async def _replicate_on_all(self, request: Replicate) -> None:
        step, begin = StepId(request.serial, request.step), time.monotonic()
        self._group.publish(request)
        topic, failure, sent = f"replicas/done/{request.number}", None, 0
        patience = self._group.deadline + self._own.steps.held[step].record.nbytes / self._slowest
        mine = encode(await self._copy(request))
        ranks: tuple[int, ...] = ()
        try:
            came = await gather(self._group.communicator, topic, mine, timeout=patience)
            for data in came.values():
                copied: _Copied = decode(data, _Copied)
                sent += copied.sent
                failure = failure or copied.failure
                ranks = tuple(sorted({*ranks, *copied.ranks}))
        except TieredCkptError as error:
            failure = Failure.of(error)
            ranks = error.ranks if isinstance(error, RanksUnavailable) else ()
        if not self._ledger.stays(step):
            return  # it was evicted meanwhile, or is about to be: the copies of an older one are still of use
        if failure is None:
            self._ledger.made(request)
            for part, _, rank in request.copies:
                if rank == part:
                    self._commits.homes.get(step, {}).pop(part, None)
        else:
            self._ledger.failed(step)
        result = Replicated(request.step, request.serial, self.copies, sent, time.monotonic() - begin, failure, ranks)
        self._group.publish(result)
        await self.apply_result(result)

    @property
    def _slowest(self) -> float:
        """Bytes a second below which a rank that still copies counts as silent."""
        return min(self._config.min_bandwidth, self._config.rate_limit or self._config.min_bandwidth)

    # -- every rank ---------------------------------------------------------------------------------------

    def apply_request(self, request: Replicate) -> None:
        """Begin to make the copies that a request of rank 0 asks of this rank."""
        self._group.start(self._copy_and_report(request), f"copies of step {request.step}")

    async def _copy_and_report(self, request: Replicate) -> None:
        copied = encode(await self._copy(request))
        await self._group.communicator.send([COORDINATOR], f"replicas/done/{request.number}", copied)

    async def _copy(self, request: Replicate) -> _Copied:
        step = StepId(request.serial, request.step)
        sending = [
            self._send_part(request, step, part, to)
            for part, source, to in request.copies
            if source == self._group.rank
        ]
        receiving = [
            self._receive_part(request, part, source) for part, source, to in request.copies if to == self._group.rank
        ]
        ended = await asyncio.gather(*sending, *receiving, return_exceptions=True)
        failures = [end for end in ended if isinstance(end, BaseException)]
        for failure in failures:
            if not isinstance(failure, TieredCkptError):
                _log.error("%s: unexpected failure of a copy", step, exc_info=failure)
        sent = sum(end for end in ended[: len(sending)] if isinstance(end, int))
        return _Copied(sent, Failure.of(failures[0]) if failures else None, self._at_fault(failures))

    def _at_fault(self, failures: Sequence[BaseException]) -> tuple[int, ...]:
        found: set[int] = set()
        for failure in failures:
            if isinstance(failure, RanksUnavailable):
                found.update(failure.ranks)
            else:
                found.add(failure.rank if isinstance(failure, Refused) else self._group.rank)
        return tuple(sorted(found))

    def _transfer(self, request: Replicate, part: int) -> Transfer:
        number = request.number * self._group.size + part
        return Transfer(self._group.communicator, number, self._group.deadline)

    async def _send_part(self, request: Replicate, step: StepId, part: int, to: int) -> int:
        here = [
            self._own if part == self._group.rank else self.kept.get(part),
            self._commits.folders.get(step, {}).get(part),
        ]
        tier = next((tier for tier in here if tier is not None and tier.steps.has_own(step)), self._own)
        return await send_part(self._state, self._transfer(request, part), tier, step, to, self._pace)

    async def _receive_part(self, request: Replicate, part: int, source: int) -> None:
        mine = part == self._group.rank
        evict = partial(evict_until, self._state, self._collector)
        tier, make_room = (self._own, evict) if mine else (self.kept[part], self._let_older_go)
        step = await receive_part(self._state, self._transfer(request, part), tier, source, make_room)
        if step not in (self._own.steps.held if mine else self._state.records()):  # all have evicted it meanwhile
            await self._collector.evictor.drop_part(step, tier)
        elif mine:
            self._own.steps.agree(self._own.steps.held[step].record)
            self._state.changed.notify()

    async def _let_older_go(self, tier: Tier, enough: Callable[[], bool]) -> None:
        """Evict kept replicas oldest first, never the last fully replicated step (the newest if none is)."""
        whole_ones = self._state.membership.replicated or {max(tier.steps.parts, default=None)}
        for step in sorted(tier.steps.parts):
            if enough():
                return
            if step not in whole_ones:
                await self._collector.evictor.drop_part(step, tier)

    def _hear(self, event: Event) -> None:
        """Drop the copies of a step that was deleted on every tier, or the next opening would bring it back."""
        if isinstance(event, StepEvicted):
            step = StepId(event.serial, event.step)
            if step not in self._state.records() and any(step in tier.steps.parts for tier in self.kept.values()):
                self._group.start(self._drop_copies(step), f"eviction of copies of {step}")

    async def _drop_copies(self, step: StepId) -> None:
        for tier in self.kept.values():
            await self._collector.evictor.drop_part(step, tier)

    async def apply_result(self, result: Replicated) -> None:
        """Drop older copies if those of a step are complete; report it if they are not."""
        step = StepId(result.serial, result.step)
        if result.failure is not None:
            error = result.failure.error()
            _log.warning("%s could not be copied to other nodes: %s", step, error)
            self._state.events.emit(ReplicationFailed(result.step, result.serial, result.ranks, error))
            return
        self._state.membership.replicated = {step: result.copies}
        for tier in self.kept.values():
            for older in [held for held in tier.steps.parts if held < step]:
                try:
                    await self._collector.evictor.drop_part(older, tier)
                except TieredCkptError as error:
                    _log.warning("a copy of %s stays: %s", older, error)
        self._state.events.emit(StepReplicated(result.step, result.serial, result.copies, result.sent, result.seconds))
        self._state.changed.notify()
