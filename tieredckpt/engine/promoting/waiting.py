"""Waits until steps have reached the tiers that they are due on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack

from tieredckpt.engine.keeping.policies import is_due, why_not_due
from tieredckpt.engine.promoting.promoter import Promoter
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["again", "drained", "in_ram_alone", "reached"]


async def reached(
    state: State,
    promoters: Mapping[str, Promoter],
    step: StepId,
    name: str,
    news: Callable[[Tier], Awaitable[None]] | None = None,
) -> None:
    """Return when the tier holds the step; ``news`` waits until something changed, and raises when nothing will.

    Raises:
        NotFound: it will not get there: it is not due there, or was evicted before; or no such tier.
        TieredCkptError: what keeps the tier from it.
    """
    tier = state.tier(name)
    while not _is_known_there(state, tier, step):
        promoter = promoters.get(name)
        if tier.steps.scanning or (step in tier.steps.held and tier.comes_back):  # which is no news of the step
            await state.changed.wait()
            continue
        if step in state.membership.failed:
            raise again(state.membership.failed[step], "")
        if step in state.membership.undecided:
            await (state.changed.wait() if news is None else news(tier))
            continue
        if step in tier.steps.stuck:
            raise again(tier.steps.stuck[step], f"{step} cannot reach tier {name!r}: ")
        if step not in state.records():
            raise NotFound(f"{step} is held by no tier any more, so it does not reach {name!r}")
        if tier.health.error is not None:
            raise again(tier.health.error, f"{step} is not on tier {name!r}: ")
        if tier.in_memory:
            raise NotFound(
                f"{step} is not in tier {name!r}: it was too large for the slab and went past it, or has left it "
                f"since; {' and '.join(repr(other.name) for other in state.holders(step))} has it"
            )
        if not (is_due(state, step, tier) or (promoter is not None and promoter.busy == step)):
            raise NotFound(
                f"{step} is not due on tier {name!r}: {why_not_due(state, step, tier)}; "
                f"store.promote({step.step}, {name!r}) sends it there all the same"
            )
        await (state.changed.wait() if news is None else news(tier))


async def drained(state: State, promoters: Mapping[str, Promoter]) -> None:
    """Return when every tier has what is due on it.

    Raises:
        TieredCkptError: a tier that still lacks a step failed; the others have theirs.
    """
    with ExitStack() as waiting:
        for promoter in promoters.values():
            waiting.enter_context(promoter.flushing())
        while True:
            before = state.observation.promotions_ended
            for promoter in promoters.values():
                await promoter.rest()
            if any(tier.steps.promotions or tier.steps.scanning for tier in state.every_tier):
                await state.changed.wait()
            elif state.observation.promotions_ended == before:  # else a step may be due that no other is on its way
                break
    for promoter in promoters.values():
        if (error := promoter.tier.health.error) is not None and promoter.tier.outdated and promoter.tier.steps.held:
            raise again(error, f"tier {promoter.tier.name!r} is to be read again, and may lack steps: ")
        if error is not None and (due := promoter.next_due(at_rest=True)) is not None:
            raise again(error, f"tier {promoter.tier.name!r} lacks {due}: ")
        for step, error in promoter.tier.steps.stuck.items():
            if step in state.records():
                raise again(error, f"tier {promoter.tier.name!r} lacks {step}: ")


def _is_known_there(state: State, tier: Tier, step: StepId) -> bool:
    """Whether a tier holds a step, and is not to be read again, after which it may not."""
    return step in tier.steps.held and not (tier.steps.scanning or (tier.outdated and state.manages(tier)))


def in_ram_alone(state: State) -> str:
    """Explain to people, once all is drained, why no tier below RAM has a step; empty if one has, or failed."""
    slower = [tier for tier in state.tiers if not tier.in_memory]
    if not slower or not state.records() or any(tier.steps.held or tier.health.error for tier in slower):
        return ""
    newest = max(state.records())
    why = "; ".join(f"tier {tier.name!r}: {why_not_due(state, newest, tier)}" for tier in slower)
    return f"no step is below RAM, so that the loss of the node loses them all: {newest} is due nowhere ({why})"


def again(error: Exception, prefix: str) -> TieredCkptError:
    """An error once more, for one caller, with what it concerns in front."""
    kind = type(error) if isinstance(error, TieredCkptError) else TierUnavailable
    copy = kind(prefix + str(error))
    copy.__cause__ = error
    return copy
