"""What stays on a tier, what leaves it, and that what left does not come back by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from reliability.tiers import FaultyTiers
from support.scenes import Heard, config, crash, folder, ram, save_steps, steps_on, tree
from tieredckpt_policies.retention import LastN

from tieredckpt import CheckpointStore
from tieredckpt.engine.keeping.policies import retained
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.state.state import State
from tieredckpt.errors import NotFound, TierUnavailable
from tieredckpt.events import SaveFailed, StepEvicted, StepPromoted, StepSaved
from tieredckpt.format.manifest import StepId
from tieredckpt.policy import base
from tieredckpt.policy.base import Observed, Promotion, Retention, Schedule, StepView, StoreView, TierView


class ByTheClock(Promotion):
    """Every other time that it is asked the step is due: as one may be whose answer depends on the time."""

    kind: Literal["test_by_the_clock"] = "test_by_the_clock"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return int(store.now * 1e6) % 2 == 0


class SerialsAtFirst(Retention):
    """Serials of few steps, of many their numbers: a mistake that no sample shows."""

    kind: Literal["test_serials_at_first"] = "test_serials_at_first"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        steps = store.line_on(tier.name)
        large = any(step.nbytes > 1 for step in steps)
        return frozenset(step.step if large else step.serial for step in steps)


class Raises(Schedule):
    kind: Literal["test_raises"] = "test_raises"

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        raise ArithmeticError("a schedule with a bug")


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """These policies can be configured in the tests of this file alone."""
    monkeypatch.setattr(base, "_offered", dict(base._offered))
    base.register(ByTheClock)
    base.register(Raises)
    base.register(SerialsAtFirst)


async def test_each_tier_keeps_what_its_own_policy_retains(shared_memory: Path, tmp_path: Path) -> None:
    settings = config(
        {
            "ram": ram(shared_memory, capacity="1 MiB"),
            "disk": folder(tmp_path / "disk", retain={"kind": "last_n", "n": 3}),
            "far": folder(tmp_path / "far", survives="site", retain={"kind": "every_k", "k": 4}),
        }
    )
    async with CheckpointStore.open(settings) as store:
        await save_steps(store, *range(10))
        assert await steps_on(store, "ram") == [6, 7, 8, 9]  # all that fit: memory that is there costs nothing
        assert await steps_on(store, "disk") == [7, 8, 9]
        assert await steps_on(store, "far") == [0, 4, 8, 9]  # the newest stays, whatever the policy says


async def test_serials_of_no_step_are_no_answer_and_every_step_stays(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path, retain={"kind": "test_serials_at_first"})})
    async with CheckpointStore.open(settings) as store:
        await save_steps(store, 100, 200, 300, to="disk")
        await store.flush()
        assert await steps_on(store, "disk") == [100, 200, 300]
    assert "a policy of tier 'disk' failed; nothing is evicted from it" in caplog.text
    assert "what retains() gave, such as 100, is the serial of no step" in caplog.text


def test_what_few_steps_a_tier_retains_is_not_compared_with_the_thousands_of_a_nearer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restart the answer is asked for with each of those: to list them all each time would take seconds."""
    near, far = (TierView(name, index, "node", None, 0, None, True) for index, name in enumerate(("near", "far")))
    steps = tuple(StepView(step, step, 0.0, 0.0, 1, {}, ("near", "far")[: 1 + (step > 97)]) for step in range(1, 101))
    listed: list[str] = []
    serials_on = StoreView.serials_on
    monkeypatch.setattr(StoreView, "serials_on", lambda *asked: listed.append(asked[1]) or serials_on(*asked))
    assert retained("far", LastN(n=2), far, StoreView(0.0, steps, (near, far))) == {99, 100}
    assert listed == ["far"]


@pytest.mark.parametrize("again", [False, True], ids=["the same process", "the next process"])
async def test_what_left_a_tier_does_not_come_back(shared_memory: Path, tmp_path: Path, again: bool) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path, retain={"kind": "last_n", "n": 1})})
    store = await CheckpointStore.open(settings)
    await save_steps(store, *range(4), to="disk")
    await store.flush()
    if again:
        await crash(store)
        store = await CheckpointStore.open(settings)
    heard = Heard(store)
    await store.flush()
    assert await steps_on(store, "ram") == [0, 1, 2, 3]
    assert await steps_on(store, "disk") == [3]
    assert heard.of(StepPromoted) == []
    await crash(store)


