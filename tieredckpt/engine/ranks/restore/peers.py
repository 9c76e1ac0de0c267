"""Exchange of chunks in a restore: ranks send chunks from RAM; a chunk in no RAM is read by one rank for all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tieredckpt.engine import limits
from tieredckpt.engine.ranks.communicator import Communicator
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.restore.plan import Stock, Task
from tieredckpt.engine.ranks.restore.transfer import ChunkTransfer, Terms, agree_on_tasks, decline
from tieredckpt.engine.restoring.pieces import Piece
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.state.state import Near, State
from tieredckpt.errors import Corrupt, RanksUnavailable, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["MessageBulk", "PeerExchange"]

_ROUNDS = 3
_TAGS = 8192
"""Even tags: copies of parts have odd ones, and MPI allows tags up to 32,767."""
_TRANSFERS_IN_DEADLINE = 4
"""A rank that waits for another until it times out, and then reads, must not itself time out at the others."""

Bytes = npt.NDArray[np.uint8]


class PeerExchange:
    """One rank's side of the exchanges of restores that all ranks make together. Lives on the engine's loop."""

    def __init__(self, state: State, group: Group) -> None:
        self._state = state
        self._group = group
        self._epoch = 0
        self._round = _ROUNDS

    def begin(self, epoch: int) -> None:
        """Prepare for the exchanges of the restore of that epoch."""
        self._epoch, self._round = epoch, 0

    def leave(self, *, within: bool = False) -> list[int]:
        """Leave a restore that has failed here; returns the exchanges that are left, to be given to `decline`.

        With ``within``, rank 0 counts the exchange under way among them: no other rank can go on without rank 0.
        """
        under_way = within and self._group.coordinates and self._round > 0
        first = self._number + (0 if under_way else 1)
        self._round = _ROUNDS
        return list(range(first, self._number + 1))

    async def decline(self, exchanges: Sequence[int]) -> None:
        """Tell the others not to wait for this rank in these exchanges."""
        for number in exchanges:
            await decline(self._group.communicator, number)

    @property
    def _number(self) -> int:
        """The number of the last exchange, which is the same on all ranks also after failures."""
        return self._epoch * (_ROUNDS + 1) + self._round

    async def take(self, source: StepSource, pieces: list[Piece], sources: dict[str, int]) -> list[Piece]:
        """Receive chunks that are not in this machine's RAM; a call of all ranks that restore the step of ``source``.

        Args:
            source: of the step; this rank sends others the chunks that it has ``near``.
            pieces: that this rank needs, none of them inline; each one that arrives is put in its place.
            sources: the bytes that arrived, by tier and `tieredckpt.engine.ranks.restore.transfer.PEERS`; added to.

        Returns:
            The pieces left for this rank to read: those that did not arrive, or that it alone needs and no RAM has.
        """
        wanted: dict[bytes, list[Piece]] = {}
        for piece in pieces:
            wanted.setdefault(piece.chunk.digest, []).append(piece)
        place = _Place(source, wanted, source.near or {})
        came: dict[bytes, str] = {}
        corrupt: set[bytes] = set()
        # Repeat while there are tasks: a rank that received a damaged chunk gets it from another rank.
        while self._round < _ROUNDS:
            tasks = await self._agree(source, place, came.keys(), corrupt)
            if tasks is None:
                self._round = _ROUNDS
                break
            passing = self._passing(place)
            came |= await passing.run(tasks)
            corrupt |= passing.corrupt
        for digest, name in came.items():
            sources[name] = sources.get(name, 0) + sum(piece.wanted for piece in wanted[digest])
        return [piece for piece in pieces if piece.chunk.digest not in came]

    async def _agree(
        self, source: StepSource, place: _Place, came: Collection[bytes], corrupt: Collection[bytes]
    ) -> list[Task] | None:
        group, again = self._group, self._round > 0
        needs = {digest: some[0].nbytes for digest, some in place.wanted.items() if digest not in came}
        # A chunk that is near and needed nevertheless is damaged here.
        has = [digest for digest in place.near if digest not in place.wanted and digest not in corrupt]
        # Without bulk, exchange only what no shared tier has.
        worth = group.communicator.bulk or not self._is_shared(source.step)
        stock = Stock(needs, has) if worth else Stock({})
        terms = Terms(group=self._state.config.restore_group, reads=not again, worth=worth)
        self._round += 1
        timeout = group.deadline / _TRANSFERS_IN_DEADLINE if again else group.deadline
        return await agree_on_tasks(group.communicator, self._number, stock, terms, timeout=timeout)

    def _passing(self, place: _Place) -> ChunkTransfer:
        group = self._group
        return ChunkTransfer(
            rank=group.rank,
            bulk=group.communicator if group.communicator.bulk else MessageBulk(group.communicator),
            tag=2 * (self._number % _TAGS),
            timeout=group.deadline / _TRANSFERS_IN_DEADLINE,
            scratch=self._state.scratch,
            pool=self._state.pool,
            held=place.held,
            read=place.read,
            place=place.put,
        )

    def _is_shared(self, step: StepId) -> bool:
        """Whether a tier that all ranks reach has the step."""
        return any(tier.shared and tier.answers for tier in self._state.holders(step))


@dataclass(frozen=True, slots=True)
class _Place:
    """Places of the chunks of an exchange, and their targets."""

    source: StepSource
    wanted: Mapping[bytes, Sequence[Piece]]
    near: Near

    def held(self, digest: bytes) -> Bytes | None:
        tier, extent = self.near.get(digest, (None, None))
        if tier is None or extent is None or tier.ram is None:
            return None
        try:
            return tier.ram.memory(extent)
        except (Corrupt, TierUnavailable):
            return None

    async def read(self, digest: bytes, memory: Bytes) -> str:
        piece = self.wanted[digest][0]
        return (await self.source.read(piece.key, piece.ordinal, memory)).name

    def put(self, digest: bytes, memory: Bytes) -> None:
        for piece in self.wanted[digest]:
            piece.put(memory)


class MessageBulk:
    """Sends and receives bulk bytes through a `Communicator` that has only messages."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sent: Counter[tuple[int, int]] = Counter()
        """Pieces so far, by the receiver and the tag."""
        self._received: Counter[tuple[int, int]] = Counter()

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Return when the receiver has taken everything. Raises `RanksUnavailable`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        for start in range(0, len(memory), limits.in_force.message_size):
            self._sent[to, tag] += 1
            topic = f"bulk/{tag}/{self._sent[to, tag]}"
            await self._communicator.send([to], topic, bytes(memory[start : start + limits.in_force.message_size]))
            await self._communicator.recv(to, f"{topic}/taken", timeout=max(0.0, deadline - loop.time()))

    async def recv_bulk(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Fill the memory. Raises `RanksUnavailable`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        for start in range(0, len(memory), limits.in_force.message_size):
            self._received[source, tag] += 1
            topic = f"bulk/{tag}/{self._received[source, tag]}"
            piece = await self._communicator.recv(source, topic, timeout=max(0.0, deadline - loop.time()))
            into = memory[start : start + limits.in_force.message_size]
            if len(piece) != len(into):
                raise RanksUnavailable(f"rank {source} has sent {len(piece)} bytes instead of {len(into)}", [source])
            into[:] = piece
            await self._communicator.send([source], f"{topic}/taken", b"")
