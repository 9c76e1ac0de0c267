"""The step table: every step that some tier holds, by age, updated by what came and went."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.policy.views import StepView

__all__ = ["Called", "Line", "StepTable", "on"]

Line = tuple[tuple[int, int], ...]
"""Serials, as inclusive ranges that ascend."""


@dataclass(frozen=True, slots=True)
class Called:
    """The steps that there are at one time; never changed."""

    records: dict[StepId, StepRecord] = field(default_factory=dict)
    """By age."""
    views: tuple[StepView, ...] = ()
    """Views for policies, in the same order, all of age 0."""


class StepTable:
    """Cache of all steps and of their views, rebuilt only for steps that have changed.

    ``describe`` gives the view of a step from its record, the names of the tiers that hold it, and whether it is on
    the line.
    """

    def __init__(
        self, tiers: Sequence[Tier], describe: Callable[[StepId, StepRecord, tuple[str, ...], bool], StepView]
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
        self._views: dict[StepId, StepView] = {}
        """By age, as in `Called`."""
        self._called = Called()

    def call(self, line: Line) -> Called:
        """The steps that there are now, when this is the branch."""
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
            self._torn = False
            return self._called
        finally:
            self._guards_table.release()

    def _all(self) -> set[StepId]:
        """Every step that there is, or was when this was renewed last."""
        return set(self._views).union(*(tuple(tier.steps.held) for tier in self._tiers))

    def _anew(self, line: Line) -> Called:
        """The same, found out from the tiers alone, while another call is renewing what is known."""
        fresh = StepTable(self._tiers, self._describe)
        fresh._line = line
        fresh._renew(fresh._all())
        return fresh._called

    def _moved(self, line: Line) -> set[StepId]:
        """The steps that came to the line or left it."""
        last = self._line[-1][1] if self._line else 0
        if tuple((first, min(end, last)) for first, end in line if first <= last) == self._line:
            return {step for step in _since(self._views, last) if on(line, step.serial)}
        return {step for step, view in self._views.items() if view.on_line != on(line, step.serial)}

    def _renew(self, changed: set[StepId]) -> None:
        views, records = dict(self._views), dict(self._called.records)
        newest = next(reversed(views), None)
        in_order = True
        for step in sorted(changed):
            holding = [(tier.name, held) for tier in self._tiers if (held := tier.steps.held.get(step)) is not None]
            if not holding:
                views.pop(step, None)
                records.pop(step, None)
                continue
            in_order &= step in views or newest is None or step > newest
            record, names = holding[0][1].record, tuple(name for name, _ in holding)
            on_line = on(self._line, step.serial)
            known = views.get(step)
            if known is None or records.get(step) is not record:
                views[step] = self._describe(step, record, names, on_line)
            elif known.tiers != names or known.on_line != on_line:
                views[step] = dataclasses.replace(known, tiers=names, on_line=on_line)
            records[step] = record
        if not in_order:
            views, records = dict(sorted(views.items())), dict(sorted(records.items()))
        self._views = views
        self._called = Called(records, tuple(views.values()))


def _since(steps: dict[StepId, StepView], serial: int) -> list[StepId]:
    found = []
    for step in reversed(steps):
        if step.serial <= serial:
            break
        found.append(step)
    return found


def on(line: Line, serial: int) -> bool:
    """Whether a serial is in one of the ranges."""
    return any(first <= serial <= last for first, last in line)