async def test_what_was_evicted_by_hand_comes_back_by_hand_alone(tmp_path: Path) -> None:
    settings = config({"near": folder(tmp_path / "near"), "far": folder(tmp_path / "far")})
    async with CheckpointStore.open(settings) as store:
        checkpoint = await store.save(1, tree(1))
        await checkpoint.reached("far")
        await store.evict(1, "far")
        with pytest.raises(NotFound, match="does not hold step 1"):
            await store.evict(1, "far")
        await save_steps(store, 2)
        assert await store.where(1) == ("near",)
        with pytest.raises(NotFound, match="not due on tier 'far'"):
            await checkpoint.reached("far")
        assert await store.promote(1, "far") > 0
        assert await store.where(1) == ("near", "far")
        await checkpoint.reached("far")


async def test_what_could_not_be_evicted_for_it_is_not_there_yet_still_comes_there(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    settings = config({"near": folder(tmp_path / "near"), "far": folder(tmp_path / "far")})
    async with CheckpointStore.open(settings) as store:
        held = faults["far"].hold("put", key="packs/*", times=None)
        for step in (1, 2):  # the one is on its way, the other waits for that
            await store.save(step, tree(step))
        await held.reached()
        for step in (1, 2):
            with pytest.raises(NotFound, match=f"does not hold step {step}"):
                await store.evict(step, "far")
        held.release()
        await store.flush()
        for step in (1, 2):
            assert await store.where(step) == ("near", "far")


async def test_what_was_evicted_by_hand_stays_away_though_not_all_of_it_could_be_deleted(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    settings = config({"near": folder(tmp_path / "near"), "far": folder(tmp_path / "far")})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("far")
        faults["far"].fail("delete", TierUnavailable("no answer"), key="steps/*btree")
        with pytest.raises(TierUnavailable, match="no answer"):
            await store.evict(1, "far")
        await store.flush()
        assert await store.where(1) == ("near",)


async def test_events_tell_each_step_of_the_way_in_order(shared_memory: Path, tmp_path: Path) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path, retain={"kind": "last_n", "n": 1})})
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)

        def deaf(_: object) -> None:
            raise RuntimeError("a listener with a bug")

        store.subscribe(deaf)
        await save_steps(store, 1, 2)
        kinds = [(type(event), event.step, event.tier) for event in heard.events]
        assert kinds == [
            (StepSaved, 1, "ram"),
            (StepPromoted, 1, "disk"),
            (StepSaved, 2, "ram"),
            (StepPromoted, 2, "disk"),
            (StepEvicted, 1, "disk"),
        ]
        assert heard.of(SaveFailed) == []


async def test_flush_returns_though_a_promotion_depends_on_the_time(shared_memory: Path, tmp_path: Path) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path, promote="test_by_the_clock")})
    async with CheckpointStore.open(settings) as store, asyncio.timeout(20):
        for step in range(30):
            await store.save(step, {"x": step})
            await store.flush()


async def test_a_schedule_says_when_and_one_that_fails_saves(tmp_path: Path) -> None:
    tiers = {"disk": folder(tmp_path)}
    async with CheckpointStore.open(config(tiers, schedule={"kind": "every_n_steps", "n": 3})) as store:
        saved = []
        for step in range(1, 12):
            if store.due(step):
                await store.save(step, {})
                saved.append(step)
        assert saved == [3, 6, 9]
    async with CheckpointStore.open(config(tiers, schedule="test_raises")) as store:
        assert store.due(1)


async def test_that_a_step_has_come_is_told_before_it_is_told_to_have_left(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    even = folder(tmp_path / "disk", retain="all", promote={"kind": "every_n_steps", "n": 2})
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": even})) as store:
        heard = Heard(store)
        for step in (1, 2):
            await store.save(step, tree(step))
        await store.flush()
        opened = StepSource.open

        @asynccontextmanager
        async def evicted_at_once(state: State, step: StepId) -> AsyncIterator[StepSource]:
            async with opened(state, step) as source:
                yield source
            await store._life.engine.admin.evict(1, "disk")

        monkeypatch.setattr(StepSource, "open", evicted_at_once)
        await store.promote(1, "disk")
        assert [type(event) for event in heard.events if event.step == 1][1:] == [StepPromoted, StepEvicted]
