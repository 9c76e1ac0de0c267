"""Two reports side by side: which of this library's figures became worse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tieredckpt.bench.report import AIMS, Report

__all__ = ["Change", "compare", "unlike"]

Verdict = Literal["worse", "better", "alike", "new", "gone"]

_TOLERANCE = 0.15
"""A change of a ratio by less than this is what runs on one machine differ by; see docs/guides/bench.md."""
_LEAST = {"peak_save_over_slab": 64 << 20, "peak_restore": 64 << 20, "save_large_extra_s": 0.01, "interference": 0.02}
"""Changes below this are none, whatever their ratio: figures that may be next to nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, before and now; every figure is better when it is smaller."""

    key: str
    before: float | None
    now: float | None
    verdict: Verdict


def compare(before: Report, now: Report) -> list[Change]:
    """Every figure of either report that has an aim, in the order of the aims."""
    changes = []
    for aim in AIMS:
        old, new = before.ratios.get(aim.key), now.ratios.get(aim.key)
        if old is not None or new is not None:
            changes.append(Change(aim.key, old, new, _verdict(aim.key, old, new)))
    return changes


def _verdict(key: str, old: float | None, new: float | None) -> Verdict:
    if old is None:
        return "new"
    if new is None:
        return "gone"
    if abs(new - old) <= max(_TOLERANCE * min(old, new), _LEAST.get(key, 0.0)):
        return "alike"
    return "worse" if new > old else "better"


def unlike(before: Report, now: Report) -> list[str]:
    """Why the figures of two reports are not of the same thing; empty where they are."""
    reasons = []
    if before.size != now.size:
        reasons.append(f"the states have {before.size} and {now.size} bytes")
    if before.ranks != now.ranks:
        reasons.append(f"{before.ranks} and {now.ranks} ranks saved together")
    reasons += [
        f"{name}: {before.machine.get(name)!r} and {now.machine.get(name)!r}"
        for name in ("processor", "cores", "file_system")
        if before.machine.get(name) != now.machine.get(name)
    ]
    return reasons
