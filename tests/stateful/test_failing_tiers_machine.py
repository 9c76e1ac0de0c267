"""Tiers die and come back, processes and nodes end, clocks jump and policies change: what was acknowledged stays.

The model is a dict of every tree that was saved, and for each tier the serials that it was heard to hold.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from reliability.life import slow_stores
from reliability.memory import MemoryBlobs, Objects
from reliability.tiers import FaultyTiers, faulty_tiers
from support.insight import tier_of
from support.limits import limit
from support.scenes import CHUNK, SOON, assert_same, config, crash, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import Survives
from tieredckpt.engine.restoring.source import SilentSource
from tieredckpt.errors import Conflict, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import Event, StepEvicted, StepPromoted, StepSaved

T = TypeVar("T")
Tree = dict[str, Any]

SLOWER = ("disk", "far")
RETENTIONS = st.sampled_from([{"kind": "last_n", "n": 1}, {"kind": "last_n", "n": 3}, {"kind": "all"}])
PROMOTIONS = st.sampled_from([{"kind": "always"}, {"kind": "every_n_steps", "n": 2}, {"kind": "never"}])


class FailingTiersMachine(RuleBasedStateMachine):
    """A store of RAM, a directory and servers that put in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.place = new_shared_folder()
        self.patch = pytest.MonkeyPatch()
        self.runner = asyncio.Runner()
        self.objects = Objects()
        self.servers = slow_stores(lambda: MemoryBlobs(self.objects, pieces=16 << 10, survives=Survives.NODE))
        self.script = faulty_tiers()
        self.faults: FaultyTiers | None = None
        self.opened: CheckpointStore | None = None
        self.policies: dict[str, Any] = {}
        self.late = 0.0
        self.dead: set[str] = set()
        self.saved: dict[int, Tree] = {}
        """By serial."""
        self.state: Tree = {"w": np.zeros(2 * CHUNK, np.uint8), "step": 0}
        self.acknowledged: dict[str, set[int]] = {name: set() for name in ("ram", *SLOWER)}

    @property
    def store(self) -> CheckpointStore:
        assert self.opened is not None
        return self.opened

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, SOON))

    def hear(self, event: Event) -> None:
        match event:
            case StepSaved(serial=serial, tier=name) | StepPromoted(serial=serial, tier=name):
                self.acknowledged[name].add(serial)
            case StepEvicted(serial=serial, tier=name):
                self.acknowledged[name].discard(serial)

    # -- life ---------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        now = time.time
        self.patch.setattr(time, "time", lambda: now() + self.late)
        limit(self.patch, first_retry=0.005)
        limit(self.patch, last_retry=0.02)
        limit(self.patch, source_retry=0.02)
        self.servers.__enter__()
        self.faults = self.script.__enter__()  # around the servers
        self.open()

    def open(self) -> None:
        assert self.faults is not None
        for name in SLOWER:
            (self.faults.refuse if name in self.dead else self.faults.allow)(name)
        of = {name: self.policies.get(name, {"retain": {"kind": "last_n", "n": 3}}) for name in SLOWER}
        far = {"kind": "kvstore", "spec": "memory://", "survives": "node", "retries": 0}
        tiers = {
            "ram": ram(self.place, capacity=8 * CHUNK, on_close="keep"),
            "disk": folder(self.place / "of-test" / "disk", **of["disk"]),
            "far": far | of["far"],
        }
        opening = CheckpointStore.open(config(tiers, when_full="replace"))
        opening.subscribe(self.hear)
        self.opened = self.run(_opened(opening))

    @precondition(lambda self: self.opened is not None)
    @rule(dies=st.booleans(), loses_ram=st.booleans(), disk=PROMOTIONS, far=PROMOTIONS, kept=RETENTIONS)
    def end_and_open_again(
        self, dies: bool, loses_ram: bool, disk: dict[str, Any], far: dict[str, Any], kept: dict[str, Any]
    ) -> None:
        store, self.opened = self.store, None
        self.run(crash(store) if dies else store.close())
        loses_ram &= self.dead != set(SLOWER)  # or there may be nothing to go on from, rightly
        if loses_ram:
            shutil.rmtree(self.place / "of-test" / "ram", ignore_errors=True)
            self.acknowledged["ram"].clear()
        self.policies = {"disk": {"promote": disk, "retain": kept}, "far": {"promote": far, "retain": kept}}
        owed = self.owed()
        self.open()
        try:
            restored = self.run(self.store.restore())
        except TierUnavailable:
            assert not owed
            assert self.dead
            return
        if restored is None:
            assert not owed
            return
        assert restored.serial >= owed, f"serial {restored.serial} was restored, and {owed} was acknowledged"
        assert_same(restored.tree, self.saved[restored.serial])
        self.state = restored.tree

    def owed(self) -> int:
        """The newest serial that a tier which answers was heard to hold."""
        return max((max(held, default=0) for name, held in self.acknowledged.items() if name not in self.dead))

    def teardown(self) -> None:
        try:
            if self.opened is not None:
                for name in tuple(self.dead):
                    self.revive(name)
                self.settle()
                self.what_is_listed_is_what_was_saved()
                self.run(self.store.close())
        finally:
            if self.faults is not None:
                self.script.__exit__(None, None, None)
                self.servers.__exit__(None, None, None)
            self.patch.undo()
            self.runner.close()
            shutil.rmtree(self.place)

    # -- what happens -------------------------------------------------------------------------------------

    @precondition(lambda self: self.opened is not None)
    @rule(value=st.integers(0, 9), waits=st.booleans())
    def save(self, value: int, waits: bool) -> None:
        self.state["w"][value % 2 * CHUNK :][:CHUNK] = value
        self.state["step"] += 1
        tree = {"w": self.state["w"].copy(), "step": self.state["step"]}
        self.run(self.save_once(tree))
        if waits:
            with suppress(TieredCkptError):
                self.run(self.store.flush())

    async def save_once(self, tree: Tree) -> None:
        # Known before anybody can hear of it.
        serial = self.store._life.engine.state.branch.last_serial + 1
        self.saved[serial] = tree
        checkpoint = await self.store.save(tree["step"], tree)
        assert not checkpoint.skipped
        assert checkpoint.saved is not None
        assert checkpoint.saved.step.serial == serial

    @precondition(lambda self: self.opened is not None and len(self.dead) < len(SLOWER))
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in SLOWER if name not in self.dead]))
        assert self.faults is not None
        self.faults[name].kill()
        self.dead.add(name)

    @precondition(lambda self: self.opened is not None and self.dead)
    @rule(data=st.data())
    def comes_back(self, data: st.DataObject) -> None:
        self.revive(data.draw(st.sampled_from(sorted(self.dead))))

    def revive(self, name: str) -> None:
        assert self.faults is not None
        self.dead.discard(name)
        self.faults.allow(name)
        with suppress(KeyError):
            self.faults[name].revive()
        self.run(self.works_again(name))

    async def works_again(self, name: str) -> None:
        # It is tried again in hundredths of a second; who waits is told by the store's own pulse.
        while not tier_of(self.store, name).healthy:
            with suppress(TieredCkptError):
                await self.store.flush()

    @precondition(lambda self: self.opened is not None)
    @rule(seconds=st.sampled_from([-1e6, -60.0, 60.0, 1e4, 1e6]))
    def the_clock_jumps(self, seconds: float) -> None:
        self.late += seconds

    @precondition(lambda self: self.opened is not None)
    @rule()
    def collect(self) -> None:
        with suppress(TierUnavailable):
            self.run(self.store.collect())

    @precondition(lambda self: self.opened is not None and self.saved)
    @rule(which=st.integers(0, 5), way=st.sampled_from([("ram", "disk"), ("disk", "far"), ("far", "disk")]))
    def evict_and_promote(self, which: int, way: tuple[str, str]) -> None:
        steps = sorted({info.step for info in self.run(self.store.steps())})
        if not steps:
            return
        step, (away, to) = steps[which % len(steps)], way
        with suppress(Conflict, NotFound, TierUnavailable):
            self.run(self.store.promote(step, to))
        try:
            self.run(self.store.evict(step, away))
        except TierUnavailable:  # half deleted, it is held no more
            self.acknowledged[away] -= {serial for serial, tree in self.saved.items() if tree["step"] == step}
        except (Conflict, NotFound):
            pass

    @precondition(lambda self: self.opened is not None and not self.dead)
    @rule()
    def settle(self) -> None:
        self.run(self.arrived())

    async def arrived(self) -> None:
        """Wait until everything is where it is due: what only a silent tier had is tried again by and by."""
        while True:
            try:
                await self.store.flush()
                return
            except SilentSource:
                await asyncio.sleep(0.01)

    @precondition(lambda self: self.opened is not None and not self.dead)
    @rule()
    def what_is_listed_is_what_was_saved(self) -> None:
        self.settle()
        infos = self.run(self.store.steps())
        for info in infos:
            assert info.step == self.saved[info.serial]["step"]
            for found in self.run(self.store.verify(info.step, serial=info.serial)):
                assert not found.problem or found.tier not in info.tiers
        newest = max((info.serial for info in infos), default=0)
        assert newest >= self.owed()
        for name, held in self.acknowledged.items():
            # An older one may be gone unheard, where a process died while it evicted it.
            listed = {info.serial for info in infos if name in info.tiers}
            assert max(held, default=0) <= max(listed, default=0), f"{name} was heard to hold {held}, not {listed}"


async def _opened(store: CheckpointStore) -> CheckpointStore:
    return await store


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tieredckpt")  # each failure is told of


def test_whatever_tiers_do_what_was_acknowledged_stays() -> None:
    run_state_machine_as_test(FailingTiersMachine, settings=settings(max_examples=20, stateful_step_count=20))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_tiers_do_for_long_what_was_acknowledged_stays() -> None:
    run_state_machine_as_test(FailingTiersMachine, settings=settings(max_examples=150, stateful_step_count=30))
