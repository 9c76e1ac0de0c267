"""Copies a rank's part of a step into the RAM of another node: `send_part` at the source, `receive_part` there.

The source offers the list of chunks of its part. The holder answers which of them it lacks, receives these into the
slab that it has for that rank, verifies each, and commits the part as the rank itself did. A replica folder has the
format of every RAM tier, so a restore reads it as one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.wrap import Pace
from tieredckpt.concurrency import in_thread, outlast
from tieredckpt.engine.ranks.commit.parts import encode_written
from tieredckpt.engine.ranks.communicator import Communicator
from tieredckpt.engine.restoring.source import being_read
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.index_cache import located, unique_extents
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import Failure, decode, encode
from tieredckpt.errors import Corrupt, NoSpace, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format.digest import SIZE, digest_array
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.part import PartArray, decode_part
from tieredckpt.units import format_size

__all__ = ["Refused", "Transfer", "receive_part", "send_part"]

_log = logging.getLogger("tieredckpt")

_TAGS = 8192
"""Transfers between two ranks that are under way at once differ in this many numbers."""
_AHEAD = 2
"""Chunks that are verified while the next one comes."""

Bytes = npt.NDArray[np.uint8]
MakeRoom = Callable[[Tier, Callable[[], bool]], Awaitable[object]]
"""Evicts older steps from a tier until there is enough room, as far as they may leave."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part on its way from one rank to another; both sides say the same."""

    communicator: Communicator
    number: int
    """New for every transfer between the two."""
    timeout: float
    """Seconds to wait for the other side, each time."""

    @property
    def tag(self) -> int:
        """Odd, as exchanges of chunks have even ones; MPI allows tags up to 32,767."""
        return 2 * (self.number % _TAGS) + 1

    def topic(self, what: str) -> str:
        return f"replica/{self.number}/{what}"


