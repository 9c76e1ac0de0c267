"""Verifies what a tier holds of a step, and has it mended on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.engine.collector import Collector
from tieredckpt.engine.heal import heal, heal_index, inspect
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId

__all__ = ["Verified", "verify_on"]


@dataclass(frozen=True, slots=True)
class Verified:
    """What verifying a step on a tier found."""

    id: StepId
    tier: str
    nbytes: int
    damaged: tuple[str, ...]
    """Keys of the arrays with a chunk that is not as it was saved; ``tieredckpt/step.json`` for the index."""
    repaired: bool
    problem: str
    """What is wrong, or why the tier could not be read; empty when all of the step was found intact."""

    @property
    def intact(self) -> bool:
        """Whether the tier now has all of the step as it was saved."""
        return self.repaired or not self.problem


async def verify_on(
    state: State,
    collector: Collector,
    step: StepId,
    tier: Tier,
    *,
    repair: bool,
    progress: Callable[[int], None] | None = None,
) -> Verified:
    """Read all of a step on a tier that holds it, compare every digest, and mend what is damaged if asked.

    ``progress`` is called with the bytes of each part that was read, from any thread.
    """
    record = state.records().get(step)
    nbytes = record.nbytes if record is not None else 0
    try:
        if step in tier.damaged:
            raise tier.damaged[step]
        damage = await inspect(state, step, tier, progress)
    except TierUnavailable as error:
        return Verified(step, tier.name, nbytes, (), False, str(error))
    except TieredCkptError as error:
        if repair:
            await heal_index(state, collector, step, tier, error)
        repaired = repair and step in tier.held
        return Verified(step, tier.name, nbytes, (layout.STEP_RECORD,), repaired, str(error))
    if not damage:
        return Verified(step, tier.name, nbytes, (), False, "")
    problems = await heal(state, collector, step, damage) if repair else []
    keys = tuple(sorted({found.key for found in damage}))
    problem = str(problems[0] if problems else damage[0].error)
    return Verified(step, tier.name, nbytes, keys, repair and not problems, problem)
