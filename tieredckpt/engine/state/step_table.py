"""The step table: every step that some tier holds, by age, updated by what came and went."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import takewhile, zip_longest
from typing import Protocol

from tieredckpt.engine.tier.steps import Steps
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.policy.steps import Listing, StepView

__all__ = ["Line", "StepTable", "on"]

Line = tuple[tuple[int, int], ...]
"""Serials, as inclusive ranges that ascend."""


class Holding(Protocol):
    """Holds steps: a tier, or what policies see as one."""

    @property
    def name(self) -> str: ...

    @property
    def steps(self) -> Steps: ...


class StepTable:
    """Cache of all steps and of their views, renewed only for steps that have changed.

    ``describe`` gives the view of a step from its record, the names of the tiers that hold it, and whether it is on
    the line.
    """

    def __init__(
        self, tiers: Sequence[Holding], describe: Callable[[StepId, StepRecord, tuple[str, ...], bool], StepView]
    ) -> None:
        self._tiers = tiers
        self._describe = describe
        self._guards_table = threading.Lock()
        """The trainer's thread asks whether a save is due, while the engine's changes what is held.

        Nobody waits for it: a signal handler may have interrupted the thread that holds it, and wait for the engine.
        """
        self._torn = False
        """Whether an interrupt has ended a renewal, so that what came and went is not known."""
        self._line: Line = ()
        self._views = Listing(tuple(tier.name for tier in tiers))
        self._records: dict[StepId, StepRecord] = {}
        self._not_recorded: set[StepId] = set()
        """Steps that changed since `_records` was made: few ask for records, and a new dict has all of them."""

    def views(self, line: Line) -> Listing:
        """Views of all steps as of now, all of age 0, with ``line`` as the branch."""
        return self._renewed(line)[0]

    def records(self, line: Line) -> dict[StepId, StepRecord]:
        """The records of the same steps, by age; never changed."""
        return self._renewed(line, records=True)[1]

    def refuse(self, step: StepId, tier: str) -> None:
        """List a step no longer as waiting for a tier, until the step comes, goes, or changes."""
        if self._guards_table.acquire(blocking=False):  # else it is asked about once more
            try:
                self._views = self._views.refused(tier, step)
            finally:
                self._guards_table.release()

    def _renewed(self, line: Line, *, records: bool = False) -> tuple[Listing, dict[StepId, StepRecord]]:
        """What this table has as of now, the records only if they are asked for."""
        if not self._guards_table.acquire(blocking=False):
            return self._anew(line)
        try:
            changed = self._all() if self._torn else set()
            self._torn = True
            changed = changed.union(*(tier.steps.held.news(self) for tier in self._tiers))
            if line != self._line:
                changed |= self._moved(line)
                self._line = line
            if changed:
                self._renew(changed)
            if records and self._not_recorded:
                self._record()
            self._torn = False
            return self._views, self._records
        finally:
            self._guards_table.release()

    def _anew(self, line: Line) -> tuple[Listing, dict[StepId, StepRecord]]:
        """The same, found out from the tiers alone, while another call is renewing what is known."""
        fresh = StepTable(self._tiers, self._describe)  # which hears no news: they would pile up
        fresh._line = line
        fresh._renew(fresh._all())
        fresh._record()
        return fresh._views, fresh._records

    def _all(self) -> set[StepId]:
        """Every step that there is, or was when this was renewed last."""
        return set(map(_id, self._views.steps)).union(*(tuple(tier.steps.held) for tier in self._tiers))

    def _moved(self, line: Line) -> set[StepId]:
        """The steps that came to the line or left it: none before the first serial at which the two differ."""
        pairs = zip_longest(self._line, line, fillvalue=(math.inf, math.inf))
        before, after = next((before, after) for before, after in pairs if before != after)
        first = min(before[1], after[1]) + 1 if before[0] == after[0] else min(before[0], after[0])
        later = takewhile(lambda view: view.serial >= first, reversed(self._views.steps))
        return {_id(view) for view in later if view.on_line != on(line, view.serial)}

    def _renew(self, changed: set[StepId]) -> None:
        self._not_recorded |= changed
        self._views = self._views.changed({step: self._view(step) for step in changed})

    def _view(self, step: StepId) -> StepView | None:
        holding = [(tier.name, held) for tier in self._tiers if (held := tier.steps.held.get(step)) is not None]
        if not holding:
            return None
        names = tuple(name for name, _ in holding)
        return self._describe(step, holding[0][1].record, names, on(self._line, step.serial))

    def _record(self) -> None:
        records = dict(self._records)
        newest = next(reversed(records), None)
        in_order = True
        for step in sorted(self._not_recorded):
            held = next((held for tier in self._tiers if (held := tier.steps.held.get(step)) is not None), None)
            if held is None:
                records.pop(step, None)
                continue
            in_order &= step in records or newest is None or step > newest
            records[step] = held.record
        self._records = records if in_order else dict(sorted(records.items()))
        self._not_recorded = set()


def _id(view: StepView) -> StepId:
    return StepId(view.serial, view.step)


def on(line: Line, serial: int) -> bool:
    """Whether a serial is in one of the ranges."""
    return any(first <= serial <= last for first, last in line)
