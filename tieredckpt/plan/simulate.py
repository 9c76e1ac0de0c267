"""Runs a training under failures in simulated time, with the configuration's own policies.

The job is one synchronous training: a failure of one node stops all, so the nodes together are one trainer, one failure
process and one tier of each kind (`cluster`, `scenario`).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable

import simpy

from tieredckpt.errors import Invalid, NoSpace
from tieredckpt.format.manifest import StepId
from tieredckpt.plan.actions import Action
from tieredckpt.plan.cluster import Failure, failures, outages
from tieredckpt.plan.derived import derive
from tieredckpt.plan.figures import Figures, Ledger, Phase
from tieredckpt.plan.flows import Flows, Lane
from tieredckpt.plan.scenario import Scenario
from tieredckpt.plan.tiers import WorldTier
from tieredckpt.plan.world import World

__all__ = ["simulate"]

Events = Generator[simpy.Event, object, None]

_LOOK_AGAIN = 30.0
"""Seconds after which the engine's promoter asks the policies again without a change."""

_AT_ONCE = 30.0
"""Most seconds of training for which a schedule that stays due is asked in one question."""

_WAIT_FOR_ROOM = 600.0
"""Most seconds that the engine waits for room."""

_FIRST_RETRY, _LAST_RETRY = 0.5, 60.0
"""Seconds until the engine tries a full tier again."""

_SAMPLES = 600
"""Number of samples of the tiers' fill."""

_EPOCH = 1.8e9
"""The simulated time at the start: policies see seconds since the epoch."""


