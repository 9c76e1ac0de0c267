"""Conformance suite of policies: subclass `PolicyTests` to test a policy of your own.

::

    class TestMilestones(PolicyTests):
        policies = (Milestones(steps=(1, 10, 100)),)

The policies must be found by their kind: install the package that offers them, or `register` the classes.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tieredckpt.config import load
from tieredckpt.errors import Invalid
from tieredckpt.policy.base import (
    QUESTIONS,
    Eviction,
    Observed,
    Policy,
    Promotion,
    Retention,
    Schedule,
    StepView,
    StoreView,
    TierView,
    answers_for_good,
    keeps_all,
    parse,
    registered,
)

__all__ = ["PolicyTests", "answers", "observations", "store_views"]

_TIERS = ("ram", "nvme", "lustre")

_many = settings(
    max_examples=60,
    deadline=None,
    # An inherited test runs once per subclass, each with policies of its own. Speed depends on the machine.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


@st.composite
def store_views(draw: st.DrawFn) -> StoreView:
    """Stores of one to three tiers and up to eight steps, with rollbacks, gaps, signals and strange metrics."""
    names = _TIERS[: draw(st.integers(1, 3))]
    tiers = tuple(
        TierView(
            name=name,
            index=index,
            survives=("process", "node", "site")[index],
            capacity=draw(st.none() | st.integers(1, 2**50)),
            used=draw(st.integers(0, 2**50)),
            write_bandwidth=draw(st.none() | st.floats(1, 1e12)),
            healthy=draw(st.booleans()),
            promoting=draw(st.booleans()),
        )
        for index, name in enumerate(names)
    )
    serials = sorted(draw(st.sets(st.integers(1, 50), max_size=8)))
    ages = sorted(draw(st.lists(st.floats(0, 1e6), min_size=len(serials), max_size=len(serials))), reverse=True)
    now = 1.8e9
    steps = tuple(
        StepView(
            step=draw(st.integers(0, 40)),
            serial=serial,
            saved_at=now - age,
            age=age,
            nbytes=draw(st.integers(0, 2**40)),
            metrics=draw(st.dictionaries(st.sampled_from(("loss", "accuracy")), st.floats())),
            tiers=tuple(sorted(draw(st.sets(st.sampled_from(names), min_size=1)), key=names.index)),
            on_line=draw(st.booleans()),
        )
        for serial, age in zip(serials, ages, strict=True)
    )
    signals = draw(st.frozensets(st.sampled_from(("preempt", "keep"))))
    return StoreView(now=now, steps=steps, tiers=tiers, signals=signals)


@st.composite
def observations(draw: st.DrawFn) -> Observed:
    """Observations that a trainer's process may have made, before its first save and after."""
    started_at = 1.8e9 - draw(st.floats(0, 1e6))
    saves = draw(st.integers(0, 1000))
    return Observed(
        started_at=started_at,
        last_save_step=draw(st.integers(0, 10_000)) if saves else None,
        last_save_at=started_at + draw(st.floats(0, 1e6)) if saves else None,
        save_count=saves,
        stall_seconds=draw(st.floats(0, 1e3)) if saves else None,
        step_seconds=draw(st.none() | st.floats(1e-6, 1e4)),
        promotion_seconds=draw(st.none() | st.floats(0, 1e5)),
        failures=draw(st.integers(0, 1000)),
        trained_seconds=draw(st.floats(0, 1e9)),
        stalled_seconds=draw(st.floats(0, 1e6)),
        lost_seconds=draw(st.floats(0, 1e6)),
    )


def answers(policy: Policy, store: StoreView, observed: Observed, step: int = 0) -> list[object]:
    """Every answer of ``policy`` about ``store``: for each tier and step, or for the trainer at ``step``."""
    match policy:
        case Promotion():
            return [policy.promotes(one, tier, store) for tier in store.tiers for one in store.steps]
        case Retention():
            return [policy.retains(tier, store) for tier in store.tiers]
        case Eviction():
            return [policy.order(store.on(tier.name), tier, store) for tier in store.tiers]
        case Schedule():
            return [policy.due(step, store, observed)]
        case _:
            raise Invalid(f"{policy!r} answers none of the questions")


