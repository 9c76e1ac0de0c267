"""Promise 6 against policies that answer anything, in any order, beside anything that is done by hand."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.scenes import Keeper, assert_same, config, folder, ram, tree

from tieredckpt import CheckpointStore, StoreConfig, SyncStore
from tieredckpt.errors import Conflict, NoSpace, NotFound
from tieredckpt.policy import base
from tieredckpt.policy.base import Eviction, Observed, Promotion, Retention, Schedule, StepView, StoreView, TierView

TIERS = ("ram", "disk", "far")

Answer = Callable[[Sequence[int]], Any]
"""What a policy says, given the serials that there are."""


class Script:
    """What the policies answer next, over and over."""

    answers: Iterator[Answer] = itertools.repeat(frozenset)

    @classmethod
    def next(cls, serials: Sequence[int]) -> Any:
        return next(cls.answers)(serials)


class AnyPromotion(Promotion):
    kind: Literal["test_any"] = "test_any"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> Any:
        return Script.next([step.serial for step in store.steps])


class AnyRetention(Retention):
    kind: Literal["test_any"] = "test_any"

    def retains(self, tier: TierView, store: StoreView) -> Any:
        serials = [step.serial for step in store.on(tier.name)]
        # What answers strangely on the sample that a configuration is tried with is refused there.
        return Script.next(serials) if store.now else frozenset(serials)


class AnyEviction(Eviction):
    kind: Literal["test_any"] = "test_any"

    def order(self, candidates: Sequence[StepView], tier: TierView, store: StoreView) -> Any:
        return Script.next([step.serial for step in candidates])


class AnySchedule(Schedule):
    kind: Literal["test_any"] = "test_any"

    def due(self, step: int, store: StoreView, observed: Observed) -> Any:
        return Script.next([step.serial for step in store.steps])


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


def _do(store: SyncStore, action: str, step: int, chosen: int) -> int:
    """Do one thing; returns the newest step."""
    match action:
        case "save":
            store.save(step + 1, tree(step + 1))
            return step + 1
        case "flush":
            with suppress(NoSpace):  # of a tier whose policies keep everything
                store.flush()
        case "collect":
            store.collect()
        case "signal":
            store.signal("preempt", on=chosen % 2 == 0)
        case "due":
            assert store.due(step) in (True, False)
        case tier:
            with suppress(Conflict, NotFound):
                store.evict(chosen % (step + 1), tier)
    return step


def _life(opened: StoreConfig, actions: Iterator[tuple[str, int]], step: int) -> int:
    """Open a store and do things until it is to be opened anew; the newest step is what it is when it comes back."""
    with CheckpointStore.open(opened).sync() as store:
        keeper = Keeper(store._store, TIERS)
        for info in store.steps():
            for tier in info.tiers:
                keeper.held.setdefault(tier, set()).add(info.serial)
        restored = store.restore()
        assert (0 if restored is None else restored.step) == step
        if restored is not None:
            assert_same(restored.tree, tree(step))
        for action, chosen in actions:
            if action == "reopen":
                break
            step = _do(store, action, step, chosen)
            assert keeper.broken == []
    assert keeper.broken == []
    return step


TRAINING = 3 * [*4 * [("save", 0)], ("flush", 0)]


def always_the_same(test: Callable[..., None]) -> Callable[..., None]:
    """Try each answer alone, too, and by turns with that of a retention that keeps nothing: then others are asked."""
    for answer in ANSWERS:
        for answers in ([answer], [lambda serials: frozenset(), answer]):
            test = example(answers=answers, actions=[*TRAINING, ("collect", 0)])(test)
    return test


@always_the_same
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    answers=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=30),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 20)), min_size=4, max_size=16),
)
def test_whatever_policies_answer_and_whatever_is_done_the_newest_step_comes_back(
    shared_memory: Path, tmp_path: Path, answers: list[Answer], actions: list[tuple[str, int]]
) -> None:
    Script.answers = itertools.cycle(answers)
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
            step = _life(store, todo, step)
        assert _life(store, iter(()), step) == step
    finally:
        for path in (tmp_path / "disk", tmp_path / "far", shared_memory / "of-test"):
            shutil.rmtree(path, ignore_errors=True)
