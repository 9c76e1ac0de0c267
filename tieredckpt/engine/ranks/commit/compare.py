"""Compares equal data of several ranks that divide its storage: only one rank stores the bytes of each piece.

Before its save returns, every rank digests the pieces that others store. It votes with one digest for each group of
ranks with equal data. If these differ, rank 0 asks all ranks for the digests of the chunks, and names key and rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from tieredckpt.concurrency import in_thread, side_by_side
from tieredckpt.engine.notify import Notification
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import CompareReplicas, ReplicaDigests
from tieredckpt.engine.saving.cells import Cell
from tieredckpt.engine.saving.outlet import Outlet
from tieredckpt.engine.saving.snapshot import Snapshot
from tieredckpt.engine.state.state import State
from tieredckpt.errors import Conflict, RanksUnavailable
from tieredckpt.format.digest import SIZE, digest
from tieredckpt.format.layout import array_key
from tieredckpt.format.manifest import StepIndex
from tieredckpt.format.replicas import Difference, differences, show_ranks
from tieredckpt.tree.flatten import Flat, Replicated
from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["Comparison", "Digests", "digests_elsewhere", "with_own"]

_log = logging.getLogger("tieredckpt")

Digests = dict[str, bytes]
"""The digests of all chunks of some pieces, one after another, by the storage key of the piece."""


async def digests_elsewhere(state: State, flat: Flat) -> dict[bytes, Digests]:
    """The digests of pieces that this rank has and others store, by the name of the group of ranks.

    Reads the arrays; when this ends, no thread reads them any more.
    """
    compared = flat.replicated if state.config.when_replicas_differ != "ignore" else ()
    outlet = Outlet(state.host_memory, flat.ready)
    return {_name(group): await _digests(state, group.elsewhere, outlet) for group in compared}


def with_own(
    elsewhere: Mapping[bytes, Digests], groups: Sequence[Replicated], index: StepIndex
) -> dict[bytes, Digests]:
    """``elsewhere`` with the digests of the pieces that this rank stores itself, from the ``index`` of its part."""
    return {
        name: elsewhere[name]
        | {key: b"".join([chunk.digest for chunk in index.arrays[key].chunks]) for key in group.here}
        for group in groups
        if (name := _name(group)) in elsewhere
    }


def _name(group: Replicated) -> bytes:
    return digest(",".join(map(str, group.ranks)).encode())


async def _digests(state: State, leaves: Sequence[ArrayLeaf], outlet: Outlet) -> Digests:
    """Digest leaves by several threads. What is on a device is fetched cell by cell."""
    cells = enumerate(_cells(leaves, state.config.chunk_size, outlet))
    guards_cells, stop = threading.Lock(), threading.Event()
    found: list[tuple[int, str, bytes]] = []

    def work() -> None:
        with suppress(StopIteration):
            while not stop.is_set():
                with guards_cells:
                    at, (key, cell) = next(cells)
                found.append((at, key, cell()))

    await side_by_side(state.config.copy_threads, work, stop.set, state.pool)
    digests: dict[str, list[bytes]] = {}
    for _, key, value in sorted(found):
        digests.setdefault(key, []).append(value)
    return {key: b"".join(values) for key, values in digests.items()}


def _cells(leaves: Iterable[ArrayLeaf], chunk_size: int, outlet: Outlet) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for leaf in leaves:
        planned = Snapshot.of([leaf], chunk_size, {}, outlet=outlet)
        for value in planned.inline.get(0, ()):
            yield leaf.key, partial(digest, value)
        for cell in planned.pending:
            yield leaf.key, partial(_digest, cell, outlet)


def _digest(cell: Cell, outlet: Outlet) -> bytes:
    with outlet.link(cell.nbytes) as link:
        return cell.digest_by(link)


class Comparison:
    """Compares replicas of undecided saves across ranks. Runs on the engine's loop."""

    def __init__(self, state: State, group: Group) -> None:
        self._state = state
        self._group = group
        self._mine: dict[str, Mapping[bytes, Digests]] = {}
        """By attempt and group of ranks."""
        self._answers: dict[str, dict[int, Mapping[bytes, Digests]]] = {}
        """At rank 0, what ranks have, by attempt and rank, while it compares them."""
        self._came = Notification()

    def hold(self, attempt: str, groups: Mapping[bytes, Digests]) -> dict[bytes, bytes]:
        """Keep the digests of an attempt until `forget`; one digest for each group of ranks."""
        self._mine[attempt] = groups
        return {
            name: digest(b"".join([key.encode() + b"\0" + found[key] for key in sorted(found)]))
            for name, found in groups.items()
        }

    def forget(self, attempt: str) -> None:
        self._mine.pop(attempt, None)

    async def differing(
        self, attempt: str, votes: Mapping[int, Mapping[bytes, bytes]], deadline: float
    ) -> tuple[Difference, ...]:
        """At rank 0: which ranks differ from the rest, and where, from the digests that every rank voted with.

        Waits until ``deadline``, by the loop's clock. A rank that has not answered by then is left out, unless the
        configuration refuses such steps.

        Raises:
            Conflict: not all ranks have the same leaves.
            RanksUnavailable: a rank has not answered, and the configuration refuses such steps.
        """
        values: dict[bytes, set[bytes]] = {}
        for voted in votes.values():
            for name, value in voted.items():
                values.setdefault(name, set()).add(value)
        groups = tuple(name for name, found in values.items() if len(found) > 1)
        if not groups:
            return ()
        answers = await self._ask(CompareReplicas(attempt, groups), deadline)
        found, silent = await in_thread(_compared, groups, votes, answers, pool=self._state.pool)
        if silent:
            told = f"replicas differ, and {show_ranks(silent)} did not say in time what they have"
            if self._state.config.when_replicas_differ == "refuse":
                raise RanksUnavailable(told, silent)
            _log.error("%s", told)
        return found

    async def _ask(self, asked: CompareReplicas, deadline: float) -> dict[int, Mapping[bytes, Digests]]:
        """The digests of all ranks, or of those that have answered at the deadline."""
        answers = self._answers[asked.attempt] = {self._group.rank: self.answer(asked).groups}
        self._group.publish(asked)
        try:
            await self._group.all_in(answers, self._came, deadline)
        finally:
            del self._answers[asked.attempt]
        return answers

    def answer(self, asked: CompareReplicas) -> ReplicaDigests:
        """The digests of this rank."""
        mine = self._mine.get(asked.attempt, {})
        return ReplicaDigests(asked.attempt, {name: mine[name] for name in asked.groups if name in mine})

    def answered(self, rank: int, answer: ReplicaDigests) -> None:
        """At rank 0: another rank has told its digests."""
        if (answers := self._answers.get(answer.attempt)) is not None:
            answers[rank] = answer.groups
            self._came.notify()


