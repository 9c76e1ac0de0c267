"""Tiers that the agent lends to a trainer, which writes packs there; the agent makes room and commits."""

from __future__ import annotations

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.agent import messages
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.full_tier import make_room
from tieredckpt.engine.promoting.dedupe import refer_to_intact
from tieredckpt.engine.ranks.commit.parts import check_found
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.tier.written_packs import WrittenPacks
from tieredckpt.errors import Conflict, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import decode_step

__all__ = ["LentTiers"]


class LentTiers:
    """At the agent: tiers that the trainer of one connection streams to. Runs on the engine's loop."""

    def __init__(self, state: State, collector: Collector) -> None:
        self._state = state
        self._collector = collector
        self._lent: set[str] = set()

    async def make_room(self, operation: messages.MakeRoom) -> bool:
        """Whether so many bytes fit, after evictions if needed."""
        tier = self._state.tier(operation.tier)
        return await make_room(self._state, self._collector, None, tier, operation.nbytes)

    async def lend(self, operation: messages.Lend) -> None:
        """Keep the tier's packs as they are until it is given back."""
        tier = self._state.tier(operation.tier)
        if tier.marker is None:
            raise TierUnavailable(f"tier {tier.name!r} is not available: {tier.health.error}")
        await tier.packs.guard.acquire()
        self._lent.add(tier.name)

    def give_back(self, name: str) -> None:
        """Release the packs; those that were written and not committed are collected, as after a crash."""
        if name in self._lent:
            self._lent.remove(name)
            self._state.tier(name).packs.guard.release()

    def give_all_back(self) -> None:
        for name in tuple(self._lent):
            self.give_back(name)

    async def find(self, operation: messages.Find) -> list[tuple[bytes, str, int, int]]:
        """Locate intact copies of chunks on a lent tier."""
        tier = self._lent_one(operation.tier)
        await refer_to_intact(self._state, tier, None, operation.sizes)
        packs = tier.packs
        there = {digest: packs.index[digest] for digest, nbytes in operation.sizes.items() if packs.has(digest, nbytes)}
        return [(digest, extent.path, extent.offset, extent.length) for digest, extent in there.items()]

    async def commit(self, operation: messages.Commit) -> None:
        """Commit a step whose packs the trainer has written."""
        tier = self._lent_one(operation.tier)
        index = await in_thread(decode_step, operation.manifest, operation.btree, operation.key, pool=self._state.pool)
        for key, size in operation.packs.items():
            if layout.parse_pack_key(key) is None or (await tier.store.stat(key)).size != size:
                raise Conflict(f"tier {tier.name!r}: pack {key} is not as the trainer has written it; save again")
        found = unique_extents(index.arrays)
        new = {digest: extent for digest, extent in found.items() if extent.path in operation.packs}
        tier.packs.add(WrittenPacks(new, operation.packs))
        check_found(index, tier.packs.sizes)
        await commit_file.commit(tier, index.record, index.arrays)
        self._state.branch.committed(index.record)  # or the step would be off-branch until the trainer tells
        self._state.changed.notify()

    def _lent_one(self, name: str) -> Tier:
        if name not in self._lent:
            raise Conflict(f"tier {name!r} was not lent to this trainer; save again")
        return self._state.tier(name)
