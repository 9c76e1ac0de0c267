"""Asks the policies of an export: which steps are due, and which exports stay.

Policies of promotion and retention answer both, for they see an export as one more tier, the slowest: its name is
``exports.NAME``, and it holds the steps that were exported, also those that all tiers have let go.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tieredckpt._callbacks import Callback, Tolerated
from tieredckpt.config.exports import ExportConfig
from tieredckpt.engine.exporting.places import Record
from tieredckpt.engine.keeping.policies import retained
from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.views import numbers
from tieredckpt.format.manifest import StepId
from tieredckpt.policy.base import StepView, StoreView, TierView, decided

__all__ = ["can_be_read", "leaving", "next_due", "tier_name"]


def tier_name(export: ExportConfig) -> str:
    """Name of the tier that policies see an export as."""
    return f"exports.{export.name}"


def can_be_read(state: State, step: StepId) -> bool:
    """Whether this process can read all of a step: of several ranks, on a tier that all of them see."""
    return any(step in tier.steps.held and (tier.shared or state.membership.size == 1) for tier in state.tiers)


def next_due(
    state: State, export: ExportConfig, there: Mapping[int, Record], without: Collection[StepId], *, busy: bool
) -> StepId | None:
    """The newest step that is to be exported: on the branch, held, not exported, and wanted.

    A step that ``keep`` would let go at once is not exported: ``keep`` is asked about all wanted steps together, and
    about the step alone. A policy that raises is logged, and asks for nothing.

    Args:
        state: of the engine.
        export: which.
        there: what was exported, by step.
        without: steps that cannot be exported.
        busy: whether an export is under way.
    """
    waiting = [step for step in state.records() if step not in without and state.on_line(step.serial)]
    waiting = [step for step in waiting if step.step not in there or there[step.step].serial < step.serial]
    waiting = [step for step in waiting if can_be_read(state, step)]
    if not waiting:
        return None
    view = _view(state, export, there)
    tier = _tier_view(state, export, busy=busy)
    newest: dict[int, int] = {}
    for step in waiting:
        newest[step.step] = max(step.serial, newest.get(step.step, 0))
    serials = {step.serial: step for step in waiting if step.serial == newest[step.step]}
    places = [place for place, seen in enumerate(view.steps) if seen.serial in serials]
    wanted = [place for place in places if _asks(export, view.steps[place], tier, view)]
    for place in reversed(_staying(export, wanted, tier, view)):
        if _staying(export, [place], tier, view):
            return serials[view.steps[place].serial]
    return None


def _asks(export: ExportConfig, step: StepView, tier: TierView, view: StoreView) -> bool:
    """Whether ``when`` asks for a step."""
    with (
        Tolerated("the policy `when` of the export %r failed on step %d", export.name, step.step),
        Callback(f"export {export.name!r}: the policy `when`", export.when),
    ):
        return decided(export.when, export.when.promotes(step, tier, view))
    return False


def _staying(export: ExportConfig, places: Sequence[int], tier: TierView, view: StoreView) -> list[int]:
    """Those of the places in ``view.steps`` that ``keep`` would keep if all of them were exported."""
    if not places:
        return []
    steps = list(view.steps)
    for place in places:
        steps[place] = replace(steps[place], tiers=(*steps[place].tiers, tier.name))
    with Tolerated("the policy `keep` of the export %r failed; nothing is exported", export.name):
        kept = _kept(export, tier, replace(view, steps=tuple(steps)))
        return [place for place in places if steps[place].serial in kept]
    return []


def leaving(state: State, export: ExportConfig, there: Mapping[int, Record]) -> list[Record]:
    """The exports that ``keep`` lets go; none if it raises."""
    tier = _tier_view(state, export, busy=False)
    with Tolerated("the policy `keep` of the export %r failed; no export is deleted", export.name):
        kept = _kept(export, tier, _view(state, export, there))
        return [record for record in there.values() if record.serial not in kept]
    return []


def _kept(export: ExportConfig, tier: TierView, view: StoreView) -> frozenset[int]:
    return retained(f"export {export.name!r}: the policy `keep`", export.keep, tier, view)


def _view(state: State, export: ExportConfig, there: Mapping[int, Record]) -> StoreView:
    """The store with the export as a further tier."""
    view, name = state.view(at_rest=True), tier_name(export)
    exported = {record.serial: record for record in there.values()}
    steps = [
        replace(step, tiers=(*step.tiers, name)) if exported.pop(step.serial, None) is not None else step
        for step in view.steps
    ]
    steps += [
        StepView(
            step=record.step,
            serial=record.serial,
            saved_at=record.saved_at,
            age=max(0.0, view.now - record.saved_at),
            nbytes=record.nbytes,
            metrics=numbers(record.metrics),
            tiers=(name,),
            on_line=state.on_line(record.serial),
        )
        for record in exported.values()
    ]
    steps.sort(key=lambda step: step.serial)
    tiers = (*view.tiers, _tier_view(state, export, busy=False))
    return replace(view, steps=tuple(steps), tiers=tiers)


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