class Refused(TieredCkptError):
    """The rank that was to hold a part could not."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(f"rank {rank}: {failure.text}")
        self.rank = rank
        self.failure = failure


class _Answer(msgspec.Struct, frozen=True):
    """The digests of the chunks that a holder lacks, one after another; or why it cannot hold the part."""

    lacks: bytes = b""
    failure: Failure | None = None


async def send_part(state: State, transfer: Transfer, tier: Tier, step: StepId, to: int, pace: Pace) -> int:
    """Copy the part of a step that lies on ``tier``, one in RAM, to rank ``to``; returns the bytes sent.

    Raises:
        NotFound: it is not there any more.
        RanksUnavailable: the other rank does not answer.
        Refused: the other rank says why it cannot hold it.
    """
    communicator = transfer.communicator
    try:
        async with being_read(tier, step):
            index = await step_index.load(tier, step)
            if (ram := tier.ram) is None:
                raise NotFound(f"tier {tier.name!r} went away, and {step} with it")
            # Without the bytes of its chunks, except small ones, which lie in the index.
            offer = await in_thread(encode_written, index, {}, pool=state.pool)
            await communicator.send([to], transfer.topic("offer"), offer)
            lacks = await _receive_answer(transfer, "lacks", to)
            sent = await _send(transfer, ram, index, lacks, to, pace)
            await _receive_answer(transfer, "kept", to)
            return sent
    except NotFound:
        await communicator.send([to], transfer.topic("offer"), b"")
        raise


async def _receive_answer(transfer: Transfer, what: str, source: int) -> list[bytes]:
    data = await transfer.communicator.recv(source, transfer.topic(what), timeout=transfer.timeout)
    answer: _Answer = decode(data, _Answer)
    if answer.failure is not None:
        raise Refused(source, answer.failure)
    return [answer.lacks[at : at + SIZE] for at in range(0, len(answer.lacks), SIZE)]


async def _send(transfer: Transfer, ram: Ram, index: StepIndex, lacks: Sequence[bytes], to: int, pace: Pace) -> int:
    extents = unique_extents(index.arrays)
    sent = 0
    for digest in lacks:
        if digest not in extents:
            raise Corrupt(f"rank {to} asks for a chunk that {index.record.id} has not")
        nbytes = extents[digest].length
        await pace.take(nbytes)
        memory = memoryview(ram.memory(extents[digest]))
        await transfer.communicator.send_bulk(to, memory, tag=transfer.tag, timeout=transfer.timeout)
        sent += nbytes
    return sent


async def receive_part(state: State, transfer: Transfer, tier: Tier, source: int, make_room: MakeRoom) -> StepId:
    """Receive the part of a step from rank ``source``, and commit it on ``tier``, one in RAM; returns the step.

    Raises:
        NotFound: the other rank does not have it any more.
        RanksUnavailable: the other rank does not answer.
        TierUnavailable: the RAM is not there any more; the source gets the failure.
        NoSpace: it does not fit, with the numbers; the source gets the failure.
        Corrupt: what came is not what was saved; the source gets the failure.
    """
    communicator = transfer.communicator
    offer = await communicator.recv(source, transfer.topic("offer"), timeout=transfer.timeout)
    if not offer:
        raise NotFound(f"rank {source} let the part go that it was to send")
    stage = "lacks"
    if (ram := tier.ram) is None:
        gone = TierUnavailable(
            f"tier {tier.name!r} has no RAM to hold a part of rank {source} in; look for why it is gone"
        )
        await _send_answer(transfer, stage, source, _Answer(failure=Failure.of(gone)))
        raise gone
    taken = _Taken(tier, ram)
    try:
        part = await in_thread(decode_part, offer, f"the part offered by rank {source}", pool=state.pool)
        step = part.record.id
        if tier.steps.has_own(step):
            await _send_answer(transfer, "lacks", source, _Answer())
        else:
            sizes = _sizes(part.arrays)
            await _have_room(tier, ram, step, sizes, make_room)
            await in_thread(taken.have_memory, sizes)
            lacks = taken.reserve(sizes)
            await _send_answer(transfer, "lacks", source, _Answer(b"".join(lacks)))
            stage = "kept"
            await _receive(state, transfer, taken, lacks, source)
            await commit_file.commit(tier, part.record, located(part.arrays, taken.places))
            taken.committed = True
        await _send_answer(transfer, "kept", source, _Answer())
    except TieredCkptError as error:
        await _send_answer(transfer, stage, source, _Answer(failure=Failure.of(error)))
        raise
    finally:
        taken.end()
    return step


async def _send_answer(transfer: Transfer, what: str, to: int, answer: _Answer) -> None:
    await transfer.communicator.send([to], transfer.topic(what), encode(answer))


def _sizes(arrays: Mapping[str, PartArray]) -> dict[bytes, int]:
    """Bytes of every chunk that does not lie in the index, by digest, in the order of the arrays."""
    return {
        digest: array.grid.cell_nbytes
        for array in arrays.values()
        for digest, where in array.chunks
        if not isinstance(where, bytes)
    }


async def _have_room(tier: Tier, ram: Ram, step: StepId, sizes: Mapping[bytes, int], make_room: MakeRoom) -> None:
    slab, chunks = ram.slab, ram.index

    def need() -> int:
        return sum(slab_size(nbytes) for digest, nbytes in sizes.items() if not chunks.holds(digest))

    await make_room(tier, lambda: slab.room >= need())
    if slab.room < need():
        raise NoSpace(
            f"a copy of {step} needs {format_size(need())} in {tier.store.location}, which has "
            f"{format_size(slab.room)} of {format_size(slab.capacity)} left beside what must stay; give tier "
            f"{tier.name!r} a larger capacity"
        )


@dataclass
class _Taken:
    """Chunks and extents of the slab that a part uses while it is received."""

    tier: Tier
    ram: Ram
    uses: list[bytes] = field(default_factory=list)
    extents: dict[bytes, tuple[int, Bytes]] = field(default_factory=dict)
    """Extents of chunks that have not arrived yet."""
    places: dict[bytes, Extent] = field(default_factory=dict)
    committed: bool = False

    def have_memory(self, sizes: Mapping[bytes, int]) -> None:
        """Grow the slab once for all chunks that are not there. Blocks."""
        slab = self.ram.slab
        lacking = sum(slab_size(nbytes) for digest, nbytes in sizes.items() if self.ram.index.find(digest) is None)
        with suppress(NoSpace):  # then the first extent is refused
            slab.reserve(slab.used + lacking)

    def reserve(self, sizes: Mapping[bytes, int]) -> list[bytes]:
        """Use the chunks that are there, take extents for the others, and return their digests. Raises `NoSpace`."""
        for digest, nbytes in sizes.items():
            offset = self.ram.index.take(digest)
            if offset is not None:
                self._use(digest, offset, nbytes)
                continue
            found = self.ram.index.allocate(nbytes)
            if found is None:
                raise NoSpace(
                    f"the slab at {self.tier.store.location} has no piece of {format_size(nbytes)} left for a "
                    f"replica; give tier {self.tier.name!r} a larger capacity"
                )
            self.extents[digest] = found
        return list(self.extents)

    def arrived(self, digest: bytes) -> None:
        """Count a chunk as there: its bytes have arrived in its extent."""
        offset, memory = self.extents.pop(digest)
        self._use(digest, self.ram.index.add(digest, offset, memory.size), memory.size)

    def _use(self, digest: bytes, offset: int, nbytes: int) -> None:
        self.uses.append(digest)
        self.places[digest] = Extent(self.ram.store.slab_key, offset, nbytes)

    def end(self) -> None:
        """Release what no commit uses."""
        for offset, memory in self.extents.values():
            self.ram.index.release(offset, memory.size)
        self.extents.clear()
        if not self.committed:
            self.ram.index.drop(self.uses)
            self.uses.clear()


async def _receive(state: State, transfer: Transfer, taken: _Taken, lacks: Iterable[bytes], source: int) -> None:
    """Fill the extents. Receives all chunks, also after a damaged one: they come in order, without names."""
    checking: set[asyncio.Task[bool]] = set()
    wrong = 0
    try:
        for digest in lacks:
            _, memory = taken.extents[digest]
            await transfer.communicator.recv_bulk(
                source, memoryview(memory), tag=transfer.tag, timeout=transfer.timeout
            )
            checking.add(asyncio.create_task(_check(state, taken, digest, memory)))
            if len(checking) > _AHEAD:
                done, checking = await asyncio.wait(checking, return_when=asyncio.FIRST_COMPLETED)
                wrong += sum(not task.result() for task in done)
    finally:
        await outlast(asyncio.gather(*checking, return_exceptions=True))  # they use memory that is released next
    wrong += sum(not task.result() for task in checking)
    if wrong:
        raise Corrupt(f"{wrong} of the chunks that rank {source} gave for a replica are not what was saved")


async def _check(state: State, taken: _Taken, digest: bytes, memory: Bytes) -> bool:
    if await in_thread(digest_array, memory, pool=state.pool) != digest:
        return False
    taken.arrived(digest)
    return True