def simulate(
    scenario: Scenario,
    seconds: float,
    *,
    seed: int = 0,
    trace: Iterable[Failure] | None = None,
    hear: Callable[[Action], None] | None = None,
    progress: Callable[[float], object] = float,
) -> Figures:
    """Train for ``seconds`` of simulated time; equal arguments give equal figures.

    Args:
        scenario: configuration, training and machines.
        seconds: simulated time, including failures and restarts.
        seed: of the random failures.
        trace: failures in their order, instead of random ones.
        hear: called with every action as it happens; its time is seconds since the epoch.
        progress: called now and then with the simulated seconds that have passed since.

    Raises:
        Invalid: no tier can take a save.
    """
    if seconds <= 0:
        raise Invalid(f"a simulation of {seconds} s shows nothing; make it longer")
    run = _Run(scenario, seconds, random.Random(seed), trace, hear, progress)
    return run.figures()


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        seconds: float,
        rng: random.Random,
        trace: Iterable[Failure] | None,
        hear: Callable[[Action], None] | None,
        progress: Callable[[float], object],
    ) -> None:
        self.scenario = scenario
        self.seconds = seconds
        self.env = simpy.Environment()
        self.ledger = Ledger()
        self.world = World(scenario, self._clock, self._note)
        derived = derive(self.world, self._clock, self._note)
        self.tiers: tuple[tuple[World, WorldTier], ...] = (
            *((self.world, tier) for tier in self.world.rungs),
            *((each, each.own) for each in derived),
        )
        """Every tier, with the world that decides what comes there."""
        if not self.world.save_tiers():
            raise Invalid("no tier can take a save: RAM is smaller than the state, and there is no other tier")
        self.flows = Flows(self.env)
        self.changed = self.env.event()
        self.phase: Phase = "train"
        self.since: float = 0.0
        self.step = 0
        self.begun = 0.0
        """When the training step under way began; a failure loses all of it."""
        self.partial = 0.0
        """Seconds of such steps that are not counted as lost yet."""
        self._hear, self._progress = hear, progress
        self._promoters: dict[str, simpy.Process] = {}
        self._start_promoters()
        self.trainer = self.env.process(self._life())
        for world, tier in self.tiers:
            if (mtbf := scenario.tier_mtbf.get(tier.name)) is not None:
                # A generator of its own, so that the other failures do not depend on this tier.
                self.env.process(self._outages(world, tier, mtbf, random.Random(rng.random())))
        coming = failures(scenario.mtbf, random.Random(rng.random())) if trace is None else trace
        self.env.process(self._strike(coming))
        self.env.process(self._sample())

    def _clock(self) -> float:
        return _EPOCH + float(self.env.now)

    def figures(self) -> Figures:
        self.env.run(until=self.seconds)
        self._enter(self.phase)
        if self.partial:  # the simulation ended while the job was down
            self._throw_back(self.step)
        return self.ledger.close(self.seconds, tuple(tier.name for _, tier in self.tiers))

    # -- what is counted ----------------------------------------------------------------------------------

    def _note(self, action: Action) -> None:
        match action.what:
            case "saved":
                self.ledger.saves += 1
            case "skipped":
                self.ledger.skipped += 1
            case "promoted":
                self.ledger.promoted[action.tier] += 1
            case "evicted":
                self.ledger.evicted[action.tier] += 1
        if self._hear is not None:
            self._hear(action)

    def _enter(self, phase: Phase) -> None:
        self.ledger.spent[self.phase] += self.env.now - self.since
        self.phase, self.since = phase, self.env.now

    def _sample(self) -> Events:
        while True:
            for _, tier in self.tiers:
                self.ledger.fill.setdefault(tier.name, []).append((self.env.now, tier.used))
            yield self.env.timeout(self.seconds / _SAMPLES)
            self._progress(self.seconds / _SAMPLES)

    def _beat(self) -> None:
        self.changed.succeed()
        self.changed = self.env.event()

    # -- the trainer --------------------------------------------------------------------------------------

    def _life(self) -> Events:
        running = True
        while True:
            try:
                if not running:
                    yield from self._start()
                    running = True
                yield from self._train()
            except simpy.Interrupt:
                running = False

    def _train(self) -> Events:
        while True:
            self._enter("train")
            self.begun = self.env.now
            steps, due = self._uneventful()
            yield self.env.timeout(steps * self.scenario.step_seconds)
            self.step += steps
            self.begun = self.env.now
            if self.world.due(self.step) if due is None else due:
                self._enter("stall")
                yield from self._save()

    def _uneventful(self) -> tuple[int, bool | None]:
        """Training steps to take at once, and whether a save is due after them; None: ask then.

        Until the next event only the clock and the step change for the schedule. So one that stays due is asked about
        the last step before that event, and if a save is due by then, a binary search finds the first such step.
        """
        if not self.scenario.config.schedule.stays_due:
            return 1, None
        step_seconds, now = self.scenario.step_seconds, self.env.now
        until = min(self.env.peek(), now + _AT_ONCE)
        steps = math.ceil((until - now) / step_seconds) - 1

        def due(count: int) -> bool:
            return self.world.due(self.step + count, count * step_seconds)

        if steps < 2:
            return 1, None
        if not due(steps):
            return steps, False
        return bisect_left(range(steps), True, lo=1, key=due), True

    def _save(self) -> Events:
        begin = self.env.now
        tier = next(iter(self.world.save_tiers()), None)
        if tier is None:
            return
        while not self.world.make_room(tier):
            left = _WAIT_FOR_ROOM - (self.env.now - begin)
            when_full = self.scenario.config.when_full
            if when_full == "wait" and left > 0 and self.world.waiting_helps(tier):
                yield self.changed | self.env.timeout(left)
            elif when_full == "skip" or not self.world.replace_oldest(tier):
                self.world.skipped(self.step, tier)
                return
        # RAM gets one pass over all of the state; a slower tier gets the chunks that it lacks.
        nbytes = self.scenario.state if tier.rung.ram else self.scenario.added(len(tier.steps.held))
        yield from self.flows.move(nbytes, [Lane(tier.name, tier.rung.write)])
        self.ledger.written[tier.name] += nbytes
        self.world.saved(self.step, tier, self.env.now - begin)
        self._beat()

    def _start(self) -> Events:
        self._enter("restart")
        yield self.env.timeout(self.scenario.restart)
        self._enter("restore")
        step = self.world.reopen()
        while step is None and any(tier.down for tier in self.world.rungs):  # one of them may hold something
            yield self.changed
            step = self.world.reopen()
        self._start_promoters()
        if step is None:
            self.ledger.from_nothing += 1
            self._throw_back(0)
            return
        source = self.world.source(step)
        assert source is not None
        begin = self.env.now
        source.steps.begin_read(step)
        yield from self.flows.move(self.scenario.state, [Lane(source.name, source.rung.read)])
        _end_read(source, step)
        self.ledger.reads.setdefault(source.name, []).append(self.env.now - begin)
        self.world.restored(step, source)
        self._throw_back(step.step)
        self._beat()

    def _throw_back(self, step: int) -> None:
        """Count the training after the step that it resumes from as lost."""
        self.ledger.losses.append((self.step - step) * self.scenario.step_seconds + self.partial)
        self.step, self.partial = step, 0.0

    # -- failures -----------------------------------------------------------------------------------------

    def _strike(self, coming: Iterable[Failure]) -> Events:
        for failure in coming:
            yield self.env.timeout(max(0.0, failure.at - self.env.now))
            self.ledger.failures[failure.kind] += 1
            if self.phase == "train":
                self.partial += self.env.now - self.begun
            self._enter("restart")
            for promoter in self._promoters.values():
                if promoter.is_alive:
                    promoter.interrupt()  # the promoter lives in the trainer's process
            self.world.fail(failure.kind)
            self.trainer.interrupt()

    def _outages(self, world: World, tier: WorldTier, mtbf: float, rng: random.Random) -> Events:
        for works, away in outages(mtbf, self.scenario.tier_repair, rng):
            yield self.env.timeout(works)
            tier.down = True
            world.touched()
            promoter = self._promoters[tier.name]
            if tier.busy and promoter.is_alive:
                promoter.interrupt("outage")
            self._beat()
            yield self.env.timeout(away)
            world.answers_again(tier)
            self._beat()

    # -- promotion ----------------------------------------------------------------------------------------

    def _start_promoters(self) -> None:
        self._promoters = {
            tier.name: self.env.process(self._promoter(world, tier)) for world, tier in self.tiers if tier.index
        }

    def _promoter(self, world: World, tier: WorldTier) -> Events:
        delay = _FIRST_RETRY
        while True:
            try:
                step = world.next_due(tier)
                if step is None:
                    yield self.changed | self.env.timeout(_LOOK_AGAIN)
                    continue
                if not world.make_room(tier, step):
                    if any(held > step for held in tier.steps.held):
                        tier.steps.tombstones.add(step)
                        continue
                    tier.health.error = NoSpace(f"tier {tier.name!r} is full")
                    world.touched()
                    yield self.env.timeout(delay)
                    delay = min(_LAST_RETRY, 2 * delay)
                    tier.health.error = None
                    world.touched()
                    continue
                delay = _FIRST_RETRY
                yield from self._promote(world, tier, step)
            except simpy.Interrupt as interrupt:
                if interrupt.cause != "outage":
                    return

    def _promote(self, world: World, tier: WorldTier, step: StepId) -> Events:
        source = world.source(step)
        if source is None:  # only a tier that is away has it
            yield self.changed | self.env.timeout(_LOOK_AGAIN)
            return
        record = source.steps.held[step].record
        nbytes = self.scenario.added(len(tier.steps.held))
        lanes = [Lane(tier.name, tier.rung.write)]
        if not source.rung.ram:  # memory has bandwidth to spare
            lanes.append(Lane(source.name, source.rung.read))
        limit = tier.config.rate_limit
        begin = self.env.now
        tier.busy = True
        source.steps.begin_read(step)
        world.touched()
        try:
            yield from self.flows.move(nbytes, lanes, limit * self.scenario.nodes if limit else float("inf"))
        finally:
            tier.busy = False
            _end_read(source, step)
            world.touched()
        self.ledger.written[tier.name] += nbytes
        seconds = self.env.now - begin
        world.promoted(step, record, tier, nbytes / seconds if seconds else None)
        self._beat()


def _end_read(tier: WorldTier, step: StepId) -> None:
    """End a read, unless a failure of the trainer has ended it already."""
    if step in tier.steps.readers:
        tier.steps.end_read(step)
