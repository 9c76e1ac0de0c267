"""Promise 6: which copy of which step may be deleted, whatever a policy proposes."""

from __future__ import annotations

from tieredckpt.engine.state.state import Role, State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId

__all__ = ["why_not"]


def why_not(state: State, step: StepId, tier: Tier) -> str:
    """Why the copy of ``step`` on ``tier`` must stay; empty when it may go.

    A copy may go only if afterwards a tier that answers and survives at least as much still holds this step, or a
    newer one of the branch, which a restore would rather take. So the newest step on a durable tier stays until a
    newer one is committed there, not merely until one lies in RAM; steps off the branch stay until a save that came
    after them is as safe; and a copy that is being deleted counts no more. For an agent RAM never counts, though it
    survives as much as some tiers do: the trainer lets a step leave it at any time, for the agent's tiers have it.
    """
    if tier.pins.get(step):
        return f"{step} is being read from tier {tier.name!r}"
    for other in state.tiers:
        if state.role is Role.AGENT and not state.manages(other):
            continue
        if other.survives < tier.survives or not (other.answers or other is tier):
            continue
        for held in reversed(other.held):  # as a rule the newest is the last, and settles it
            better = held.serial > step.serial and state.on_line(held.serial)
            if (better or (held == step and other is not tier)) and held not in other.leaving:
                return ""
    return (
        f"{step} on tier {tier.name!r} is the last good copy that survives as much: "
        f"no other tier that answers holds it or a newer step"
    )
