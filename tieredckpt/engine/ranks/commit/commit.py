"""Promotes a step of many ranks to a shared tier: rank 0 orders, every rank writes its part, rank 0 commits.

Rank 0 knows from the parts which rank has which chunk, and which chunks the tier lacks. It assigns each of these to one
of the ranks that have it, so that all write about the same number of bytes. A rank writes its chunks as packs and then
its part, durably, and answers. Rank 0 reads the parts, merges them and writes the commit. If anything fails before
that, on any rank, readers do not see the step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing, suppress
from functools import partial

from tieredckpt.concurrency import in_thread, outlast, together
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.full_tier import evicting_older, needing
from tieredckpt.engine.promoting.copy_step import batches, check_wanted, copy_step
from tieredckpt.engine.promoting.dedupe import is_verified, refer_to_intact
from tieredckpt.engine.promoting.pack_writer import Need, write_packs
from tieredckpt.engine.promoting.room import have_room
from tieredckpt.engine.ranks.commit.merged import cell_sizes, placed, without_places
from tieredckpt.engine.ranks.commit.parts import (
    check_found,
    encode_own,
    encode_written,
    extents_of,
    holders,
    merge_parts,
    share_out,
)
from tieredckpt.engine.ranks.commit.vote import Votes
from tieredckpt.engine.ranks.communicator import COORDINATOR, RanksMissing
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import Aborted, Done, Promote
from tieredckpt.engine.ranks.reopen import check_open
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.state.promotions import promoting, report_promoted
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.packs import WrittenPacks
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import Failure, decode, encode
from tieredckpt.errors import Corrupt, NotFound, RanksUnavailable, TieredCkptError, TierUnavailable
from tieredckpt.events import CommitFailed
from tieredckpt.format.digest import SIZE, digest
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.merging import show_ranks
from tieredckpt.format.ocdbt import Extent

__all__ = ["Commits"]

_log = logging.getLogger("tieredckpt")

_PART_MAX = 1 << 30
"""Bytes of the largest part that is read."""
_PARALLEL_READS = 16


class Commits:
    """Orders promotions at rank 0, and carries them out on every rank. Lives on the engine's loop."""

    def __init__(self, state: State, collector: Collector, group: Group, votes: Votes) -> None:
        self._state = state
        self._collector = collector
        self._group = group
        self._votes = votes
        self._ordered = 0
        self.homes: dict[StepId, dict[int, int]] = {}
        """At rank 0, of steps of former runs: the rank that has each part now, by the rank that saved it."""
        self.folders: dict[StepId, dict[int, Tier]] = {}
        """Of steps of former runs: the RAM with each part that this rank is responsible for."""
        self._executing: dict[tuple[StepId, str], asyncio.Task[None]] = {}
        """By step and tier: a step may be on its way to several tiers at once."""
        self.written: dict[tuple[StepId, str], int] = {}
        """Bytes of the packs that this rank wrote of a step to a tier, until it is there, failed, or has left RAM."""

    # -- rank 0 ---------------------------------------------------------------------------------------

    async def promote(self, step: StepId, tier: Tier) -> int:
        """Promote a step to a shared tier; returns the bytes of the packs that all ranks wrote.

        Raises as `copy_step`; `RanksUnavailable` when ranks are silent, `Conflict` when their parts do not fit.
        """
        parts = self._votes.coordinator.parts.get(step)
        if parts is None or step not in self._state.tiers[0].steps.held:
            return await copy_step(self._state, self._collector, step, tier)
        was_there = step in tier.steps.to_mend()
        try:
            return await self.commit(step, tier, parts)
        except (Corrupt, NotFound):  # a part has left RAM, or is damaged there
            if was_there and not tier.steps.keeps(step):
                raise  # it was evicted meanwhile, so it does not come back
            others = (other for other in self._state.holders(step) if other is not tier and other.shared)
            if not any(other.answers for other in others):
                raise
        return await copy_step(self._state, self._collector, step, tier)

    async def commit_streamed(self, step: StepId, name: str, parts: Mapping[int, bytes]) -> None:
        """Commit a step on the tier to which ranks streamed their parts; a failure counts as one of the save."""
        failure: TieredCkptError | None = None
        try:
            await self.commit(step, self._state.tier(name), parts)
        except TieredCkptError as error:
            failure = error
        except Exception as error:  # whatever it is, the step is waited for
            _log.exception("%s: unexpected failure of the commit on tier %r", step, name)
            failure = Failure.of(error).error()
        await self._votes.end_streamed(step, failure)

    async def commit(self, step: StepId, tier: Tier, parts: Mapping[int, bytes]) -> int:
        """See `promote`; ``parts`` are what the ranks have, encoded, by rank."""
        if tier.steps.has_good(step):
            return 0
        begin = time.monotonic()
        try:
            with promoting(self._state, tier):
                commit = partial(self._commit, step, tier, parts, begin)
                return await evicting_older(self._state, self._collector, step, tier, commit)
        except Exception as error:
            ranks = tuple(error.ranks) if isinstance(error, RanksUnavailable) else ()
            reason = Failure.of(error).text
            self._group.publish(Aborted(step.step, step.serial, tier.name, ranks, reason))
            self._state.events.emit(CommitFailed(step.step, step.serial, tier.name, ranks, reason))
            raise
        finally:
            self.written.pop((step, tier.name), None)

    async def _commit(self, step: StepId, tier: Tier, parts: Mapping[int, bytes], begin: float) -> int:
        """The bytes written; 0 where another promotion of the step came first."""
        await self._state.until_read(tier)
        was_there, impaired_by = step in tier.steps.to_mend(), tier.steps.lacking(step)
        find = partial(in_thread, holders, parts, partial(is_verified, tier), pool=self._state.pool)
        losses = tier.packs.losses
        ranks, sizes = await find()
        stored_size, there, doubted = tier.chunks.encoding.stored_size, tier.packs.has_of_part, tier.packs.doubted
        need = sum(stored_size(n) for digest, n in sizes.items() if digest in doubted or not there(digest, n))
        await have_room(self._state, self._collector, step, tier, need)
        # Held to the end, so that no pack is collected that ranks refer to or have just written.
        async with needing(need), tier.packs.guard:
            tier.check_known()
            if tier.steps.has_good(step):
                return 0
            if tier.packs.losses != losses:  # evicted steps had chunks of this one, or some were found damaged
                ranks, sizes = await find()
            await refer_to_intact(self._state, tier, step, await self._cell_sizes(step, sizes))
            lacking = {digest: having for digest, having in ranks.items() if not there(digest, sizes[digest])}
            shares = await in_thread(share_out, lacking, sizes, pool=self._state.pool)
            done = await self._order(step, tier, parts, shares, sizes)
            index = await self._merged(step, tier, done, parts)
            if not was_there:
                check_wanted(step, tier)
            await commit_file.commit(tier, index.record, index.arrays, only_anew=was_there)
            tier.steps.mend(step, impaired_by)
            if step in self._state.membership.undecided:  # it did not fit into RAM
                self._state.branch.committed(index.record)
            # Before anybody can tell that it was evicted again.
            report_promoted(self._state, index.record, tier, self.written.get((step, tier.name), 0), begin)
            self._index(step, tier, index, new={path for each in done for path in each.packs})
            await self._remove_parts(step, tier, tuple(parts))
        return sum(nbytes for each in done for nbytes in each.packs.values())

    async def _cell_sizes(self, step: StepId, sizes: Mapping[bytes, int]) -> Mapping[bytes, int]:
        """Bytes of the cells of chunks; the parts of a streamed step give the bytes as they are stored."""
        whole = self._votes.coordinator.merged_steps.get(step)
        if whole is None or step not in self._state.membership.undecided:
            return sizes
        return await in_thread(cell_sizes, whole, sizes.keys(), pool=self._state.pool)

    async def _order(
        self,
        step: StepId,
        tier: Tier,
        parts: Mapping[int, bytes],
        shares: Mapping[int, Sequence[bytes]],
        sizes: Mapping[bytes, int],
    ) -> list[Done]:
        """Ask every rank to write its share and its part, and wait until all have."""
        self._ordered += 1
        number, group = self._ordered, self._group
        todo: dict[int, dict[int, bytes]] = {rank: {} for rank in range(group.size)}
        homes = self.homes.get(step, {})
        for part in parts:
            todo[homes.get(part, part)][part] = b"".join(shares.get(part, ()))
        for rank in group.others:
            await group.communicator.send([rank], f"todo/{number}", encode(todo[rank]))
        group.publish(Promote(number, step.step, step.serial, tier.name))
        largest = max((sum(sizes[digest] for digest in share) for share in shares.values()), default=0)
        patience = group.deadline + largest / tier.config.min_bandwidth
        mine = asyncio.ensure_future(self._contribute(step, tier, todo[COORDINATOR]))
        missing: Sequence[int] = ()
        try:
            came = await group.gather(f"done/{number}", b"", timeout=patience)
        except RanksMissing as error:
            came, missing = error.came, error.ranks
        except BaseException:
            mine.cancel()
            await outlast(asyncio.gather(mine, return_exceptions=True))
            raise
        done: dict[int, Done] = {rank: decode(data, Done) for rank, data in came.items() if rank != COORDINATOR}
        done[COORDINATOR] = await mine
        for each in done.values():
            tier.packs.add(WrittenPacks(sizes=each.packs))
        if missing:
            raise RanksUnavailable(
                f"{step} is not on tier {tier.name!r}: {show_ranks(missing)} did not write their parts of it within "
                f"{patience:.0f} s",
                missing,
            )
        for rank, each in sorted(done.items()):
            if each.failure is not None:
                text = each.failure.text if rank == COORDINATOR else f"rank {rank}: {each.failure.text}"
                raise Failure(each.failure.kind, text, each.failure.ranks or (rank,)).error()
        return [done[rank] for rank in sorted(done)]

    async def _merged(self, step: StepId, tier: Tier, done: Sequence[Done], parts: Mapping[int, bytes]) -> StepIndex:
        """Check the part of each rank as it lies on the tier; returns the step with the places of all its chunks."""
        expected = {part: found for each in done for part, found in each.parts.items()}
        written: dict[int, bytes] = {}

        async def read(rank: int) -> None:
            promised, nbytes = expected[rank]
            key = step.part_key(rank)
            # This is an error of the tier and not of the step: the rank still has its part.
            anew = f"tier {tier.name!r}: {key} is not what rank {rank} wrote; it is written anew"
            try:
                written[rank] = await tier.store.get(key, limit=min(nbytes, _PART_MAX))
            except (Corrupt, NotFound) as error:
                raise TierUnavailable(anew) from error
            if digest(written[rank]) != promised:
                raise TierUnavailable(anew)

        await together(map(read, parts), _PARALLEL_READS)

        kept = self._votes.coordinator.merged_steps.get(step)

        def merged() -> StepIndex:
            whole = without_places(merge_parts(parts)) if kept is None else kept
            return placed(whole, extents_of(written), tier.packs.index, tier.chunks.encoding)

        index = await in_thread(merged, pool=self._state.pool)
        check_found(index, tier.packs.sizes)
        return index

    def _index(self, step: StepId, tier: Tier, index: StepIndex, new: AbstractSet[str]) -> None:
        """Index the chunks of a step in ``new`` packs; those that are nowhere are lost: they were forgotten since."""
        lost = set()
        chunks = ((chunk, array.grid.cell_nbytes) for array in index.arrays.values() for chunk in array.chunks)
        for chunk, nbytes in chunks:
            if not isinstance(chunk.where, Extent) or tier.packs.has(chunk.digest, nbytes):
                continue
            if chunk.where.path in new:
                tier.packs.index[chunk.digest] = chunk.where
            elif chunk.digest not in tier.packs.index:
                lost.add(chunk.digest)
        if lost:
            tier.steps.impair(step, lost)

    async def _remove_parts(self, step: StepId, tier: Tier, ranks: Sequence[int]) -> None:
        with suppress(TieredCkptError):  # what is left is a stray, and collected as such
            await together([tier.store.delete(step.part_key(rank)) for rank in ranks])

    # -- every rank ---------------------------------------------------------------------------------------

    def forget(self, step: StepId) -> None:
        """Forget what was written of a step that has left RAM."""
        self.written = {of: nbytes for of, nbytes in self.written.items() if of[0] != step}

    def execute(self, order: Promote) -> None:
        """Begin the work that rank 0 requested; cancels an older request for the same step and tier."""
        step = StepId(order.serial, order.step)
        self._executing = {what: task for what, task in self._executing.items() if not task.done()}
        before = self._executing.get((step, order.tier))
        if before is not None:
            before.cancel()
        self._executing[step, order.tier] = self._group.start(self._execute(step, order, before), f"part of {step}")

    async def _execute(self, step: StepId, order: Promote, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await outlast(asyncio.gather(before, return_exceptions=True))
        group, tier = self._group, self._state.tier(order.tier)
        data = await group.communicator.recv(COORDINATOR, f"todo/{order.number}", timeout=group.deadline)
        todo: dict[int, bytes] = decode(data, dict[int, bytes])
        async with tier.packs.guard:
            with promoting(self._state, tier):
                done = await self._contribute(step, tier, todo)
        await group.communicator.send([COORDINATOR], f"done/{order.number}", encode(done))

    async def _contribute(self, step: StepId, tier: Tier, todo: Mapping[int, bytes]) -> Done:
        """Write the packs and parts that are asked of this rank."""
        begin = time.monotonic()
        written = WrittenPacks(sizes=await self._streamed_packs(step, tier))
        found: dict[int, tuple[bytes, int]] = {}
        failure = None
        try:
            await check_open(self._state, tier)
            for part, digests in todo.items():
                encoded = await self._write(step, tier, part, digests, written)
                await tier.store.put(step.part_key(part), [encoded])
                found[part] = digest(encoded), len(encoded)
        except TieredCkptError as error:
            failure = Failure.of(error)
            if not self._state.manages(tier):  # rank 0 opens its own store again, and no other's
                tier.health.fail_here(error)
            self._state.changed.notify()
        except Exception as error:
            _log.exception("%s: the part for tier %r could not be written", step, tier.name)
            failure = Failure.of(error)
        finally:
            if self._state.manages(tier):
                tier.packs.add(written)
        if step in self._state.tiers[0].steps.held or step in self._state.membership.undecided:
            self.written[step, tier.name] = written.nbytes
        return Done(written.sizes, found, time.monotonic() - begin, failure)

    async def _streamed_packs(self, step: StepId, tier: Tier) -> dict[str, int]:
        """The packs that a save streamed to the tier for its part; rank 0 does not know them yet."""
        streamed = self._state.membership.streamed.get(step)
        if streamed is None or streamed.tier is not tier:
            return {}
        with suppress(TieredCkptError):  # rank 0 notices a pack that is gone, and fails
            return {path: (await tier.store.stat(path)).size for path in streamed.written}
        return {}

    async def _write(self, step: StepId, tier: Tier, part: int, digests: bytes, written: WrittenPacks) -> bytes:
        """Write some chunks of a part as packs, and add these to ``written``; returns the part, encoded."""
        streamed = self._state.membership.streamed.get(step)
        if streamed is not None and streamed.tier is tier:
            return await in_thread(encode_own, streamed.index, pool=self._state.pool)
        wanted = {digests[start : start + SIZE] for start in range(0, len(digests), SIZE)}
        async with StepSource.open(self._state, step, only=self._home(step, part)) as source:
            needs: dict[bytes, Need] = {}
            for key, array in source.index.arrays.items():
                for ordinal, chunk in enumerate(array.chunks):
                    if chunk.digest in wanted and isinstance(chunk.where, Extent):
                        needs[chunk.digest] = Need(chunk.digest, key, ordinal, array.grid.cell_nbytes)
            if lacking := wanted - needs.keys():
                raise NotFound(f"{step}: {len(lacking)} chunks of the part of rank {part} are not in RAM any more")
            if needs:
                async with aclosing(batches(self._state, source, tier, [*needs.values()])) as sealed:
                    await write_packs(tier, sealed, written)
            return await in_thread(encode_written, source.index, written.extents, pool=self._state.pool)

    def _home(self, step: StepId, part: int) -> Tier:
        return self.folders.get(step, {}).get(part, self._state.tiers[0])
