"""Saves: a tree's chunks are copied into RAM and committed there, or streamed on if they do not fit.

While a save runs, the copy threads work on the caller's arrays; a save that ends, in whatever way, has no
thread left that touches them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.slab import Slab
from tieredckpt.engine.ask import waits_for_promotion
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.packs import Batch, Payload, seal, stored_size, write_pack
from tieredckpt.engine.slab_index import SlabIndex
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Conflict, NoSpace, TierUnavailable
from tieredckpt.events import SaveSkipped, StepSaved
from tieredckpt.format.manifest import Chunk, StepId, StepRecord
from tieredckpt.tree.flatten import Flat
from tieredckpt.tree.snapshot import Copied, Snapshot
from tieredckpt.units import format_size

__all__ = ["Saved", "Writer"]

_WAIT_FOR_ROOM = 600.0
"""Seconds that ``when_full = "wait"`` waits at most without any step having been promoted."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did."""

    step: StepId
    tier: str | None
    """Where it was committed first; None when it was skipped."""
    nbytes: int
    new_bytes: int
    seconds: float
    skipped: str = ""
    """Why the save was not made, if it was not."""


class _Skip(Exception):
    """This save is not made, and training goes on."""


class Writer:
    """Makes saves, one at a time. Lives on the engine's loop."""

    def __init__(self, state: State, collector: Collector) -> None:
        self._state = state
        self._collector = collector
        self._guards_saves = asyncio.Lock()
        self._digests: dict[str, list[bytes]] = {}
        """Of the last save, by key of the array."""
        self._unchanged: dict[str, list[bytes | None]] = {}
        """The same, None for chunks that were another one in the save before."""

    async def save(self, step: int, flat: Flat, metrics: Mapping[str, float], *, overwrite: bool = False) -> Saved:
        """Copy and commit one tree.

        Args:
            step: the trainer's number, not negative.
            flat: the flattened tree; its arrays do not change until this returns.
            metrics: finite or not, by name.
            overwrite: save a step number again that the live line has already.

        Raises:
            Conflict: the live line has that step already.
            NoSpace, TierUnavailable: no tier can take the tree.
        """
        begin = time.monotonic()
        async with self._guards_saves:
            state = self._state
            self._check_new(step, overwrite=overwrite)
            snapshot = await self._in_pool(Snapshot.of, flat.arrays, state.config.chunk_size, self._unchanged)
            identity = StepId(state.last_serial + 1, step)
            try:
                tier, located = await self._place(snapshot, identity)
            except _Skip as reason:
                state.events.emit(SaveSkipped(step, str(reason)))
                return Saved(identity, None, snapshot.nbytes, 0, time.monotonic() - begin, str(reason))
            record = self._record(identity, flat, snapshot, metrics)
            arrays = await self._in_pool(snapshot.index, located)
            try:
                await tier.commit(record, arrays)
            except BaseException:
                self._abandon(snapshot, tier)
                raise
            state.last_serial = identity.serial
            state.line = record.line
            self._learn({key: [chunk.digest for chunk in array.chunks] for key, array in arrays.items()})
            seconds = time.monotonic() - begin
            self._observe(step, record, seconds)
        state.events.emit(StepSaved(step, identity.serial, tier.name, record.nbytes, snapshot.new_bytes, seconds))
        state.changed.beat()
        return Saved(identity, tier.name, record.nbytes, snapshot.new_bytes, seconds)

    async def _in_pool(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._state.pool, function, *arguments)

    def _check_new(self, step: int, *, overwrite: bool) -> None:
        state = self._state
        same = [found for found in state.records() if found.step == step and state.on_line(found.serial)]
        if same and not overwrite:
            raise Conflict(
                f"step {step} was saved before on this line ({same[-1]}); to train on from it, restore it first, "
                f"or pass overwrite=True to save the number again"
            )

    # -- where the bytes go -------------------------------------------------------------------------------

    async def _place(self, snapshot: Snapshot, identity: StepId) -> tuple[Tier, dict[tuple[int, int], Chunk]]:
        """Copy every cell to where it will be committed: the slab, or if that is too small the next tier."""
        first = self._state.tiers[0]
        if first.ram is not None and first.slab_index is not None:
            if await self._fill_slab(snapshot, first, identity):
                return first, snapshot.in_slab(first.ram.slab_key)
            slab, index = first.ram.slab, first.slab_index
        else:
            slab, index = self._state.scratch.slab, SlabIndex(self._state.scratch.slab)
        return await self._stream(snapshot, slab, index)

    async def _fill_slab(self, snapshot: Snapshot, tier: Tier, identity: StepId) -> bool:
        """Copy all cells into the slab; False, with the cells still to do, when it can never hold them."""
        assert tier.ram is not None
        assert tier.slab_index is not None
        slab, index = tier.ram.slab, tier.slab_index
        largest = sum(stored_size(cell.nbytes) for cell in snapshot.pending)
        unchanged = sum(stored_size(cell.nbytes) for cell in snapshot.pending if cell.expected is not None)
        if largest - unchanged > slab.capacity:
            return False
        if not slab.reserved:
            await self._in_pool(self._reserve_for_two, slab, largest)
        if slab.room < largest - unchanged:
            await self._make_room(tier, partial(_has_room, slab, largest - unchanged), identity)
        try:
            while snapshot.pending:
                await self._run(snapshot, index)
                if snapshot.full:
                    more = stored_size(snapshot.pending[0].nbytes)
                    # More than there was: what is free may be in pieces that are too small.
                    await self._make_room(tier, partial(_has_room, slab, slab.room + more), identity)
        except BaseException:
            self._abandon(snapshot, tier)
            raise
        uses = Counter(done.digest for done in snapshot.copied)
        index.drop((uses - Counter(set(uses))).elements())  # a step uses each of its chunks once
        return True

    @staticmethod
    def _reserve_for_two(slab: Slab, nbytes: int) -> None:
        """An automatic slab takes memory for two snapshots at the first save, so that later ones do not."""
        try:
            slab.reserve(2 * nbytes)
        except NoSpace:
            slab.reserve(nbytes)

    async def _run(self, snapshot: Snapshot, room: SlabIndex) -> None:
        """Let the copy threads work until all is copied or the slab is full; none of them runs afterwards."""
        snapshot.full = False
        loop = asyncio.get_running_loop()
        threads = min(self._state.config.copy_threads, len(snapshot.pending)) or 1
        workers = [loop.run_in_executor(self._state.pool, snapshot.work, room) for _ in range(threads)]
        everyone = asyncio.gather(*workers)
        cancelled = False
        while not everyone.done():
            try:
                await asyncio.shield(everyone)
            except asyncio.CancelledError:
                cancelled = True
                snapshot.stop()
        if cancelled:
            raise asyncio.CancelledError
        if snapshot.error is not None:
            raise snapshot.error

    def _abandon(self, snapshot: Snapshot, tier: Tier) -> None:
        if tier.slab_index is not None:
            tier.slab_index.drop([done.digest for done in snapshot.copied])
        snapshot.copied.clear()

    async def _make_room(self, tier: Tier, enough: Any, identity: StepId) -> None:
        """Have room in the slab by evicting, and by what ``when_full`` says if that is not enough."""
        state = self._state
        when_full = state.config.when_full
        patience = time.monotonic() + _WAIT_FOR_ROOM
        while not await self._collector.make_room(tier, enough):
            left = patience - time.monotonic()
            if when_full == "wait" and left > 0 and self._waiting_helps(tier):
                await state.changed.wait(min(left, 1.0))
                continue
            if when_full != "skip" and await self._collector.replace_oldest(tier, enough):
                return
            raise _Skip(
                f"step {identity.step} was not saved: the slab of tier {tier.name!r} "
                f"({format_size(tier.capacity or 0)}) is full of steps that must stay for now; give it a larger "
                f"capacity, or save less often"
            )

    def _waiting_helps(self, tier: Tier) -> bool:
        """Whether a step of the slab is on its way to a tier that works, or being read."""
        return bool(tier.pins) or any(
            waits_for_promotion(self._state, step, tier, only_healthy=True) for step in tier.held
        )

    # -- streaming ----------------------------------------------------------------------------------------

    async def _stream(
        self, snapshot: Snapshot, slab: Slab, index: SlabIndex
    ) -> tuple[Tier, dict[tuple[int, int], Chunk]]:
        """Send a tree that the slab cannot hold through it, a part at a time, to the nearest tier that works."""
        problems = []
        for tier in self._state.tiers:
            if tier.ram is not None:
                continue
            if not tier.healthy:
                problems.append(f"tier {tier.name!r} is not available ({tier.error})")
                continue
            need = sum(stored_size(cell.nbytes) for cell in snapshot.pending)
            if not await self._collector.make_room(tier, partial(_fits, tier, need)):
                problems.append(f"tier {tier.name!r} has no room for {format_size(need)}")
                continue
            return tier, await self._stream_to(tier, snapshot, slab, index)
        raise NoSpace(
            f"the tree of {format_size(snapshot.nbytes)} does not fit into RAM, and nothing slower can take it: "
            + ("; ".join(problems) or "there is no other tier; give the RAM tier a larger capacity, or add one")
        )

    async def _stream_to(
        self, tier: Tier, snapshot: Snapshot, slab: Slab, index: SlabIndex
    ) -> dict[tuple[int, int], Chunk]:
        found: dict[tuple[int, int], Chunk] = {}
        first = self._state.tiers[0]
        async with tier.guards_packs:
            while snapshot.pending:
                if first.ram is not None:
                    await self._collector.make_room(first, partial(_has_room, slab, slab.capacity // 2))
                try:
                    await self._run(snapshot, index)
                    if not snapshot.copied:
                        raise NoSpace(
                            f"the slab of {format_size(slab.capacity)} has no room for a single chunk while its steps "
                            f"must stay; give the RAM tier a larger capacity"
                        )
                    snapshot.new_bytes += await self._write_copied(tier, snapshot.copied, slab)
                    for done in snapshot.copied:
                        found[done.cell.array, done.cell.ordinal] = Chunk(done.digest, tier.chunks[done.digest])
                finally:
                    index.drop([done.digest for done in snapshot.copied])
                    snapshot.copied.clear()
        return found

    async def _write_copied(self, tier: Tier, copied: list[Copied], slab: Slab) -> int:
        new = {done.digest: done for done in copied if done.digest not in tier.chunks}
        limit = 1 if not tier.store.traits.ranged_get else len(new)
        waiting = sorted(new.values(), key=lambda done: done.offset)
        written = 0
        while waiting:
            batch = Batch([self._payload(done, slab) for done in waiting[:limit]])
            await asyncio.gather(*(self._in_pool(seal, payload) for payload in batch.payloads))
            written += await write_pack(tier, batch)
            del waiting[:limit]
        return written

    @staticmethod
    def _payload(done: Copied, slab: Slab) -> Payload:
        memory: npt.NDArray[np.uint8] = slab.array[done.offset : done.offset + stored_size(done.cell.nbytes)]
        return Payload(done.digest, done.cell.nbytes, memory)

    # -- what is remembered -------------------------------------------------------------------------------

    def _record(self, identity: StepId, flat: Flat, snapshot: Snapshot, metrics: Mapping[str, float]) -> StepRecord:
        state = self._state
        if state.marker is None:
            raise TierUnavailable("no tier could be opened yet, so the store has no identity")
        return StepRecord(
            store=state.marker.store,
            step=identity.step,
            serial=identity.serial,
            line=state.extended_line(identity.serial),
            restored_from=state.restored_from.serial if state.restored_from else None,
            saved_at=time.time(),
            nbytes=snapshot.nbytes,
            metrics={name: _storable(value) for name, value in metrics.items()},
            provenance={
                "tieredckpt": version("tieredckpt"),
                "python": platform.python_version(),
                "numpy": np.__version__,
                "host": socket.gethostname(),
                "process": str(os.getpid()),
            },
            policy=state.config.model_dump(mode="json"),
            structure=flat.structure,
        )

    def _learn(self, now: dict[str, list[bytes]]) -> None:
        self._unchanged = {
            key: [
                digest if digest == before else None for digest, before in zip(digests, self._digests[key], strict=True)
            ]
            for key, digests in now.items()
            if len(self._digests.get(key, ())) == len(digests)
        }
        self._digests = now

    def _observe(self, step: int, record: StepRecord, seconds: float) -> None:
        before = self._state.observed
        stall = seconds if before.stall_seconds is None else 0.7 * before.stall_seconds + 0.3 * seconds
        step_seconds = before.step_seconds
        if before.last_save_step is not None and before.last_save_at is not None and step > before.last_save_step:
            each = (record.saved_at - before.last_save_at) / (step - before.last_save_step)
            step_seconds = each if step_seconds is None else 0.7 * step_seconds + 0.3 * each
        self._state.observed = dataclasses.replace(
            before,
            last_save_step=step,
            last_save_at=record.saved_at,
            save_count=before.save_count + 1,
            stall_seconds=stall,
            step_seconds=step_seconds,
        )


def _has_room(slab: Slab, nbytes: int) -> bool:
    return slab.room >= nbytes


def _fits(tier: Tier, nbytes: int) -> bool:
    return tier.capacity is None or tier.used + nbytes <= tier.capacity


def _storable(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)
