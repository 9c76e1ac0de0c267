"""How often trainers of a store have died, and how long they ran: an estimate of the time between failures.

A trainer that closes its store releases its leases. The leases of one that dies stay, with the time of its last sign of
life; the next trainer finds them, counts, and stores the count with every step that it saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tieredckpt.engine.tier.lease import Holder
from tieredckpt.format.manifest import StepRecord

__all__ = ["FailureHistory", "failure_history"]

_FAILURES = "failures"
_TRAINED = "trained_seconds"
_STALLED = "stalled_seconds"
_LOST = "lost_seconds"
_MOST = 2.0**53
"""Maximum of failures and of seconds that a step may claim."""


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """History of a store's earlier trainers."""

    failures: int = 0
    """Trainers that ended without closing the store."""
    trained_seconds: float = 0.0
    """How long they ran, together."""
    stalled_seconds: float = 0.0
    """Training time that saves took."""
    lost_seconds: float = 0.0
    """Training since the last save of each trainer that died."""

    def provenance(self, running: float, stalled: float) -> dict[str, str]:
        """Provenance of a step for the next trainer; it was saved after ``running`` seconds, ``stalled`` among them."""
        return {
            _FAILURES: str(self.failures),
            _TRAINED: f"{self.trained_seconds + running:.1f}",
            _STALLED: f"{self.stalled_seconds + stalled:.3f}",
            _LOST: f"{self.lost_seconds:.1f}",
        }


def failure_history(newest: StepRecord | None, dead: Iterable[Holder]) -> FailureHistory:
    """The failure history from the newest step and the stale leases found at opening.

    A trainer has a lease on every tier and counts once. One that was counted before counts no more, though its
    lease may lie on a tier that could not be read then: it neither saved the newest step nor began after it.
    """
    before = _stored(newest)
    saved_at = newest.saved_at if newest is not None else 0.0
    last = {
        (holder.machine, holder.process, holder.process_started): holder
        for holder in dead
        if holder.taken_at >= saved_at or _saved(holder, newest)
    }.values()
    since = sum(max(0.0, holder.renewed_at - max(saved_at, holder.taken_at)) for holder in last)
    return FailureHistory(
        before.failures + len(last), before.trained_seconds + since, before.stalled_seconds, before.lost_seconds + since
    )


def _saved(holder: Holder, record: StepRecord | None) -> bool:
    return record is not None and (record.provenance.get("host"), record.provenance.get("process")) == (
        holder.host,
        str(holder.process),
    )


def _stored(record: StepRecord | None) -> FailureHistory:
    """The history that a step stores; empty for steps of older versions and for damaged numbers."""
    if record is None:
        return FailureHistory()
    try:
        failures = int(record.provenance.get(_FAILURES, "0"))
        times = [float(record.provenance.get(name, "0")) for name in (_TRAINED, _STALLED, _LOST)]
    except ValueError:
        return FailureHistory()
    sound = all(0 <= number <= _MOST for number in (failures, *times))
    return FailureHistory(failures, *times) if sound else FailureHistory()
