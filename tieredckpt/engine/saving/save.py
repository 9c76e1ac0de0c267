"""Saves: a tree's chunks are copied into RAM and committed there, or streamed on if they do not fit.

While a save runs, the copy threads work on the caller's arrays; a save that ends, in whatever way, has no
thread left that touches them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import platform
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tieredckpt._arguments import as_number
from tieredckpt.concurrency import in_thread
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.full_tier import NoRoom, evict_older
from tieredckpt.engine.saving.call import SaveCall
from tieredckpt.engine.saving.capture import Capture
from tieredckpt.engine.saving.copy_to_slab import SkipSave, fill_slab
from tieredckpt.engine.saving.frozen import FrozenCheck
from tieredckpt.engine.saving.last_save import Fingerprint, LastSave, take_fingerprints
from tieredckpt.engine.saving.outlet import Outlet
from tieredckpt.engine.saving.plan import Plan
from tieredckpt.engine.saving.slower_tiers import SlowerTiers
from tieredckpt.engine.saving.snapshot import NO_SMALL, Located, Snapshot
from tieredckpt.engine.saving.spill import Refused, attributed, stream, usable_ram
from tieredckpt.engine.state.branch import RESTORED_LOSSY, Continued
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.packs import WrittenPacks
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, TieredCkptError, TierUnavailable
from tieredckpt.events import OriginIgnored, SaveSkipped, StepSaved
from tieredckpt.format.joining import join
from tieredckpt.format.manifest import BEGAN_AFTER, RUN, ArrayIndex, StepId, StepIndex, StepRecord
from tieredckpt.tree.flatten import Flat
from tieredckpt.tree.shards import check_whole

__all__ = ["Saved", "Writer", "versions"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")

_TRAINER_WAKES = 0.001
"""Seconds in which a trainer goes on from a save that has ended."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did."""

    step: StepId
    tier: str | None
    """Where it was committed first; None when it was skipped."""
    nbytes: int
    new_bytes: int
    """Bytes that its tier did not have: of chunks, and of small arrays that were not the same in the save before."""
    seconds: float
    """From the call of `save` to this commit; the trainer waits for all of it with ``capture="copy"`` alone."""
    skipped: str = ""
    """Why the save was not made, if it was not."""


class _MadeAnew(TierUnavailable):
    """RAM was made anew under a save: the copy is gone, and the new RAM may take another."""


class _Indexed(NamedTuple):
    """A step before its commit."""

    record: StepRecord
    arrays: dict[str, ArrayIndex]
    """As this rank has them."""
    stored: dict[str, ArrayIndex]
    encoded: commit_file.Encoded | None = None
    """What is to be put, where it is known already."""


