"""How a policy is found by its kind, and what is said when it is not."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given

from tieredckpt import _registry
from tieredckpt.errors import Conflict, Invalid
from tieredckpt.policy import base as policies
from tieredckpt.policy.base import (
    GROUP,
    AnyPromotion,
    Eviction,
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
    register,
    registered,
)
from tieredckpt.testing.policies import store_views


class Milestones(Promotion):
    """The steps that were named go to the tier."""

    kind: Literal["milestones"] = "milestones"
    steps: tuple[int, ...]

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return step.step in self.steps


class Both(Promotion):
    """A step goes to the tier when both parts say so."""

    kind: Literal["both"] = "both"
    first: AnyPromotion
    second: AnyPromotion

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return self.first.promotes(step, tier, store) and self.second.promotes(step, tier, store)


class Nothing(Retention):
    """No step must stay."""

    kind: Literal["nothing"] = "nothing"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset()


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points that are installed, in place of the real ones; `register` starts empty."""
    installed: list[EntryPoint] = []
    monkeypatch.setattr(_registry, "entry_points", lambda group: [e for e in installed if e.group == group])
    monkeypatch.setattr(policies, "_offered", {})
    _registry.offered.cache_clear()
    yield installed
    _registry.offered.cache_clear()


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)


HERE = __name__


def test_a_policy_is_found_by_its_entry_point(entries: list[EntryPoint]) -> None:
    entries += [
        entry("promotion.milestones", f"{HERE}:Milestones"),
        entry("retention.nothing", f"{HERE}:Nothing"),
    ]
    assert registered(Promotion) == {"milestones": Milestones}
    assert registered(Retention) == {"nothing": Nothing}
    assert registered(Schedule) == {}
    assert parse(Promotion, {"kind": "milestones", "steps": [1, 5]}) == Milestones(steps=(1, 5))


def test_a_bare_kind_is_a_policy_with_its_defaults() -> None:
    register(Nothing)
    assert parse(Retention, "nothing") == Nothing()


def test_a_policy_is_taken_as_it_is() -> None:
    one = Nothing()
    assert parse(Retention, one) is one


def test_nested_policies_are_found_by_kind_and_dumped_whole() -> None:
    register(Milestones)
    register(Both)
    inner = {"kind": "both", "first": {"kind": "milestones", "steps": [1]}, "second": Milestones(steps=(2,))}
    nested = parse(Promotion, {"kind": "both", "first": inner, "second": {"kind": "milestones", "steps": [3]}})
    assert isinstance(nested, Both)
    assert isinstance(nested.first, Both)
    assert nested.first.second == Milestones(steps=(2,))
    assert parse(Promotion, json.loads(nested.model_dump_json())) == nested


def test_an_unknown_kind_is_answered_with_the_nearest_one() -> None:
    register(Milestones)
    register(Both)
    with pytest.raises(Invalid) as raised:
        parse(Promotion, {"kind": "milestone"})
    assert str(raised.value) == "promotion.kind: `milestone` is not a kind of promotion; did you mean `milestones`?"


def test_an_unknown_kind_like_no_other_is_answered_with_all() -> None:
    register(Milestones)
    register(Both)
    with pytest.raises(Invalid, match="there are: both, milestones"):
        parse(Promotion, {"kind": "xyz"})


def test_a_kind_of_another_question_is_named_as_such() -> None:
    register(Nothing)
    register(Both)
    with pytest.raises(Invalid, match="it answers retention"):
        parse(Promotion, "nothing")
    with pytest.raises(Invalid, match="`nothing` answers retention, not promotion"):
        parse(Promotion, Nothing())


def test_without_any_policy_it_is_said_how_to_get_them() -> None:
    with pytest.raises(Invalid, match="pip install"):
        parse(Eviction, "oldest")


@pytest.mark.parametrize("data", [3, None, ["nothing"], {}, {"kind": 3}, {"kind": None}])
def test_what_is_no_policy_is_refused(data: object) -> None:
    register(Nothing)
    with pytest.raises(Invalid, match="kind"):
        parse(Retention, data)


