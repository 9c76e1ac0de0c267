"""Asks the policies, and stays safe whatever they answer: if one raises anything, it is logged and its step kept.

An answer of the wrong type counts as a failure, too: an endless iterator is not read.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace

from tieredckpt._callbacks import Callback, Tolerated
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId
from tieredckpt.policy.base import (
    Observed,
    Promotion,
    Retention,
    Schedule,
    StoreView,
    TierView,
    answers_for_good,
    decided,
    keeps_all,
)

__all__ = [
    "any_due",
    "holds_for_good",
    "is_due",
    "is_wanted",
    "retained",
    "save_is_due",
    "to_evict_for",
    "to_evict_when_full",
    "unretained",
    "waits_for_promotion",
    "why_not_due",
]


def is_due(state: State, step: StepId, tier: Tier, view: StoreView | None = None) -> bool:
    """Whether a step is to be promoted to a tier on its own: it is on the branch, nearer, not there, and wanted.

    What left the tier does not come back; a step older than what the tier holds is wanted only if the tier would
    retain it, for another process may have let it go. Without a ``view``, policies see a store at rest: it is asked
    whether the step will be due when the promotions under way have ended.
    """
    steps = tier.steps
    mended = (step in steps.damaged or step in steps.impaired) and not tier.in_memory
    if (step in steps.held and not mended) or step in steps.tombstones or step in steps.deletions:
        return False
    others = state.tiers if mended else state.tiers[: tier.index]  # from wherever it is
    if not any(each.steps.has_chunks(step) for each in others if each is not tier):
        return False
    view = view or state.view(at_rest=True)
    if (mine := view.find(step)) is None or not mine.on_line:
        return False
    tier_view = view.tiers[tier.index]
    what = f"tier {tier.name!r}: promotion policy"
    with Tolerated("a policy of tier %r failed on %s; the step is promoted", tier.name, step):
        with Callback(what, tier.config.promote):
            promotes = decided(tier.config.promote, tier.config.promote.promotes(mine, tier_view, view))
        if not promotes:
            if not mended and holds_for_good(what, tier.config.promote):
                state.refuse(step, tier)
            return False
        newest = next(reversed(view.line_on(tier.name)), None)
        if newest is not None and newest.serial > step.serial:
            if keeps_all(tier.config.retain):
                return True
            return step.serial in _retained(tier, tier_view, view.with_copy(mine, tier.name))
    return True


def holds_for_good(what: str, policy: Promotion) -> bool:
    """Whether an answer of a promotion policy holds until the step changes; not if the policy fails to say so."""
    with Tolerated("%s: by_step_alone() failed; steps are asked about again", what), Callback(what, policy):
        return answers_for_good(policy)
    return False


def any_due(state: State) -> tuple[StepId, Tier] | None:
    """A step that is due on a tier, and the tier; None if no step is due on any tier."""
    view = state.view(at_rest=True)
    for tier in state.tiers:
        for step in sorted({*state.waiting(tier), *tier.steps.to_mend()}):
            if step not in tier.steps.stuck and is_due(state, step, tier, view):
                return step, tier
    return None


def why_not_due(state: State, step: StepId, tier: Tier) -> str:
    """Explain to people why a step is not due on a tier, as `is_due` has found."""
    nearer = state.tiers[: tier.index]
    if step in tier.steps.tombstones:
        return "it has left that tier before"
    if step in tier.steps.deletions:
        return "a deletion of it there has failed and may still be carried out"
    if not state.on_line(step.serial):
        return "it is not on the branch that is trained"
    names = " and ".join(repr(each.name) for each in nearer)
    if not any(step in each.steps.held for each in nearer):
        return f"it left {names} before that tier, which is slower than steps are saved, had taken it"
    if not any(each.steps.has_chunks(step) for each in nearer):
        return f"it lacks chunks on {names}, as `tieredckpt verify` tells"
    view = state.view(at_rest=True)
    mine = view.find(step)
    with suppress(Exception):  # a policy that fails is told of where it is asked
        if mine is not None and tier.config.promote.promotes(mine, view.tiers[tier.index], view):
            return (
                f"newer steps came to that tier first, which is slower than steps are saved, and beside them its "
                f"policy {tier.config.retain!r} does not keep it"
            )
    return f"by its policy {tier.config.promote!r}"


def waits_for_promotion(state: State, step: StepId, tier: Tier, *, only_healthy: bool = False) -> bool:
    """Whether a slower tier is still to get the step, or to derive it from this one, and may get it."""
    view = state.view(at_rest=True)
    slower: list[tuple[Tier, State, StoreView | None]] = [(each, state, view) for each in state.tiers[tier.index + 1 :]]
    slower += [(each.target, each, None) for each in state.derivations if tier in each.tiers[:-1]]
    return any(
        step not in other.steps.stuck and (other.works or not only_healthy) and is_due(of, step, other, seen)
        for other, of, seen in slower
    )


def unretained(state: State, tier: Tier) -> list[StepId]:
    """The steps that retention lets go: stale ones, off-branch ones, then as the eviction policy orders them."""
    if keeps_all(tier.config.retain):
        return []
    stale = sorted(tier.steps.damaged.stale())
    view = state.view()
    tier_view = state.tier_view(tier)
    with Tolerated("a policy of tier %r failed; nothing is evicted from it", tier.name):
        staying = _retained(tier, tier_view, view)
        if not view.serials_on(tier.name) - staying:
            return stale
        found = {step.serial: step for step in view.on(tier.name) if step.serial not in staying}
        with Callback(f"tier {tier.name!r}: eviction policy", tier.config.evict):
            proposed = tier.config.evict.order(tuple(found.values()), tier_view, view)
        if not isinstance(proposed, (list, tuple)):
            raise TypeError(f"{tier.config.evict.kind}: order() gave a {type(proposed).__name__}, not a list")
        order = list(dict.fromkeys([*(serial for serial in proposed if serial in found), *found]))
        order.sort(key=lambda serial: found[serial].on_line)
        return stale + [StepId(serial, found[serial].step) for serial in order]
    return []


def _first_to_evict(state: State, tier: Tier) -> list[StepId]:
    """As `unretained`; from a full tier stale steps leave also where all are retained."""
    return unretained(state, tier) or sorted(tier.steps.damaged.stale())


def to_evict_when_full(state: State, tier: Tier) -> list[StepId]:
    """As `unretained`; from RAM, which is a cache, then also retained steps that another tier holds, oldest first."""
    others = [other.steps.held for other in state.tiers if tier.in_memory and other is not tier and other.answers]
    elsewhere = (step for step in sorted(tier.steps.held) if any(step in held for held in others))
    return list(dict.fromkeys([*_first_to_evict(state, tier), *elsewhere]))


def to_evict_for(state: State, tier: Tier, step: StepId | None) -> list[StepId]:
    """Steps that may leave a full tier for a newer one: unretained ones first, then retained ones, oldest first.

    ``step`` is None for one that is newer than all there is. An off-branch step drives out none that is retained.
    """
    going = _first_to_evict(state, tier)
    if step is not None and not state.on_line(step.serial):
        return going
    older = [held for held in sorted(tier.steps.held) if step is None or held < step]
    return list(dict.fromkeys([*going, *sorted(older, key=lambda held: state.on_line(held.serial))]))


def _retained(tier: Tier, tier_view: TierView, view: StoreView) -> AbstractSet[int]:
    return retained(f"tier {tier.name!r}: retention policy", tier.config.retain, tier_view, view)


def retained(what: str, policy: Retention, tier: TierView, view: StoreView) -> frozenset[int]:
    """The answer of a retention. Raises `TypeError` for what is no answer, such as numbers of steps."""
    with Callback(what, policy):
        given = policy.retains(tier, view)
    if not isinstance(given, (AbstractSet, list, tuple)):
        raise TypeError(f"{policy.kind}: retains() gave a {type(given).__name__}, not a frozenset")
    answer = frozenset(given)
    if any(not isinstance(each, int) for each in answer) or (
        answer
        and answer.isdisjoint(view.serials_on(tier.name))  # as a rule it is not, and those elsewhere may be many
        and all(answer.isdisjoint(view.serials_on(each.name)) for each in view.tiers)
        and not answer.isdisjoint(step.step for step in view.steps)
    ):
        raise TypeError(f"{policy.kind}: what retains() gave, such as {next(iter(answer))!r}, is the serial of no step")
    return answer


def save_is_due(state: State, step: int, after: float | None = None) -> bool:
    """The schedule's answer now, or ``after`` seconds from now; if the schedule fails, the answer is to save."""
    view, observed = state.view(), state.observe(step)
    if after is not None:
        last = None if observed.last_save_at is None else view.now - after
        observed = replace(observed, started_at=view.now - after, last_save_at=last)
    return is_wanted(state.config.schedule, step, view, observed)


def is_wanted(schedule: Schedule, step: int, view: StoreView, observed: Observed) -> bool:
    """The answer of a schedule; if it fails, to save."""
    with Tolerated("the schedule failed at step %d; the step is saved", step), Callback("schedule", schedule):
        return decided(schedule, schedule.due(step, view, observed))
    return True
