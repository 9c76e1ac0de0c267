"""Messages between a trainer and its agent; those about steps use the types of `engine.wire_types`."""

from __future__ import annotations

from typing import Any

import msgspec

from tieredckpt.engine.tier.lease import Holder
from tieredckpt.engine.wire_types import Failure, StepOnTier
from tieredckpt.format.manifest import StepId
from tieredckpt.format.marker import StoreMarker

__all__ = [
    "BadChunk",
    "BeginRead",
    "Cancel",
    "Collect",
    "Commit",
    "EndRead",
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
    "OnTier",
    "Operation",
    "Pin",
    "Progress",
    "Promote",
    "Reach",
    "Ready",
    "Refused",
    "Repair",
    "Request",
    "Response",
    "Scrub",
    "Verify",
]


class _Frame(msgspec.Struct, frozen=True, tag=True):
    pass


# -- operations that the trainer requests ----------------------------------------------------------------------------


class Promote(_Frame, frozen=True):
    """Copy a step to a tier; responds with the bytes written."""

    number: int
    tier: str


class Evict(_Frame, frozen=True):
    """Drop a step from a tier."""

    number: int
    tier: str


class Pin(_Frame, frozen=True):
    """Keep a step on a tier, by default the slowest, or let it go; responds with the tier's name."""

    number: int
    tier: str | None
    on: bool


class Delete(_Frame, frozen=True):
    """Delete every copy of steps; with ``force``, a tier that does not answer keeps its copies."""

    steps: tuple[StepId, ...]
    force: bool


class Collect(_Frame, frozen=True):
    """Reclaim the space that no step needs; responds with a list of `Collected`."""


class Verify(_Frame, frozen=True):
    """Verify a step on a tier; responds with a list of `Verified`."""

    number: int | None
    serial: int | None
    tier: str
    repair: bool


class Scrub(_Frame, frozen=True):
    """Verify all that a tier holds; responds with a list of `Verified`."""

    tier: str
    repair: bool
    rate: float | None


class Flush(_Frame, frozen=True):
    """Respond when every tier has what is due on it."""


class Reach(_Frame, frozen=True):
    """Respond when a tier holds a step."""

    step: StepId
    tier: str


class GiveWay(_Frame, frozen=True):
    """Interrupt the promotion of an older step to a tier."""

    step: StepId
    tier: str


class BadChunk(msgspec.Struct, frozen=True):
    """A chunk that could not be read on a tier: its digest, the key of its array, and the failure."""

    tier: str
    digest: bytes
    key: str
    failure: Failure


class Repair(_Frame, frozen=True):
    """Repair a step on the tiers where chunks are damaged."""

    step: StepId
    damage: tuple[BadChunk, ...]
    unreadable: tuple[tuple[str, Failure], ...]
    """Tiers whose index of the step could not be read, and why."""


class BeginRead(_Frame, frozen=True):
    """Keep a step on a tier while the trainer reads it there."""

    step: StepId
    tier: str


class EndRead(_Frame, frozen=True):
    step: StepId
    tier: str


class MakeRoom(_Frame, frozen=True):
    """Evict steps until so many bytes fit on a tier; responds with whether they do."""

    tier: str
    nbytes: int


class Lend(_Frame, frozen=True):
    """Keep a tier's packs as they are until `GiveBack`: the trainer streams a step there."""

    tier: str


class Find(_Frame, frozen=True):
    """Find intact chunks of these digests and sizes on a lent tier: a list of (digest, pack, offset, length)."""

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
    """End `Lend`: the trainer no longer writes to the tier."""

    tier: str


Operation = (
    Promote
    | Evict
    | Pin
    | Delete
    | Collect
    | Verify
    | Scrub
    | Flush
    | Reach
    | GiveWay
    | Repair
    | BeginRead
    | EndRead
    | MakeRoom
    | Lend
    | Find
    | Commit
    | GiveBack
)


# -- the trainer ------------------------------------------------------------------------------------------


class Hello(_Frame, frozen=True):
    """First message of a trainer, by which the agent checks that both belong together."""

    version: str
    """Version of the library; both sides run the same one."""
    settings: str
    """Hash of the settings, see `tieredckpt.engine.agent.deltas.settings_of`."""
    store: str
    """Identity of the store."""
    made_up: bool
    """Whether no tier had an identity that answered when the trainer opened."""
    slab: str
    """Key of RAM's slab and its size; the agent attaches again if either has changed."""
    capacity: int


class InRam(_Frame, frozen=True):
    """State delta of RAM, the branch and the signals, from the trainer."""

    anew: bool
    """Whether this is the whole state and not a change."""
    held: tuple[StepOnTier, ...]
    gone: tuple[StepId, ...]
    line: tuple[tuple[int, int], ...]
    last_serial: int
    signals: tuple[str, ...]
    used: int
    """Bytes of RAM."""


class Request(_Frame, frozen=True):
    """A remote procedure call: the agent executes the operation, and responds under the same number."""

    number: int
    operation: Operation


class Cancel(_Frame, frozen=True):
    """Cancel a request: the trainer no longer waits for its response."""

    number: int


class Goodbye(_Frame, frozen=True):
    """The trainer closes its store."""

    done: bool
    """Whether in order, and everything that was due is promoted."""


FromTrainer = Hello | InRam | Request | Cancel | Goodbye


# -- the agent --------------------------------------------------------------------------------------------


class Ready(_Frame, frozen=True):
    """The agent has its leases and has sent the state of all its tiers."""

    dead: tuple[Holder, ...]
    """Writers that died: the agent found their stale leases."""


class Refused(_Frame, frozen=True):
    """The agent cannot work and ends, for this reason."""

    failure: Failure


class OnTier(_Frame, frozen=True):
    """State delta of a slower tier, from the agent."""

    tier: str
    anew: bool
    """Whether this is the whole state and not a change."""
    known: bool
    """Whether the agent could list the tier."""
    marker: StoreMarker | None
    """Identity of the store, which may have become known with the tier."""
    held: tuple[StepOnTier, ...]
    gone: tuple[StepId, ...]
    damaged: tuple[tuple[StepId, Failure], ...]
    """As `DamagedSteps.told`."""
    impaired: tuple[StepId, ...]
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
    """The response to a request: its encoded result, or the failure."""

    number: int
    value: bytes
    failure: Failure | None


class Progress(_Frame, frozen=True):
    """Bytes that a request has read since its last progress message."""

    number: int
    nbytes: int


class Heartbeat(_Frame, frozen=True):
    """The agent is alive."""


FromAgent = Ready | Refused | OnTier | Happened | Response | Progress | Heartbeat
