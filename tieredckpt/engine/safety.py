"""Promise 6: which copy of which step may be deleted, whatever a policy proposes."""

from __future__ import annotations

from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.format.manifest import StepId

__all__ = ["why_not"]


def why_not(state: State, step: StepId, tier: Tier) -> str:
    """Why the copy of ``step`` on ``tier`` must stay; empty when it may go.

    A copy may go only if afterwards a healthy tier that survives at least as much still holds this step or a
    newer one of the live line. So the newest good step never has its last copy deleted, and the newest step on
    a durable tier stays until a newer one is committed there, not merely until one lies in RAM.
    """
    if tier.pins.get(step):
        return f"{step} is being read from tier {tier.name!r}"
    if not state.on_line(step.serial) and state.newest() is not None:
        return ""
    for other in state.tiers:
        if not other.healthy or other.survives < tier.survives:
            continue
        for held in other.held:
            newer = held.serial > step.serial and state.on_line(held.serial)
            if newer or (held == step and other is not tier):
                return ""
    return (
        f"{step} on tier {tier.name!r} is the last good copy that survives as much: "
        f"no other healthy tier holds it or a newer step"
    )
