"""Whatever ranks save, skip, lag behind, refuse or lose, in whatever order: a step is all ranks', or no rank's.

All ranks follow one program of saves, each at its own pace. Messages of a rank, its copies into RAM and its writes are
held up until they are released. What is drawn depends on nothing that a thread did, and the model states only what
holds in every order of the threads. At quiet points all is decided, and the model is compared.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support.cohort import Cohort, assert_whole, cohort, part
from support.insight import tier_of
from support.limits import limit
from support.rank_insight import failing, none, remembered, waiting
from support.scenes import SOON, crash, files_under, new_shared_folder

from tieredckpt import CheckpointStore
from tieredckpt.checkpoint import Checkpoint
from tieredckpt.engine.keeping.used_packs import packs_by_step
from tieredckpt.engine.ranks import ranked
from tieredckpt.errors import NoSpace, TierUnavailable
from tieredckpt.events import StepCommitted, StepPromoted, StepReplicated, StepSaved
from tieredckpt.testing.faulty import Faulty, Hold

T = TypeVar("T")

NODES = ("a", "b", "b", "a")
RANKS = st.integers(0, 3)
"""A rank; with fewer of them, the remainder."""

LOSSES = st.sampled_from([None, None, "a", "b"])
"""The node whose RAM is gone after its processes died."""

A_MOMENT = 0.3
"""Seconds that ranks wait for one that skips a save."""

TOPICS = ("log/*", "todo/*", "done/*", "found/*")
PLACES = [(verb, topic) for topic in TOPICS for verb in ("send", "recv")] + [("send_bulk", "*"), ("recv_bulk", "*")]
"""Calls of a communicator at which a rank may be held up."""

CAPACITIES = ("16 MiB", "16 MiB", "2 MiB", "1 MiB", "64 KiB")
"""Of each rank's RAM: with room for all, for a few parts, for one, for none."""

GOOD = ("copy", "lazy")
HOWS = (*GOOD, *GOOD, "refused", "full", "cancelled")
"""How a rank saves: with a tree that cannot be stored, without room, or with a call that is cancelled."""

MAY_BE_REFUSED = frozenset({"refused", "cancelled"})
"""Of these, the next save of the same step may count as the same call."""


@dataclass(eq=False)
class Save:
    """A save of the program: the same on all ranks, if all make it."""

    step: int
    attempt: str
    """Its name among the ranks."""
    seed: int
    again: bool
    """Whether its step was saved before."""
    hurried: bool
    """Whether all ranks wait only a moment for one that skips it."""
    may_fail: bool
    hows: dict[int, str] = field(default_factory=dict)
    """How each rank has made it."""
    calls: dict[int, asyncio.Task[Checkpoint]] = field(default_factory=dict)


