"""Whatever ranks call `restore`, wait in vain, or are cancelled: one that all call brings all of them the same step.

The ranks are in one process. Where some are to be missed they wait for each other a moment, else as long as it takes.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.cohort import Cohort, assert_whole, cohort
from support.limits import limit
from support.scenes import SOON, new_shared_folder

from tieredckpt.checkpoint import Restored
from tieredckpt.errors import RanksUnavailable

T = TypeVar("T")

RANKS = range(3)
A_MOMENT = 0.3
"""Seconds that ranks wait for those that do not come."""

PLACES = [
    (verb, topic)
    for topic in ("log/*", "restore/*", "reading/*", "exchange/*", "restored/*")
    for verb in ("send", "recv")
]
"""Calls of a communicator at which a rank may be cancelled; each rank makes some of them."""

Outcome = Restored | BaseException | None


class RestoresMachine(RuleBasedStateMachine):
    """Three ranks on two nodes, over RAM and a shared directory."""

    def __init__(self) -> None:
        super().__init__()
        self.place = new_shared_folder()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.branch: list[int] = []
        self.origin: int | None = None
        """The step at which the next save forks."""
        self.saved = 0

    @initialize()
    def open(self) -> None:
        opening = cohort(3, self.place / "shm", self.place / "disk", nodes=["a", "b", "b"], rank_deadline=SOON)
        self.ranks: Cohort = self.run(self.stack.enter_async_context(opening))
        self.save()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, SOON))

    @contextmanager
    def soon_given_up(self) -> Iterator[None]:
        """Ranks wait a moment for each other."""
        groups = [store._life.engine.mode.ranked.group for store in self.ranks.stores]
        try:
            for each in groups:
                each.deadline = A_MOMENT
            yield
        finally:
            for each in groups:
                each.deadline = SOON

    async def outcomes(
        self, ranks: Sequence[int], step: int | None = None, resume: bool | None = None
    ) -> list[Outcome]:
        restoring = (self.ranks[rank].restore(step, resume=resume) for rank in ranks)
        return list(await asyncio.gather(*restoring, return_exceptions=True))

    def assert_restored(self, outcomes: Sequence[Outcome], step: int) -> None:
        for outcome in outcomes:
            assert isinstance(outcome, Restored), outcome
            assert outcome.step == step
            assert_whole(outcome, step)

    # -- what all do --------------------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        self.saved += 1

        async def save() -> None:
            await self.ranks.reached(await self.ranks.save(self.saved), "disk")

        self.run(save())
        if self.origin is not None:
            del self.branch[self.branch.index(self.origin) + 1 :]
        self.branch.append(self.saved)
        self.origin = None
        for store in self.ranks.stores:
            assert [info.step for info in self.run(store.steps()) if not info.off_branch] == self.branch

    @rule()
    def restore(self) -> None:
        self.assert_restored(self.run(self.outcomes(RANKS)), self.branch[-1])
        self.origin = None

    @precondition(lambda self: len(self.branch) > 1)
    @rule(data=st.data(), resume=st.sampled_from([None, True, False]))
    def restore_a_step(self, data: st.DataObject, resume: bool | None) -> None:
        step = data.draw(st.sampled_from(self.branch))
        self.assert_restored(self.run(self.outcomes(RANKS, step, resume=resume)), step)
        if resume is not False:
            self.origin = step if resume else None  # every save is above the newest step

    # -- what only some do --------------------------------------------------------------------------------

    @rule(ranks=st.sets(st.sampled_from(RANKS), min_size=1, max_size=2), oldest=st.booleans())
    def restore_without_the_others(self, ranks: set[int], oldest: bool) -> None:
        with self.soon_given_up():
            outcomes = self.run(self.outcomes(sorted(ranks), self.branch[0] if oldest else None))
        for outcome in outcomes:
            assert isinstance(outcome, RanksUnavailable)
            assert set(outcome.ranks) - ranks, "it names who did not come"

    @rule(first=st.sets(st.sampled_from(RANKS), min_size=1, max_size=2))
    def join_late(self, first: set[int]) -> None:
        async def join() -> list[Outcome]:
            early = asyncio.create_task(self.outcomes(sorted(first)))
            if 0 not in first:
                calls = len(self.ranks.world.calls)
                while not any(topic.startswith("log/") for _, _, topic in self.ranks.world.calls[calls:]):
                    await asyncio.sleep(0.001)
            late = await self.outcomes([rank for rank in RANKS if rank not in first])
            return [*await early, *late]

        self.assert_restored(self.run(join()), self.branch[-1])
        self.origin = None

    @rule(victim=st.sampled_from(RANKS), at=st.sampled_from(PLACES))
    def cancel_one(self, victim: int, at: tuple[str, str]) -> None:
        async def cancel() -> list[Outcome]:
            held = self.ranks.world.hold(victim, at[0], topic=at[1])
            restoring = [asyncio.create_task(store.restore()) for store in self.ranks.stores]
            reached = asyncio.create_task(held.reached())
            await asyncio.wait([reached, restoring[victim]], return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
            restoring[victim].cancel()
            held.release()
            await asyncio.gather(reached, return_exceptions=True)
            return list(await asyncio.gather(*restoring, return_exceptions=True))

        with self.soon_given_up():
            outcomes = self.run(cancel())
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, Restored):
                self.assert_restored([outcome], self.branch[-1])
            else:
                # A victim that came to that call late was told before that the others have not come.
                assert isinstance(outcome, RanksUnavailable | asyncio.CancelledError)
                assert isinstance(outcome, RanksUnavailable) or rank == victim
        self.restore()  # the others may have restored it and go on from there, and the victim not

    def teardown(self) -> None:
        try:
            if self.branch:
                self.restore()
                self.save()
                self.restore()
        finally:
            self.runner.run(self.stack.aclose())
            self.runner.close()
            shutil.rmtree(self.place)


def test_a_restore_that_all_ranks_call_is_the_same_for_all_whatever_was_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, wait_longer=0.1)
    run_state_machine_as_test(RestoresMachine, settings=settings(max_examples=6, stateful_step_count=8))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_restore_that_all_ranks_call_is_the_same_for_all_after_long_histories(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, wait_longer=0.1)
    run_state_machine_as_test(RestoresMachine, settings=settings(max_examples=60, stateful_step_count=12))
