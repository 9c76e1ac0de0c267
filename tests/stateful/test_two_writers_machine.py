"""Two hosts would write to one store, and die, come back and lose their clocks: one writes, and nothing is lost.

The model is a dict of every tree by serial and step, what the shared tier was heard to hold, and who holds the store.
Hosts are told apart by the context that their calls run in: each has a clock, a machine and processes of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import shutil
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reliability.tiers import FaultyTiers, faulty_tiers
from support.scenes import CHUNK, SOON, assert_same, config, crash, folder, new_shared_folder, ram
from support.trees import fingerprint

from tieredckpt import CheckpointStore
from tieredckpt.checkpoint import Restored
from tieredckpt.engine.tier import lease
from tieredckpt.engine.tier.lease import Holder, Lease
from tieredckpt.errors import Conflict
from tieredckpt.events import Event, StepEvicted, StepPromoted

T = TypeVar("T")
Tree = dict[str, Any]

Id = tuple[int, int]
"""Serial and step."""

HOSTS = ("a", "b")
HOUR = 3600.0
LONG_AGO = 1e6

host = contextvars.ContextVar("host", default="")
process = contextvars.ContextVar("process", default=0)


class TwoWritersMachine(RuleBasedStateMachine):
    """Each host has RAM of its own; both have the same directory."""

    own_disks = False
    """Whether each has a disk of its own besides."""

    def __init__(self) -> None:
        super().__init__()
        self.place = new_shared_folder()
        self.patch = pytest.MonkeyPatch()
        self.runner = asyncio.Runner()
        self.late = dict.fromkeys(("", *HOSTS), 0.0)
        self.script = faulty_tiers()
        self.faults: FaultyTiers | None = None
        self.processes = 0
        self.living: set[int] = set()
        """Processes by number."""
        self.opened: tuple[str, int, CheckpointStore] | None = None
        """The host that writes, its process and its store."""
        self.dead: str | None = None
        """The host whose process died last, while its lease is still fresh."""
        self.saved: dict[str, dict[Id, Tree]] = {name: {} for name in HOSTS}
        """By host: two may give the same serial to saves that the other cannot see."""
        self.held: dict[Id, Tree] = {}
        """What the directory was heard to hold."""
        self.state = new_tree()

    # -- hosts --------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        now = time.time
        self.patch.setattr(time, "time", lambda: now() + self.late[host.get()])
        self.patch.setattr(lease, "_machine", lambda: f"machine {host.get()}")
        self.patch.setattr(lease, "_started", lambda number: "then" if number in self.living else None)
        self.patch.setattr(lease, "_this_process", this_process)
        self.faults = self.script.__enter__()

    def run(self, work: Coroutine[Any, Any, T], name: str | None = None, number: int = 0) -> T:
        """Run something as the writer does, or as another process."""
        writer, its_number, _ = self.opened or ("", 0, None)
        context = contextvars.copy_context()
        context.run(host.set, name or writer)
        context.run(process.set, number or its_number)
        return self.runner.run(asyncio.wait_for(work, SOON), context=context)

    @property
    def store(self) -> CheckpointStore:
        assert self.opened is not None
        return self.opened[2]

    def new(self, name: str) -> CheckpointStore:
        self.processes += 1
        tiers = {
            "ram": ram(self.place, path=self.place / name / "ram", capacity=8 * CHUNK, on_close="keep"),
            **({"own": folder(self.place / name / "disk", retain="all")} if self.own_disks else {}),
            "disk": folder(self.place / "disk", retain={"kind": "last_n", "n": 2}),
        }
        opening = CheckpointStore.open(config(tiers, name="shared", when_full="replace"))
        opening.subscribe(partial(self.hear, self.saved[name]))
        return opening

    def hear(self, mine: dict[Id, Tree], event: Event) -> None:
        match event:
            case StepPromoted(serial=serial, step=step, tier="disk"):
                self.held[serial, step] = mine[serial, step]
            case StepEvicted(serial=serial, step=step, tier="disk"):
                self.held.pop((serial, step), None)

    def assert_saved(self, restored: Restored) -> None:
        """What the directory was heard to hold is that; any other step is what one of the hosts saved."""
        found = restored.serial, restored.step
        if found in self.held:
            assert_same(restored.tree, self.held[found])
        else:
            texts = [fingerprint(mine[found]) for mine in self.saved.values() if found in mine]
            assert fingerprint(restored.tree) in texts

    def leases(self) -> list[Path]:
        return list(self.place.glob("disk/leases/*"))

    # -- who writes ---------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(HOSTS))
    def open(self, name: str) -> None:
        before = self.leases()
        opening = self.new(name)
        number = self.processes
        self.living.add(number)
        if self.opened is not None or self.dead not in (None, name):
            with pytest.raises(Conflict, match=r"is being written to by|in use"):
                self.run(opened(opening), name, number)
            self.living.discard(number)
            assert self.leases() == before
            return
        self.opened, self.dead = (name, number, self.run(opened(opening), name, number)), None
        assert len(self.leases()) == 1
        restored = self.run(self.store.restore())
        owed = max(self.held, default=(0, 0))
        if restored is None:
            assert owed == (0, 0)
            self.state = new_tree()
            return
        found = restored.serial, restored.step
        assert found >= owed, f"{found} was restored, and the directory was heard to hold {owed}"
        self.assert_saved(restored)
        self.state = restored.tree

    @precondition(lambda self: self.opened is not None)
    @rule(clean=st.booleans())
    def end(self, clean: bool) -> None:
        assert self.opened is not None
        name, number, store = self.opened
        if clean:
            self.run(store.close())
            assert self.leases() == []
        else:
            with pytest.MonkeyPatch.context() as patch:  # the dead give nothing back
                patch.setattr(Lease, "release", nothing)
                self.run(crash(store))
            assert len(self.leases()) == 1
            self.dead = name
        self.opened = None
        self.living.discard(number)

    @rule()
    def time_passes(self) -> None:
        """So long that whoever lives has renewed its lease, and that of the dead is stale."""
        for path in self.leases():
            lives = json.loads(path.read_bytes())["process"] in self.living
            then = path.stat().st_mtime if lives else LONG_AGO
            os.utime(path, (then, then))
        self.dead = None

    @precondition(lambda self: self.dead is not None and self.opened is None)
    @rule(value=st.integers(0, 9))
    def the_other_goes_on(self, value: int) -> None:
        """What happens where a node failed: somebody else takes over as soon as may be, and trains on."""
        (other,) = {*HOSTS} - {self.dead}
        self.time_passes()
        self.open(other)
        self.save(value, waits=True)
        self.end(clean=True)

    @rule(name=st.sampled_from(HOSTS), hours=st.sampled_from([-40, -1, 1, 40]))
    def a_clock_jumps(self, name: str, hours: int) -> None:
        self.late[name] += hours * HOUR

    # -- what the writer does -----------------------------------------------------------------------------

    @precondition(lambda self: self.opened is not None)
    @rule(value=st.integers(0, 9), waits=st.booleans())
    def save(self, value: int, waits: bool) -> None:
        self.state["w"][value % 2 * CHUNK :][:CHUNK] = value
        self.state["step"] += 1
        tree = {"w": self.state["w"].copy(), "step": self.state["step"]}
        serial = self.store._life.engine.state.branch.last_serial + 1
        assert self.opened is not None
        self.saved[self.opened[0]][serial, tree["step"]] = tree
        saved = self.run(self.store.save(tree["step"], tree))
        if waits:
            self.run(self.store.flush())
        elif self.own_disks:
            self.run(saved.reached("own"))

    @precondition(lambda self: self.opened is not None)
    @rule(value=st.integers(0, 9), saves=st.integers(1, 3))
    def save_where_nobody_else_sees_it_and_die(self, value: int, saves: int) -> None:
        """RAM keeps what did not get to the directory: nobody else knows of these serials."""
        assert self.faults is not None
        self.faults["disk"].hold("put", key="packs/*", times=None)
        for _ in range(saves):
            self.save(value, waits=False)
        self.end(clean=False)

    @precondition(lambda self: self.opened is not None)
    @rule()
    def the_lease_is_renewed(self) -> None:
        held = self.store._life.engine.state.tier("disk").lease
        assert held is not None
        self.run(self.store._life.loop.call(held.renew()))
        assert len(self.leases()) == 1

    @precondition(lambda self: self.opened is not None)
    @rule()
    def collect(self) -> None:
        self.run(self.store.collect())

    @precondition(lambda self: self.opened is not None)
    @rule()
    def look(self) -> None:
        self.run(self.store.flush())
        infos = self.run(self.store.steps())
        on_disk = {(info.serial, info.step) for info in infos if "disk" in info.tiers}
        assert max(self.held, default=(0, 0)) == max(on_disk, default=(0, 0))
        for gone in self.held.keys() - on_disk:  # evicted just before a death, so that nobody heard of it
            del self.held[gone]
        for info in infos:
            for found in self.run(self.store.verify(info.step, serial=info.serial)):
                assert not found.problem
            if not info.off_branch:
                restored = self.run(self.store.restore(info.step, resume=False))
                assert restored is not None
                self.assert_saved(restored)

    @invariant()
    def the_writer_goes_on(self) -> None:
        if self.opened is not None:
            assert self.store._life.engine.state.tier("disk").healthy

    def teardown(self) -> None:
        try:
            if self.opened is not None:
                self.look()
                self.end(clean=True)
        finally:
            if self.faults is not None:
                self.script.__exit__(None, None, None)
            self.patch.undo()
            self.runner.close()
            shutil.rmtree(self.place)


class TwoWritersWithDisks(TwoWritersMachine):
    own_disks = True

    @precondition(lambda self: self.opened is not None)
    @rule(value=st.integers(0, 9), saves=st.integers(1, 3))
    def the_other_goes_on_until_this_one_is_back(self, value: int, saves: int) -> None:
        assert self.opened is not None
        back = self.opened[0]
        self.save_where_nobody_else_sees_it_and_die(value, saves)
        self.the_other_goes_on(value + 1)
        self.open(back)
        self.look()


def new_tree() -> Tree:
    return {"w": np.zeros(2 * CHUNK, np.uint8), "step": 0}


def this_process(taken_at: float) -> Holder:
    return Holder(
        host=host.get(),
        machine=f"machine {host.get()}",
        process=process.get(),
        process_started="then",
        taken_at=taken_at,
        renewed_at=time.time(),
    )


async def opened(store: CheckpointStore) -> CheckpointStore:
    return await store


async def nothing(_: Lease) -> None:
    pass


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tieredckpt")


def test_of_two_hosts_one_writes_and_nothing_that_was_acknowledged_is_lost() -> None:
    run_state_machine_as_test(TwoWritersMachine, settings=settings(max_examples=20, stateful_step_count=25))


def test_what_is_on_a_disk_of_one_host_is_not_taken_for_what_the_other_saved_since() -> None:
    run_state_machine_as_test(TwoWritersWithDisks, settings=settings(max_examples=20, stateful_step_count=25))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_two_hosts_one_writes_for_long_and_nothing_that_was_acknowledged_is_lost() -> None:
    run_state_machine_as_test(TwoWritersMachine, settings=settings(max_examples=400, stateful_step_count=50))
