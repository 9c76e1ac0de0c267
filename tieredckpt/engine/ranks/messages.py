"""The messages between the ranks of a store.

Most are in logs: rank 0 sends numbered messages to all other ranks, each other rank sends its own to rank 0, and the
receivers apply them in order. Answers have topics of their own.
"""

from __future__ import annotations

import msgspec

from tieredckpt.engine.wire_types import Failure, StepOnTier, decode
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.marker import StoreMarker
from tieredckpt.format.replicas import Difference

__all__ = [
    "Aborted",
    "Ballot",
    "Catalog",
    "Chosen",
    "Closing",
    "Committed",
    "CompareReplicas",
    "Damaged",
    "Done",
    "Evicted",
    "Find",
    "Logged",
    "Opened",
    "PartDropped",
    "Promote",
    "Promoted",
    "RendezvousComplete",
    "RendezvousOpened",
    "ReplicaDigests",
    "Replicate",
    "Replicated",
    "Reported",
    "RestoreJoined",
    "RestoreRequested",
    "RestoreWithdrawn",
    "SaveAt",
    "Signalled",
    "Stuck",
    "TierChanged",
    "Wanted",
    "decode_said",
]


class Ballot(msgspec.Struct, frozen=True, tag=True):
    """One rank's vote on a save: its part of the step, or why it has none."""

    attempt: str
    step: int
    serial: int
    """Of the step on this rank; 0 if it has no part."""
    last_serial: int
    part: bytes = b""
    """The rank's part of the step, encoded by `format.part`; empty if it has none."""
    tier: str | None = None
    """The shared tier to which the part was streamed; None for the rank's own RAM."""
    failure: Failure | None = None
    """Why the rank has no part."""
    reached: int = 0
    """Of a rank without a part: the serial that it reaches with this save, once all before it are numbered."""
    gone: tuple[tuple[int, int], ...] = ()
    """Serial and step of the steps that have left this rank's RAM since it last reported such."""
    origin: int = 0
    """Serial of the step that this rank restored last before the save; 0 for none."""
    replicas: dict[bytes, bytes] = {}
    """For each group of ranks that have equal data and divide its storage among them: one digest of all that data."""
    failing: tuple[str, ...] = ()
    """Shared tiers that this rank cannot use at present."""


class Catalog(msgspec.Struct, frozen=True):
    """Content of a shared tier."""

    tier: str
    known: bool
    """Whether rank 0 could read the tier."""
    steps: tuple[StepOnTier, ...] = ()
    damaged: tuple[tuple[StepId, Failure], ...] = ()
    """As `DamagedSteps.told`."""


class Opened(msgspec.Struct, frozen=True):
    """Answer of rank 0 when all ranks have opened their tiers."""

    whole: tuple[StepRecord, ...]
    """Steps that are whole in the RAM of the ranks, without the structures."""
    kept: tuple[tuple[int, int], ...]
    """Serial and step of the steps that have parts in RAM, and that a shared tier holds."""
    last_serial: int
    line: tuple[tuple[int, int], ...]


class Chosen(msgspec.Struct, frozen=True):
    """The step that all ranks restore."""

    step: int | None
    """None if there is no step."""
    serial: int = 0
    tier: str = ""
    """The nearest tier with a readable index of it."""
    btree_key: str = ""
    sizes: tuple[int, int] = (0, 0)
    """Of the index: manifest and nodes, in bytes; they follow."""


class Committed(msgspec.Struct, frozen=True, tag=True):
    """Every rank has its part of a step, and the parts fit."""

    attempt: str
    record: StepRecord
    """Of the whole step, without the structure."""
    in_ram: bool
    """Whether all parts are in the ranks' RAM."""
    open: tuple[str, ...]
    """Other attempts on which rank 0 has not decided yet."""
    failing: tuple[str, ...]
    """Shared tiers that some rank cannot use."""
    differing: tuple[Difference, ...] = ()
    """Replicas that are not equal."""


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """A step was not committed: not at all, or not on one tier."""

    step: int
    serial: int
    tier: str | None
    ranks: tuple[int, ...]
    reason: str
    attempt: str = ""
    """The attempt to save the step; empty if it was saved, and its promotion failed."""
    last_serial: int = 0
    """The serial that the next save follows."""
    open: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    differing: tuple[Difference, ...] = ()
    """Replicas that are not equal."""


class CompareReplicas(msgspec.Struct, frozen=True, tag=True):
    """Replicas of a save are not equal: every rank is to send the digests of their chunks."""

    attempt: str
    groups: tuple[bytes, ...]
    """Groups of ranks, named as in `Ballot`."""


class Promote(msgspec.Struct, frozen=True, tag=True):
    """Every rank is to write its share of a step to a tier."""

    number: int
    step: int
    serial: int
    tier: str


