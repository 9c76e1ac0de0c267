"""Events of a store, as frozen values, and their distribution to listeners.

Events carry plain numbers (bytes, seconds) and names. A listener runs in the engine's thread and must return quickly:
the log names one that takes seconds. A listener cannot call the store: the call would wait for itself, and is refused.
The error of a listener is logged, and the other listeners still get the event.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tieredckpt._callbacks import Callback, Tolerated

__all__ = [
    "ChunkRepaired",
    "CommitFailed",
    "Event",
    "Events",
    "ExportFailed",
    "FrozenChanged",
    "OriginIgnored",
    "RamLeftAlone",
    "ReplicasDiffer",
    "ReplicationFailed",
    "RetentionCut",
    "SaveFailed",
    "SaveSkipped",
    "StepCommitted",
    "StepEvicted",
    "StepExported",
    "StepPromoted",
    "StepReplicated",
    "StepRestored",
    "StepSaved",
    "TierFailed",
    "TierHangs",
    "TierRecovered",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class StepSaved(Event):
    """A step was committed in the first tier that had room for it."""

    step: int
    serial: int
    tier: str
    nbytes: int
    new_bytes: int
    """Bytes that this tier did not have."""
    seconds: float
    """From the call of `save` to this commit; the trainer waits for all of it with ``capture="copy"`` alone."""


@dataclass(frozen=True, slots=True)
class SaveSkipped(Event):
    """A save was not made, because the slab was full and what ``when_full`` says did not help."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class OriginIgnored(Event):
    """A save extends the branch, whose newest step is ``newest``, though the step ``origin`` was restored last.

    Its number is above that of the newest step, and the restore did not say ``resume=True``; ``advice`` says what
    to do about it. Emitted on every rank.
    """

    step: int
    origin: int
    newest: int
    advice: str


@dataclass(frozen=True, slots=True)
class SaveFailed(Event):
    """A save that had returned (any ``capture`` but ``"copy"``) could not be completed."""

    step: int
    error: Exception


@dataclass(frozen=True, slots=True)
class FrozenChanged(Event):
    """An array that is declared ``frozen`` has changed: stored steps hold its old bytes.

    These are the steps after ``checked``, the last one known to be right (None if none is), up to ``step``, and those
    saved while the check ran. The next save reads the array.
    """

    step: int
    key: str
    checked: int | None

    @property
    def advice(self) -> str:
        """Description of the event, and advice what to do."""
        since = "steps" if self.checked is None else f"steps after {self.checked}"
        return (
            f"array {self.key!r} is declared frozen and has changed: {since} up to {self.step} may hold its bytes of "
            f"before; take it out of `frozen`, and save again what those steps are needed for"
        )


@dataclass(frozen=True, slots=True)
class StepCommitted(Event):
    """All ranks have saved their parts of a step, and the parts fit together; emitted on every rank.

    ``nbytes`` counts all arrays of the step once.
    """

    step: int
    serial: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CommitFailed(Event):
    """A save or a promotion of several ranks failed: nothing was committed. Emitted on every rank.

    ``tier`` is None where the ranks did not agree on what each has in its own memory; ``ranks`` are those that
    failed, were silent or disagreed, as far as known.
    """

    step: int
    serial: int
    tier: str | None
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicasDiffer(Event):
    """Ranks differ in an array that should be equal on all; emitted on every rank.

    A rank's memory or computation is wrong, or the array is not replicated. ``ranks`` are those that differ from the
    majority (more than half of the ranks); without a majority, all that have the array. ``key`` is the first such array
    by name, ``more`` counts further ones of the same ranks. If the step is not committed, a `CommitFailed` says so; if
    each rank or node stores the array whole, it never is, whatever the settings say.
    """

    step: int
    serial: int
    key: str
    ranks: tuple[int, ...]
    more: int


@dataclass(frozen=True, slots=True)
class StepPromoted(Event):
    """A step was committed on a slower tier; ``written`` counts the bytes of this rank's new packs.

    ``seconds`` is what copying it took, and ``lag`` the time since its save; 0 for the repair of a step that was there.
    """

    step: int
    serial: int
    tier: str
    nbytes: int
    written: int
    seconds: float
    lag: float = 0.0


@dataclass(frozen=True, slots=True)
class StepExported(Event):
    """A step was exported behind the training, to ``to``; ``nbytes`` counts the bytes of its files.

    ``seconds`` is what writing it took, and ``lag`` the time since its save. ``left_out`` are the keys of leaves that
    the format cannot hold, the first hundred of ``left_out_count``.
    """

    step: int
    serial: int
    export: str
    to: str
    nbytes: int
    seconds: float
    lag: float
    left_out: tuple[str, ...] = ()
    left_out_count: int = 0


@dataclass(frozen=True, slots=True)
class ExportFailed(Event):
    """A step could not be exported; or the destination could not be looked at, or cleared of what ``keep`` lets go
    (``step`` is None then).

    It is tried again in ``retry_in`` seconds; None where only a change of the step or the configuration would help.
    """

    step: int | None
    serial: int | None
    export: str
    error: Exception
    retry_in: float | None


@dataclass(frozen=True, slots=True)
class StepReplicated(Event):
    """Every rank's part of a step is in the RAM of ``copies`` nodes; ``sent`` counts the bytes sent."""

    step: int
    serial: int
    copies: int
    sent: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplicationFailed(Event):
    """The parts of a step could not be copied to the RAM of other nodes; the next step is tried again.

    ``ranks`` are those that failed or were silent, as far as known.
    """

    step: int
    serial: int
    ranks: tuple[int, ...]
    error: Exception


@dataclass(frozen=True, slots=True)
class StepEvicted(Event):
    """A step was retracted from a tier."""

    step: int
    serial: int
    tier: str


@dataclass(frozen=True, slots=True)
class RetentionCut(Event):
    """A step leaves a tier that retains it, for a newer one: there is no room for both."""

    step: int
    serial: int
    tier: str


@dataclass(frozen=True, slots=True)
class StepRestored(Event):
    """A step was restored; ``sources`` maps a tier's name, or ``peers``, to the bytes that came from it.

    ``lossy`` tells that it was a lossy copy, whose values are not all as they were saved.
    """

    step: int
    serial: int
    sources: dict[str, int]
    seconds: float
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class ChunkRepaired(Event):
    """Good bytes of a chunk, ``nbytes`` of them, were written back to a tier that had lost or damaged them."""

    step: int
    key: str
    tier: str
    source: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TierFailed(Event):
    """A tier stopped working; it is bypassed, and retried in ``retry_in`` seconds."""

    tier: str
    error: Exception
    retry_in: float


@dataclass(frozen=True, slots=True)
class TierHangs(Event):
    """Calls of a tier, ``calls`` of them so far, hang in its device; emitted again only after none did."""

    tier: str
    calls: int


@dataclass(frozen=True, slots=True)
class TierRecovered(Event):
    """A tier works again and catches up."""

    tier: str


@dataclass(frozen=True, slots=True)
class RamLeftAlone(Event):
    """RAM of another store, which was at this folder before, is left as it is: ``steps`` steps, the newest ``step``."""

    store: str
    folder: str
    steps: int
    step: int
    serial: int


class Events:
    """Hands each event to every listener; safe to call from any thread, and without a lock from a signal handler."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with every event from now on; the returned function ends that."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            with suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    def emit(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            with Tolerated("a listener failed on %s", type(event).__name__), Callback("listener", listener):
                listener(event)
