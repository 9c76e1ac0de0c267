"""Events of a store, as frozen values, and their distribution to listeners.

Events carry plain numbers (bytes, seconds) and names. A listener runs in the engine's thread and must return quickly:
one that takes seconds is named in the log, and one that calls the store is refused, for that would wait for itself. One
that raises anything is logged and costs nobody else anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tieredckpt._callbacks import Callback, is_failure

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

_log = logging.getLogger("tieredckpt")


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class StepSaved(Event):
    """A step was committed in the first tier; ``seconds`` is what `save` took from the trainer."""

    step: int
    serial: int
    tier: str
    nbytes: int
    new_bytes: int
    """As of `Saved`."""
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveSkipped(Event):
    """A save was not made, because the slab was full and what ``when_full`` says did not help."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class OriginIgnored(Event):
    """A save extends the branch, whose newest step is ``newest``, though the step ``origin`` was restored last.

    Its number is above that of the newest step, and the restore did not say ``resume=True``; ``advice`` says what
    to do about it. Of several ranks, each tells it.
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
    """An array that ``frozen`` names has changed: steps hold its bytes of before.

    These are the steps after ``checked``, the newest for which the array was as it is stored (None if none is known),
    up to ``step`` and those that were saved while the check ran. The next save reads the array.
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
    """All ranks have saved their parts of a step, and the parts fit together; told on every rank.

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
    """Ranks have other bytes than the rest for an array that all should have alike; emitted on every rank.

    Memory or computation of a rank is wrong, or the array is no replica. ``ranks`` are those that differ from more than
    half of the ranks; all that have the array, where no value is that of more than half. ``key`` is the first such
    array by name, ``more`` counts further ones of the same ranks. A `CommitFailed` of the same step tells if
    it is not committed, which for what each rank or node stores whole no setting changes.
    """

    step: int
    serial: int
    key: str
    ranks: tuple[int, ...]
    more: int


@dataclass(frozen=True, slots=True)
class StepPromoted(Event):
    """A step was committed on a slower tier; ``written`` counts the bytes of its new packs, those of this rank.

    ``seconds`` is what copying it took, and ``lag`` the time since its save; 0 where it was there and is repaired.
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
    """A step could not be exported, or where exports go could not be looked at (``step`` is None then).

    It is tried again in ``retry_in`` seconds; None where only a change of the step or the configuration would help.
    """

    step: int | None
    serial: int | None
    export: str
    error: Exception
    retry_in: float | None


@dataclass(frozen=True, slots=True)
class StepReplicated(Event):
    """Every rank's part of a step lies in the RAM of so many nodes; ``sent`` counts the bytes that it took."""

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
    """Calls of a tier, ``calls`` of them so far, hang in its device; told again only after none did."""

    tier: str
    calls: int


@dataclass(frozen=True, slots=True)
class TierRecovered(Event):
    """A tier works again and catches up."""

    tier: str


@dataclass(frozen=True, slots=True)
class RamLeftAlone(Event):
    """RAM of another store that was at this one's folder holds ``steps`` steps, the newest as given; it stays."""

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
            try:
                with Callback("listener", listener):
                    listener(event)
            except BaseException as error:
                if not is_failure(error):
                    raise
                _log.exception("a listener failed on %s", type(event).__name__)
