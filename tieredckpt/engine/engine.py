"""The engine: everything a store does, on one event loop of its own.

The parts, each a module: `connect` makes tiers, `writer` saves, `promoter` and `copier` move steps down,
`reader` and `source` bring them back, `heal` mends, `collector` and `safety` let go. This one ties them
together and owns their life.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

from tieredckpt.blobs.settle import told_to_end, whole
from tieredckpt.config import StoreConfig
from tieredckpt.engine import heal as healing
from tieredckpt.engine.ask import save_is_due
from tieredckpt.engine.collector import Collected, Collector
from tieredckpt.engine.connect import connect, identify, make_tiers
from tieredckpt.engine.copier import copy_step
from tieredckpt.engine.promoter import Promoter
from tieredckpt.engine.reader import fill
from tieredckpt.engine.repack import collect_on
from tieredckpt.engine.safety import why_not
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.scrub import scrub
from tieredckpt.engine.source import StepSource
from tieredckpt.engine.state import State
from tieredckpt.engine.targets import empty_targets
from tieredckpt.engine.tier import Tier
from tieredckpt.engine.verifier import Verified, verify_step
from tieredckpt.engine.views import damage_of, view_step
from tieredckpt.engine.waiting import reached, settled
from tieredckpt.engine.writer import Saved, Writer
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import Events, StepRestored
from tieredckpt.format.manifest import StepId, StepIndex, StepRecord
from tieredckpt.tree.flatten import Flat

__all__ = ["Engine", "Read"]

_log = logging.getLogger("tieredckpt")

_SCRATCH_MIN = 256 << 20
_CHUNKS_IN_SCRATCH = 8


@dataclass(frozen=True, slots=True)
class Read:
    """A step that was read: its record, its arrays by key, and the bytes that came from each tier."""

    id: StepId
    record: StepRecord
    arrays: dict[str, npt.NDArray[Any]]
    sources: dict[str, int]


class Engine:
    """Runs a store. Every coroutine belongs on the engine's loop."""

    def __init__(self, config: StoreConfig, events: Events, *, read_only: bool) -> None:
        self._config = config
        self._events = events
        self._read_only = read_only
        self._tasks: list[asyncio.Task[None]] = []
        self._heals: set[asyncio.Task[None]] = set()
        self.promoters: dict[str, Promoter] = {}

    # -- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the tiers and begin to work. Raises when no tier can be opened, or another store writes here."""
        config = self._config
        self.state = State(
            config=config,
            tiers=make_tiers(config, read_only=self._read_only),
            events=self._events,
            pool=ThreadPoolExecutor(config.copy_threads + 2, thread_name_prefix="tieredckpt-copy"),
            scratch=Scratch(max(_SCRATCH_MIN, _CHUNKS_IN_SCRATCH * config.chunk_size)),
            read_only=self._read_only,
        )
        self.collector = Collector(self.state)
        self._writer = Writer(self.state, self.collector)
        try:
            await self._open_tiers()
        except BaseException:
            await whole(self._release())
            raise
        self.state.adopt_line()
        if self._read_only:
            return
        for tier in self.state.tiers:
            promoter = Promoter(self.state, self.collector, tier, self._reconnect)
            self.promoters[tier.name] = promoter
            self._tasks.append(asyncio.create_task(promoter.run(), name=f"tieredckpt promote to {tier.name}"))
            # Each on its own: one that hangs must not let the leases of the others run out.
            self._tasks.append(asyncio.create_task(self._renew_lease(tier), name=f"tieredckpt lease of {tier.name}"))
        self._tasks.append(asyncio.create_task(self._keep_tidy(), name="tieredckpt collect"))
        self._prefault()

    async def _open_tiers(self) -> None:
        failures = await identify(self.state)
        for tier, error in failures:
            if isinstance(error, Conflict | Invalid) and not self._read_only:
                raise error
            self.state.report(tier, error)
        if len(failures) == len(self.state.tiers):
            raise failures[0][1]

    async def _reconnect(self, tier: Tier) -> None:
        if tier.ram is not None:
            await tier.disconnect()  # its folder went away, and the slab with it
        await connect(self.state, tier)
        self.state.meet(tier)
        if tier.index == 0:
            self._prefault()

    def _prefault(self) -> None:
        ram = self.state.tiers[0].ram
        if ram is not None and ram.slab.writable:
            asyncio.get_running_loop().run_in_executor(None, ram.slab.prefault)

    async def _renew_lease(self, tier: Tier) -> None:
        while not told_to_end():
            await asyncio.sleep(self._config.lease_ttl / 3)
            if tier.lease is None or not tier.answers:
                continue
            try:
                await tier.lease.renew()
            except TieredCkptError as error:
                self.state.report(tier, error)
            except Exception as error:
                _log.exception("tier %r: unexpected failure to renew the lease", tier.name)
                self.state.report(tier, error)

    async def _keep_tidy(self) -> None:
        """Reclaim what crashes and repairs leave behind; nothing of it is ripe before the grace period is over."""
        while not told_to_end():
            await asyncio.sleep(self._config.grace)
            try:
                await self.collect()
            except TieredCkptError as error:
                _log.warning("collection: %s", error)
            except Exception:
                _log.exception("collection: unexpected failure")

    async def close(self, *, flush: bool, keep_ram: bool) -> None:
        """Finish what is due on the tiers that work, and let everything go.

        Args:
            flush: wait for the promotions that are due.
            keep_ram: leave the RAM tier's memory as it is, for the next process; otherwise it is given back if
                everything in it is on another tier.
        """
        try:
            if flush and not self._read_only:
                with suppress(TieredCkptError):
                    await self.flush()
        finally:
            await whole(self._let_go(keep_ram=keep_ram))  # a close that is cancelled closes none the less

    async def _let_go(self, *, keep_ram: bool) -> None:
        for task in [*self._tasks, *self._heals]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._heals, return_exceptions=True)
        await self._release(keep_ram=keep_ram)

    async def _release(self, *, keep_ram: bool = True) -> None:
        state = self.state
        for tier in state.tiers:
            if tier.blobs is None:
                continue
            if tier.lease is not None:
                with suppress(TieredCkptError):
                    await tier.lease.release()
            spare = not keep_ram and not any(why_not(state, step, tier) for step in tier.held)
            if tier.ram is not None and spare and tier.ram.slab.writable:
                await asyncio.to_thread(tier.ram.remove)  # while its lock is held
            await tier.blobs.close()
        await asyncio.to_thread(state.pool.shutdown)
        state.scratch.close()

    # -- saving -------------------------------------------------------------------------------------------

    async def save(self, step: int, flat: Flat, metrics: Mapping[str, float], *, overwrite: bool) -> Saved:
        """See `Writer.save`."""
        self._check_writable("save")
        reserved = self._slab_reserved()
        saved = await self._writer.save(step, flat, metrics, overwrite=overwrite)
        if saved.tier is not None:
            await self.collector.settle(self.state.tier(saved.tier))
        if self._slab_reserved() != reserved:
            self._prefault()
        return saved

    def _slab_reserved(self) -> int:
        ram = self.state.tiers[0].ram
        return ram.slab.reserved if ram is not None else 0

    def _check_writable(self, what: str) -> None:
        if self._read_only:
            raise Invalid(f"cannot {what}: the store was opened with read_only=True")

    def is_due(self, step: int) -> bool:
        """The schedule's answer."""
        return save_is_due(self.state, step)

    async def reached(self, step: StepId, name: str) -> None:
        """See `waiting.reached`."""
        await reached(self.state, self.promoters, step, name)

    async def flush(self) -> None:
        """Wait until damage that was found is mended, and as `waiting.settled`."""
        while self._heals:
            await asyncio.wait(set(self._heals))
        await settled(self.state, self.promoters)

    # -- restoring ----------------------------------------------------------------------------------------

    async def look_up(self, step: int | None) -> tuple[StepId, StepRecord] | None:
        """The step that a restore takes; None when the store is empty.

        Raises:
            NotFound: a step number that no tier holds.
            TierUnavailable: nothing was found, and a tier that may hold something does not answer.
            Corrupt: every step there is has a damaged commit.
        """
        state = self.state
        records = state.records()
        if step is None and not records:
            silent = [tier for tier in state.tiers if tier.marker is None and tier.error is not None]
            silent = [tier for tier in silent if not (self._read_only and isinstance(tier.error, NotFound))]
            if silent:
                raise TierUnavailable(
                    f"no tier that answers holds a step, and {', '.join(repr(tier.name) for tier in silent)} cannot be "
                    f"read ({silent[0].error}); to start afresh all the same, take it out of the configuration"
                )
            damaged = {step: tier.name for tier in state.tiers for step in tier.damaged}
            if damaged:
                raise Corrupt(
                    f"no step can be read: the commit of {max(damaged)} on tier {damaged[max(damaged)]!r}"
                    + (f" and of {len(damaged) - 1} other steps are" if len(damaged) > 1 else " is")
                    + " damaged; to start afresh all the same, move what is there out of the tier"
                )
            return None
        found = state.newest() if step is None else None
        found = found or state.find(step)
        return found, records[found]

    async def read(self, step: StepId, targets_for: Callable[[StepIndex], Mapping[str, npt.NDArray[Any]]]) -> Read:
        """Fill the arrays that ``targets_for`` gives for the step's index. Raises as `StepSource` does."""
        begin = time.monotonic()
        read = await self._fill(step, targets_for)
        self._events.emit(StepRestored(step.step, step.serial, read.sources, time.monotonic() - begin))
        return read

    async def _fill(self, step: StepId, targets_for: Callable[[StepIndex], Mapping[str, npt.NDArray[Any]]]) -> Read:
        async with StepSource.open(self.state, step) as source:
            targets = await asyncio.to_thread(targets_for, source.index)
            sources = await fill(self.state, source, targets)
            record, damage, unreadable = source.index.record, source.damage, source.unreadable
        if (damage or unreadable) and not self._read_only:
            self._heal_behind(step, damage, unreadable)
        return Read(step, record, dict(targets), sources)

    async def view(
        self, step: StepId, keys: Sequence[str]
    ) -> tuple[Read, Callable[[], Coroutine[Any, Any, None]]] | None:
        """Read-only arrays: views of RAM, and copies of what does not lie there in one piece.

        Returns:
            The arrays, and what verifies the views, which raises `Corrupt` and mends them. None when the step is
            not in RAM.
        """
        begin = time.monotonic()
        found = await view_step(self.state, step, keys)
        if found is None:
            return None
        index, arrays = found
        check = partial(self._check_views, step, index, dict(arrays))
        sources = {self.state.tiers[0].name: sum(array.nbytes for array in arrays.values())}
        rest = [key for key in keys if key not in arrays]
        if rest:
            copied = await self._fill(step, lambda index: empty_targets(index, rest))
            for key, array in copied.arrays.items():
                array.flags.writeable = False
                arrays[key] = array
            for name, nbytes in copied.sources.items():
                sources[name] = sources.get(name, 0) + nbytes
        self._events.emit(StepRestored(step.step, step.serial, sources, time.monotonic() - begin))
        return Read(step, index.record, arrays, sources), check

    async def _check_views(self, step: StepId, index: StepIndex, views: Mapping[str, npt.NDArray[Any]]) -> None:
        damage = await damage_of(self.state, index, views)
        if damage and not self._read_only and step in self.state.tiers[0].held:
            self._heal_behind(step, damage, ())
        if damage:
            keys = ", ".join(map(repr, sorted({found.key for found in damage})))
            raise Corrupt(f"views of {step} in RAM are damaged: {keys}; restore it with copy=True")

    async def resume_from(self, step: StepId, record: StepRecord) -> None:
        """Make a step the end of the live line, after the saves that were begun before."""
        async with self._writer.guards_saves:
            self.state.rewind(step, record)
        self.state.changed.beat()

    def _heal_behind(
        self, step: StepId, damage: Sequence[Any], unreadable: Sequence[tuple[Tier, TieredCkptError]]
    ) -> None:
        async def work() -> None:
            try:
                for tier, error in unreadable:
                    if not isinstance(error, TierUnavailable):
                        await healing.heal_index(self.state, self.collector, step, tier, error)
                await healing.heal(self.state, self.collector, step, damage)
            except TieredCkptError as error:
                _log.error("%s could not be mended: %s", step, error)

        task = asyncio.create_task(work(), name=f"tieredckpt heal {step}")
        self._heals.add(task)
        task.add_done_callback(self._heals.discard)

    # -- by hand ------------------------------------------------------------------------------------------

    async def promote(self, number: int, name: str) -> int:
        """Copy a step to a tier now, whatever its policy says; the bytes written."""
        self._check_writable("promote")
        step, tier = self.state.find(number), self.state.tier(name)
        if tier.ram is not None:
            raise Invalid(f"tier {name!r} is RAM: a step gets there by being saved")
        tier.dismissed.discard(step)
        written = await copy_step(self.state, self.collector, step, tier)
        await self.collector.settle(tier)
        return written

    async def evict(self, number: int, name: str) -> None:
        """See `Collector.evict`."""
        self._check_writable("evict")
        step, tier = self.state.find(number, damaged=True), self.state.tier(name)
        tier.dismissed.add(step)
        try:
            await self.collector.evict(step, tier)
        except BaseException:
            tier.dismissed.discard(step)
            raise
        await self.collector.collect(tier, orphans=False)

    async def collect(self) -> list[Collected]:
        """Reclaim dead packs on every tier that works, and rewrite those that are mostly dead.

        Raises the first error, after the other tiers were collected.
        """
        self._check_writable("collect")
        reclaimed: list[Collected] = []
        errors: list[Exception] = []
        for tier in self.state.tiers:
            if not tier.healthy:
                continue
            try:
                reclaimed.append(await collect_on(self.state, self.collector, tier))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return reclaimed

    async def verify(
        self,
        number: int | None,
        serial: int | None,
        name: str | None,
        *,
        repair: bool,
        progress: Callable[[int], None] | None,
    ) -> list[Verified]:
        """Read all of a step on one tier or on every tier that holds it, and mend what is damaged if asked."""
        if repair:
            self._check_writable("repair")
        return await verify_step(self.state, self.collector, number, serial, name, repair=repair, progress=progress)

    async def scrub(
        self, name: str | None, *, repair: bool, rate: float | None, progress: Callable[[int], None] | None
    ) -> list[Verified]:
        """See `tieredckpt.engine.scrub`."""
        if repair:
            self._check_writable("repair")
        tiers = self.state.tiers if name is None else (self.state.tier(name),)
        return await scrub(self.state, self.collector, tiers, repair=repair, rate=rate, progress=progress)
