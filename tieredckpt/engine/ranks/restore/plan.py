"""Plans a restore of many ranks: which rank gets which chunk from where. Pure functions of what each needs and has.

Every chunk comes from a rank that has it in RAM, if there is one. Otherwise one of the ranks that need it reads it from
a slower tier and passes it on to the others. The plan chooses sources and readers so that all ranks send and read the
same number of bytes. Rank 0 makes the plan; `tieredckpt.engine.ranks.restore.transfer` carries it out.

All ranks carry out their tasks in one common order. No transfer ever waits for a later one, so the memory in flight can
be bounded without deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from tieredckpt._decoders import from_msgpack
from tieredckpt.errors import Corrupt
from tieredckpt.format.digest import SIZE

__all__ = ["Stock", "Task", "decode_stock", "decode_tasks", "encode_stock", "encode_tasks", "plan"]


@dataclass(frozen=True, slots=True)
class Stock:
    """A rank's report to rank 0: the chunks that it needs and has not in RAM, and those that it can send."""

    needs: Mapping[bytes, int]
    """Bytes of each, by digest; in the order in which they lie on the slower tier."""
    has: Sequence[bytes] = ()


class Task(NamedTuple):
    """One rank's task for one chunk, in the common order."""

    digest: bytes
    nbytes: int
    source: int | None
    """The rank that sends it, from RAM if it is this one. None: this rank reads it from a slower tier."""
    to: tuple[int, ...]
    """The ranks to which this rank sends it."""


_U4 = np.dtype("<u4")
T = TypeVar("T")


class _Stock(msgspec.Struct, array_like=True, frozen=True):
    needs: bytes
    sizes: bytes
    has: bytes


class _Tasks(msgspec.Struct, array_like=True, frozen=True):
    digests: bytes
    sizes: bytes
    sources: bytes
    """By task, the source + 1; 0 for none."""
    to: bytes
    """By task, the index in ``audiences`` of the ranks to which the chunk is sent."""
    audiences: list[tuple[int, ...]]


def encode_stock(stock: Stock) -> bytes:
    """A message of 20 bytes for each chunk needed, and 16 for each chunk in RAM."""
    return msgspec.msgpack.encode(_Stock(b"".join(stock.needs), _packed(stock.needs.values()), b"".join(stock.has)))


def decode_stock(data: bytes) -> Stock:
    """Raises `Corrupt` for what `encode_stock` did not make."""
    found = _decode(data, _Stock)
    sizes = _column(found.sizes)
    return Stock(dict(zip(_digests(found.needs, len(sizes)), sizes, strict=True)), list(_digests(found.has)))


def encode_tasks(tasks: Sequence[Task]) -> bytes:
    """A message of 28 bytes for each chunk."""
    audiences: dict[tuple[int, ...], int] = {}
    to = [audiences.setdefault(task.to, len(audiences)) for task in tasks]
    sources = [0 if task.source is None else task.source + 1 for task in tasks]
    sizes = [task.nbytes for task in tasks]
    digests = b"".join(task.digest for task in tasks)
    return msgspec.msgpack.encode(_Tasks(digests, _packed(sizes), _packed(sources), _packed(to), list(audiences)))


def decode_tasks(data: bytes) -> list[Task]:
    """Raises `Corrupt` for what `encode_tasks` did not make."""
    found = _decode(data, _Tasks)
    sizes, sources, to = _column(found.sizes), _column(found.sources), _column(found.to)
    if not len(sizes) == len(sources) == len(to) or max(to, default=-1) >= len(found.audiences):
        raise Corrupt("a plan of exchange has columns that do not fit together")
    return [
        Task(digest, nbytes, source - 1 if source else None, found.audiences[audience])
        for digest, nbytes, source, audience in zip(
            _digests(found.digests, len(sizes)), sizes, sources, to, strict=True
        )
    ]


def _decode(data: bytes, kind: type[T]) -> T:
    return from_msgpack(data, kind, "a message about an exchange of chunks cannot be read")


def _packed(numbers: Collection[int]) -> bytes:
    return np.fromiter(numbers, dtype=_U4, count=len(numbers)).tobytes()


def _column(data: bytes) -> list[int]:
    if len(data) % _U4.itemsize:
        raise Corrupt("a message about an exchange of chunks ends within a number")
    numbers: list[int] = np.frombuffer(data, dtype=_U4).tolist()
    return numbers


