"""Messages between a trainer and its agent; those about steps use the types of `engine.wire_types`."""

from __future__ import annotations

from typing import Any

import msgspec

from tieredckpt.engine.tier.lease import Holder
from tieredckpt.engine.wire_types import Failure, HeldStep
from tieredckpt.format.manifest import StepId, StoreMarker

__all__ = [
    "BadChunk",
    "Cancel",
    "Collect",
    "Commit",
    "Evict",
    "Find",
    "Flush",
    "FromAgent",
    "FromTrainer",
    "GiveBack",
    "GiveWay",
    "Goodbye",
    "Happened",
    "Heartbeat",
    "Hello",
    "InRam",
    "Lend",
    "MakeRoom",
    "Mend",
    "OnTier",
    "Order",
    "Pin",
    "Progress",
    "Promote",
    "Reach",
    "Ready",
    "Refused",
    "Request",
    "Response",
    "Scrub",
    "Unpin",
    "Verify",
]


class _Frame(msgspec.Struct, frozen=True, tag=True):
    pass


# -- what the trainer asks for ----------------------------------------------------------------------------


class Promote(_Frame, frozen=True):
    """Copy a step to a tier; the bytes written."""

    number: int
    tier: str


class Evict(_Frame, frozen=True):
    """Drop a step from a tier."""

    number: int
    tier: str


class Delete(_Frame, frozen=True):
    """Delete every copy of steps; with ``force``, a tier that does not answer keeps its copies."""

    steps: tuple[StepId, ...]
    force: bool


class Collect(_Frame, frozen=True):
    """Reclaim the space that no step needs; a list of `Collected`."""


class Verify(_Frame, frozen=True):
    """Read all of a step on a tier; a list of `Verified`."""

    number: int | None
    serial: int | None
    tier: str
    repair: bool


class Scrub(_Frame, frozen=True):
    """Verify all that a tier holds; a list of `Verified`."""

    tier: str
    repair: bool
    rate: float | None


class Flush(_Frame, frozen=True):
    """Answer when every tier has what is due on it."""


class Reach(_Frame, frozen=True):
    """Answer when a tier holds a step."""

    step: StepId
    tier: str


class GiveWay(_Frame, frozen=True):
    """Interrupt the promotion of an older step to a tier."""

    step: StepId
    tier: str


class BadChunk(msgspec.Struct, frozen=True):
    """A chunk that a tier should have had: its digest, the key of its array, and what happened instead."""

    tier: str
    digest: bytes
    key: str
    failure: Failure


class Mend(_Frame, frozen=True):
    """Write good bytes of a step back to the tiers that lost some."""

    step: StepId
    damage: tuple[BadChunk, ...]
    unreadable: tuple[tuple[str, Failure], ...]
    """Tiers whose index of the step could not be read, and why."""


class Pin(_Frame, frozen=True):
    """Keep a step on a tier while the trainer reads it there."""

    step: StepId
    tier: str


class Unpin(_Frame, frozen=True):
    step: StepId
    tier: str


class MakeRoom(_Frame, frozen=True):
    """Whether so many bytes fit on a tier, after evictions if needed."""

    tier: str
    nbytes: int


class Lend(_Frame, frozen=True):
    """Keep a tier's packs as they are until `GiveBack`: the trainer streams a step there."""

    tier: str


class Find(_Frame, frozen=True):
    """Where a lent tier has chunks intact, of which these are digests and sizes: digest, pack, offset, length."""

    tier: str
    sizes: dict[bytes, int]


class Commit(_Frame, frozen=True):
    """Commit a step whose packs, of these sizes, the trainer has written to a lent tier."""

    tier: str
    manifest: bytes
    btree: bytes
    key: str
    """Of the nodes in ``btree``, as the manifest has it."""
    packs: dict[str, int]


class GiveBack(_Frame, frozen=True):
    """The trainer has done with a lent tier."""

    tier: str


Order = (
    Promote
    | Evict
    | Delete
    | Collect
    | Verify
    | Scrub
    | Flush
    | Reach
    | GiveWay
    | Mend
    | Pin
    | Unpin
    | MakeRoom
    | Lend
    | Find
    | Commit
    | GiveBack
)


# -- the trainer ------------------------------------------------------------------------------------------


class Hello(_Frame, frozen=True):
    """The trainer's first word."""

    version: str
    """Of the library: both sides run one."""
    settings: str
    """Of what agents go by, as `tieredckpt.engine.agent.deltas.settings_of` has it."""
    store: str
    """Identity of the store."""
    made_up: bool
    """Whether no tier had an identity that answered when the trainer opened."""
    slab: str
    """Key of RAM's slab, and its size: another than the agent has attached to is attached to anew."""
    capacity: int


class InRam(_Frame, frozen=True):
    """What changed in RAM, and what policies see of the trainer."""

    anew: bool
    """Whether this is all there is, and not only what changed."""
    held: tuple[HeldStep, ...]
    gone: tuple[StepId, ...]
    line: tuple[tuple[int, int], ...]
    last_serial: int
    signals: tuple[str, ...]
    used: int
    """Bytes of RAM."""


class Request(_Frame, frozen=True):
    """An order, to be answered under its number."""

    number: int
    order: Order


class Cancel(_Frame, frozen=True):
    """Nobody waits for that answer any more."""

    number: int


class Goodbye(_Frame, frozen=True):
    """The trainer closes its store."""

    done: bool
    """Whether in order, and everything that was due is promoted."""


FromTrainer = Hello | InRam | Request | Cancel | Goodbye


# -- the agent --------------------------------------------------------------------------------------------


class Ready(_Frame, frozen=True):
    """The agent has its leases and has told what all tiers hold."""

    dead: tuple[Holder, ...]
    """Who was found to have died while writing."""


class Refused(_Frame, frozen=True):
    """Why the agent cannot work, and ends."""

    failure: Failure


class OnTier(_Frame, frozen=True):
    """What changed on a tier, and how it is."""

    tier: str
    anew: bool
    """Whether this is all there is, and not only what changed."""
    known: bool
    """Whether the agent could look."""
    marker: StoreMarker | None
    """Identity of the store, which may have become known with the tier."""
    held: tuple[HeldStep, ...]
    gone: tuple[StepId, ...]
    damaged: tuple[tuple[StepId, str], ...]
    stuck: tuple[tuple[StepId, Failure], ...]
    tombstones: tuple[StepId, ...]
    used: int
    bandwidth: float | None
    promotions: int
    note: str
    failure: Failure | None


class Happened(_Frame, frozen=True):
    """An event: its kind, and its fields; an error as a `Failure`."""

    kind: str
    fields: dict[str, Any]


class Response(_Frame, frozen=True):
    """What came of an order: its result, encoded, or why there is none."""

    number: int
    value: bytes
    failure: Failure | None


class Progress(_Frame, frozen=True):
    """Bytes that an order has read since it last said so."""

    number: int
    nbytes: int


class Heartbeat(_Frame, frozen=True):
    """The agent is alive."""


FromAgent = Ready | Refused | OnTier | Happened | Response | Progress | Heartbeat
