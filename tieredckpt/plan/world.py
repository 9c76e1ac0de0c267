"""The engine's own state and decisions over tiers without bytes; rollout and simulation act on it.

The engine's functions decide, on its `State`, which steps are due, leave and stay; they are called in the order of its
promoter, collector and writer. Nothing here waits: the caller gives the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tieredckpt.engine.keeping.policies import (
    is_due,
    is_wanted,
    to_evict_for,
    to_evict_when_full,
    unretained,
    waits_for_promotion,
)
from tieredckpt.engine.keeping.safety import why_kept
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.state.branch import Branch
from tieredckpt.engine.state.observation import Observation, blend
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.events import Events
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.structure import DictNode
from tieredckpt.plan.actions import Action, What
from tieredckpt.plan.scenario import KINDS, Kind, Scenario
from tieredckpt.plan.tiers import WorldTier
from tieredckpt.policy.base import Observed, StoreView, TierView

__all__ = ["Changes", "World"]

_NOTHING = DictNode([], [])
"""The structure of every step here."""


@dataclass(slots=True)
class Changes:
    """Counter of changes, shared by all worlds that see the same exact steps."""

    count: int = 0


class World(State):
    """The steps on the tiers of a scenario.

    Args:
        scenario: what is simulated.
        clock: seconds since the epoch.
        tell: called with every action.
        tiers: by default the exact tiers of the scenario.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: Callable[[], float],
        tell: Callable[[Action], None],
        tiers: tuple[WorldTier, ...] | None = None,
    ) -> None:
        if tiers is None:
            tiers = tuple(WorldTier(rung, index, scenario) for index, rung in enumerate(scenario.rungs))
        self.rungs = tiers
        self._ahead = 0.0
        """Seconds from the clock's time to the time that the present question is about."""
        # The engine's threads and memory are unused: nothing is copied here.
        scratch = Scratch(4096)
        scratch.close()
        super().__init__(
            config=scenario.config,
            tiers=self.rungs,
            events=Events(),
            pool=ThreadPoolExecutor(1),
            scratch=scratch,
            read_only=False,
            observation=Observation(lambda: clock() + self._ahead),
        )
        self.scenario = scenario
        self.asked = 0
        """How often a promotion policy was asked about a step."""
        self._tell = tell
        self.changes = Changes()
        self._kept_view: tuple[object, StoreView] | None = None
        self._kept_tiers: dict[str, tuple[tuple[int, float | None, bool, bool], TierView]] = {}

    # -- what policies see --------------------------------------------------------------------------------

    def view(self, *, at_rest: bool = False) -> StoreView:
        """As `State.view`, at the time of this world; the last view is kept until time or world change."""
        which = (self.observation.now(), self.changes.count, at_rest)
        if self._kept_view is None or self._kept_view[0] != which:
            self._kept_view = which, super().view(at_rest=at_rest)
        return self._kept_view[1]

    def tier_view(self, tier: Tier, *, at_rest: bool = False) -> TierView:
        """As `State.tier_view`."""
        assert isinstance(tier, WorldTier)
        of = (len(tier.steps.held) + len(tier.unseen), tier.seen_bandwidth, tier.healthy, tier.busy and not at_rest)
        kept = self._kept_tiers.get(tier.name)
        if kept is None or kept[0] != of:
            kept = self._kept_tiers[tier.name] = of, self._tier_view(tier, promoting=of[-1])
        return kept[1]

    def _tier_view(self, tier: WorldTier, *, promoting: bool) -> TierView:
        return TierView(
            name=tier.name,
            index=tier.index,
            survives=tier.rung.survives_name,
            capacity=tier.capacity,
            used=tier.used,
            write_bandwidth=tier.seen_bandwidth,
            healthy=tier.healthy,
            promoting=promoting,
        )

    def due(self, step: int, later: float = 0.0) -> bool:
        """Whether the schedule wants a save of the step trained just now, or ``later`` if nothing happens before."""
        self._ahead = later
        try:
            return is_wanted(self.config.schedule, step, self.view(), self.observe(step))
        finally:
            self._ahead = 0.0

    # -- saving -------------------------------------------------------------------------------------------

    def save_tiers(self) -> list[WorldTier]:
        """The tiers that may take a save, nearest first: RAM that is too small is skipped."""
        return [
            tier for tier in self.rungs if tier.healthy and (tier.index or not tier.rung.ram or self._ever_fits(tier))
        ]

    def _ever_fits(self, tier: WorldTier) -> bool:
        return tier.capacity is None or self.scenario.state <= tier.capacity

    def saved(self, step: int, tier: WorldTier, stall: float) -> StepId:
        """Commit a save that took ``stall`` seconds from the training."""
        now = self.observation.now()
        identity = StepId(self.branch.last_serial + 1, step)
        self.branch.last_serial = identity.serial
        continued = self.branch.decide(step, self.branch.origin, overwrite=True)
        self.branch.begin(identity, continued)
        record = StepRecord(
            store="",
            step=step,
            serial=identity.serial,
            line=continued.line_with(identity.serial),
            restored_from=continued.restored_from,
            saved_at=now,
            nbytes=self.scenario.state,
            metrics={},
            provenance={},
            policy={},
            structure=_NOTHING,
        )
        self.branch.committed(record)
        self._hold(identity, record, tier)
        self.observation.observe_save(step, now, stall)
        self._happened("saved", identity, tier)
        self.apply_retention(tier)
        return identity

    def skipped(self, step: int, tier: WorldTier) -> None:
        """Note a save that was not made."""
        self._happened("skipped", StepId(0, step), tier)

    # -- room ---------------------------------------------------------------------------------------------

    def make_room(self, tier: WorldTier, step: StepId | None = None) -> bool:
        """Evict until the tier has room for one more step (``step``, or a new one); False if no more steps may go."""
        if self._fits(tier):
            return True
        for old in to_evict_when_full(self, tier):
            if not waits_for_promotion(self, old, tier) and self._try_evict(old, tier) and self._fits(tier):
                return True
        if not tier.rung.ram:
            for older in to_evict_for(self, tier, step):
                if waits_for_promotion(self, older, tier, only_healthy=True):
                    continue
                if self._try_evict(older, tier) and self._fits(tier):
                    return True
        most = tier.rung.at_most
        return most is not None and tier.used + self.scenario.added(len(tier.steps.held), tier.rung.share) <= most

    def replace_oldest(self, tier: WorldTier) -> bool:
        """Evict unpromoted snapshots, oldest first, until there is room; never the last good copy."""
        held = sorted(tier.steps.held)
        return any(self._try_evict(step, tier) and self._fits(tier) for step in held) or self._fits(tier)

    def waiting_helps(self, tier: WorldTier) -> bool:
        """Whether a step of the tier is being promoted to a working tier, or read."""
        if tier.steps.readers:
            return True
        return any(waits_for_promotion(self, step, tier, only_healthy=True) for step in tier.steps.held)

    def apply_retention(self, tier: WorldTier) -> None:
        """Evict steps that are not retained, on a tier without a capacity; other tiers wait until they need room."""
        if tier.capacity is None and tier.answers:
            for step in unretained(self, tier):
                self._try_evict(step, tier)

    def _fits(self, tier: WorldTier) -> bool:
        return (
            tier.capacity is None
            or tier.used + self.scenario.added(len(tier.steps.held), tier.rung.share) <= tier.capacity
        )

    def _try_evict(self, step: StepId, tier: WorldTier) -> bool:
        if step not in tier.steps.held or why_kept(self, step, tier):
            return False
        del tier.steps.held[step]
        self.touched()
        if any(step in other.steps.held for other in self.rungs):
            tier.steps.tombstones.add(step)
        else:
            for other in self._all_rungs():
                other.steps.tombstones.discard(step)
        self._happened("evicted", step, tier)
        return True

    # -- promotion ----------------------------------------------------------------------------------------

    def next_due(self, tier: WorldTier) -> StepId | None:
        """The step to promote next: the newest that is due."""
        if not tier.index or not tier.healthy:
            return None
        for step in self.waiting(tier):
            if step not in tier.steps.tombstones:
                self.asked += 1
                if is_due(self, step, tier, self.view()):
                    return step
        return None

    def source(self, step: StepId) -> WorldTier | None:
        """The nearest tier that answers and holds the step."""
        return next((tier for tier in self.rungs if step in tier.steps.held and tier.answers), None)

    def promoted(self, step: StepId, record: StepRecord, tier: WorldTier, bandwidth: float | None) -> None:
        """Commit a promotion."""
        self._hold(step, record, tier)
        if bandwidth is not None:
            tier.seen_bandwidth = blend(tier.seen_bandwidth, bandwidth)
        self.observation.observe_promotion(record, tier)
        self._happened("promoted", step, tier)
        self.apply_retention(tier)

    def _hold(self, step: StepId, record: StepRecord, tier: WorldTier) -> None:
        tier.steps.held[step] = Held(record, "")
        tier.steps.tombstones.discard(step)
        self.touched()

    def touched(self) -> None:
        """Note that a step came or went, or that a tier's health or work changed."""
        self.changes.count += 1

    # -- failures -----------------------------------------------------------------------------------------

    def fail(self, kind: Kind) -> None:
        """End the trainer, and lose the steps on tiers that do not survive such a failure."""
        before, ended = self.observation.history, self.observation.observed
        self.observation.history = dataclasses.replace(
            before,
            failures=before.failures + 1,
            trained_seconds=before.trained_seconds + self.observation.now() - ended.started_at,
            stalled_seconds=before.stalled_seconds + ended.stalled_seconds,
        )
        for tier in self._all_rungs():
            tier.steps.readers.clear()
            tier.busy = False
            if tier.survives < KINDS[kind]:
                whole = self.scenario.copied_after(tier.rung) if kind == "node" else None
                for step, held in tuple(tier.steps.held.items()):
                    if whole is None or self.observation.now() - held.record.saved_at < whole:
                        del tier.steps.held[step]
                tier.unseen.clear()
        self.touched()

    def reopen(self) -> StepId | None:
        """Begin as the next process does, with the tiers that answer; returns the step to restore."""
        for tier in self._all_rungs():
            tier.steps.tombstones.clear()
            tier.health.error = None
            tier.seen_bandwidth = tier.steps.promotion_seconds = None
            if tier.down:
                tier.unseen |= tier.steps.held
                tier.steps.held.clear()
        records = self.records()
        newest = next(reversed(records), None)
        known = [*([newest] if newest else []), *(step for tier in self.rungs for step in tier.unseen)]
        last_serial = max(known).serial if known else self.branch.last_serial
        self.branch = Branch(records[newest].line if newest else (), newest, last_serial=last_serial)
        for each in self.derivations:
            each.branch = self.branch
        self.observation.observed = Observed(started_at=self.observation.now())
        self.touched()
        return newest

    def restored(self, step: StepId, tier: WorldTier) -> None:
        """Resume the training from a step that was read from a tier."""
        self.branch.note(step, tier.steps.held[step].record, named=False, resume=True)
        self._happened("restored", step, tier)

    def answers_again(self, tier: WorldTier) -> None:
        """Note that a tier answers again, with the steps that it held."""
        tier.down = False
        tier.steps.held.update(tier.unseen)
        tier.unseen = {}
        if not self.branch.line and tier.steps.held:
            newest = max(tier.steps.held)
            self.branch.adopt(tier.steps.held[newest].record.line, newest)
        self.touched()

    def _derived_worlds(self) -> list[World]:
        """The worlds of lossy tiers, which see the exact steps as well."""
        return [each for each in self.derivations if isinstance(each, World)]

    def _all_rungs(self) -> tuple[WorldTier, ...]:
        """All tiers, including lossy ones."""
        return (*self.rungs, *(each.rungs[-1] for each in self._derived_worlds()))

    def _happened(self, what: What, step: StepId, tier: WorldTier) -> None:
        self._tell(Action(self.observation.now(), what, step.step, tier.name))
