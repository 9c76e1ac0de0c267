"""Whatever is done to a store, in whatever order: what it lists is what was saved, and the newest step is there.

A restore changes nothing that is listed, and the model knows where the next save forks. It is a dict of every tree
that was ever saved, and knows no timing: promotions and retention go on behind the rules as they like, and what is
asserted holds at every moment of them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
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
from support.insight import flip_chunk
from support.scenes import CHUNK, assert_same, config, crash, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.engine.inventory import StepInfo
from tieredckpt.errors import Conflict, Corrupt
from tieredckpt.events import OriginIgnored

T = TypeVar("T")

KEYS = ("a", "b", "c")
ORDINALS = (0, 1)
"""Of the chunks of each array; every chunk is one value all over, which names its content."""
WHICH = st.integers(0, 11)
EVERY = 3
"""Steps between saves, by the schedule."""

Tree = dict[str, Any]


def contents(tree: Tree, key: str) -> set[int]:
    """What the chunks of an array are made of."""
    return {int(tree[key][ordinal * CHUNK]) for ordinal in ORDINALS}


def copied(tree: Tree) -> Tree:
    return {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in tree.items()}


class StoreMachine(RuleBasedStateMachine):
    """A store of RAM, a directory and a kvstore."""

    def __init__(self) -> None:
        super().__init__()
        self.place = new_shared_folder()
        self.runner = asyncio.Runner()
        self.opened: CheckpointStore | None = None
        self.state: Tree = {key: np.full(len(ORDINALS) * CHUNK, i, np.uint8) for i, key in enumerate(KEYS)}
        self.state["half"] = np.zeros(9, np.float16)
        self.state["step"] = 0
        self.saved: dict[int, Tree] = {}
        """By serial."""
        self.branches: dict[int, tuple[int, ...]] = {0: ()}
        """By serial, the serials of its history with itself at the end."""
        self.live = 0
        """The end of the branch."""
        self.origin: tuple[int, bool] | None = None
        """Serial of the step that was restored last by number and whole, and whether it was to resume."""
        self.ignored: list[OriginIgnored] = []
        self.flipped: set[tuple[str, int]] = set()
        """Tiers with the contents of which a chunk was damaged there, repaired since or not."""
        self.pinned: set[tuple[int, str]] = set()
        """Serials of steps, and the tiers where they are pinned."""

    # -- what the rules are made of -----------------------------------------------------------------------

    @property
    def store(self) -> CheckpointStore:
        assert self.opened is not None
        return self.opened

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def steps(self) -> dict[int, StepInfo]:
        return {info.serial: info for info in self.run(self.store.steps())}

    def settle(self) -> None:
        """Wait until everything has arrived that can: a snapshot that was damaged before it was promoted cannot."""
        try:
            self.run(self.store.flush())
        except Corrupt:
            assert self.flipped

    def chosen(self, which: int) -> StepInfo:
        """A step that its number alone names. How many there are depends on what arrived in time, so none is drawn."""
        infos = self.steps()
        named = {
            info.step: info for info in sorted(infos.values(), key=lambda info: (not info.off_branch, info.serial))
        }
        return sorted(named.values(), key=lambda info: info.serial)[which % len(named)]

    def may_be_lost(self, info: StepInfo) -> set[str]:
        """The arrays of which a chunk was damaged wherever the step is now."""
        lost = {
            content
            for content in range(256)
            if info.tiers and all((tier, content) in self.flipped for tier in info.tiers)
        }
        return {key for key in KEYS if contents(self.saved[info.serial], key) & lost}

    def assert_named(self, info: StepInfo, error: Corrupt) -> None:
        """The error names an array that may be lost."""
        assert any(f"array {key!r}" in str(error) for key in self.may_be_lost(info)), (info, error)

    def restored(self, info: StepInfo, *, resume: bool | None, by_number: bool = True) -> bool:
        """Restore a step; False when it said which array is lost, rightly. It changes nothing that is stored."""
        self.settle()
        before = {serial: info.off_branch for serial, info in self.steps().items()}
        try:
            found = self.run(self.store.restore(info.step if by_number else None, resume=resume))
        except Corrupt as error:
            self.assert_named(info, error)
            return False
        assert found is not None
        assert (found.step, found.serial) == (info.step, info.serial)
        assert_same(found.tree, self.saved[info.serial])
        self.settle()
        assert {serial: info.off_branch for serial, info in self.steps().items()} == before
        return True

    def number(self, serial: int) -> int:
        return int(self.saved[serial]["step"]) if serial else 0

    def fork(self, step: int, *, overwrite: bool) -> int | None:
        """Where a save of that number forks; None where it extends the branch."""
        if self.origin is None or self.origin[0] == self.live:
            return None
        serial, resume = self.origin
        newest = self.number(self.live)
        return serial if resume or step < newest or (step == newest and not overwrite) else None

    # -- life ---------------------------------------------------------------------------------------------

    @initialize()
    def open(self) -> None:
        far = {"kind": "kvstore", "spec": {"driver": "file", "path": f"{self.place}/of-test/far/"}, "retries": 0}
        tiers = {
            "ram": ram(self.place, capacity="1 MiB"),
            "disk": folder(self.place / "of-test" / "disk", retain={"kind": "last_n", "n": 3}),
            "far": far | {"promote": {"kind": "every_n_steps", "n": 2}, "retain": {"kind": "last_n", "n": 6}},
        }
        schedule = {"kind": "every_n_steps", "n": EVERY}
        self.opened = self.run(_opened(CheckpointStore.open(config(tiers, schedule=schedule))))
        self.opened.subscribe(lambda event: self.ignored.append(event) if isinstance(event, OriginIgnored) else None)

    @precondition(lambda self: self.opened is not None)
    @rule(dies=st.booleans(), loses_ram=st.booleans())
    def end_and_open_again(self, dies: bool, loses_ram: bool) -> None:
        infos = self.steps()
        store, self.opened = self.store, None
        self.run(crash(store) if dies else store.close())
        if loses_ram:
            shutil.rmtree(self.place / "of-test" / "ram", ignore_errors=True)
        self.open()

        # A clean end waits for what is due; a snapshot that was damaged does not get there.
        whole = not loses_ram or not (dies or self.flipped)
        kept = [info.serial for info in infos.values() if not info.off_branch and (whole or set(info.tiers) - {"ram"})]
        after = self.steps()
        self.live, self.origin = max(after, default=0), None
        assert self.live >= max(kept, default=0), "the newest step of the branch was lost"
        if not after:
            return
        try:
            found = self.run(self.store.restore())
        except Corrupt as error:
            self.assert_named(after[self.live], error)
            return
        assert found is not None
        assert found.serial == self.live
        assert_same(found.tree, self.saved[self.live])
        self.state = found.tree

    def teardown(self) -> None:
        try:
            if self.opened is not None:
                self.settle()
                for info in self.steps().values():
                    for verified in self.run(self.store.verify(info.step, serial=info.serial)):
                        self.assert_explained(info, verified)
                self.run(self.store.close())
        finally:
            self.runner.close()
            shutil.rmtree(self.place)

    # -- the trainer --------------------------------------------------------------------------------------

    @rule(
        changes=st.dictionaries(
            st.sampled_from(KEYS), st.tuples(st.sampled_from(ORDINALS), st.integers(0, 12)), max_size=2
        ),
        offset=st.none() | st.integers(-3, 2),
        overwrite=st.booleans(),
        waits=st.booleans(),
    )
    def save(self, changes: dict[str, tuple[int, int]], offset: int | None, overwrite: bool, waits: bool) -> None:
        """A save goes on from the state, or has a number near that of the newest step."""
        for key, (ordinal, value) in changes.items():
            self.state[key][ordinal * CHUNK : (ordinal + 1) * CHUNK] = value
        self.save_one(offset, overwrite=overwrite)
        if waits:
            self.settle()

    def save_one(self, offset: int | None, *, overwrite: bool) -> None:
        step = int(self.state["step"]) + 1 if offset is None else max(0, self.number(self.live) + offset)
        self.state["half"] = self.state["half"] + np.float16(1)
        self.state["step"] = step
        fork = self.fork(step, overwrite=overwrite)
        before = self.branches[self.live if fork is None else fork]
        same = {serial for serial in before if self.number(serial) == step}
        self.ignored.clear()
        try:
            checkpoint = self.run(self.store.save(step, self.state, overwrite=overwrite))
        except Conflict:
            assert same
            assert not overwrite
            return
        assert overwrite or not same & self.steps().keys()
        told = [(event.step, event.origin, event.newest) for event in self.ignored]
        if self.origin is not None and self.origin[0] != self.live and fork is None:
            assert told == [(step, self.number(self.origin[0]), self.number(self.live))]
        else:
            assert not told
        assert checkpoint.saved is not None
        serial = checkpoint.saved.step.serial
        assert serial > max(self.steps().keys() - {serial}, default=0)
        self.saved[serial] = copied(self.state)
        self.branches[serial] = (*before, serial)
        self.live, self.origin = serial, None

    @precondition(lambda self: self.live)
    @rule()
    def settled(self) -> None:
        self.settle()

    @precondition(lambda self: self.live)
    @rule(resume=st.sampled_from([None, True, False]))
    def restore_the_newest(self, resume: bool | None) -> None:
        if not self.restored(self.steps()[self.live], resume=resume, by_number=False):
            assert self.flipped
        elif resume is not False:
            self.origin = None

    @precondition(lambda self: self.live)
    @rule(which=WHICH, key=st.none() | st.sampled_from(KEYS))
    def look_at_a_step(self, which: int, key: str | None) -> None:
        self.settle()
        info = self.chosen(which)
        if key is None:
            self.restored(info, resume=False)
            return
        try:
            found = self.run(self.store.restore(info.step, keys=[key]))
        except Corrupt as error:
            self.assert_named(info, error)
        else:
            assert found is not None
            assert_same(found.tree[key], self.saved[info.serial][key])

    @precondition(lambda self: self.live)
    @rule(
        which=WHICH,
        resume=st.sampled_from([None, True]),
        trains_on=st.booleans(),
        saves=st.lists(st.tuples(st.none() | st.integers(-2, 1), st.booleans()), max_size=3),
    )
    def restore_a_step(
        self, which: int, resume: bool | None, trains_on: bool, saves: list[tuple[int | None, bool]]
    ) -> None:
        """A step by its number, of which the trainer takes the state, or only looks at it; then what it saves."""
        self.settle()
        info = self.chosen(which)
        if self.restored(info, resume=resume):
            self.origin = info.serial, resume is True
            if trains_on:
                self.state = copied(self.saved[info.serial])
            for offset, overwrite in saves:
                self.ask_whether_a_save_is_due(4)
                self.save_one(offset, overwrite=overwrite)

    @rule(after=st.integers(0, 9))
    def ask_whether_a_save_is_due(self, after: int) -> None:
        newest = self.number(self.live)
        step = max(0, newest + after - 4)
        fork = self.fork(step, overwrite=False)
        last = newest if fork is None else self.number(fork)
        assert self.store.due(step) == (step // EVERY > (last if step >= last else 0) // EVERY)

    # -- by hand ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(which=WHICH, where=WHICH)
    def evict(self, which: int, where: int) -> None:
        self.settle()
        info = self.chosen(which)
        tier = info.tiers[where % len(info.tiers)]
        try:
            self.run(self.store.evict(info.step, tier))
        except Conflict:
            assert tier in self.steps()[info.serial].tiers
        else:
            held = self.steps().get(info.serial)
            assert held is None or tier not in held.tiers

    @precondition(lambda self: self.live)
    @rule(which=WHICH, tier=st.sampled_from(["disk", "far"]))
    def promote(self, which: int, tier: str) -> None:
        self.settle()
        info = self.chosen(which)
        try:
            self.run(self.store.promote(info.step, tier))
        except Corrupt as error:
            self.assert_named(info, error)

    @precondition(lambda self: self.live)
    @rule(which=WHICH, tier=st.sampled_from(["disk", "far"]))
    def pin(self, which: int, tier: str) -> None:
        self.settle()
        info = self.chosen(which)
        try:
            self.run(self.store.pin(info.step, tier))
        except Corrupt as error:
            self.assert_named(info, error)
        else:
            self.pinned.add((info.serial, tier))

    @precondition(lambda self: self.pinned)
    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        serial, tier = sorted(self.pinned)[which % len(self.pinned)]
        step = self.number(serial)
        self.run(self.store.pin(step, tier, on=False))
        self.pinned -= {(each, tier) for each in self.saved if self.number(each) == step}

    @precondition(lambda self: self.live)
    @rule(which=WHICH, repair=st.booleans())
    def verify(self, which: int, repair: bool) -> None:
        self.settle()
        info = self.chosen(which)
        for verified in self.run(self.store.verify(info.step, repair=repair)):
            self.assert_explained(info, verified)
            assert verified.intact or not repair or self.may_be_lost(info), verified
        if repair and not self.may_be_lost(info):
            again = self.run(self.store.verify(info.step))
            assert not any(found.problem for found in again), (info, again)

    def assert_explained(self, info: StepInfo, verified: Any) -> None:
        """What is found damaged is what was damaged."""
        damaged = {content for tier, content in self.flipped if tier == verified.tier}
        for key in verified.damaged:
            assert contents(self.saved[info.serial], key) & damaged, (info, verified)
        assert verified.damaged or not verified.problem, verified

    @rule()
    def collect(self) -> None:
        try:
            self.run(self.store.collect())
        except Corrupt:  # a chunk to be written anew is intact nowhere
            assert self.flipped

    @precondition(lambda self: self.live)
    @rule(which=WHICH, where=WHICH, key=st.sampled_from(KEYS), ordinal=st.sampled_from(ORDINALS))
    def damage_a_chunk(self, which: int, where: int, key: str, ordinal: int) -> None:
        self.settle()
        info = self.chosen(which)
        tier = info.tiers[where % len(info.tiers)]
        self.flipped.add((tier, int(self.saved[info.serial][key][ordinal * CHUNK])))
        self.run(flip_chunk(self.store, tier, info.step, key, ordinal))

    # -- at every moment ----------------------------------------------------------------------------------

    @invariant()
    def what_is_listed_was_saved_and_the_branch_goes_on(self) -> None:
        if self.opened is None:
            return
        infos = self.steps()
        assert not self.live or self.live in infos, "the newest step of the branch is gone"
        assert all(tier in infos[serial].tiers for serial, tier in self.pinned), "a pinned step has left"
        for serial, info in infos.items():
            assert info.step == self.saved[serial]["step"]
            assert info.off_branch == (serial not in self.branches[self.live])
            assert not info.damaged


async def _opened(store: CheckpointStore) -> CheckpointStore:
    return await store


def test_whatever_is_done_every_listed_step_is_what_was_saved() -> None:
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=30, stateful_step_count=30))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_is_done_for_long_every_listed_step_is_what_was_saved() -> None:
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=300, stateful_step_count=60))
