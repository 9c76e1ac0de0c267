"""Seconds and sizes that the engine works with, in one frozen value: how long it waits, how soon it tries again.

Modules read `in_force` whenever they need one of them, so that a test can put another value in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits", "backoff", "in_force"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times are in seconds, sizes in bytes."""

    longest_pause: float = 5.0
    """A longer pause in which the engine's loop did not run counts as so much: other processes, and the threads of this
    one, could not be heard either. It is above the time for which a trainer may keep Python's lock."""

    # -- tiers
    first_retry: float = 0.5
    """Until a tier that failed is tried again; doubles with every failure."""
    last_retry: float = 60.0
    """The longest that such a tier is left alone."""
    source_retry: float = 2.0
    """Until a step is tried again whose bytes only a silent tier has."""
    ask_policies_again: float = 30.0
    """Until policies are asked again though nothing happened: an answer may depend on the time."""
    unreadable_commit: float = 60.0
    """How long an unreadable commit, with unknown packs, keeps all packs of its tier."""
    catalog_interval: float = 60.0
    """Between looks at whether enough is new for a catalog."""
    catalog_entries: int = 64
    """From so many packs and steps without a catalog on, one is written for them: fewer are soon read."""
    serials_skipped: int = 10_000
    """A tier that cannot be read at start may hold serials that nobody knows of; new ones keep clear of them."""

    # -- exports
    export_gives_up: float = 5.0
    """How long a cancelled export may take to end, before its thread is left behind."""

    export_silence: float = 150.0
    """How long an export may neither ask for arrays nor end, besides the time for the bytes that it got. Then it counts
    as hanging: its thread is left behind, and the export fails. Lustre recovers within two minutes."""
    export_rate: float = 10e6
    """Least bytes per second at which an export writes the bytes that it got."""
    export_part: int = 16 << 20
    """Bytes that are read together for an export; two such parts are read while one is written."""
    export_flush_rate: float = 100e6
    """Least bytes per second of a flush to the device, where a format's library leaves all to the end."""

    # -- packs and reads
    pack_size: int = 256 << 20
    """Bytes of a pack that is written from the slab."""
    read_run: int = 16 << 20
    """Small neighbouring extents are read together up to this size."""
    reads_under_way: int = 192 << 20
    """Bytes that are read at a time, or one run, from a store that digests reads or is remote: so each read ends within
    the deadline even on the slowest tier that is allowed, though all reads share its bandwidth."""

    steps_asked: int = 4
    """Newest steps whose indexes are asked which copy of a chunk they use, before a chunk is read to verify it."""

    # -- saves
    wait_for_room: float = 600.0
    """How long ``when_full = "wait"`` waits at most."""
    look_for_room: float = 1.0
    """Until a waiting save looks for readers that have gone, which nobody announces."""
    scratch_size: int = 256 << 20
    """The least scratch memory of an engine."""
    frozen_rate: float = 256 << 20
    """Bytes per second of frozen arrays that are read again behind the training, to see whether they are frozen."""

    # -- ranks
    wait_longer: float = 2.0
    """How much longer other ranks wait than rank 0, which may tell them which rank was silent."""
    listen_again: float = 60.0
    """Until a rank that hears nothing asks its communicator anew."""
    send_again: float = 1.0
    """Until a rank tries again to send what could not be sent."""
    last_words: float = 5.0
    """How long rank 0 waits for the others to take its last message."""
    hello_again: float = 1.0
    """Until a rank that nobody has welcomed says hello once more."""
    go_within: float = 5.0
    """Until a rank that was welcomed and not told to go says hello once more: rank 0 may be dead."""
    message_size: int = 1 << 20
    """Largest message of a bulk transfer between ranks whose communicator has messages alone."""
    schedule_ahead: float = 1.0
    """How long a message may take to reach all ranks, at first."""
    find_within: float = 10.0
    """How long a rank waits for rank 0 to tell which chunks a tier has, before it writes all of them."""
    save_again: float = 2.0
    """How long a rank that could not begin a save may take to call it again, before the others are told."""
    ask_rank_0_again: float = 5.0
    """How long a rank waits for rank 0 to bring a step to a tier, before it asks again."""

    # -- the agent
    agent_silence: float = 60.0
    """How long an agent may be silent, or take to get ready while somebody waits for it."""
    agent_first_retry: float = 0.2
    """Until another agent is started in place of one that did not get ready; doubles with every failure."""
    agent_last_retry: float = 30.0
    agents_asked: int = 5
    """How many agents get the same request, each after the one before has died of it."""
    agent_look: float = 0.2
    """Between looks at whether an agent lives that has not called yet."""
    agent_ends: float = 30.0
    """How long an agent that has nothing more to do may take to end."""
    agent_gives_up: float = 3600.0
    """How long an agent without a trainer goes on with tiers that fail, before it gives up what is due there."""


in_force = Limits()
"""The limits of this process."""

_DOUBLINGS = 64
"""From so many failures on it is the longest time anyhow; a float cannot be doubled for ever."""


def backoff(first: float, last: float, failures: int) -> float:
    """Seconds until the next try: ``first`` after no earlier failure, doubled by each, at most ``last``."""
    return min(last, first * 2.0 ** min(failures, _DOUBLINGS))
