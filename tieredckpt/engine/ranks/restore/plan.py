"""Which rank gets which chunk from where in a restore of many: the plan, a pure function of what each needs and has.

Every chunk comes from a rank that has it in RAM, if there is one; else one of those that need it reads it from a
slower tier and passes it on to the others. Who has it and who reads it is chosen so that all give and read the
same number of bytes. Rank 0 makes the plan; `tieredckpt.engine.ranks.restore.transfer` carries it out.

All ranks do what concerns them in one common order. That no transfer waits for a later one, anywhere, is why the
memory in flight may be bounded and nothing locks up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from tieredckpt.errors import Corrupt
from tieredckpt.format.digest import SIZE

__all__ = ["Stock", "Task", "decode_stock", "decode_tasks", "encode_stock", "encode_tasks", "plan"]


@dataclass(frozen=True, slots=True)
class Stock:
    """What one rank tells rank 0: chunks that it needs and has no way to in RAM, and those that it can give."""

    needs: Mapping[bytes, int]
    """Bytes of each, by digest; in the order in which they lie on the slower tier."""
    has: Sequence[bytes] = ()


class Task(NamedTuple):
    """What one rank does about one chunk, in the common order."""

    digest: bytes
    nbytes: int
    source: int | None
    """The rank that gives it: this one gives from RAM what it is itself the source of. None: this one reads it."""
    to: tuple[int, ...]
    """The ranks that this one passes it on to."""


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
    """By task, which of ``audiences`` it is passed on to."""
    audiences: list[tuple[int, ...]]


def encode_stock(stock: Stock) -> bytes:
    """A message of 20 bytes a chunk needed and 16 a chunk there."""
    return msgspec.msgpack.encode(_Stock(b"".join(stock.needs), _packed(stock.needs.values()), b"".join(stock.has)))


def decode_stock(data: bytes) -> Stock:
    """Raises `Corrupt` for what `encode_stock` did not make."""
    found = _decode(data, _Stock)
    sizes = _column(found.sizes)
    return Stock(dict(zip(_digests(found.needs, len(sizes)), sizes, strict=True)), list(_digests(found.has)))


def encode_tasks(tasks: Sequence[Task]) -> bytes:
    """A message of 28 bytes a chunk."""
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
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Corrupt(f"a message about an exchange of chunks cannot be read: {error}") from error


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


class _Give(NamedTuple):
    """One chunk's way: from ``source``, which reads it unless it has it, to those that need it."""

    before: int
    """Bytes that the source has given or read by then."""
    source: int
    digest: bytes
    nbytes: int
    from_ram: bool
    to: tuple[int, ...]


def plan(stocks: Mapping[int, Stock], *, group: int | None = None, reads: bool = True) -> dict[int, list[Task]]:
    """The tasks of every rank, by rank, such that each gets all that another needs too or has.

    What one rank alone needs, and none has, is in no task: it is read by that rank as it likes.

    Args:
        stocks: of every rank that takes part.
        group: ranks that share what one of them reads from a slower tier, at most; consecutive ones, for those are
            near each other. None for all of them. What is in RAM is given to anyone.
        reads: whether what nobody has in RAM is read for others at all.
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
    gives = _Loads(sizes)
    for (having, needing), digests in _alike(holders, needers).items():
        if having:
            gives.share(digests, having, needing, from_ram=True)
        elif reads:
            for near in _groups(needing, group):
                if len(near) > 1:
                    gives.share(digests, near, near, from_ram=False)
    tasks: dict[int, list[Task]] = {rank: [] for rank in stocks}
    for give in sorted(gives.made):
        source = give.source if give.from_ram else None
        tasks[give.source].append(Task(give.digest, give.nbytes, source, give.to))
        for rank in give.to:
            tasks[rank].append(Task(give.digest, give.nbytes, give.source, ()))
    return tasks


def _alike(
    holders: Mapping[bytes, list[int]], needers: Mapping[bytes, list[int]]
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[bytes]]:
    """Chunks that the same ranks have and the same ranks need, in the order in which they are needed."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[bytes]] = {}
    for digest, needing in needers.items():
        having = tuple(holders.get(digest, ()))
        without = tuple(rank for rank in needing if rank not in having) if having else tuple(needing)
        if without:
            alike.setdefault((having, without), []).append(digest)
    return alike


def _groups(ranks: Sequence[int], group: int | None) -> list[tuple[int, ...]]:
    """Ranks by the group that they are in, whoever else is in it."""
    if group is None:
        return [tuple(ranks)]
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank // group, []).append(rank)
    return [tuple(near) for near in found.values()]


class _Loads:
    """Gives chunks to sources so that all have the same number of bytes to give."""

    def __init__(self, sizes: Mapping[bytes, int]) -> None:
        self._sizes = sizes
        self._load: dict[tuple[int, bool], int] = {}
        """By source, bytes read, and bytes given from RAM."""
        self.made: list[_Give] = []

    def share(self, digests: Sequence[bytes], sources: Sequence[int], to: Sequence[int], *, from_ram: bool) -> None:
        """Divide chunks among ``sources``, in runs: what lies side by side is read in one go.

        Sources are filled up to a common level, those that have the least so far first.
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
            self.made.append(_Give(load[source], source, digest, self._sizes[digest], from_ram, others))
            load[source] += nbytes
            given += nbytes
        self._load.update({(source, from_ram): nbytes for source, nbytes in load.items()})


def _next(sources: Iterator[int], to: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    source = next(sources)
    return source, tuple(rank for rank in to if rank != source)


def _level(loads: Sequence[int], more: int) -> float:
    """How high ``more`` fills vessels that are filled so high already, given in ascending order."""
    level = float(more)
    for count, filled in enumerate(accumulate(loads), start=1):
        level = (filled + more) / count
        if count < len(loads) and level <= loads[count]:
            break
    return level
