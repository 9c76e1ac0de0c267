"""Promise 6 against policies that answer anything, in any order, beside anything that is done by hand."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.scenes import SOON, Keeper, assert_same, config, folder, ram, tree

from tieredckpt import CheckpointStore, StoreConfig
from tieredckpt.errors import Conflict, NoSpace, NotFound
from tieredckpt.policy import base
from tieredckpt.policy.base import Eviction, Observed, Promotion, Retention, Schedule, StepView, StoreView, TierView

TIERS = ("ram", "disk", "far")
QUESTIONS = ("due", *(f"{what} {tier}" for what in ("promotes", "retains", "order") for tier in TIERS))

Answer = Callable[[Sequence[int]], Any]
"""What a policy says, given the serials that there are."""


class Script:
    """What the policies answer next to each question, over and over."""

    answers: ClassVar[dict[str, Iterator[Answer]]]

    @classmethod
    def next(cls, question: str, serials: Sequence[int]) -> Any:
        return next(cls.answers[question])(serials)


class AnyPromotion(Promotion):
    kind: Literal["test_any"] = "test_any"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> Any:
        return Script.next(f"promotes {tier.name}", [step.serial for step in store.steps])


class AnyRetention(Retention):
    kind: Literal["test_any"] = "test_any"

    def retains(self, tier: TierView, store: StoreView) -> Any:
        serials = [step.serial for step in store.on(tier.name)]
        # What answers strangely on the sample that a configuration is tried with is refused there.
        return Script.next(f"retains {tier.name}", serials) if store.now else frozenset(serials)


class AnyEviction(Eviction):
    kind: Literal["test_any"] = "test_any"

    def order(self, candidates: Sequence[StepView], tier: TierView, store: StoreView) -> Any:
        return Script.next(f"order {tier.name}", [step.serial for step in candidates])


class AnySchedule(Schedule):
    kind: Literal["test_any"] = "test_any"

    def due(self, step: int, store: StoreView, observed: Observed) -> Any:
        return Script.next("due", [step.serial for step in store.steps])


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tieredckpt")  # every strange answer is logged
    monkeypatch.setattr(base, "_offered", dict(base._offered))
    for hostile in (AnyPromotion, AnyRetention, AnyEviction, AnySchedule):
        base.register(hostile)


def _raises(error: BaseException) -> Answer:
    def answer(serials: Sequence[int]) -> Any:
        raise error

    return answer


ANSWERS: list[Answer] = [
    lambda serials: True,
    lambda serials: False,
    lambda serials: None,
    lambda serials: "all",
    lambda serials: object(),
    lambda serials: frozenset(),
    frozenset,
    lambda serials: frozenset(serials[:1]),
    lambda serials: frozenset({-1, 10**9}),
    list,
    lambda serials: list(reversed(serials)) * 2,
    lambda serials: [[], {}, 7, *serials],
    lambda serials: {"x": 1},
    lambda serials: (serial for serial in serials),
    lambda serials: itertools.count(),
    _raises(ZeroDivisionError("a policy with a bug")),
    _raises(RecursionError()),
    _raises(SystemExit(3)),
]

ACTIONS = ["save", "save", "save", "flush", "collect", "signal", "reopen", "due", *TIERS]


async def _do(store: CheckpointStore, action: str, step: int, chosen: int) -> int:
    """Do one thing; returns the newest step."""
    match action:
        case "save":
            await store.save(step + 1, tree(step + 1))
            return step + 1
        case "flush":
            with suppress(NoSpace):  # of a tier whose policies keep everything
                await store.flush()
        case "collect":
            await store.collect()
        case "signal":
            store.signal("preempt", on=chosen % 2 == 0)
        case "due":
            assert store.due(step) in (True, False)
        case tier:
            with suppress(Conflict, NotFound):
                await store.evict(chosen % (step + 1), tier)
    return step


async def _life(opened: StoreConfig, actions: Iterator[tuple[str, int]], step: int) -> int:
    """Open a store and do things until it is to be opened anew; the newest step is what it is when it comes back."""
    async with asyncio.timeout(SOON), CheckpointStore.open(opened) as store:
        keeper = Keeper(store, TIERS)
        for info in await store.steps():
            for tier in info.tiers:
                keeper.held.setdefault(tier, set()).add(info.serial)
        restored = await store.restore()
        assert (0 if restored is None else restored.step) == step
        if restored is not None:
            assert_same(restored.tree, tree(step))
        for action, chosen in actions:
            if action == "reopen":
                break
            step = await _do(store, action, step, chosen)
            assert keeper.broken == []
    assert keeper.broken == []
    return step


TRAINING = [*2 * [*4 * [("save", 0)], ("flush", 0)], ("due", 0), ("collect", 0)]


def with_each_answer_alone(test: Callable[..., Any]) -> Callable[..., Any]:
    """Add an example for each answer, in which it is the only answer to all questions but four.

    The answers to those four see to it that the others are asked: the disk gets every step, and what it does not retain
    leaves it; RAM and the far tier retain nothing, so that their eviction is asked.
    """
    others: dict[str, list[Answer]] = {
        "promotes disk": [lambda serials: True],
        "order disk": [list],
        "retains ram": [lambda serials: frozenset()],
        "retains far": [lambda serials: frozenset()],
    }
    for answer in ANSWERS:
        test = example(answers={question: [answer] for question in QUESTIONS} | others, actions=TRAINING)(test)
    return test


@with_each_answer_alone
@settings(
    max_examples=25,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    answers=st.fixed_dictionaries(dict.fromkeys(QUESTIONS, st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=8))),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 20)), min_size=4, max_size=16),
)
async def test_whatever_policies_answer_and_whatever_is_done_the_newest_step_comes_back(
    shared_memory: Path, tmp_path: Path, answers: dict[str, list[Answer]], actions: list[tuple[str, int]]
) -> None:
    Script.answers = {question: itertools.cycle(script) for question, script in answers.items()}
    hostile = {"retain": "test_any", "evict": "test_any"}
    tiers = {
        "ram": ram(shared_memory, capacity="1 MiB", **hostile),
        "disk": folder(tmp_path / "disk", promote="test_any", **hostile),
        "far": folder(tmp_path / "far", capacity="1 MiB", promote="test_any", **hostile),
    }
    store = config(tiers, schedule="test_any", when_full="replace")
    todo, step = iter(actions), 0
    try:
        for _ in range(1 + [action for action, _ in actions].count("reopen")):
            step = await _life(store, todo, step)
        assert await _life(store, iter(()), step) == step
    finally:
        for path in (tmp_path / "disk", tmp_path / "far", shared_memory / "of-test"):
            shutil.rmtree(path, ignore_errors=True)
