"""Worlds of lossy tiers: each tier has its own world, derived from the exact steps, as in the engine."""

from __future__ import annotations

from collections.abc import Callable

from tieredckpt.plan.actions import Action
from tieredckpt.plan.scenario import Rung
from tieredckpt.plan.tiers import WorldTier
from tieredckpt.plan.world import World

__all__ = ["DerivedWorld", "derive"]


class DerivedWorld(World):
    """The derived steps of one lossy tier, which is its last tier, behind the tiers that it is derived from."""

    def __init__(self, exact: World, rung: Rung, clock: Callable[[], float], tell: Callable[[Action], None]) -> None:
        place = [tier.name for tier in exact.config.tiers].index
        # With several nodes, no RAM has a whole step.
        sources = (tier for tier in exact.rungs if exact.scenario.nodes == 1 or not tier.rung.ram)
        nearer = [tier for tier in sources if place(tier.name) < place(rung.name)]
        own = WorldTier(rung, len(nearer), exact.scenario)
        super().__init__(exact.scenario, clock, tell, (*nearer, own))
        self.own = own
        self.changes = exact.changes
        self.branch, self.observation = exact.branch, exact.observation

    def answers_again(self, tier: WorldTier) -> None:
        """As `World.answers_again`, but a training never resumes from these steps."""
        tier.down = False
        tier.steps.held.update(tier.unseen)
        tier.unseen = {}
        self.touched()


def derive(world: World, clock: Callable[[], float], tell: Callable[[Action], None]) -> tuple[DerivedWorld, ...]:
    """A world for each lossy tier; from now on, exact steps wait in ``world`` until these are derived."""
    found = tuple(DerivedWorld(world, rung, clock, tell) for rung in world.scenario.derived)
    world.derivations = found
    return found
