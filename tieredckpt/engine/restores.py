"""Restores of several ranks: all take one step, which the leader chooses, and all succeed or none does.

The leader tells with its choice the index of the whole step, so that nobody else reads it. Each rank then reads
the chunks that it needs, from RAM of its machine where they are there, and says how that ended.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec

from tieredckpt.blobs.settle import in_thread
from tieredckpt.engine import messages
from tieredckpt.engine.agreement import Agreement
from tieredckpt.engine.messages import Chosen
from tieredckpt.engine.neighbours import near
from tieredckpt.engine.opening import Opening
from tieredckpt.engine.parts import merge_parts
from tieredckpt.engine.ranks import LEADER
from tieredckpt.engine.sharing import Sharing
from tieredckpt.engine.source import ChosenStep
from tieredckpt.engine.state import State
from tieredckpt.engine.team import Team, consult
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, StepRecord, decode_step, encode_step

__all__ = ["Restores"]

_log = logging.getLogger("tieredckpt")

_PIECE = 4 << 20
"""Bytes of an index that go in one message."""

T = TypeVar("T")
Index = tuple[bytes, bytes, str]
"""Manifest of a step, its nodes, and their key."""


class _Wanted(msgspec.Struct, frozen=True):
    """What a rank wants to restore, and what its RAM has no more."""

    step: int | None
    gone: tuple[tuple[int, int], ...]


class Restores:
    """Chooses with the other ranks what to restore. Lives on the engine's loop.

    ``look_up`` finds a step as a store of one rank does; ``gone`` gives what has left this rank's RAM since it was
    asked before, and ``forget`` counts such steps of other ranks as not held there.
    """

    def __init__(
        self,
        state: State,
        team: Team,
        agreement: Agreement,
        opening: Opening,
        look_up: Callable[[int | None], Awaitable[tuple[StepId, StepRecord] | None]],
        gone: Callable[[], tuple[tuple[int, int], ...]],
        forget: Callable[[tuple[tuple[int, int], ...]], Awaitable[None]],
    ) -> None:
        self._state = state
        self._team = team
        self._agreement = agreement
        self._opening = opening
        self._look_up = look_up
        self._gone = gone
        self._forget = forget
        self._sharing = Sharing(state, team)
        self._asked = 0
        self._done = 0
        self._begun = False
        self._index: Index = (b"", b"", "")

    async def look_up(self, step: int | None) -> tuple[StepId, StepRecord] | None:
        """The step that all ranks restore, and its record; a call of all ranks. Raises as the leader's search."""
        self._asked += 1
        topic = f"restore/{self._asked}"
        verdict = await consult(self._team, topic, self._want(step), self._choose)
        chosen: Chosen = messages.decode(verdict, Chosen)
        if chosen.step is None:
            self._state.chosen = None
            return None
        manifest, btree = await self._pass_index(topic, chosen)
        index = await in_thread(decode_step, manifest, btree, chosen.btree_key, pool=self._state.pool)
        found = StepId(chosen.serial, chosen.step)
        self._agreement.restored()
        self._sharing.begin(self._asked)
        known = (self._state.tiers[0], *self._opening.leftovers)
        here = partial(near, self._state, found, known)
        self._state.chosen = ChosenStep(found, self._state.tier(chosen.tier), index, here, self._sharing.take)
        return found, index.record

    async def together(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do this rank's work of a restore; raises when it fails on any rank, for then none has restored."""
        result: list[T] = []
        self._done += 1
        self._begun = False

        async def mine() -> bytes:
            try:
                result.append(await work())
            except Exception as error:
                if self._state.chosen is not None and not self._begun:
                    await self.begin(error)
                await self._sharing.leave()
                raise
            return b""

        try:
            await consult(self._team, f"restored/{self._done}", mine(), _agree)
        finally:
            self._state.chosen = None
        return result[0]

    async def begin(self, failure: Exception | None = None) -> None:
        """Begin to read, once all ranks can: where one cannot, none waits for what that one was to pass on."""
        self._begun = True

        async def ready() -> bytes:
            if failure is not None:
                raise failure
            return b""

        await consult(self._team, f"reading/{self._done}", ready(), _agree)

    # -- which --------------------------------------------------------------------------------------------

    async def _want(self, step: int | None) -> bytes:
        return messages.encode(_Wanted(step, self._gone()))

    async def _choose(self, said: dict[int, bytes]) -> bytes:
        wanted: dict[int, _Wanted] = {rank: messages.decode(data, _Wanted) for rank, data in said.items()}
        for rank, each in wanted.items():
            if each.step != wanted[LEADER].step:
                raise Conflict(
                    f"rank {rank} wants to restore {_shown(each.step)}, rank {LEADER} {_shown(wanted[LEADER].step)}; "
                    f"all ranks restore one step"
                )
            await self._forget(each.gone)
        found = await self._look_up(wanted[LEADER].step)
        if found is None:
            return messages.encode(Chosen(None))
        step, _ = found
        tier, self._index = await self._whole_index(step)
        manifest, btree, btree_key = self._index
        return messages.encode(Chosen(step.step, step.serial, tier.name, btree_key, (len(manifest), len(btree))))

    async def _whole_index(self, step: StepId) -> tuple[Tier, Index]:
        """The index of a whole step from the nearest tier that has a readable one. Raises the last one's error."""
        problem: TieredCkptError = NotFound(f"no tier holds {step}")
        for tier in self._state.holders(step):
            try:
                if tier.config.kind == "ram":
                    return tier, await in_thread(self._index_of_parts, step, pool=self._state.pool)
                return tier, await tier.read_index(step)
            except (Conflict, Corrupt, NotFound, TierUnavailable) as error:
                _log.warning("%s cannot be opened on tier %r: %s", step, tier.name, error)
                problem = error
        raise problem

    def _index_of_parts(self, step: StepId) -> Index:
        parts = self._agreement.parts.get(step)
        if parts is None:
            raise NotFound(f"the parts of {step} in RAM are not known any more")
        merged = merge_parts(parts)
        btree_key = layout.btree_key(step.step, step.serial)
        index = encode_step(merged.record, merged.arrays, btree_path=btree_key, checksum=False)
        return index.manifest, index.btree, btree_key

    async def _pass_index(self, topic: str, chosen: Chosen) -> tuple[bytes, bytes]:
        """The index of the chosen step, which the leader has, at all ranks."""
        team, total = self._team, sum(chosen.sizes)
        count = -(-total // _PIECE)
        if team.leads:
            data = self._index[0] + self._index[1]
            self._index = (b"", b"", "")
            for piece in range(count):
                part = data[piece * _PIECE : (piece + 1) * _PIECE]
                await team.coordinator.post(team.others, f"{topic}/index/{piece}", part)
        else:
            pieces = [
                await team.coordinator.take(LEADER, f"{topic}/index/{piece}", timeout=team.deadline)
                for piece in range(count)
            ]
            data = b"".join(pieces)
        return data[: chosen.sizes[0]], data[chosen.sizes[0] :]


async def _agree(_: dict[int, bytes]) -> bytes:
    return b""


def _shown(step: int | None) -> str:
    return "the newest step" if step is None else f"step {step}"
