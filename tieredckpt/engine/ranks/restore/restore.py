"""Restores of several ranks: all restore one step, which rank 0 chooses, and all succeed or none does.

When all ranks have called `restore` (`rendezvous`), rank 0 sends them its choice and the index of the whole step, so
that no other rank reads the index. Each rank then reads the chunks that it needs, from RAM of its machine if they are
there, and votes on the result. If a rank is cancelled on the way, it tells the others, which fail at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.ranks.commit.parts import merge_parts
from tieredckpt.engine.ranks.commit.vote import Votes
from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.ranks.departed import Departed, StepNumbers
from tieredckpt.engine.ranks.group import Group, bow_out, vote
from tieredckpt.engine.ranks.messages import Chosen
from tieredckpt.engine.ranks.node_ram import near
from tieredckpt.engine.ranks.open import Opening
from tieredckpt.engine.ranks.restore.peers import PeerExchange
from tieredckpt.engine.ranks.restore.rendezvous import Rendezvous
from tieredckpt.engine.restoring.lookup import Wanted
from tieredckpt.engine.restoring.source import ChosenStep, ask_again
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import decode, encode
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, RanksUnavailable, TieredCkptError, TierUnavailable
from tieredckpt.format.encoding import PLAIN
from tieredckpt.format.manifest import StepId, StepRecord, decode_step, encode_step

__all__ = ["CollectiveRestores"]

_log = logging.getLogger("tieredckpt")

_PIECE = 4 << 20
"""Bytes of an index that go in one message."""

T = TypeVar("T")
Index = tuple[bytes, bytes, str]
"""Manifest of a step, its nodes, and their key."""


class _Asked(msgspec.Struct, frozen=True):
    """The step that a rank wants to restore, those that have left its RAM, and its saves without a known decision."""

    wanted: Wanted
    gone: StepNumbers
    undecided: tuple[StepId, ...]


class CollectiveRestores:
    """Chooses with the other ranks what to restore. Lives on the engine's loop.

    ``look_up`` finds a step as a store of one rank does.
    """

    def __init__(
        self,
        state: State,
        group: Group,
        votes: Votes,
        opening: Opening,
        look_up: Callable[[int | None], Awaitable[tuple[StepId, StepRecord] | None]],
        departed: Departed,
    ) -> None:
        self._state = state
        self._group = group
        self._votes = votes
        self._opening = opening
        self._look_up = look_up
        self._departed = departed
        self.rendezvous = Rendezvous(group, votes.begin_epoch, self._stay_away)
        self._peers = PeerExchange(state, group)
        self._guards_restore = asyncio.Lock()
        self._epoch = 0
        """Epoch of the restore under way, the same on all ranks."""
        self._found = False
        """Whether there is a step to restore, so that all ranks vote on whether they can read it."""
        self._begun = False
        """Whether this rank has voted on that."""
        self._reading = False
        """Whether all ranks read."""
        self._index: Index = (b"", b"", "")
        self.chosen: ChosenStep | None = None
        """The step that all ranks restore at present."""

    async def look_up(self, wanted: Wanted) -> tuple[StepId, StepRecord] | None:
        """The step that all ranks restore, and its record; once in a restore.

        Raises as rank 0's search; `Invalid` if the ranks ask for different steps.
        """
        topic = f"restore/{self._epoch}"
        gone = self._departed.take()
        try:
            asked = _Asked(wanted, gone, tuple(self._state.membership.undecided))
            verdict = await vote(self._group, topic, _said(asked), self._choose)
        except BaseException:
            self._departed.take_back(gone)
            raise
        chosen: Chosen = decode(verdict, Chosen)
        if chosen.step is None:
            self.chosen = None
            return None
        self._found = True
        manifest, btree = await self._pass_index(topic, chosen)
        index = await in_thread(decode_step, manifest, btree, chosen.btree_key, pool=self._state.pool)
        found = StepId(chosen.serial, chosen.step)
        self._peers.begin(self._epoch)
        known = (self._state.tiers[0], *self._opening.leftovers)
        here = partial(near, self._state, found, known)
        self.chosen = ChosenStep(found, self._state.tier(chosen.tier), index, here, self._peers.take)
        return found, index.record

    async def together(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do this rank's work of a restore; raises if it fails on any rank, for then no rank has restored.

        Raises `RanksUnavailable` when not all ranks call this.
        """
        result: list[T] = []

        async def mine() -> bytes:
            try:
                result.append(await work())
            except asyncio.CancelledError:
                self._leave_behind()
                raise
            except Exception as error:
                if self._found and not self._begun:
                    await self.begin(error)
                if self._reading:
                    await self._peers.decline(self._peers.leave())
                raise
            if self._reading:  # no array, perhaps, and so in no exchange
                await self._peers.decline(self._peers.leave())
            return b""

        async with self._guards_restore:
            self._epoch = await self.rendezvous.meet()
            self._found = self._begun = self._reading = False
            try:
                await vote(self._group, f"restored/{self._epoch}", mine(), _agree)
            finally:
                self.chosen = None
        return result[0]

    async def begin(self, failure: Exception | None = None) -> None:
        """Begin to read when all ranks can: if one cannot, none may wait for chunks that it was to send."""
        self._begun = True

        async def ready() -> bytes:
            if failure is not None:
                raise failure
            return b""

        await vote(self._group, f"reading/{self._epoch}", ready(), _agree)
        self._reading = True

    # -- ranks that give up -------------------------------------------------------------------------------

    def _leave_behind(self) -> None:
        """Tell the others not to wait for this rank in the restore that was cancelled here."""
        topics = [] if self._begun else [f"reading/{self._epoch}"]
        exchanges = self._peers.leave(within=True) if self._begun else []
        self._group.start_last(self._bow_out(topics, exchanges), f"leaving of restore {self._epoch}")

    def _stay_away(self, epoch: int) -> None:
        """Tell the others not to wait for this rank in a restore that it has withdrawn from."""
        topics = [f"{phase}/{epoch}" for phase in ("restore", "reading", "restored")]
        self._group.start_last(self._bow_out(topics, ()), f"leaving of restore {epoch}")

    async def _bow_out(self, topics: Sequence[str], exchanges: Sequence[int]) -> None:
        for topic in topics:
            await bow_out(self._group, topic)
        await self._peers.decline(exchanges)

    # -- the choice of step -------------------------------------------------------------------------------

    async def _choose(self, answers: dict[int, bytes]) -> bytes:
        asked: dict[int, _Asked] = {rank: decode(data, _Asked) for rank, data in answers.items()}
        for each in asked.values():
            await self._departed.forget(each.gone)
        ours = asked[COORDINATOR].wanted
        for rank, each in asked.items():
            if each.wanted != ours:
                raise Invalid(
                    f"rank {rank} restores {_shown(each.wanted)}, rank {COORDINATOR} {_shown(ours)}; "
                    f"all ranks restore one step, whole or not, with one `resume`"
                )
        await self._decided(set.intersection(*({*each.undecided} for each in asked.values())))
        found = await self._look_up(ours.step)
        if found is None:
            return encode(Chosen(None))
        step, _ = found
        tier, self._index = await self._whole_index(step)
        manifest, btree, btree_key = self._index
        return encode(Chosen(step.step, step.serial, tier.name, btree_key, (len(manifest), len(btree))))

    async def _decided(self, saves: set[StepId]) -> None:
        """At rank 0: return when it has decided on saves that all ranks have made, before the others wait in vain."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._group.deadline / 2):
                await self._state.changed.until(lambda: saves.isdisjoint(self._state.membership.undecided))

    async def _whole_index(self, step: StepId) -> tuple[Tier, Index]:
        """The index of a whole step from the nearest tier that has a readable one. Raises the last one's error."""
        problem: TieredCkptError = NotFound(f"no tier holds {step}")
        asked, loop = self._state.holders(step), asyncio.get_running_loop()
        until = loop.time() + self._group.deadline / 2  # then the other ranks would hear of rank 0 that it is silent
        for tier in asked:
            try:
                if not tier.shared:
                    return tier, await in_thread(self._index_of_parts, step, pool=self._state.pool)
                return tier, await step_index.read(tier, step)
            except (Conflict, Corrupt, NotFound, TierUnavailable) as error:
                _log.warning("%s cannot be opened on tier %r: %s", step, tier.name, error)
                if loop.time() < until:
                    ask_again(asked, tier, error)
                problem = error
        raise problem

    def _index_of_parts(self, step: StepId) -> Index:
        parts = self._votes.coordinator.parts.get(step)
        if parts is None:
            raise NotFound(f"the parts of {step} in RAM are not known any more")
        merged = merge_parts(parts)
        btree_key = step.first_btree_key
        index = encode_step(merged.record, merged.arrays, btree_path=btree_key, encoding=PLAIN)
        return index.manifest, index.btree, btree_key

    async def _pass_index(self, topic: str, chosen: Chosen) -> tuple[bytes, bytes]:
        """Send the index of the chosen step from rank 0 to all ranks."""
        group, total = self._group, sum(chosen.sizes)
        topics = [f"{topic}/index/{piece}" for piece in range(-(-total // _PIECE))]
        if group.coordinates:
            sent = 0
            try:
                data = self._index[0] + self._index[1]
                for each in topics:
                    await group.communicator.send(group.others, each, data[sent * _PIECE : (sent + 1) * _PIECE])
                    sent += 1
            except BaseException:
                # The piece under way may have come to some.
                group.start_last(self._break_off(topics[sent : sent + 2]), f"leaving of {topic}")
                raise
            finally:
                self._index = (b"", b"", "")
        else:
            pieces = []
            for each in topics:
                pieces.append(await group.communicator.recv(COORDINATOR, each, timeout=group.deadline))
                if not pieces[-1]:
                    raise RanksUnavailable(f"rank {COORDINATOR} has given up {each!r}", [COORDINATOR])
            data = b"".join(pieces)
        return data[: chosen.sizes[0]], data[chosen.sizes[0] :]

    async def _break_off(self, topics: Sequence[str]) -> None:
        """At rank 0: send nothing more of an index that the others wait for."""
        for topic in topics:
            await self._group.communicator.send(self._group.others, topic, b"")


async def _said(asked: _Asked) -> bytes:
    return encode(asked)


async def _agree(_: dict[int, bytes]) -> bytes:
    return b""


def _shown(wanted: Wanted) -> str:
    step = "the newest step" if wanted.step is None else f"step {wanted.step}"
    return f"{step if wanted.whole else f'some keys of {step}'} with resume={wanted.resume}"
