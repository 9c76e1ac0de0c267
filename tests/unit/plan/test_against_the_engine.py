"""The simulator does what the engine does: one trace of saves and failures, played by both, step by step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.scenes import Heard, crash, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.events import SaveSkipped, StepEvicted, StepPromoted, StepRestored, StepSaved
from tieredckpt.plan.actions import Action
from tieredckpt.plan.cluster import Failure
from tieredckpt.plan.scenario import Scenario, rungs
from tieredckpt.plan.simulate import simulate
from tieredckpt.policy import base
from tieredckpt.policy.base import Observed, Promotion, Retention, Schedule, StepView, StoreView, TierView

NBYTES = 256 << 10
EVERY_3 = {"kind": "every_n_steps", "n": 3}
EVERY_4 = {"kind": "every_n_steps", "n": 4}

Done = tuple[str, int, str]
"""What happened, to which step, on which tier."""

Trace = list[tuple[int, str]]
"""After which training step what fails; a failure comes before the next one ends."""


class ByFours(Promotion):
    """Of all steps at once, whenever the newest is a multiple of four."""

    kind: Literal["test_by_fours"] = "test_by_fours"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return store.newest is not None and store.newest.step % 4 == 0


class Careless(Retention):
    """Keeps the second newest step alone: promise 6 must keep the newest."""

    kind: Literal["test_careless"] = "test_careless"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset(step.serial for step in store.line_on(tier.name)[-2:-1])


class Fails(Schedule):
    kind: Literal["test_fails"] = "test_fails"

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        raise ZeroDivisionError("a policy with a bug")


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """These policies can be configured in the tests of this file alone."""
    monkeypatch.setattr(base, "_offered", dict(base._offered))
    base.register(ByFours)
    base.register(Careless)
    base.register(Fails)


def tree(seed: int) -> dict[str, Any]:
    """A state of which every chunk changes."""
    return {"w": np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)}


async def played_by_the_engine(config: StoreConfig, steps: int, trace: Trace, memory: Path) -> list[set[Done]]:
    """What the engine did in each training step, and in each restart."""
    failing, step, seed = list(trace), 0, 0
    moments: list[set[Done]] = []
    while True:
        store = await CheckpointStore.open(config)
        heard = Heard(store)
        if moments:
            await store.flush()
            restored = await store.restore()
            step = 0 if restored is None else restored.step
        moments.append(done(heard))
        while step < steps:
            begin = len(heard.events)
            step += 1
            if store.due(step):
                seed += 1
                await store.save(step, tree(seed))
                await store.flush()
            moments.append(done(heard, begin))
            if failing and failing[0][0] == step:
                break
        else:
            await crash(store)
            return moments
        _, kind = failing.pop(0)
        await crash(store)
        if kind == "node":
            shutil.rmtree(memory, ignore_errors=True)  # there is none without RAM


def done(heard: Heard, begin: int = 0) -> set[Done]:
    found: set[Done] = set()
    for event in heard.events[begin:]:
        match event:
            case StepSaved(step=step, tier=tier):
                found.add(("saved", step, tier))
            case SaveSkipped(step=step):
                found.add(("skipped", step, "ram"))  # the only tier that a save waits for here
            case StepPromoted(step=step, tier=tier):
                found.add(("promoted", step, tier))
            case StepEvicted(step=step, tier=tier):
                found.add(("evicted", step, tier))
            case StepRestored(step=step, sources=sources):
                found.update(("restored", step, tier) for tier in sources)
    return found


def played_by_the_simulator(config: StoreConfig, steps: int, trace: Trace) -> list[set[Done]]:
    """The same, of a training whose steps take an hour and whose tiers are fast."""
    hour, restart = 3600.0, 600.0
    rates = dict.fromkeys((tier.name for tier in config.tiers), 1e9)
    scenario = Scenario(config, NBYTES, hour, 1, rungs(config, NBYTES, 1, rates, {}), restart=restart)
    heard: list[Action] = []
    failures, ends, now, step = [], [0.0], 0.0, 0
    failing = list(trace)
    while step < steps:
        now, step = now + hour, step + 1
        ends.append(now + 1800)
        if failing and failing[0][0] == step:
            kind = failing.pop(0)[1]
            failures.append(Failure(now + 1900, kind))
            step = restored_by(scenario, failures, now + 1900 + restart + 60)
            now += 1900 + restart
            ends.append(now + 1800)
    simulate(scenario, now + 1800, trace=failures, hear=heard.append)
    moments: list[set[Done]] = [set() for _ in ends]
    for action in heard:
        at = action.at - 1.8e9
        moments[next(i for i, end in enumerate(ends) if at <= end)].add((action.what, action.step, action.tier))
    return moments


def restored_by(scenario: Scenario, failures: list[Failure], until: float) -> int:
    """The step that the last restore before a time gave; the trace goes on from there."""
    heard: list[Action] = []
    simulate(scenario, until, trace=failures, hear=heard.append)
    restores = [action for action in heard if action.what == "restored" and action.at - 1.8e9 > failures[-1].at]
    return restores[-1].step if restores else 0


def tiers(memory: Path, disk: Path, which: str) -> dict[str, Any]:
    two_and_a_half = {"capacity": f"{NBYTES * 5 // 2 // 1024} KiB"}
    match which:
        case "retention":
            return {
                "ram": ram(memory) | two_and_a_half,
                "disk": folder(disk / "disk", retain={"kind": "last_n", "n": 2}),
                "far": folder(disk / "far", survives="site", promote=EVERY_3, retain={"kind": "every_k", "k": 6}),
            }
        case "capacity":
            return {
                "ram": ram(memory) | two_and_a_half,
                "disk": folder(disk / "disk", retain={"kind": "last_n", "n": 1}, capacity="900 KiB"),
            }
        case "sparse":
            return {
                "ram": ram(memory, capacity="700 KiB", retain={"kind": "last_n", "n": 2}),
                "disk": folder(disk / "disk", promote=EVERY_4, retain={"kind": "all"}),
            }
        case "careless":
            return {
                "ram": ram(memory) | two_and_a_half,
                "disk": folder(disk / "disk", retain={"kind": "test_careless"}),
            }
        case "many at once":
            return {
                "ram": ram(memory, capacity="1500 KiB"),
                "disk": folder(disk / "disk", promote={"kind": "test_by_fours"}, retain={"kind": "last_n", "n": 2}),
            }
        case _:
            return {
                "disk": folder(disk / "disk", retain={"kind": "last_n", "n": 2}),
                "far": folder(disk / "far", survives="site", promote=EVERY_4, retain={"kind": "last_n", "n": 1}),
            }


@pytest.mark.parametrize("when_full", ["wait", "skip", "replace"])
@pytest.mark.parametrize("which", ["retention", "capacity", "sparse", "careless", "many at once", "no RAM"])
async def test_engine_and_simulator_do_the_same_step_by_step(
    shared_memory: Path, tmp_path: Path, which: str, when_full: str
) -> None:
    schedules: dict[str, Any] = {"retention": {"kind": "every_n_steps", "n": 2}, "careless": "test_fails"}
    config = StoreConfig(
        name="traced",
        tiers=tiers(shared_memory, tmp_path, which),
        schedule=schedules.get(which, "always"),
        chunk_size=NBYTES,  # in one piece, so that pages and checksums hardly add to it
        when_full=when_full,
    )
    trace = [(5, "process"), (9, "node"), (11, "process"), (14, "node")]
    engine = await played_by_the_engine(config, 20, trace, shared_memory / "of-test")
    simulated = played_by_the_simulator(config, 20, trace)
    for moment, (one, other) in enumerate(zip(engine, simulated, strict=True)):
        assert one == other, f"after {moment} moments"
    assert {what for moment in engine for what, _, _ in moment} >= {"saved", "restored"}
