"""The engine: everything a store does, on one event loop of its own.

`mode` is how this process takes part in the store, `saving`, `promoting`, `restoring`, `repairing` and `keeping` do
the work; this module makes the parts, connects them and owns their life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tieredckpt.blobs.ram.find import FoundRam
from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.concurrency import in_thread, whole
from tieredckpt.config import RamTier, StoreConfig
from tieredckpt.config.kinds import kind_of
from tieredckpt.devices.base import Bytes
from tieredckpt.devices.memory import HostMemory
from tieredckpt.engine import limits
from tieredckpt.engine.admin import Admin
from tieredckpt.engine.exporting.export import ExportInfo
from tieredckpt.engine.exporting.exporter import Exporter
from tieredckpt.engine.inventory import Inventory
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.retention import after_commit
from tieredckpt.engine.keeping.safety import why_kept
from tieredckpt.engine.mode.alone import Alone, Reader
from tieredckpt.engine.mode.among_ranks import AmongRanks
from tieredckpt.engine.mode.beside_agent import BesideAgent
from tieredckpt.engine.opening.connect import connect_late, connect_ram, make_tiers
from tieredckpt.engine.opening.identify import identify
from tieredckpt.engine.opening.ram import keep_noted
from tieredckpt.engine.opening.upkeep import catalogue, keep_catalogued, keep_tidy, read_again, renew_lease
from tieredckpt.engine.promoting.copy_step import copy_step
from tieredckpt.engine.promoting.promoter import Promoter
from tieredckpt.engine.promoting.waiting import drained, in_ram_alone, reached
from tieredckpt.engine.ranks.communicator import Communicator
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.repairing.background import BackgroundRepair
from tieredckpt.engine.restoring.restore import Restorer
from tieredckpt.engine.saving.call import SaveCall
from tieredckpt.engine.saving.capture import Capture
from tieredckpt.engine.saving.pending import PendingSaves
from tieredckpt.engine.saving.plan import snapshot_size
from tieredckpt.engine.saving.save import Saved, Writer, versions
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.state.membership import Membership, Role
from tieredckpt.engine.state.state import DerivedState, State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Invalid, NotFound, TieredCkptError
from tieredckpt.events import Events
from tieredckpt.format.manifest import StepId
from tieredckpt.tree.arrays import as_template, load_frameworks
from tieredckpt.tree.flatten import Flat, skeleton
from tieredckpt.tree.form import Flattener
from tieredckpt.tree.leaf import ArrayLeaf
from tieredckpt.tree.select import choose

__all__ = ["Engine"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")

_CHUNKS_IN_SCRATCH = 8


class Engine:
    """Runs a store. Every coroutine belongs on the engine's loop."""

    def __init__(
        self,
        config: StoreConfig,
        events: Events,
        *,
        read_only: bool,
        role: Role | None = None,
        ram: Path | None = None,
    ) -> None:
        """``ram`` is the folder where an agent has found its trainer's RAM."""
        self.events = events
        self._config = config
        self._read_only = read_only
        self._ram = ram
        has_agent = config.promote_in == "agent" and not read_only
        self._role = role or (Role.TRAINER if has_agent else Role.WHOLE)
        self._tasks: list[asyncio.Task[None]] = []
        self.promoters: dict[str, Promoter] = {}
        self.exporter: Exporter | None = None
        """Exports steps behind the training; None where there are no exports, or another process makes them."""
        self._snapshot = 0
        """Bytes that a save is known to take."""
        self._told_of_ram = False
        """Whether a warning was given that no step is below RAM."""
        self.prepared = False
        """Whether its parts are there; they are made when it starts."""

    # -- life ---------------------------------------------------------------------------------------------

    async def start(self, communicator: Communicator | None = None) -> None:
        """Open the tiers and begin to work; with other ranks where the ``communicator`` has some.

        Raises when no tier can be opened, another store writes here, or another rank cannot open.
        """
        group = None
        if communicator is not None and communicator.size > 1:
            if self._role is Role.TRAINER:
                raise Invalid(
                    f"promote_in = 'agent' is for a store of one rank, and there are {communicator.size}: leave it "
                    f"out, so that the ranks promote"
                )
            group = Group(communicator, deadline=self._config.rank_deadline)
        try:
            if group is not None:
                await group.open()
            await in_thread(load_frameworks)
            await in_thread(versions)  # reads files, for which a save may have no descriptor
            self._prepare(group)
        except BaseException:
            if group is not None:
                await whole(group.close())
            raise
        try:
            await self.mode.open(self._open_tiers)
        except BaseException:
            await whole(self._release())
            raise
        if not self._read_only:
            self._begin()

    def _prepare(self, group: Group | None) -> None:
        config = self._config
        tiers, derived = make_tiers(config, read_only=self._read_only, events=self.events)
        self.state = State(
            config=config,
            tiers=tiers,
            events=self.events,
            pool=ThreadPoolExecutor(config.copy_threads + 2, thread_name_prefix="tieredckpt-copy"),
            scratch=Scratch(
                max(limits.in_force.scratch_size, _CHUNKS_IN_SCRATCH * config.chunk_size),
                shared=any(kind_of(tier).shares_memory for tier in config.tiers),
            ),
            read_only=self._read_only,
            membership=Membership(role=self._role),
        )
        self.collector = Collector(self.state)
        self.mode = self._make_mode(group)
        self.state.derivations = tuple(DerivedState.of(self.state, tier) for tier in derived)
        self._deriving = {each.target.name: Collector(each) for each in self.state.derivations}
        connect_ram(self.state, sharers=_sharers(config.ram, group), folder=self._ram)
        self.admin = self.mode.admin
        if self._role is not Role.TRAINER:  # whose agent carries them out
            for each in self.state.derivations:
                collector = self._deriving[each.target.name]
                admin = Admin(each, collector, partial(copy_step, each, collector), [each.target])
                self.admin.derived[each.target.name] = admin
        self.background_repair = BackgroundRepair(self.state, self.collector, self.mode.repair_elsewhere)
        flattener = Flattener()
        self.restorer = Restorer(
            self.state, self.mode, self.background_repair.behind, self.prepare, self.expect_saves_of, flattener
        )
        self._writer = Writer(self.state, self.collector, self.mode.slower_tiers)
        self.prepared = True
        self.inventory = Inventory(self.state)
        self.pending = PendingSaves(self.state, self.save, self.mode.not_begun, flattener)

    def _make_mode(self, group: Group | None) -> Alone:
        """How this process takes part in the store."""
        if group is not None:
            return AmongRanks(self.state, self.collector, group, self._open_tiers, self.promote_at_once)
        if self._role is Role.TRAINER:
            return BesideAgent(self.state, self.collector)
        return (Reader if self._read_only else Alone)(self.state, self.collector)

    def _begin(self) -> None:
        """Start what goes on behind the training."""
        for tier in filter(self.state.manages, self.state.tiers):
            mode = self.mode
            promoter = Promoter(self.state, self.collector, tier, self._reconnect, mode.promote, mode.report_stuck)
            self._promote_to(tier, promoter, self.collector)
        for derivation in self.state.derivations:
            if self.state.manages(tier := derivation.target):
                collector = self._deriving[tier.name]
                derive = partial(copy_step, derivation, collector)
                self._promote_to(tier, Promoter(derivation, collector, tier, self._reconnect, derive), collector)
        if self._config.exports and self.state.membership.rank == 0 and self._role is not Role.TRAINER:
            self.exporter = Exporter(self.state, self._config.exports, self.background_repair.behind)
            self._go_on(self.exporter.run(), "exports")
        if self._role is not Role.AGENT:
            self._go_on(keep_noted(self.state), "note of whose RAM it is")
        if self._role is not Role.TRAINER:
            self._go_on(keep_tidy(self._config.grace, self.admin.collect), "collect")
        self._go_on(self.mode.ram_of_ranks.give_back(), "RAM of ranks")
        self.prepare_memory()

    def _promote_to(self, tier: Tier, promoter: Promoter, collector: Collector) -> None:
        self.promoters[tier.name] = promoter
        self._go_on(promoter.run(), f"promote to {tier.name}")
        # Each on its own: one that hangs must not let the leases of the others run out.
        self._go_on(renew_lease(self.state, tier), f"lease of {tier.name}")
        self._go_on(keep_catalogued(tier), f"catalog of {tier.name}")
        self._go_on(read_again(tier, collector.evictor.look_again), f"unreadable steps of {tier.name}")

    def _go_on(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=f"tieredckpt {name}"))

    async def _open_tiers(self, found: Sequence[FoundRam] | None = None) -> None:
        failures = await identify(self.state, found, self._ram)
        for tier, error in failures:
            if isinstance(error, Conflict | Invalid) and not self._read_only:
                raise error
            self.state.report(tier, error)
        not_there_yet = self._read_only and all(isinstance(error, NotFound) for _, error in failures)
        failed = [tier for tier, _ in failures if not tier.derived and tier.marker is None]
        if len(failed) == len(self.state.tiers) and not not_there_yet:
            raise failures[0][1]

    async def _reconnect(self, tier: Tier) -> None:
        if tier.ram is not None:
            await tier.disconnect()  # its folder went away, and the slab with it
        try:
            await connect_late(self.state, tier)
        finally:  # a tier that is full is known as well
            self.mode.ram_of_ranks.count()  # some of it may be stale, as the tier shows
        if tier is self.state.tiers[0]:
            self.prepare_memory(self._snapshot)
            await self.mode.reopened()

    async def prepare(self, tree: Any, mesh: Any = None) -> None:
        """Allocate memory for saves of trees like ``tree``, in the background; ``mesh`` as for `match`.

        Raises `Invalid` as flattening does.
        """
        self.state.check_writable("take memory")
        leaves = (await in_thread(skeleton, tree, partial(as_template, mesh=mesh))).leaves
        whole = choose(self._config.replicated, [leaf.key for leaf in leaves if leaf.place is None])
        alike = {key for _, keys in whole for key in keys}

        def ranks_with(leaf: ArrayLeaf) -> int:
            if leaf.place is not None:
                return max(1, len(leaf.place.replicas))
            return self.state.membership.size if leaf.key in alike else 1

        self.prepare_memory(await in_thread(snapshot_size, leaves, self._config.chunk_size, ranks_with))

    def expect_saves_of(self, nbytes: int) -> None:
        """Allocate memory for saves of states of so many bytes, over all ranks."""
        self.prepare_memory(nbytes // self.state.membership.size)

    def prepare_memory(self, snapshot: int = 0) -> None:
        """Allocate and map RAM in the background: what is expected, and room for two snapshots of so many bytes.

        So a save finds room beside the one before, which may still be on its way to other tiers.
        """
        self._snapshot = max(self._snapshot, snapshot)
        ram = self.state.tiers[0].ram
        if ram is not None and not self._read_only and (mapping := ram.slab.mapped) is not None:
            ram.slab.expect(2 * snapshot, at_least=snapshot)
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, _take_memory, ram.slab, mapping, self.state.host_memory)

    async def promote_at_once(self, step: StepId, tier: Tier) -> None:
        """Copy a step to a tier before older ones that are on their way. Raises as `Admin.promote`."""
        await self.give_way(step, tier.name)
        await self.mode.ask_to_promote(step, tier)

    async def close(
        self, *, flush: bool, keep_ram: bool, end_calls: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Finish what is due on the tiers that work, and release everything.

        Args:
            flush: wait for the promotions that are due.
            keep_ram: leave the RAM tier's memory as it is, for the next process; otherwise it is given back if
                everything in it is on another tier.
            end_calls: ends other calls that use the tiers, before these are released.
        """
        done = in_order = False
        try:
            if flush and not self._read_only:
                with suppress(TieredCkptError):
                    await self.flush()
                    done = True
                in_order = True  # a close that is cancelled waits for nobody else
        finally:
            try:
                await self.mode.leave(done=done, in_order=in_order)
            finally:
                await whole(self._stop(keep_ram, end_calls))  # a close that is cancelled closes none the less

    async def _stop(self, keep_ram: bool, end_calls: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        """End the background work, then release everything."""
        if end_calls is not None:
            await end_calls()
        if (ram := self.state.tiers[0].ram) is not None:
            ram.slab.expect_no_more()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(
            *self._tasks, self.background_repair.stop(), self._writer.frozen.stop(), return_exceptions=True
        )
        await self._release(keep_ram=keep_ram)

    async def _release(self, *, keep_ram: bool = True) -> None:
        state = self.state
        first = state.tiers[0]
        await self.mode.close(may_remove=lambda: not keep_ram and first.ram is not None and self._is_spare(first))
        for tier in state.every_tier:
            if tier.blobs is None:
                continue
            if tier.lease is not None:
                await catalogue(tier)
                with suppress(TieredCkptError):
                    await tier.lease.release()
            if not keep_ram and tier.ram is not None and tier.ram.slab.writable and self._is_spare(tier):
                await asyncio.to_thread(tier.ram.store.remove)  # while its lock is held
            await tier.blobs.close()
        await asyncio.to_thread(state.pool.shutdown)
        await asyncio.to_thread(state.host_memory.close)
        state.scratch.close()

    def _is_spare(self, tier: Tier) -> bool:
        """Whether all that a tier holds may go."""
        state = self.state
        own = [step for step in tier.steps.held if not (tier.in_memory and step in state.ram_of_ranks)]
        return not state.membership.undecided and not any(why_kept(state, step, tier) for step in own)

    # -- saving -------------------------------------------------------------------------------------------

    async def save(self, call: SaveCall, capture: Capture, flat: Flat) -> Saved:
        """See `Writer.save`; with several ranks, saves this rank's share of the replicated leaves."""
        self.state.check_writable("save")
        saved = await self.mode.save(call, flat, partial(self._writer.save, call, capture))
        if saved.tier is not None:
            await after_commit(self.state, self.collector, self.state.tier(saved.tier))
        self.prepare_memory()
        return saved

    async def reached(self, step: StepId, name: str) -> None:
        """See `waiting.reached`."""
        await self.mode.reached(step, name, partial(reached, self.state, self.promoters, step, name))

    async def give_way(self, step: StepId, name: str) -> None:
        """Interrupt the promotion of an older step to a tier, for one that is more urgent."""
        if (promoter := self.promoters.get(name)) is not None:
            promoter.give_way(step)
        else:
            await self.mode.give_way(step, name)

    async def flush(self) -> None:
        """Wait for saves by reference, checks of frozen arrays, repairs, promotions (`waiting.drained`) and exports.

        Raises the error of a promotion or an export that failed.
        """
        await self.pending.drained()
        await self._writer.frozen.drained()
        await self.background_repair.drained()
        await self.mode.drained()
        await drained(self.state, self.promoters)
        await self.mode.told()
        if self.state.membership.rank == 0 and not self._told_of_ram and (why := in_ram_alone(self.state)):
            self._told_of_ram = True
            _log.warning("%s", why)
        if self.exporter is not None:
            await self.exporter.drained()

    async def export_infos(self) -> tuple[ExportInfo, ...]:
        """Every export that this process makes, as it is now."""
        return () if self.exporter is None else self.exporter.infos()


def _take_memory(slab: Slab, mapping: Bytes, reached: HostMemory) -> None:
    """Take the memory that is expected, and let the devices reach what there is. Blocking."""
    slab.prepare()
    reached.extend(mapping, slab.reserved)


def _sharers(ram: RamTier | None, group: Group | None) -> int:
    """How many ranks share this machine's memory; what each keeps for others takes as much again for every replica."""
    return len(group.local_ranks) * ram.replicas if group is not None and ram is not None else 1
