"""What tests see of one rank past the public face of its store: what it waits for, and what it remembers of saves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from reliability.ranks import InProcess

from support.scenes import SOON
from tieredckpt import CheckpointStore
from tieredckpt.engine.mode.among_ranks import AmongRanks


def mode_of(store: CheckpointStore) -> AmongRanks:
    """How one rank of several takes part in its store."""
    mode = store._life.engine.mode
    assert isinstance(mode, AmongRanks)
    return mode


def early(store: CheckpointStore) -> list[str]:
    """Topics of the messages that have come to a rank, and that no call of it has received."""
    group = mode_of(store).ranked.group
    assert isinstance(group.communicator, InProcess)
    return [topic for _, topic in tuple(group.communicator._ends[group.rank].inbox._early)]


async def none(stores: Sequence[CheckpointStore], what: Callable[[CheckpointStore], list[str]]) -> None:
    """Wait until no rank has any of ``what``, which is asked on the loop of its engine."""

    async def ask(store: CheckpointStore) -> list[str]:
        return what(store)

    deadline = time.monotonic() + SOON
    while found := [
        f"rank {rank}: {each}" for rank, store in enumerate(stores) for each in await store._life.loop.call(ask(store))
    ]:
        assert time.monotonic() < deadline, "\n".join(found)
        await asyncio.sleep(0.01)


def failing(store: CheckpointStore) -> list[str]:
    """The tiers that do not work."""
    errors = {tier.name: tier.health.error for tier in store._life.engine.state.tiers}
    return [f"{name}: {error!r}" for name, error in errors.items() if error is not None]


def waiting(store: CheckpointStore) -> list[str]:
    """Saves that wait: to be copied or refused; at rank 0 for votes, on the others for what it decides."""
    mode, state = mode_of(store), store._life.engine.state
    attempts, leads = mode.ranked.votes.attempts, mode.ranked.group.coordinates
    votes = (*attempts.voted_for, *attempts.voted_against) if leads else state.membership.undecided
    return [str(each) for each in (*attempts._copying, mode._refused, *votes) if each is not None]


def remembered(store: CheckpointStore) -> list[str]:
    """What a rank remembers of saves on which all is decided, less what it needs."""
    state, rank = store._life.engine.state, mode_of(store).ranked
    votes, member, group, first = rank.votes, state.membership, rank.group, state.tiers[0]
    found = {
        "copying": votes.attempts._copying,
        "aborted": votes.attempts._aborted,
        "voted": (*votes.attempts.voted_for, *votes.attempts.voted_against),
        "ballots": votes.coordinator._box._votes,
        "compared": votes.comparison._mine,
        "parts": votes.coordinator.parts.keys() - first.steps.held.keys(),
        "undecided": member.undecided,
        "streamed": member.streamed,
        "promised": member.promised,
        "pending": state.branch._pending,
        "indeterminate": state.branch._indeterminate,
        "due": votes.turns._due,
        "early": set(early(store)) - {f"found/{number}" for number in votes.dedupe._open_questions},
        "written": rank.commits.written,
        "parts in RAM": first.steps.parts.keys() - state.tier("disk").steps.held.keys(),
        "outbox": range(group._outbox.qsize()),
        "tasks": [
            task.get_name()
            for task in tuple(group._tasks)
            if not task.get_name().startswith(("tieredckpt log of", "tieredckpt shared tiers", "tieredckpt copies in"))
        ],
        "replicas": ()
        if rank.replicas is None
        else sorted(rank.replicas._ledger._has.keys() - first.steps.held.keys())[:-1],
    }
    return [f"{name}: {what}" for name, what in found.items() if what]
