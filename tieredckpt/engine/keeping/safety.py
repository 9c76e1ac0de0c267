"""Promise 6: which copy of which step may be deleted, whatever a policy proposes.

One deletion does not ask: `CheckpointStore.delete` with ``force``, for a person may throw away what is theirs.
"""

from __future__ import annotations

from collections.abc import Collection

from tieredckpt.engine.state.membership import Role
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["check_deletable", "check_unread", "why_not"]


def why_not(state: State, step: StepId, tier: Tier) -> str:
    """Why the copy of ``step`` on ``tier`` must stay; empty when it may go.

    A copy may go only if afterwards a tier that answers and survives at least as much still holds this step, or a
    newer one of the branch, which a restore would rather take. So the newest step on a durable tier stays until a
    newer one is committed there, not merely until one lies in RAM; steps off the branch stay until a save that came
    after them is as safe; and a copy that is being deleted counts no more. For an agent RAM never counts, though it
    survives as much as some tiers do: the trainer lets a step leave it at any time, for the agent's tiers have it.
    """
    if tier.steps.pins.get(step):
        return f"{step} is being read from tier {tier.name!r}"
    if _is_covered(state, step, tier):
        return ""
    return (
        f"{step} on tier {tier.name!r} is the last good copy that survives as much: "
        f"no other tier that answers holds it or a newer step"
    )


def _is_covered(state: State, step: StepId, tier: Tier, without: Collection[StepId] = ()) -> bool:
    """Whether the step, or a newer one of the branch, is as safe elsewhere; steps in ``without`` do not count."""
    for other in state.tiers:
        if state.membership.role is Role.AGENT and not state.manages(other):
            continue
        if other.survives < tier.survives or not (other.answers or other is tier):
            continue
        for held in reversed(other.steps.held):  # as a rule the newest is the last, and settles it
            better = held.serial > step.serial and state.on_line(held.serial)
            other_copy = held == step and other is not tier
            if (better or other_copy) and held not in other.steps.leaving | state.deleting and held not in without:
                return True
    return False


def check_deletable(state: State, steps: Collection[StepId]) -> None:
    """Raise unless every copy of ``steps`` may be deleted, as a person asks without ``force``.

    Raises:
        Conflict: one is the newest step of the branch, they are all there is, or nothing newer is as safe.
        TierUnavailable: a tier that may hold one does not answer.
    """
    names = ", ".join(map(str, sorted(steps)))
    anyway = "to delete it all the same, pass force=True"
    if state.newest() in steps:
        raise Conflict(f"cannot delete {names}: it is the newest step of the branch, which a restore takes; {anyway}")
    if not state.records().keys() - steps:
        raise Conflict(f"cannot delete {names}: it is the last step there is; {anyway}")
    for tier in state.tiers:
        here = [step for step in steps if step in tier.steps.held or step in tier.steps.damaged]
        if not tier.answers and (here or tier.marker is None):
            raise TierUnavailable(
                f"cannot delete {names}: tier {tier.name!r} does not answer and may hold it ({tier.health.error}); try "
                f"again when it does, or pass force=True to delete it elsewhere"
            )
        if not all(_is_covered(state, step, tier, steps) for step in here if step in tier.steps.held):
            raise Conflict(
                f"cannot delete {names}: no newer step of the branch is on a tier that survives as much as "
                f"{tier.name!r}; wait until one is promoted, or pass force=True"
            )


def check_unread(steps: Collection[StepId], tier: Tier) -> None:
    """Raise `Conflict` where a restore, a promotion or a verification reads one of the steps on the tier."""
    for step in steps:
        if tier.steps.pins.get(step):
            raise Conflict(
                f"cannot delete: {step} is being read from tier {tier.name!r}; try again when that has ended"
            )
