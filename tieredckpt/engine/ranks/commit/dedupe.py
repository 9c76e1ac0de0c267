"""Tells ranks that stream past their RAM which of their chunks a shared tier has: rank 0 alone knows.

Rank 0 keeps the packs that it has named from collection until it has decided on the save.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile

from tieredckpt.engine import limits
from tieredckpt.engine.ranks.commit.attempts import Attempts
from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import Find
from tieredckpt.engine.saving.slower_tiers import find_chunks
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import decode, encode
from tieredckpt.errors import RanksUnavailable, TieredCkptError
from tieredckpt.format.ocdbt import Extent

__all__ = ["Dedupe"]

_log = logging.getLogger("tieredckpt")


class Dedupe:
    """Asks rank 0 which chunks a shared tier has, and answers there. Lives on the engine's loop."""

    def __init__(self, state: State, group: Group, attempts: Attempts) -> None:
        self._state = state
        self._group = group
        self._attempts = attempts
        self._asked = 0
        self._open_questions: set[int] = set()
        """Questions whose answers this rank has not received, though it may have given them up."""
        self._unanswered = ""
        self.attempt = ""
        """The attempt of the save under way on this rank."""

    async def find(self, tier: Tier, sizes: Mapping[bytes, int]) -> dict[bytes, Extent]:
        """Extents of those chunks that a shared tier has; ``sizes`` are the bytes of all chunks, by digest.

        Empty if rank 0 does not answer soon: to write chunks once more is better than to keep the training waiting.
        """
        if self._group.deserted or self._unanswered == self.attempt:
            return {}
        await self._discard()
        self._asked += 1
        asked, within = self._asked, limits.in_force.find_within
        self._group.report(Find(asked, self.attempt, tier.name, dict(sizes)))
        self._open_questions.add(asked)
        try:
            found = await self._group.communicator.recv(COORDINATOR, f"found/{asked}", timeout=within)
        except RanksUnavailable:
            _log.warning("rank %d has not told what tier %r has within %g s", COORDINATOR, tier.name, within)
            self._unanswered = self.attempt
            return {}
        self._open_questions.discard(asked)
        return decode(found, dict[bytes, Extent])

    async def _discard(self) -> None:
        """Receive the answers to questions that were given up, or they would be kept for good."""
        for asked in tuple(self._open_questions):
            with suppress(RanksUnavailable):  # it has not come yet
                await self._group.communicator.recv(COORDINATOR, f"found/{asked}", timeout=0)
                self._open_questions.discard(asked)

    async def answer(self, rank: int, asked: Find) -> None:
        """At rank 0: tell a rank which of its chunks the tier has."""
        found: dict[bytes, Extent] = {}
        tier = self._state.tier(asked.tier)
        if self._attempts.is_undecided(asked.attempt):
            noted = self._state.membership.promised.setdefault(asked.attempt, {}).setdefault(tier.name, set())
            try:
                found = await find_chunks(self._state, tier, asked.sizes, noted)
            except TieredCkptError as error:
                _log.warning("tier %r: what it has is not known, so rank %d writes anew: %s", tier.name, rank, error)
        with suppress(RanksUnavailable):  # the asker does not wait for ever
            await self._group.communicator.send([rank], f"found/{asked.number}", encode(found))

    def decided(self, attempt: str) -> None:
        """At rank 0: release the packs of an attempt, and of those asked for before it that rank 0 has not begun."""
        promised = self._state.membership.promised
        if attempt in promised:
            self._release_unbegun(takewhile(attempt.__ne__, promised))
            del promised[attempt]

    def begin_epoch(self) -> None:
        """At rank 0: release the packs of attempts that it will not begin any more, as a restore comes first."""
        self._release_unbegun(self._state.membership.promised)

    def _release_unbegun(self, asked: Iterable[str]) -> None:
        for attempt in tuple(asked):
            if self._attempts.is_to_come(attempt):
                del self._state.membership.promised[attempt]