def test_every_problem_has_a_line_with_its_place() -> None:
    register(Milestones)
    register(Both)
    with pytest.raises(Invalid) as raised:
        parse(Promotion, {"kind": "both", "first": {"kind": "milestones", "stps": [1]}, "second": "bth", "x": 1})
    assert sorted(str(raised.value).splitlines()) == [
        "promotion.first.steps: is required",
        "promotion.first.stps: `stps` is not a setting of the promotion policy `milestones`; did you mean `steps`?",
        "promotion.second.kind: `bth` is not a kind of promotion; did you mean `both`?",
        "promotion.x: `x` is not a setting of the promotion policy `both`; there are: first, kind, second",
    ]


def test_constructing_a_policy_from_wrong_values_raises_invalid() -> None:
    with pytest.raises(Invalid, match=r"Milestones\.steps\[1\]: should be a valid integer"):
        Milestones(steps=(1, "two"))


def test_an_entry_point_that_cannot_be_imported_harms_only_its_own_kind(
    entries: list[EntryPoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "broken_policies.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    entries += [
        entry("promotion.broken", "broken_policies:Broken"),
        entry("promotion.gone", "no_such_module_here:Gone"),
        entry("promotion.milestones", f"{HERE}:Milestones"),
    ]
    with caplog.at_level(logging.WARNING, "tieredckpt"):
        assert registered(Promotion) == {"milestones": Milestones}
    assert "broken_policies:Broken" in caplog.text
    assert "RuntimeError: no licence" in caplog.text
    assert "no_such_module_here" in caplog.text
    assert parse(Promotion, {"kind": "milestones", "steps": []}) == Milestones(steps=())
    with pytest.raises(Invalid, match="RuntimeError: no licence"):
        parse(Promotion, "broken")


@pytest.mark.parametrize(
    ("question", "kind", "value", "told"),
    [
        (Promotion, "stones", "Milestones", "of the kind `milestones`"),
        (Retention, "milestones", "Milestones", "is a promotion policy"),
        (Promotion, "entry", "entry", "not a class derived from Promotion"),
    ],
)
def test_an_entry_point_that_leads_elsewhere_is_refused(
    entries: list[EntryPoint], question: type[Policy], kind: str, value: str, told: str
) -> None:
    entries.append(entry(f"{question.question}.{kind}", f"{HERE}:{value}"))
    with pytest.raises(Invalid, match=told):
        parse(question, kind)


def test_two_packages_with_the_same_kind_are_refused(entries: list[EntryPoint]) -> None:
    entries += [entry("retention.nothing", f"{HERE}:Nothing"), entry("retention.nothing", "other:Nothing")]
    with pytest.raises(Invalid, match="uninstall all but one"):
        parse(Retention, "nothing")


def test_the_same_entry_point_twice_is_one(entries: list[EntryPoint]) -> None:
    entries += [entry("retention.nothing", f"{HERE}:Nothing")] * 2
    assert parse(Retention, "nothing") == Nothing()


def test_registering_does_not_take_a_kind_from_another(entries: list[EntryPoint]) -> None:
    entries.append(entry("retention.nothing", "other:Nothing"))
    with pytest.raises(Conflict, match="other:Nothing"):
        register(Nothing)
    register(Milestones)

    class Other(Milestones):
        """Of the same kind."""

    with pytest.raises(Conflict, match="another kind"):
        register(Other)
    assert registered(Promotion) == {"milestones": Milestones}


def test_registering_again_replaces_a_class_by_its_new_version() -> None:
    def define() -> type[Promotion]:
        class Never(Promotion):
            """Nothing goes."""

            kind: Literal["never"] = "never"

            def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
                return False

        return Never

    register(define())
    newer = register(define())
    assert registered(Promotion) == {"never": newer}


def test_an_incomplete_policy_is_not_registered() -> None:
    class Unkind(Promotion):
        def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
            return True

    class Silent(Promotion):
        kind: Literal["silent"] = "silent"

    with pytest.raises(Invalid, match="literal kind"):
        register(Unkind)
    with pytest.raises(Invalid, match=r"does not define promotes\(\)"):
        register(Silent)


class Yields(Promotion):
    kind: Literal["yields"] = "yields"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> Any:
        yield step.step > 1


class Asynchronous(Promotion):
    kind: Literal["asynchronous"] = "asynchronous"

    async def promotes(self, step: StepView, tier: TierView, store: StoreView) -> Any:  # type: ignore[override]  # to be refused
        return False


def test_a_policy_that_answers_a_coroutine_is_refused() -> None:
    with pytest.raises(Invalid, match=r"promotes\(\) is to `return` its answer"):
        register(Yields)
    told = r"define promotes\(\) with `def`, not `async def`: a coroutine is no answer"
    with pytest.raises(Invalid, match=told):
        register(Asynchronous)
    with pytest.raises(Invalid, match=told):
        parse(Promotion, Asynchronous())
    with pytest.raises(Invalid, match=rf"^Both.first: .*{told}"):
        Both(first=Asynchronous(), second=Milestones(steps=(1,)))


class Alone(Promotion):
    kind: Literal["alone"] = "alone"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return step.step > 1

    def by_step_alone(self) -> bool:
        return True


class OtherAnswer(Alone):
    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return bool(store.signals)


class Mixin:
    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return bool(store.signals)


class Mixed(Mixin, Alone):
    pass


class StatesItAgain(OtherAnswer):
    def by_step_alone(self) -> bool:
        return True


class MoreFields(Alone):
    n: int = 1


def test_a_claim_is_of_the_answer_beside_or_above_it() -> None:
    """A class that overrides the answer of a shipped policy does not inherit what that says of its own answer."""
    assert [answers_for_good(each()) for each in (Alone, MoreFields, StatesItAgain)] == [True] * 3
    assert [answers_for_good(each()) for each in (OtherAnswer, Mixed)] == [False] * 2
    assert not answers_for_good(Milestones(steps=(1,)))


def test_a_retention_that_overrides_the_answer_does_not_inherit_that_it_keeps_all() -> None:
    class KeepsAll(Retention):
        kind: Literal["keeps_all"] = "keeps_all"
        retains_all = True

        def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
            return store.serials_on(tier.name)

    class KeepsNone(KeepsAll):
        def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
            return frozenset()

    assert keeps_all(KeepsAll())
    assert not keeps_all(KeepsNone())


async def _awaited(self: Promotion) -> bool:
    return True


@pytest.mark.parametrize("claim", [True, property(lambda self: True), _awaited], ids=["bool", "property", "async"])
def test_a_claim_by_the_step_alone_that_is_no_plain_method_is_refused(claim: Any) -> None:
    told = r"define by_step_alone\(\) as a method with `def`"
    odd = type("Odd", (Milestones,), {"__module__": __name__})
    type.__setattr__(odd, "by_step_alone", claim)
    with pytest.raises(Invalid, match=told):
        register(odd)
    with pytest.raises(Invalid, match=told):
        parse(Promotion, odd(steps=(1,)))


def test_a_field_of_that_name_is_refused() -> None:
    with pytest.warns(UserWarning, match="shadows an attribute"):

        class Odd(Milestones):
            by_step_alone: bool = True  # type: ignore[assignment]

    with pytest.raises(Invalid, match=r"define by_step_alone\(\) as a method with `def`"):
        register(Odd)


def test_a_policy_that_nests_without_end_is_refused() -> None:
    register(Both)
    register(Milestones)
    leaf: dict[str, Any] = {"kind": "milestones", "steps": [1]}
    data = leaf
    for _ in range(20):
        data = {"kind": "both", "first": data, "second": leaf}
    parse(Promotion, data)
    for _ in range(100_000):
        data = {"kind": "both", "first": data, "second": leaf}
    try:
        with pytest.raises(Invalid, match="flatter"):
            parse(Promotion, data)
    finally:
        while "first" in data:  # freeing it at once would recurse as deep
            data = data.pop("first")


@given(store_views())
def test_a_view_of_a_tier_is_what_the_tier_holds(store: StoreView) -> None:
    for tier in store.tiers:
        held = store.on(tier.name)
        assert [step.serial for step in held] == sorted(s.serial for s in store.steps if tier.name in s.tiers)
        assert list(store.line_on(tier.name)) == [step for step in held if step.on_line]
    line = [step.serial for step in store.steps if step.on_line]
    assert (store.newest.serial if store.newest else None) == max(line, default=None)