def _compared(
    groups: Sequence[bytes],
    votes: Mapping[int, Mapping[bytes, bytes]],
    answers: Mapping[int, Mapping[bytes, Digests]],
) -> tuple[tuple[Difference, ...], list[int]]:
    """Differences within some groups of ranks, and the ranks of these groups that have not told their digests."""
    silent = [
        rank for rank in votes if any(name in votes[rank] and name not in answers.get(rank, {}) for name in groups)
    ]
    return tuple(difference for name in groups for difference in differences(_by_key(name, answers))), silent


def _by_key(name: bytes, answers: Mapping[int, Mapping[bytes, Digests]]) -> dict[str, dict[int, list[bytes]]]:
    """The digests of each piece of a group by rank. Raises `Conflict` where the ranks have different pieces."""
    members = {rank: groups[name] for rank, groups in answers.items() if name in groups}
    pieces: dict[str, dict[int, set[tuple[str, int]]]] = {}
    for rank, found in members.items():
        for key, own in found.items():
            pieces.setdefault(array_key(key), {}).setdefault(rank, set()).add((key, len(own)))
    # A leaf that only some ranks have moves the pieces of all others, so look for it first.
    for key, by_rank in pieces.items():
        if lacking := members.keys() - by_rank:
            raise Conflict(
                f"leaf {key!r} is one that ranks have alike, and {show_ranks(lacking)} did not save it; give it on all "
                f"of them, or exclude it from `replicated`"
            )
    for key, by_rank in pieces.items():
        if any(cut != by_rank[min(by_rank)] for cut in by_rank.values()):
            raise Conflict(
                f"the ranks cut leaf {key!r} in different ways; it, or another that they should have alike, has not "
                f"the same shape and dtype on all"
            )
    return {
        key: {
            rank: [found[key][at : at + SIZE] for at in range(0, len(found[key]), SIZE)]
            for rank, found in members.items()
        }
        for key in dict.fromkeys(key for found in members.values() for key in found)
    }