class Writer:
    """Makes saves, one at a time. Lives on the engine's loop."""

    def __init__(self, state: State, collector: Collector, slower: SlowerTiers) -> None:
        self._state = state
        self._collector = collector
        self._slower = slower
        self._guards_saves = asyncio.Lock()
        """Held by the save under way: the next save continues the branch as this one leaves it."""
        self._planned: object = None
        """The form of the last tree, as of `Flat`."""
        self._plan: Plan | None = None
        """Of the last tree."""
        self._small = NO_SMALL
        """Of the last save."""
        self._policies = state.config.recorded_policies
        self._last = LastSave(state.config.frozen)
        self.frozen = FrozenCheck(state, self._last)

    async def save(
        self,
        call: SaveCall,
        capture: Capture,
        flat: Flat,
        *,
        began: float | None = None,
    ) -> Saved:
        """Copy and commit one tree.

        Args:
            call: by which it is saved.
            capture: until when its arrays may be read.
            flat: the flattened tree; its arrays do not change until this returns.
            began: when (monotonic) work on the save began, if that was before this call.

        Raises:
            Conflict: the branch has that step already.
            Invalid: pieces of an array are missing.
            NoSpace, TierUnavailable: no tier can take the tree.
            DeviceUnavailable: a device did not give its memory.
        """
        begin = time.monotonic() if began is None else began
        async with self._alone():
            state = self._state
            if flat.in_pieces and state.membership.size == 1:  # in its turn, or a later save would be made before it
                await self._in_pool(check_whole, flat.structure, flat.arrays)
            continued = self._decide(call)
            identity = StepId(state.branch.last_serial + 1, call.step)
            state.branch.begin(identity, continued)
            refusals: dict[str, TieredCkptError] = {}
            tier, made_anew = None, False
            try:
                while tier is None:
                    with state.ram_gate.saving():
                        snapshot, fingerprints, frozen = await self._snapshot(flat)
                    try:
                        how = identity, flat, call.metrics, capture
                        tier, record, arrays = await self._save_once(snapshot, *how, refusals)
                    except Refused as refused:
                        if capture.arrays_may_change:
                            raise refused.error from refused
                        if isinstance(refused.error, _MadeAnew) and not made_anew:
                            made_anew = True
                            continue
                        if isinstance(full := refused.error, NoRoom) and await evict_older(
                            state, self._collector, None, refused.tier, full.need
                        ):
                            continue
                        refusals[refused.tier.name] = refused.error
                        state.report(refused.tier, refused.error)
            except SkipSave as why:
                state.branch.failed(identity)
                reason = f"step {call.step} was not saved: {why}"
                state.events.emit(SaveSkipped(call.step, reason))
                return Saved(identity, None, snapshot.nbytes, 0, time.monotonic() - begin, reason)
            except BaseException:
                state.branch.failed(identity)
                raise
            state.branch.count_from(call.origin)
            self._last.learn(fingerprints, digests := snapshot.digests(arrays))
            self.frozen.begin(identity, snapshot, digests, frozen)
            self._small = snapshot.small
            new_bytes = snapshot.new_bytes + snapshot.new_small
            seconds = time.monotonic() - begin
            self._state.observation.observe_save(
                call.step, record.saved_at, seconds if capture.stall is None else capture.stall
            )
        state.events.emit(StepSaved(call.step, identity.serial, tier.name, record.nbytes, new_bytes, seconds))
        # Wake the promoter after the trainer: this thread would keep the interpreter from the trainer's thread.
        asyncio.get_running_loop().call_later(_TRAINER_WAKES, state.changed.notify)
        return Saved(identity, tier.name, record.nbytes, new_bytes, seconds)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Make no other save in the block, and read no frozen arrays again."""
        async with self._guards_saves:
            with self.frozen.paused():
                yield

    async def _save_once(
        self,
        snapshot: Snapshot,
        identity: StepId,
        flat: Flat,
        metrics: Mapping[str, float],
        capture: Capture,
        refusals: Mapping[str, TieredCkptError],
    ) -> tuple[Tier, StepRecord, dict[str, ArrayIndex]]:
        """Copy and commit to the nearest tier that has not refused; of a save that fails nothing stays behind."""
        async with AsyncExitStack() as until_committed:
            tier, ram, located, written = await self._place(snapshot, refusals, until_committed)
            try:
                await capture.copied(snapshot, located, past_ram=ram is None)
                index = partial(self._index, identity, flat, snapshot, metrics, located)
                if tier.in_memory:  # where the hand-over from thread to thread would take a good part of a commit
                    until_committed.enter_context(self._state.ram_gate.saving())
                    index = partial(_index_and_encode, index, tier, commit_file.free_btree_key(tier, identity))
                record, arrays, stored, encoded = await self._in_pool(index)
                with attributed(tier):
                    if ram is not None and tier.ram is not ram:  # else the step would name what the new slab has there
                        raise _MadeAnew(f"tier {tier.name!r} was made anew under the save, whose copy is gone")
                    # Taken for good: a commit that fails may be there all the same.
                    self._state.branch.last_serial = max(self._state.branch.last_serial, identity.serial)
                    if tier.in_memory:
                        await commit_file.commit(tier, record, stored, encoded=encoded)
                    else:
                        await self._slower.commit(tier, StepIndex(record, stored), written.sizes)
                    if self._state.membership.size == 1:
                        self._state.branch.committed(record)  # before anything may leave for or against it
            except BaseException:
                for key in snapshot.unread:  # which may be why
                    self._last.forget(key)
                if ram is not None:  # not that of now: it may have been made anew
                    ram.index.drop({done.digest for done in snapshot.copied})
                raise
        return tier, record, arrays

    async def _snapshot(self, flat: Flat) -> tuple[Snapshot, dict[str, Fingerprint], set[str]]:
        """What there is to copy, the fingerprints of its arrays, and which of them are declared frozen."""
        plan = self._plan if flat.form is not None and flat.form is self._planned else None
        if (ram := self._state.tiers[0].ram) is not None and (mapping := ram.slab.mapped) is not None:
            self._state.host_memory.follow(mapping)
            ram.slab.before_unmapping = self._state.host_memory.forget
        outlet = Outlet(self._state.host_memory, flat.ready)
        found = await self._in_pool(self._planned_snapshot, flat, plan, outlet)
        self._planned, self._plan = flat.form, found[0].plan
        return found

    def _planned_snapshot(
        self, flat: Flat, plan: Plan | None, outlet: Outlet
    ) -> tuple[Snapshot, dict[str, Fingerprint], set[str]]:
        last, chunk_size = self._last, self._state.config.chunk_size
        plan = plan or Plan.of(flat.arrays, chunk_size)
        paged = [flat.arrays[i] for i in plan.paged]
        fingerprints = take_fingerprints(paged, frozen := last.frozen(paged), self._state.fills)
        same = last.same(fingerprints)
        return Snapshot.of(flat.arrays, chunk_size, last.unchanged, plan, outlet, same), fingerprints, frozen

    async def _in_pool(self, function: Callable[..., T], *arguments: Any) -> T:
        return await in_thread(function, *arguments, pool=self._state.pool)

    def _decide(self, call: SaveCall) -> Continued:
        """The branch that a save continues. Raises `Conflict` for a number that this branch has."""
        state, step, origin = self._state, call.step, call.origin
        continued = state.branch.decide(step, origin, overwrite=call.overwrite)
        known = (*state.records(), *state.membership.undecided)
        same = [found for found in known if found.step == step and found.serial in continued]
        if same and not call.overwrite:
            raise Conflict(
                f"step {step} was saved before on this branch ({same[-1]}); to train on from an earlier step, restore "
                f"that one with resume=True first, or pass overwrite=True to save the number again"
            )
        if continued.ignores_origin and origin is not None and continued.newest is not None:
            back, newest = origin.step.step, continued.newest.step
            advice = (
                f"step {step} continues step {newest}, the newest of the branch, though step {back} was restored last; "
                f"to continue that one, restore it with resume=True, and with resume=False to look at it"
            )
            if state.membership.rank == 0:
                _log.warning("%s", advice)
            state.events.emit(OriginIgnored(step, back, newest, advice))
        return continued

    async def _place(
        self, snapshot: Snapshot, refusals: Mapping[str, TieredCkptError], until_committed: AsyncExitStack
    ) -> tuple[Tier, Ram | None, Located, WrittenPacks]:
        """Copy every cell to where it will be committed: the slab, or if that is too small the next tier."""
        first = self._state.tiers[0]
        if (ram := usable_ram(first, refusals)) is not None:
            with attributed(first):
                if await fill_slab(self._state, self._collector, snapshot, first, ram):
                    return first, ram, snapshot.in_slab(ram.store.slab_key), WrittenPacks()
        tier, located, written = await stream(
            self._state, self._collector, self._slower, snapshot, refusals, until_committed
        )
        return tier, None, located, written

    # -- what is remembered -------------------------------------------------------------------------------

    def _index(
        self, identity: StepId, flat: Flat, snapshot: Snapshot, metrics: Mapping[str, float], located: Located
    ) -> _Indexed:
        arrays = snapshot.index(located)
        snapshot.compare_small(self._small)
        stored = join(flat.structure, arrays) if flat.in_pieces and self._state.membership.size == 1 else arrays
        return _Indexed(self._record(identity, flat, snapshot, metrics), arrays, stored)

    def _record(self, identity: StepId, flat: Flat, snapshot: Snapshot, metrics: Mapping[str, float]) -> StepRecord:
        state = self._state
        if state.identity.marker is None:
            raise TierUnavailable("no tier could be opened yet, so the store has no identity")
        continued = state.branch.continued_by(identity)
        return StepRecord(
            store=state.identity.marker.store,
            step=identity.step,
            serial=identity.serial,
            line=continued.line_with(identity.serial),
            restored_from=continued.restored_from,
            saved_at=time.time(),
            nbytes=snapshot.nbytes,
            metrics={name: _storable(as_number(name, value)) for name, value in metrics.items()},
            provenance={
                **versions(),
                "host": socket.gethostname(),
                "process": str(os.getpid()),
                **state.observation.history.provenance(
                    max(0.0, time.time() - state.observation.observed.started_at),
                    state.observation.observed.stalled_seconds,
                ),
                RUN: state.membership.run,
                BEGAN_AFTER: str(state.branch.adopted if continued.restored_from is None else continued.restored_from),
                **({RESTORED_LOSSY: continued.lossy} if continued.lossy else {}),
            },
            policy=self._policies,
            structure=flat.structure,
            rank=state.membership.rank if state.membership.size > 1 else None,
            ranks=state.membership.size,
        )


def _index_and_encode(index: Callable[[], _Indexed], tier: Tier, btree_key: str) -> _Indexed:
    found = index()
    return found._replace(encoded=commit_file.encode_now(tier, found.record, found.stored, btree_key))


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of the software that saves; cached, since finding them parses the package's metadata."""
    return {"tieredckpt": version("tieredckpt"), "python": platform.python_version(), "numpy": np.__version__}


def _storable(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