def _digests(data: bytes, count: int | None = None) -> Iterator[bytes]:
    if len(data) % SIZE or count not in (None, len(data) // SIZE):
        raise Corrupt("a message about an exchange of chunks has too few or too many digests")
    return (data[start : start + SIZE] for start in range(0, len(data), SIZE))


class _Assignment(NamedTuple):
    """The way of one chunk: from ``source``, which reads it unless its RAM has it, to the ranks that need it."""

    before: int
    """Bytes that the source has sent or read before."""
    source: int
    digest: bytes
    nbytes: int
    from_ram: bool
    to: tuple[int, ...]


def plan(stocks: Mapping[int, Stock], *, group: int | None = None, reads: bool = True) -> dict[int, list[Task]]:
    """The tasks of every rank, by rank, so that each gets every chunk that another rank has, or needs as well.

    A chunk that one rank alone needs, and no RAM has, is in no task: that rank reads it by itself.

    Args:
        stocks: of every rank that takes part.
        group: the largest number of ranks that share what one of them reads from a slower tier; consecutive ranks,
            which are near each other. None for no limit. Chunks from RAM are sent to any rank.
        reads: whether ranks read chunks that no RAM has for each other at all.
    """
    holders: dict[bytes, list[int]] = {}
    for rank, stock in stocks.items():
        for digest in stock.has:
            holders.setdefault(digest, []).append(rank)
    needers: dict[bytes, list[int]] = {}
    sizes: dict[bytes, int] = {}
    for rank, stock in stocks.items():
        for digest, nbytes in stock.needs.items():
            needers.setdefault(digest, []).append(rank)
            sizes[digest] = nbytes
    loads = _Loads(sizes)
    for (having, needing), digests in _alike(holders, needers).items():
        if having:
            loads.share(digests, having, needing, from_ram=True)
        elif reads:
            for near in _groups(needing, group):
                if len(near) > 1:
                    loads.share(digests, near, near, from_ram=False)
    tasks: dict[int, list[Task]] = {rank: [] for rank in stocks}
    for assignment in sorted(loads.made):
        source = assignment.source if assignment.from_ram else None
        tasks[assignment.source].append(Task(assignment.digest, assignment.nbytes, source, assignment.to))
        for rank in assignment.to:
            tasks[rank].append(Task(assignment.digest, assignment.nbytes, assignment.source, ()))
    return tasks


def _alike(
    holders: Mapping[bytes, list[int]], needers: Mapping[bytes, list[int]]
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[bytes]]:
    """The chunks, grouped by the ranks that have them and the ranks that need them, in the order of the needs."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[bytes]] = {}
    for digest, needing in needers.items():
        having = tuple(holders.get(digest, ()))
        without = tuple(rank for rank in needing if rank not in having) if having else tuple(needing)
        if without:
            alike.setdefault((having, without), []).append(digest)
    return alike


def _groups(ranks: Sequence[int], group: int | None) -> list[tuple[int, ...]]:
    """The ranks, divided by their group."""
    if group is None:
        return [tuple(ranks)]
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank // group, []).append(rank)
    return [tuple(near) for near in found.values()]


class _Loads:
    """Assigns chunks to sources so that all have the same number of bytes to send."""

    def __init__(self, sizes: Mapping[bytes, int]) -> None:
        self._sizes = sizes
        self._load: dict[tuple[int, bool], int] = {}
        """Bytes to send or read, by source and by whether they come from RAM."""
        self.made: list[_Assignment] = []

    def share(self, digests: Sequence[bytes], sources: Sequence[int], to: Sequence[int], *, from_ram: bool) -> None:
        """Divide chunks among ``sources``, in runs: neighbouring chunks are read together.

        Sources are filled up to a common level, those with the smallest load first.
        """
        times = len(to) if from_ram else 1
        load = {source: self._load.get((source, from_ram), 0) for source in sources}
        emptiest = sorted(sources, key=lambda source: load[source])
        more = times * sum(self._sizes[digest] for digest in digests)
        level = _level([load[source] for source in emptiest], more)
        remaining = iter(emptiest)
        source, others = _next(remaining, to)
        given, end = 0, level - load[source]
        for digest in digests:
            nbytes = times * self._sizes[digest]
            while given + nbytes / 2 > end and source != emptiest[-1]:
                source, others = _next(remaining, to)
                end += max(0.0, level - load[source])
            self.made.append(_Assignment(load[source], source, digest, self._sizes[digest], from_ram, others))
            load[source] += nbytes
            given += nbytes
        self._load.update({(source, from_ram): nbytes for source, nbytes in load.items()})


def _next(sources: Iterator[int], to: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    source = next(sources)
    return source, tuple(rank for rank in to if rank != source)


def _level(loads: Sequence[int], more: int) -> float:
    """The level to which ``more`` bytes fill up the smallest of the loads, which are in ascending order."""
    level = float(more)
    for count, filled in enumerate(accumulate(loads), start=1):
        level = (filled + more) / count
        if count < len(loads) and level <= loads[count]:
            break
    return level