@contextmanager
def _another_day() -> Iterator[None]:
    """Another time of day and other random numbers."""
    state = random.getstate()
    random.seed(state[1][0] + 1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for clock in ("time", "monotonic", "perf_counter"):
                patch.setattr(time, clock, lambda: 4e9)
            yield
    finally:
        random.setstate(state)


class PolicyTests:
    """A policy is pure and deterministic, frozen, and the same after a trip through JSON or TOML."""

    policies: ClassVar[Sequence[Policy]]
    """The policies under test: of every class, with settings that are not the defaults."""

    @_many
    @given(store=store_views(), observed=observations(), step=st.integers(0, 10_000))
    def test_equal_views_get_equal_answers(self, store: StoreView, observed: Observed, step: int) -> None:
        for policy in self.policies:
            note(repr(policy))
            first = answers(policy, store, observed, step)
            with _another_day():
                assert answers(policy, copy.deepcopy(store), observed, step) == first

    @_many
    @given(store=store_views(), observed=observations(), step=st.integers(0, 10_000))
    def test_asking_changes_nothing(self, store: StoreView, observed: Observed, step: int) -> None:
        for policy in self.policies:
            note(repr(policy))
            before = repr((policy, store))
            answers(policy, store, observed, step)
            assert repr((policy, store)) == before

    @_many
    @given(store=store_views(), observed=observations(), step=st.integers(0, 10_000))
    def test_answers_keep_to_the_question(self, store: StoreView, observed: Observed, step: int) -> None:
        for policy in self.policies:
            note(repr(policy))
            given_answers = answers(policy, store, observed, step)
            if isinstance(policy, Promotion | Schedule):
                assert all(isinstance(answer, bool) for answer in given_answers)
                continue
            for tier, answer in zip(store.tiers, given_answers, strict=True):
                held = [one.serial for one in store.on(tier.name)]
                if isinstance(policy, Retention):
                    assert isinstance(answer, frozenset)
                    assert answer <= set(held)
                    assert answer == set(held) or not keeps_all(policy)
                else:
                    assert isinstance(answer, list)
                    assert sorted(answer) == held

    @_many
    @given(store=store_views(), other=store_views())
    def test_an_answer_by_the_step_alone_is_the_same_in_another_store(self, store: StoreView, other: StoreView) -> None:
        for policy in self.policies:
            if isinstance(policy, Promotion) and answers_for_good(policy):
                note(repr(policy))
                for step in store.steps:
                    elsewhere = replace(step, age=step.age + 1, tiers=(), on_line=not step.on_line, replicas=2)
                    given_answers = {policy.promotes(step, tier, store) for tier in store.tiers}
                    assert {policy.promotes(elsewhere, tier, other) for tier in other.tiers} == given_answers

    def test_it_never_proposes_to_lose_everything(self) -> None:
        """A retention keeps some steps of a tier with every number and metric: others are not configured."""
        for policy in self.policies:
            if isinstance(policy, Retention):
                load({"tiers": {"disk": {"kind": "posix", "path": "/checkpoints", "retain": policy}}})

    def test_it_cannot_be_changed(self) -> None:
        for policy in self.policies:
            for name in type(policy).model_fields:
                with pytest.raises(ValidationError, match="frozen"):
                    setattr(policy, name, getattr(policy, name))
            # A list or dict among the settings could be changed, and has no hash.
            assert hash(policy) == hash(policy.model_copy(deep=True))

    def test_it_comes_back_from_json(self) -> None:
        for policy in self.policies:
            assert parse(_question(policy), json.loads(policy.model_dump_json())) == policy

    def test_it_comes_back_from_what_toml_can_say(self) -> None:
        for policy in self.policies:
            table = policy.model_dump(mode="json", exclude_none=True)
            assert _is_toml(table)
            assert parse(_question(policy), table) == policy

    def test_it_is_found_by_its_kind(self) -> None:
        for policy in self.policies:
            assert registered(_question(policy))[policy.kind] is type(policy)

    def test_unknown_settings_are_refused(self) -> None:
        for policy in self.policies:
            with pytest.raises(Invalid, match="no_such_setting"):
                parse(_question(policy), {**policy.model_dump(mode="json"), "no_such_setting": 1})

    def test_it_says_what_it_answers(self) -> None:
        for policy in self.policies:
            assert type(policy).__doc__, f"{type(policy).__name__} needs a docstring"


def _question(policy: Policy) -> type[Policy]:
    return next(base for base in QUESTIONS if isinstance(policy, base))


def _is_toml(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_toml(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_toml, value))
    return isinstance(value, str | int | float)
