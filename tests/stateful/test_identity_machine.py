"""Several stores whose folders are moved, copied, removed, unmounted and replaced, by turns with everything they do.

Whatever happens to the folders, no step of one store is returned by another, no acknowledged step is lost but by who
removes it, and nobody is refused but who writes to a copy, or restores while the steps may lie on a file system that
is not mounted.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reliability.ranks import World
from support.command_line import run
from support.scenes import CHUNK, config, crash, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore, Restored
from tieredckpt.blobs.ram.find import find_ram
from tieredckpt.errors import Conflict, NotFound, TierUnavailable

NAMES = st.sampled_from(["one", "two", "three", "mounted/run"])
WHICH = st.integers(0, 5)
"""One of the stores at hand."""
DISKS = 2
Step = tuple[int, int]
"""Serial and number."""


class IdentityMachine(RuleBasedStateMachine):
    """Stores of one name at several folders, over RAM in one root and one folder each."""

    def __init__(self) -> None:
        super().__init__()
        self.base = new_shared_folder()
        self.root = Path(ram(self.base)["path"])
        self.runner = asyncio.Runner()
        self.values: dict[str, set[int]] = {}
        """By store, what it may return: what it saved, and what it had when it was forked."""
        self.newest: dict[str, tuple[Step, int]] = {}
        """By store, the last acknowledged save that nobody has removed, and its value."""
        self.next = 0
        self.disk: int | None = None
        self.seen: dict[str, None] = {}
        """Stores that had RAM, in the order in which they came: their names are random, and a replay has others."""

    @initialize()
    def make_disks(self) -> None:
        """Two file systems, of which one is mounted at a time."""
        (self.base / "mounted").mkdir()
        for number in range(DISKS):
            (self.base / f"disk-{number}").mkdir()
            self.mount_at(self.base / f"disk-{number}", "-t", "tmpfs", "-o", "size=8m", "tmpfs")
        self.mount(0)

    def teardown(self) -> None:
        self.runner.close()
        if self.disk is not None:
            self.unmount()
        for number in range(DISKS):
            subprocess.run(["umount", str(self.base / f"disk-{number}")], check=False)
        shutil.rmtree(self.base)

    def mount_at(self, at: Path, *options: str) -> None:
        subprocess.run(["mount", *options, str(at)], check=True, capture_output=True)

    # -- what is there ------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        return self.base / name

    def settings(self, name: str) -> Any:
        tiers = {
            "ram": ram(self.base, capacity=40 * CHUNK, retain="all"),
            "disk": folder(self.path(name), promote="never", retain="all"),
        }
        return config(tiers, name="run")

    def uuid_at(self, name: str) -> str | None:
        marker = self.path(name) / "tieredckpt.json"
        return json.loads(marker.read_text())["store"] if marker.exists() else None

    def on_disk(self, path: Path) -> set[Step]:
        found = (each.parent.name.split("-") for each in path.glob("steps/*/manifest.ocdbt"))
        return {(int(serial), int(step)) for step, serial in found}

    def in_ram(self, store: str) -> set[Step]:
        return {step for each in find_ram(self.root) if each.store == store for step in each.steps}

    def kept(self, store: str) -> bool:
        """Whether the newest step of a store is anywhere, in RAM or in some folder."""
        step = self.newest[store][0]
        if step in self.in_ram(store):
            return True
        markers = [path for path in self.base.glob("**/tieredckpt.json") if self.root not in path.parents]
        return any(step in self.on_disk(path.parent) for path in markers)

    def with_ram(self, *, steps: bool) -> list[str]:
        """The stores that have RAM, or those with steps there, in an order that a replay has again."""
        there = {each.store for each in find_ram(self.root) if each.steps or not steps}
        return [store for store in self.seen if store in there]

    @invariant()
    def stores_are_seen_when_they_come(self) -> None:
        self.seen |= dict.fromkeys(each.store for each in find_ram(self.root))

    @invariant()
    def no_acknowledged_step_is_lost(self) -> None:
        for store in self.newest:
            assert self.kept(store), f"the newest step of {store}, {self.newest[store]}, is nowhere any more"

    def forget_what_went(self) -> None:
        """After a person removed something: what was there alone counts no more."""
        for store in [store for store in self.newest if not self.kept(store)]:
            del self.newest[store]

    # -- stores -------------------------------------------------------------------------------------------

    async def opened(self, name: str) -> CheckpointStore | None:
        """The store, to be written to; None for a copy, whose refusal names both folders."""
        try:
            return await CheckpointStore.open(self.settings(name))
        except Conflict as error:
            refusal = str(error)
        assert "is a copy of the store at" in refusal
        assert str(self.path(name)) in refusal
        return None

    async def restored(self, store: CheckpointStore) -> Restored | None:
        """The newest step; None if there is none, or if RAM has none and the folder's file system is not mounted."""
        try:
            return await store.restore()
        except TierUnavailable as error:
            if "is empty and on another file system than the one that had the store" not in str(error):
                raise
            return None

    async def save(self, store: CheckpointStore, *, promote: bool) -> None:
        marker = store._life.engine.state.identity.marker
        assert marker is not None
        self.next += 1
        ckpt = await store.save(self.next, {"w": np.full(CHUNK // 8, self.next)})
        assert ckpt.saved is not None
        self.values.setdefault(marker.store, set()).add(self.next)
        self.newest[marker.store] = ((ckpt.saved.step.serial, ckpt.saved.step.step), self.next)
        if promote and store._life.engine.state.tiers[1].healthy:
            await store.promote(self.next, "disk")

    def check(self, store: str, tree: Any) -> None:
        (value,) = set(tree["w"].tolist())
        assert value in self.values.get(store, ()), f"{store} returned step {value} of another store"

    @rule(name=NAMES, saves=st.integers(0, 2), promote=st.booleans(), kill=st.booleans(), back=st.booleans())
    def run(self, name: str, saves: int, promote: bool, kill: bool, back: bool) -> None:
        """A training: restore, save, and end in order or by a kill."""
        before = {store: (step in self.in_ram(store), step) for store, (step, _) in self.newest.items()}

        async def train() -> None:
            store = await self.opened(name)
            if store is None:
                return
            marker = store._life.engine.state.identity.marker
            assert marker is not None
            restored = await self.restored(store)
            if restored is not None:
                self.check(marker.store, restored.tree)
            in_ram, step = before.get(marker.store, (False, (0, 0)))
            if in_ram or step in self.on_disk(self.path(name)):
                assert restored is not None
                assert (restored.serial, restored.step) == step
            if back and restored is not None:
                first = (await store.steps())[0]
                looked_at = await store.restore(first.step)
                assert looked_at is not None
                self.check(marker.store, looked_at.tree)
                await store.restore()
            for _ in range(saves):
                await self.save(store, promote=promote)
            await (crash(store) if kill else store.close())

        self.runner.run(train())

    @rule(name=NAMES)
    def two_ranks(self, name: str) -> None:
        """A training of two ranks, which ends when its step is on disk."""

        async def train() -> None:
            world = World(2, nodes=["a", "a"])
            stores = [CheckpointStore.open(self.settings(name), ranks=each) for each in world.communicators()]
            for problem in await asyncio.gather(*stores, return_exceptions=True):
                if isinstance(problem, Exception):
                    assert "is a copy of the store at" in str(problem), problem
                    await asyncio.gather(*map(crash, stores))
                    return
            marker = stores[0]._life.engine.state.identity.marker
            assert marker is not None
            for restored in await asyncio.gather(*map(self.restored, stores)):
                if restored is not None:
                    self.check(marker.store, restored.tree)
            if stores[0]._life.engine.state.tiers[1].healthy:
                self.next += 1
                tree = {"w": np.full(CHUNK // 8, self.next)}
                saved = await asyncio.gather(*(store.save(self.next, tree, replicated=["**"]) for store in stores))
                await asyncio.gather(*(each.reached("ram") for each in saved))
                await stores[0].promote(self.next, "disk")
                assert saved[0].saved is not None
                step = saved[0].saved.step
                self.values.setdefault(marker.store, set()).add(self.next)
                self.newest[marker.store] = ((step.serial, step.step), self.next)
            await asyncio.gather(*(store.close() for store in stores))

        self.runner.run(train())

    @rule(name=NAMES)
    def look(self, name: str) -> None:
        """A reader changes nothing, and is never refused where there is a store."""
        before = {path: path.stat().st_mtime_ns for path in self.base.rglob("*") if path.is_file()}

        async def read() -> None:
            try:
                store = await CheckpointStore.open(self.settings(name), read_only=True)
            except NotFound:
                assert self.uuid_at(name) is None
                return
            restored = await self.restored(store)
            if restored is not None:
                assert store._life.engine.state.identity.marker is not None
                self.check(store._life.engine.state.identity.marker.store, restored.tree)
            await store.close()

        self.runner.run(read())
        assert {path: path.stat().st_mtime_ns for path in self.base.rglob("*") if path.is_file()} == before

    # -- folders ------------------------------------------------------------------------------------------

    def may_go(self, name: str, to: str) -> bool:
        return self.path(name).exists() and not self.path(to).exists()

    @rule(name=NAMES, to=NAMES)
    def move(self, name: str, to: str) -> None:
        if self.may_go(name, to):
            shutil.move(self.path(name), self.path(to))

    @rule(name=NAMES, to=NAMES)
    def copy(self, name: str, to: str) -> None:
        if self.may_go(name, to):
            shutil.copytree(self.path(name), self.path(to))

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        shutil.rmtree(self.path(name), ignore_errors=True)
        self.forget_what_went()

    @precondition(lambda self: self.disk is None)
    @rule(disk=st.integers(0, DISKS - 1))
    def mount(self, disk: int) -> None:
        if not any((self.base / "mounted").iterdir()):  # what is there would be hidden
            self.mount_at(self.base / "mounted", "--bind", str(self.base / f"disk-{disk}"))
            self.disk = disk

    @precondition(lambda self: self.disk is not None)
    @rule()
    def unmount(self) -> None:
        subprocess.run(["umount", str(self.base / "mounted")], check=True)
        self.disk = None

    # -- by hand ------------------------------------------------------------------------------------------

    def told(self, *arguments: object) -> str | None:
        """What a verb says; None where it refuses."""
        result = run(*arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.output if result.exit_code == 0 else None

    @rule(name=NAMES)
    def fork(self, name: str) -> None:
        before = self.uuid_at(name)
        told = self.told("fork", self.path(name), "--root", self.root)
        assert (told is None) == (before is None)
        after = self.uuid_at(name)
        if before is not None and after is not None:
            assert after != before
            self.values[after] = set(self.values.get(before, ()))
            if before in self.newest:
                step, value = self.newest[before]
                if step in self.in_ram(after) | self.on_disk(self.path(name)):
                    self.newest[after] = step, value
                if not self.kept(before):  # RAM went with the folder
                    del self.newest[before]

    @rule(name=NAMES, which=WHICH)
    def adopt(self, name: str, which: int) -> None:
        stores = self.with_ram(steps=True)
        if not stores:
            return
        store = stores[which % len(stores)]
        holds = self.on_disk(self.path(name))
        told = self.told("adopt", self.path(name), "--ram", store, "--root", self.root)
        if told is None:
            assert holds
        else:
            assert self.uuid_at(name) == store

    @rule(gone=st.booleans(), which=WHICH)
    def forget(self, gone: bool, which: int) -> None:
        stores = self.with_ram(steps=False)
        if not stores:
            return
        what = "--gone" if gone else stores[which % len(stores)]
        assert self.told("forget", what, "--root", self.root) is not None
        self.forget_what_went()


def may_mount() -> bool:
    return os.getuid() == 0 and shutil.which("mount") is not None and Path("/dev/shm").is_dir()


IdentityMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
TestIdentity = pytest.mark.skipif(not may_mount(), reason="only root mounts file systems")(IdentityMachine.TestCase)


@pytest.mark.slow
class TestIdentityForLong(IdentityMachine.TestCase):  # type: ignore[misc, valid-type]  # made at run time
    settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
