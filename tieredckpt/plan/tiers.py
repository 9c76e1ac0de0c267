"""A tier of the engine without bytes: it counts steps, with a given size and health."""

from __future__ import annotations

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TierUnavailable
from tieredckpt.format.manifest import StepId
from tieredckpt.plan.scenario import Rung, Scenario

__all__ = ["WorldTier"]


class WorldTier(Tier):
    """A tier of the engine without a blob store: it counts steps."""

    def __init__(self, rung: Rung, index: int, scenario: Scenario) -> None:
        super().__init__(rung.name, index, rung.config, _never)
        self.rung = rung
        self.seen_bandwidth: float | None = None
        self.busy = False
        """Whether a promotion to it is under way."""
        self.down = False
        """Whether it does not answer."""
        self.unseen: dict[StepId, Held] = {}
        """Steps that it holds and the store does not know, since it did not answer when the store was opened."""
        self._scenario = scenario

    responsive = True
    outdated = False

    @property
    def healthy(self) -> bool:
        return not self.down and self.health.error is None

    @property
    def answers(self) -> bool:
        return not self.down

    @property
    def survives(self) -> Survives:
        return self.rung.survives

    @property
    def used(self) -> int:
        return self._scenario.used(len(self.steps.held) + len(self.unseen), self.rung.share)

    @property
    def capacity(self) -> int | None:
        return self.rung.capacity


async def _never() -> BlobStore:
    raise TierUnavailable("a tier of a simulation has no blob store")
