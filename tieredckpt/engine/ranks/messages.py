"""What the ranks of a store tell each other, as bytes.

Most is in logs: numbered messages, those of rank 0 to all other ranks, and those of each other rank to the
rank 0, which apply them in their order. Answers have topics of their own.
"""

from __future__ import annotations

import msgspec

from tieredckpt.engine.wire_types import Failure, HeldStep, decode
from tieredckpt.format.manifest import StepRecord, StoreMarker
from tieredckpt.format.replicas import Difference

__all__ = [
    "Aborted",
    "Catalog",
    "Chosen",
    "Closing",
    "Committed",
    "CompareReplicas",
    "Damaged",
    "Done",
    "Evicted",
    "Logged",
    "Opened",
    "Promote",
    "Promoted",
    "RendezvousComplete",
    "RendezvousOpened",
    "Replicate",
    "Replicated",
    "Reported",
    "RestoreJoined",
    "RestoreRequested",
    "RestoreWithdrawn",
    "Save",
    "SaveAt",
    "Signalled",
    "Stuck",
    "TierNews",
    "Wanted",
    "decode_said",
]


class Save(msgspec.Struct, frozen=True):
    """How a save ended on one rank."""

    serial: int
    last_serial: int
    part: bytes = b""
    """What the rank has of the step, as `format.part` has it; empty when there is nothing."""
    tier: str | None = None
    """The shared tier to which the part was streamed; None for the rank's own RAM."""
    failure: Failure | None = None
    """Why there is nothing."""
    gone: tuple[tuple[int, int], ...] = ()
    """Serial and step of what has left this rank's RAM since it last said so."""
    origin: int = 0
    """Serial of what this rank restored last before the save; 0 for nothing."""
    replicas: dict[bytes, bytes] = {}
    """Of each group of ranks that divide among them what they have alike: a digest of all of that."""


class Catalog(msgspec.Struct, frozen=True):
    """What a shared tier holds."""

    tier: str
    known: bool
    """Whether rank 0 could look."""
    steps: tuple[HeldStep, ...] = ()
    damaged: tuple[tuple[int, int, str], ...] = ()
    """Serial, step, and what is wrong."""


class Opened(msgspec.Struct, frozen=True):
    """What rank 0 tells when all have opened their tiers."""

    whole: tuple[StepRecord, ...]
    """Steps of which all parts are in the ranks' RAM, without the structures."""
    kept: tuple[tuple[int, int], ...]
    """Serial and step of those of which parts are, and that a shared tier holds."""
    last_serial: int
    line: tuple[tuple[int, int], ...]


class Chosen(msgspec.Struct, frozen=True):
    """The step that all ranks restore."""

    step: int | None
    """None where there is none."""
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
    differing: tuple[Difference, ...] = ()
    """Replicas that are not equal."""


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """A step was not committed: nowhere, or not on a tier."""

    step: int
    serial: int
    tier: str | None
    ranks: tuple[int, ...]
    reason: str
    attempt: str = ""
    """Of all ranks to save it; empty where they had saved it."""
    last_serial: int = 0
    """That the next save follows."""
    open: tuple[str, ...] = ()
    differing: tuple[Difference, ...] = ()
    """Replicas that are not equal."""


class CompareReplicas(msgspec.Struct, frozen=True, tag=True):
    """Replicas of a save are not equal: every rank is to tell the digests of their chunks."""

    attempt: str
    groups: tuple[bytes, ...]
    """As `Save` names them."""


class Promote(msgspec.Struct, frozen=True, tag=True):
    """Every rank is to write what it has of a step to a tier."""

    number: int
    step: int
    serial: int
    tier: str


class Promoted(msgspec.Struct, frozen=True, tag=True):
    """A step was committed on a shared tier."""

    tier: str
    held: HeldStep
    used: int
    """Bytes that the tier has in use now."""
    seconds: float
    lag: float


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """A step has left a tier; RAM, when one rank has let its part go."""

    step: int
    serial: int
    tier: str


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """A step that is due on a tier cannot come there for now."""

    step: int
    serial: int
    tier: str
    failure: Failure


class TierNews(msgspec.Struct, frozen=True, tag=True):
    """A shared tier failed, or works again."""

    tier: str
    failure: Failure | None
    retry_in: float = 0.0
    catalog: Catalog | None = None
    marker: StoreMarker | None = None
    """Identity of the store, which may have become known with the tier."""


class Replicate(msgspec.Struct, frozen=True, tag=True):
    """Every rank is to give and take the copies of parts of a step that concern it."""

    number: int
    step: int
    serial: int
    copies: tuple[tuple[int, int, int], ...]
    """Part, the rank that gives it, and the rank that takes it."""


class Replicated(msgspec.Struct, frozen=True, tag=True):
    """All copies of a step are where they should be, or why they are not."""

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
    """All ranks have asked for a restore: those that still wait say so."""

    asks: dict[int, int]
    """The ranks that are called, and how often each had asked."""


class RendezvousComplete(msgspec.Struct, frozen=True, tag=True):
    """All ranks are there for a restore, which begins; or some are not, and it does not."""

    epoch: int
    """The number of the restore, the same on all ranks."""
    asks: dict[int, int]
    """The ranks that are answered, and how often each had asked."""
    missing: tuple[int, ...] = ()


class Closing(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 has nothing more to say."""


Logged = (
    Committed
    | Aborted
    | CompareReplicas
    | Promote
    | Promoted
    | Evicted
    | Stuck
    | TierNews
    | Replicate
    | Replicated
    | SaveAt
    | RendezvousOpened
    | RendezvousComplete
    | Closing
)
"""What rank 0's log consists of."""


class RestoreRequested(msgspec.Struct, frozen=True, tag=True):
    """A rank waits for the others, to restore."""

    number: int
    """How often it has asked."""


class RestoreJoined(msgspec.Struct, frozen=True, tag=True):
    """A rank that asked for a restore still waits."""

    number: int


class RestoreWithdrawn(msgspec.Struct, frozen=True, tag=True):
    """A rank that asked for a restore waits no more."""

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
    """A rank wants a step on a shared tier at once, for its machine is taken away."""

    step: int
    serial: int
    tier: str


Reported = RestoreRequested | RestoreJoined | RestoreWithdrawn | Damaged | Signalled | Wanted
"""What the logs of the other ranks consist of, which rank 0 hears."""


class Done(msgspec.Struct, frozen=True):
    """How a rank has carried out an order to promote."""

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
