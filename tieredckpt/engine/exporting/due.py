"""Asks the policies of an export: which steps are due, and which exports stay.

Policies of promotion and retention answer both, for they see an export as one more tier, the slowest: its name is
``exports.NAME``, and it holds the steps that were exported, also those that all tiers have let go.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

from tieredckpt._callbacks import Callback, Tolerated
from tieredckpt.config.exports import ExportConfig
from tieredckpt.engine.exporting.places import Record
from tieredckpt.engine.keeping.policies import holds_for_good, retained
from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.step_table import StepTable
from tieredckpt.engine.state.views import step_view, store_view
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.steps import Steps
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.structure import DictNode
from tieredckpt.policy.base import StoreView, TierView, decided, keeps_all
from tieredckpt.policy.steps import Listing

__all__ = ["Exported", "next_due", "not_kept", "tier_name"]


def tier_name(export: ExportConfig) -> str:
    """Name of the tier that policies see an export as."""
    return f"exports.{export.name}"


@dataclass(frozen=True, slots=True)
class _Tier:
    """An export as the tier that policies see."""

    name: str
    steps: Steps = field(default_factory=Steps)


class Exported(UserDict[int, Record]):
    """The exports of one table ``[exports.NAME]``, by step, and the store as it is with them.

    Args:
        state: of the engine.
        export: which.
    """

    def __init__(self, state: State, export: ExportConfig) -> None:
        super().__init__()
        self._state, self._export = state, export
        there, wanted = _Tier(tier_name(export)), _Tier(tier_name(export))
        self._held, self._wanted = there.steps.held, wanted.steps.held
        """The exports, and these with the steps that ``when`` has asked for."""
        self._table, self._with_wanted = (StepTable((*state.tiers, each), step_view) for each in (there, wanted))

    def __setitem__(self, step: int, record: Record) -> None:
        self.pop(step, None)  # of an earlier save
        super().__setitem__(step, record)
        self._held[StepId(record.serial, record.step)] = Held(_as_step(record), "")

    def __delitem__(self, step: int) -> None:
        record = self[step]
        super().__delitem__(step)
        del self._held[StepId(record.serial, record.step)]

    def view(self) -> StoreView:
        """The store with the export as a further tier."""
        return self._view(self._table)

    def _view(self, table: StepTable) -> StoreView:
        state, last = self._state, _tier_view(self._state, self._export, busy=False)
        tiers = (*(state.tier_view(tier, at_rest=True) for tier in state.tiers), last)
        return store_view(table.views(state.branch.line), tiers, state.tiers[0], state.membership, state.observation)

    def waiting(self, without: Collection[StepId]) -> Iterator[StepId]:
        """The steps of the branch that may be exported, newest first; several may have one number."""
        readable = self._readable()
        for step in reversed(self._listing().waiting(tier_name(self._export))):
            found = StepId(step.serial, step.step)
            exported = step.step in self and self[step.step].serial > step.serial
            if not exported and found not in without and not readable.isdisjoint(step.tiers):
                yield found

    def newest(self, without: Collection[StepId]) -> dict[int, int]:
        """By number, the serial of the newest step that is `waiting` or that ``when`` has refused."""
        readable = self._readable()
        return {
            step.step: step.serial
            for step in self._listing().steps
            if step.on_line
            and not readable.isdisjoint(step.tiers)
            and not (without and StepId(step.serial, step.step) in without)
        }

    def _listing(self) -> Listing:
        return self._table.views(self._state.branch.line)

    def _readable(self) -> set[str]:
        """The tiers from which this process can read all of a step: of several ranks, those that all of them see."""
        state = self._state
        return {tier.name for tier in state.tiers if tier.shared or state.membership.size == 1}

    def asks(self, step: StepId, tier: TierView, view: StoreView) -> bool:
        """Whether ``when`` asks for a step that is `waiting`."""
        when, what = self._export.when, f"export {self._export.name!r}: the policy `when`"
        if step in self._wanted and self._wanted[step] is self._nearest(step) and holds_for_good(what, when):
            return True  # as before
        with Tolerated("the policy `when` of the export %r failed on step %d", self._export.name, step.step):
            seen = view.find(step)
            assert seen is not None
            with Callback(what, when):
                asks = decided(when, when.promotes(seen, tier, view))
            if not asks and holds_for_good(what, when):
                self._table.refuse(step, tier.name)
            return asks
        return False

    def view_with(self, wanted: Iterable[StepId]) -> StoreView:
        """The store as it would be if these steps had been exported, too."""
        would = {**{step: self._nearest(step) for step in wanted}, **self._held}
        for step in self._wanted.keys() - would.keys():
            del self._wanted[step]
        for step, held in would.items():
            if self._wanted.get(step) is not held:
                self._wanted[step] = held
        return self._view(self._with_wanted)

    def _nearest(self, step: StepId) -> Held:
        return next(held for tier in self._state.tiers if (held := tier.steps.held.get(step)) is not None)


def next_due(
    state: State, export: ExportConfig, there: Exported, without: Collection[StepId], *, busy: bool
) -> StepId | None:
    """The newest step that is to be exported: on the branch, held, not exported, and wanted.

    A step that ``keep`` would let go at once is not exported: ``keep`` is asked about all wanted steps together, and
    about the step alone. A policy that raises is logged, and asks for nothing.

    Args:
        state: of the engine.
        export: which.
        there: what was exported.
        without: steps that cannot be exported.
        busy: whether an export is under way.
    """
    view, tier = there.view(), _tier_view(state, export, busy=busy)
    newest = cache(lambda: there.newest(without))
    asked_for = (
        step
        for step in there.waiting(without)
        if there.asks(step, tier, view) and newest()[step.step] == step.serial  # and is not saved anew
    )
    if keeps_all(export.keep):
        return next(asked_for, None)
    wanted = list(asked_for)
    would = there.view_with(wanted)  # of none as well: the news that its table does not read would pile up
    if not wanted:
        return None
    kept = _staying(export, tier, would)
    for step in wanted:
        seen = view.find(step) if step.serial in kept else None
        if seen is not None and step.serial in _staying(export, tier, view.with_copy(seen, tier.name)):
            return step
    return None


def _staying(export: ExportConfig, tier: TierView, view: StoreView) -> frozenset[int]:
    """Serials of the steps that ``keep`` would keep in such a store."""
    with Tolerated("the policy `keep` of the export %r failed; nothing is exported", export.name):
        return _kept(export, tier, view)
    return frozenset()


def not_kept(state: State, export: ExportConfig, there: Exported) -> list[Record]:
    """The exports that ``keep`` lets go; none if it raises."""
    if keeps_all(export.keep):
        return []
    tier = _tier_view(state, export, busy=False)
    with Tolerated("the policy `keep` of the export %r failed; no export is deleted", export.name):
        kept = _kept(export, tier, there.view())
        return [record for record in there.values() if record.serial not in kept]
    return []


def _kept(export: ExportConfig, tier: TierView, view: StoreView) -> frozenset[int]:
    return retained(f"export {export.name!r}: the policy `keep`", export.keep, tier, view)


def _as_step(record: Record) -> StepRecord:
    """The step of an export, which the tiers may have let go, as policies see it."""
    return StepRecord(
        store=record.store,
        step=record.step,
        serial=record.serial,
        line=(),
        restored_from=None,
        saved_at=record.saved_at,
        nbytes=record.nbytes,
        metrics=record.metrics,
        provenance={},
        policy={},
        structure=DictNode([], []),
    )


def _tier_view(state: State, export: ExportConfig, *, busy: bool) -> TierView:
    return TierView(
        name=tier_name(export),
        index=len(state.tiers),
        survives="site" if export.folder is None else "node",
        capacity=None,
        used=0,
        write_bandwidth=None,
        healthy=True,
        promoting=busy,
    )