class Promoted(msgspec.Struct, frozen=True, tag=True):
    """A step was committed on a shared tier."""

    tier: str
    held: StepOnTier
    used: int
    """Bytes that the tier has in use now."""
    seconds: float
    lag: float


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """A step has left a tier. It has left RAM as soon as one rank has dropped its part."""

    step: int
    serial: int
    tier: str


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """A step that is due on a tier cannot be promoted for now."""

    step: int
    serial: int
    tier: str
    failure: Failure


class TierChanged(msgspec.Struct, frozen=True, tag=True):
    """A shared tier failed, or works again."""

    tier: str
    failure: Failure | None
    retry_in: float = 0.0
    catalog: Catalog | None = None
    marker: StoreMarker | None = None
    """Identity of the store, which may have become known with the tier."""


class Replicate(msgspec.Struct, frozen=True, tag=True):
    """Every rank is to send and receive the copies of parts of a step that concern it."""

    number: int
    step: int
    serial: int
    copies: tuple[tuple[int, int, int], ...]
    """The part, the rank that sends it, and the rank that receives it."""


class Replicated(msgspec.Struct, frozen=True, tag=True):
    """All copies of a step are complete, or why they are not."""

    step: int
    serial: int
    copies: int
    sent: int
    seconds: float
    failure: Failure | None = None
    ranks: tuple[int, ...] = ()


class SaveAt(msgspec.Struct, frozen=True, tag=True):
    """All ranks are to save this step, or the first after it that they ask about."""

    step: int


class RendezvousOpened(msgspec.Struct, frozen=True, tag=True):
    """All ranks have asked for a restore; each that still waits is to confirm it."""

    asks: dict[int, int]
    """The ranks that are to confirm, and how often each had asked."""


class RendezvousComplete(msgspec.Struct, frozen=True, tag=True):
    """All ranks have confirmed a restore, and it begins; or some are missing, and it does not begin."""

    epoch: int
    """The number of the restore, the same on all ranks."""
    asks: dict[int, int]
    """The ranks that are answered, and how often each had asked."""
    missing: tuple[int, ...] = ()


class Closing(msgspec.Struct, frozen=True, tag=True):
    """The end of rank 0's log."""


Logged = (
    Committed
    | Aborted
    | CompareReplicas
    | Promote
    | Promoted
    | Evicted
    | Stuck
    | TierChanged
    | Replicate
    | Replicated
    | SaveAt
    | RendezvousOpened
    | RendezvousComplete
    | Closing
)
"""The messages of rank 0's log."""


class RestoreRequested(msgspec.Struct, frozen=True, tag=True):
    """A rank waits for the others, to restore."""

    number: int
    """How often it has asked."""


class RestoreJoined(msgspec.Struct, frozen=True, tag=True):
    """A rank that asked for a restore still waits."""

    number: int


class RestoreWithdrawn(msgspec.Struct, frozen=True, tag=True):
    """A rank that asked for a restore has given up."""

    number: int


class Damaged(msgspec.Struct, frozen=True, tag=True):
    """A rank could not read some of a step on a shared tier."""

    step: int
    serial: int
    tier: str
    digests: tuple[bytes, ...]
    """Of the chunks; none: the index."""


class Signalled(msgspec.Struct, frozen=True, tag=True):
    """The trainer of a rank has raised a signal, or withdrawn it."""

    name: str
    on: bool


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """A rank asks to promote a step to a shared tier at once, because its machine will be taken away."""

    step: int
    serial: int
    tier: str


class PartDropped(msgspec.Struct, frozen=True, tag=True):
    """A rank has dropped its part of a step that it voted for, to make room: rank 0 had not decided for too long."""

    step: int
    serial: int


class ReplicaDigests(msgspec.Struct, frozen=True, tag=True):
    """Answer to `CompareReplicas`: the digests of all chunks of each piece, by group of ranks and storage key."""

    attempt: str
    groups: dict[bytes, dict[str, bytes]]


class Find(msgspec.Struct, frozen=True, tag=True):
    """A rank that streams past its RAM asks which of its chunks a shared tier has."""

    number: int
    """How often the rank has asked; rank 0 answers to it."""
    attempt: str
    tier: str
    sizes: dict[bytes, int]
    """Bytes of each chunk, by digest."""


Reported = (
    RestoreRequested
    | RestoreJoined
    | RestoreWithdrawn
    | Damaged
    | Signalled
    | Wanted
    | Ballot
    | PartDropped
    | ReplicaDigests
    | Find
)
"""The messages of the other ranks' logs, which rank 0 applies."""


class Done(msgspec.Struct, frozen=True):
    """A rank's vote on a promotion: what it has written, or why it could not."""

    packs: dict[str, int] = {}
    """Sizes of the packs that it wrote, by key."""
    parts: dict[int, tuple[bytes, int]] = {}
    """Digests and sizes of the parts that it wrote, by the rank that saved them."""
    seconds: float = 0.0
    failure: Failure | None = None


def decode_said(data: bytes) -> tuple[bytes, Failure | None]:
    """A rank's contribution to a vote, or its failure. Raises `Corrupt`."""
    said: tuple[bytes, Failure | None] = decode(data, tuple[bytes, Failure | None])
    return said