class Problems(logging.Handler):
    """Keeps what is logged of errors that nobody expects."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.name == "asyncio":
            self.found.append(logging.Formatter().format(record))


class RanksMachine(RuleBasedStateMachine):
    """Two to four ranks on two nodes, over RAM and a shared directory."""

    def __init__(self) -> None:
        super().__init__()
        self.place = new_shared_folder()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.problems = Problems()
        for name in ("tieredckpt", "asyncio"):
            logging.getLogger(name).addHandler(self.problems)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ranked, "split", self._split(ranked.split))
        limit(self.patch, wait_longer=0.1, first_retry=0.05, last_retry=0.2, source_retry=0.1, save_again=0.1)
        limit(self.patch, last_words=1.0, find_within=1.0)
        self.steps = 0
        self.seeds = 0
        self.seeds_of: dict[int, set[int]] = {}
        """The seeds of all saves of a step."""
        self.contents: dict[int, int] = {}
        """The seed of every step that was restored, by serial."""
        self.on_disk: set[int] = set()
        """Serials that ranks were told to be on the shared tier; so below."""
        self.in_ram: set[int] = set()
        self.replicated: set[int] = set()
        self.was_full = False
        """Whether the shared tier was full since all was compared: it gives up older steps then."""
        self.holds: list[Hold] = []
        self.faulties: list[Faulty] = []
        self.opened = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, SOON + 5))

    def _split(self, split: Callable[..., Any]) -> Callable[..., Any]:
        """Hold up copies, and make some fail."""

        def held_up(flat: Any, replicated: Any, *, rank: int, **more: Any) -> Any:
            assert self.copying[rank].wait(SOON + 5)
            if (rank, self.ranks[rank]._life.engine.mode.ranked.votes.dedupe.attempt) in self.without_room:
                raise NoSpace("no room, by script")
            return split(flat, replicated, rank=rank, **more)

        return held_up

    # -- life ---------------------------------------------------------------------------------------------

    @initialize(
        size=st.integers(2, 4),
        capacity=st.sampled_from(CAPACITIES),
        replicas=st.sampled_from([1, 1, 2]),
        when_full=st.sampled_from(["wait", "skip", "replace"]),
        common=st.booleans(),
    )
    def begin(self, size: int, capacity: str, replicas: int, when_full: str, common: bool) -> None:
        self.roomy = capacity == "16 MiB"
        self.replicas = replicas
        self.settings = {
            "ram_settings": {"capacity": capacity, "replicas": replicas},
            "disk_settings": {"retain": {"kind": "all"}},
            "when_full": when_full,
            "replicated": ("common",) if common else (),
        }
        self.open(size)

    def open(self, size: int) -> None:
        opening = cohort(size, self.place / "shm", self.place / "disk", nodes=NODES[:size], **self.settings)
        self.ranks: Cohort = self.run(self.stack.enter_async_context(opening))
        self.opened = True
        self.size = size
        self.epoch = 0
        self.without_room: set[tuple[int, str]] = set()
        self.copying = [threading.Event() for _ in range(size)]
        self.patient = True
        """Whether ranks wait long for each other."""
        self.skipped = False
        """Whether some rank has skipped a save since all have counted alike."""
        self.lazy: list[tuple[Checkpoint, dict[str, Any]]] = []
        for event in self.copying:
            event.set()
        self.begin_program()

    def begin_program(self) -> None:
        self.program: list[Save] = []
        self.at = [0] * self.size
        """How many saves of the program each rank has begun."""

    @rule(dies=st.booleans(), loses=LOSSES, size=st.integers(2, 4), restores=st.booleans())
    def end_and_open_again(self, dies: bool, loses: str | None, size: int, restores: bool) -> None:
        """All ranks close or die, with saves under way, and begin anew, maybe without the RAM of a node."""
        self.note()
        if not dies and self.patient:  # else rank 0 waits for votes of ranks that have closed
            self.all_call()
        self.ranks.let_wait(A_MOMENT)
        self.run(self.ended(crash if dies else CheckpointStore.close))
        self.note()
        self.opened = False
        self.mend_disk()
        self.run(self.stack.aclose())
        assert not self.problems.found, "\n".join(self.problems.found)
        if dies and loses is not None:
            shutil.rmtree(self.place / "shm" / loses, ignore_errors=True)
        if (dies and loses is not None) or not {*NODES[: self.size]} <= {*NODES[:size]}:
            self.in_ram = self.replicated.copy() if size == self.size and self.replicas > 1 else set()
        self.open(size)
        if restores:
            self.restore_step(None)
        else:
            kept = {info.serial for info in self.run(self.ranks[0].steps())}
            assert max(kept, default=0) >= self.newest(), (kept, self.newest())

    async def ended(self, end: Callable[[CheckpointStore], Coroutine[Any, Any, None]]) -> None:
        ending = asyncio.gather(*map(end, self.ranks.stores))
        await asyncio.sleep(0)  # it has begun
        self.release_all()
        await ending
        calls = [call for save in self.program for call in save.calls.values()]
        await asyncio.gather(*calls, return_exceptions=True)

    def teardown(self) -> None:
        try:
            if self.opened and sys.exception() is None:
                self.quiet()
        finally:
            if self.opened:
                self.release_all()
                self.mend_disk()
                self.ranks.let_wait(A_MOMENT)
            self.runner.run(self.stack.aclose())
            self.runner.close()
            self.patch.undo()
            for name in ("tieredckpt", "asyncio"):
                logging.getLogger(name).removeHandler(self.problems)
            shutil.rmtree(self.place)

    # -- saves --------------------------------------------------------------------------------------------

    @rule(rank=RANKS, how=st.sampled_from(HOWS), again=st.booleans(), waits=st.booleans())
    def save(self, rank: int, how: str, again: bool, waits: bool) -> None:
        call = self.call(rank % self.size, how, again=again)
        if waits:
            self.run(_a_little(call))
        if how == "cancelled":
            call.cancel()

    @rule(how=st.sampled_from(["copy", "copy", "lazy"]), order=st.permutations(range(4)))
    def save_all(self, how: str, order: list[int]) -> None:
        for rank in order:
            if rank < self.size:
                self.call(rank, how)

    def call(self, rank: int, how: str, *, again: bool = False) -> asyncio.Task[Checkpoint]:
        """Begin the next save of a rank."""
        save = self.next_save(rank, again)
        save.hows[rank] = how
        if how == "full":
            self.without_room.add((rank, save.attempt))
        tree = part(save.seed, rank, self.size)
        if how == "refused":
            tree["bad"] = object()

        async def make() -> Checkpoint:
            capture = "lazy" if how == "lazy" else "copy"
            checkpoint = await self.ranks[rank].save(save.step, tree, overwrite=save.again, capture=capture)
            if how == "lazy":
                self.lazy.append((checkpoint, tree))
            else:
                _change(tree)
            return checkpoint

        async def begin() -> asyncio.Task[Checkpoint]:
            task = asyncio.create_task(make())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at, in time
            await asyncio.sleep(0)
            return task

        save.calls[rank] = self.run(begin())
        return save.calls[rank]

    def next_save(self, rank: int, again: bool) -> Save:
        """The next save of the program for a rank; a new one is of the last step ``again``, if all have saved that."""
        if self.at[rank] == len(self.program):
            last = self.program[-1] if self.program else None
            # A rank whose save was refused makes the same save when it calls again; after it was skipped, the first.
            if not (again and last and len(last.calls) == self.size and MAY_BE_REFUSED.isdisjoint(last.hows.values())):
                self.steps += 1
            self.seeds += 1
            self.seeds_of.setdefault(self.steps, set()).add(self.seeds)
            name = f"{self.epoch}.{self.steps}."
            attempt = f"{name}{sum(save.attempt.startswith(name) for save in self.program)}"
            again = any(save.step == self.steps for save in self.program)
            may_fail = not (self.roomy and self.patient)
            self.program.append(Save(self.steps, attempt, self.seeds, again, not self.patient, may_fail))
        self.at[rank] += 1
        return self.program[self.at[rank] - 1]

    @rule()
    def become_impatient(self) -> None:
        self.patient = False
        self.ranks.let_wait(A_MOMENT)
        for save in self.program:
            save.may_fail = True

    @rule(rank=RANKS)
    def skip(self, rank: int) -> None:
        rank %= self.size
        if self.at[rank] < len(self.program) and self.program[self.at[rank]].hurried:
            self.next_save(rank, again=False).hows[rank] = "skipped"
            self.skipped = True

    # -- orders and faults --------------------------------------------------------------------------------

    @rule(rank=RANKS, place=st.sampled_from(PLACES), nth=st.integers(1, 3))
    def hold_up(self, rank: int, place: tuple[str, str], nth: int) -> None:
        self.holds.append(self.ranks.world.hold(rank % self.size, place[0], topic=place[1], nth=nth))

    @rule(rank=RANKS)
    def hold_copies(self, rank: int) -> None:
        self.copying[rank % self.size].clear()

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        if self.holds:
            self.holds.pop(which % len(self.holds)).release()

    @rule(rank=RANKS)
    def release_copies(self, rank: int) -> None:
        self.copying[rank % self.size].set()

    @rule(seconds=st.sampled_from([0.001, 0.005, 0.02]))
    def let_things_happen(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(rank=RANKS, kind=st.sampled_from(["dead", "full", "error", "lost", "hold"]), nth=st.integers(1, 4))
    def fail_disk(self, rank: int, kind: str, nth: int) -> None:
        rank %= self.size
        if tier_of(self.ranks[rank], "disk").blobs is None:  # it is being opened again
            return
        faulty = self.ranks.faulty(rank)
        self.faulties.append(faulty)
        match kind:
            case "dead":
                faulty.kill()
            case "full":
                self.was_full = True
                faulty.fail("put", NoSpace("full, by script"), nth=nth)
            case "error" | "lost":
                faulty.fail("put", TierUnavailable("no answer, by script"), nth=nth, after=kind == "lost")
            case "hold":
                self.holds.append(faulty.hold("put", nth=nth))

    def release_all(self) -> None:
        for hold in self.holds:
            hold.release()
        for event in self.copying:
            event.set()
        self.holds.clear()

    def mend_disk(self) -> None:
        for faulty in self.faulties:
            faulty.revive()
            faulty.clear()
        self.faulties.clear()

    # -- restores -----------------------------------------------------------------------------------------

    @rule(chosen=st.none() | st.integers(0, 99))
    def restore(self, chosen: int | None) -> None:
        """All ranks restore the newest step, or another one to train on, with promotions under way."""
        self.catch_up()
        self.note()
        known = sorted({info.step for info in self.run(self.ranks[0].steps()) if info.serial in self.on_disk})
        self.restore_step(known[chosen % len(known)] if known and chosen is not None else None)

    def restore_step(self, step: int | None) -> None:
        self.wait_long()
        restored = self.run(self.ranks.restored(step, resume=step is not None))
        self.epoch += 1
        if not self.patient:
            self.ranks.let_wait(A_MOMENT)
        least = self.newest() if step is None else 0
        first = restored[0]
        if first is None:
            assert restored == [None] * self.size
            assert not least, f"serial {least} was committed, and nothing was restored"
            return
        assert first.serial >= least, f"serial {first.serial} was restored, and {least} was committed"
        assert step in (None, first.step)
        seed = self.contents.setdefault(first.serial, first.tree["epoch"])
        assert seed in self.seeds_of[first.step]
        for each in restored:
            assert_whole(each, seed)
            assert each is not None
            assert (each.step, each.serial) == (first.step, first.serial)

    def wait_long(self) -> None:
        """Once no save waits for a rank that skips it, let the ranks wait long for each other."""
        if not self.patient:
            self.run(none(self.ranks.stores, waiting))
            self.ranks.let_wait(SOON)

    def note(self) -> None:
        """Learn what the ranks were told."""
        for heard in self.ranks.heard:
            streamed = {event.serial for event in heard.of(StepSaved) if event.tier != "ram"}
            self.in_ram |= {event.serial for event in heard.of(StepCommitted)} - streamed
            self.on_disk |= {event.serial for event in heard.of(StepPromoted)}
            self.replicated |= {event.serial for event in heard.of(StepReplicated)}

    def newest(self) -> int:
        """The newest serial that was told to be where no loss has struck."""
        return max(self.on_disk | self.in_ram, default=0)

    # -- quiet points -------------------------------------------------------------------------------------

    @rule()
    def quiet(self) -> None:
        self.catch_up()
        self.wait_long()
        self.patient = True
        self.restore_step(None)  # which ends, too, what ranks keep of saves that others have skipped
        self.run(self.decided())
        self.complete_save()
        self.compare()

    def all_call(self) -> None:
        """All ranks begin the saves that others have begun."""
        for rank in range(self.size):
            while self.at[rank] < len(self.program):
                self.call(rank, "copy")

    def catch_up(self) -> None:
        """All ranks make the saves that others have made, and all calls end."""
        self.release_all()
        self.mend_disk()
        self.all_call()

        async def end() -> None:
            calls = [call for save in self.program for call in save.calls.values()]
            while any(not call.done() for call in calls) or self.lazy:
                while self.lazy:  # a later call may wait for these
                    checkpoint, tree = self.lazy.pop()
                    with suppress(Exception):
                        await checkpoint.captured()
                    _change(tree)
                await asyncio.wait(calls, timeout=0.1)

        self.run(end())

    async def decided(self) -> bool:
        """Of each save that all ranks have made, all have the step on the shared tier, or none has; whether all have.

        That is known once the tier works again: before, a call may raise the tier's error although the step gets there.
        """
        await none(self.ranks.stores, waiting)
        await self.flushed()
        await self.listed_alike()
        problems: list[str | None] = []
        for save in (save for save in self.program if len(save.calls) == self.size):
            # A call may be cancelled when its save is made, or not: only the other ranks tell.
            calls = [call for rank, call in save.calls.items() if save.hows[rank] != "cancelled"]
            problems = [await _problem(call) for call in calls]
            bad = {*save.hows.values()} - {*GOOD}
            if any(problems):
                assert all(problems), (save, problems)
                assert bad or save.may_fail or self.was_full, (save, problems)
            else:
                assert bad <= {"cancelled"}, (save, problems)
        self.begin_program()
        return not any(problems)

    def complete_save(self) -> None:
        """Whatever was before, a save of all ranks works: with little room one of several, after a skipped one two."""
        for _ in range(20 if not self.roomy else 2 if self.skipped else 1):
            self.save_all("copy", [*range(4)])
            self.program[0].may_fail |= self.skipped
            self.skipped = False
            self.catch_up()
            if self.run(self.decided()):
                return
        raise AssertionError("no save works")

    async def flushed(self) -> None:
        """Wait until all is on the tier, which may have failed, or have been full, and is tried again soon."""
        deadline = time.monotonic() + SOON
        while True:
            await none(self.ranks.stores, failing)
            try:
                return await self.ranks.flush()
            except (NoSpace, TierUnavailable):
                assert time.monotonic() < deadline

    def compare(self) -> None:
        self.note()
        self.run(none(self.ranks.stores, remembered))
        assert not self.problems.found, "\n".join(self.problems.found)
        self.restore_step(None)  # ranks tell, too, which parts have left their RAM since they voted
        listed = {serial for serial, *_ in self.run(self.listed_alike())}
        assert listed >= ({max(self.on_disk)} if self.was_full else self.on_disk), (listed, self.on_disk)
        self.on_disk &= listed
        self.was_full = False
        serials = [store._life.engine.state.branch.last_serial for store in self.ranks.stores]
        assert len({*serials}) == 1, serials
        self.no_strays()

    async def listed_alike(self) -> set[tuple[int, int, tuple[str, ...], bool]]:
        """The steps, of which all ranks say the same once they have heard what rank 0 has heard."""
        deadline = time.monotonic() + SOON
        while True:
            listed = [
                {(info.serial, info.step, info.tiers, info.off_branch) for info in await store.steps()}
                for store in self.ranks.stores
            ]
            if all(each == listed[0] for each in listed):
                return listed[0]
            assert time.monotonic() < deadline, listed
            await asyncio.sleep(0.01)

    def no_strays(self) -> None:
        """A collection deletes every file that no step refers to."""
        disk, tier = self.place / "disk", tier_of(self.ranks[0], "disk")
        for name in files_under(disk):
            with suppress(FileNotFoundError):
                os.utime(disk / name, (time.time() - 1e5,) * 2)
        tier.packs.orphans.update(dict.fromkeys(tier.packs.orphans, -1e9))  # known for long
        self.run(self.ranks[0].collect())
        used = self.run(self.ranks[0]._life.loop.call(packs_by_step(tier)))
        packs = frozenset().union(*used.values())
        steps = {f"steps/{step.step:010}-{step.serial:06}" for step in tier.steps.held}
        found = [name for name in files_under(disk) if name.startswith(("packs/", "steps/"))]
        strays = [name for name in found if name not in packs and name.rpartition("/")[0] not in steps]
        assert not strays, strays


def _change(tree: dict[str, Any]) -> None:
    tree["w"].array[:] = 0
    tree["common"][:] = 0


async def _a_little(call: asyncio.Task[Checkpoint]) -> None:
    await asyncio.wait([call], timeout=0.02)


async def _problem(call: asyncio.Task[Checkpoint]) -> str | None:
    """Why a save is not on the shared tier; None if it is."""
    try:
        await call.result().reached("disk")
    except Exception as error:
        return repr(error)
    return None


def test_a_step_is_all_ranks_or_none_whatever_the_order() -> None:
    run_state_machine_as_test(RanksMachine, settings=settings(max_examples=8, stateful_step_count=20))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_step_is_all_ranks_or_none_after_long_histories() -> None:
    run_state_machine_as_test(RanksMachine, settings=settings(max_examples=100, stateful_step_count=30))
