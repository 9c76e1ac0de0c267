"""The shipped policies: each answers what its docstring says."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import tieredckpt_policies
from hypothesis import given
from hypothesis import strategies as st
from tieredckpt_policies import eviction, promotion, retention, schedule
from tieredckpt_policies.retention import Band

from tieredckpt.config import load, to_toml
from tieredckpt.config.checks import probable_mistakes
from tieredckpt.errors import Invalid
from tieredckpt.policy.base import GROUP, Observed, Policy, StepView, StoreView, TierView, answers_for_good, register
from tieredckpt.testing.policies import PolicyTests, store_views

for _policy in tieredckpt_policies.POLICIES:
    register(_policy)

NOW = 1_800_000_000.0
TIER = TierView("disk", 1, "node", None, 0, None, healthy=True)


def saved(
    serial: int, step: int, *, age: float = 0, on_line: bool = True, held: bool = True, **metrics: float
) -> StepView:
    tiers = ("ram", "disk") if held else ("ram",)
    return StepView(step, serial, NOW - age, age, 100, metrics, tiers, on_line)


def store(*steps: StepView) -> StoreView:
    return StoreView(NOW, steps, (TIER,))


class TestEveryShippedPolicy(PolicyTests):
    policies = (
        promotion.Always(),
        promotion.Never(),
        promotion.EveryNSteps(n=3, first=True),
        promotion.Every(interval=900.0),
        promotion.Best(metric="loss", n=2, mode="max"),
        promotion.OnSignal(signal="keep"),
        promotion.WhenIdle(),
        promotion.FirstAndLast(signal="preempt"),
        promotion.AnyOf(policies=(promotion.EveryNSteps(n=2), promotion.Every(interval=60.0))),
        promotion.AllOf(policies=(promotion.AnyOf(policies=(promotion.Never(),)), promotion.Always())),
        retention.All(),
        retention.LastN(n=2),
        retention.EveryK(k=5),
        retention.Best(metric="loss", n=2, mode="max"),
        retention.WithinAge(age=1000.5),
        retention.DenseThenSparse(bands=(Band(every=60.0, until=3600.0), Band(every=600.0, until=1e5))),
        retention.Union(policies=(retention.LastN(n=1), retention.Best(metric="accuracy"))),
        eviction.Oldest(),
        eviction.Largest(),
        eviction.CheapestToGetBack(),
        schedule.Always(),
        schedule.EveryNSteps(n=10),
        schedule.Every(interval=120.0),
        schedule.YoungDaly(mtbf=7200.0, observe=False, first=5.0, at_least=10.0, at_most=900.0),
        schedule.BoundedOverhead(percent=2.0, first=5.0, at_least=10.0),
    )

    def test_none_is_left_out(self) -> None:
        assert {type(policy) for policy in self.policies} == set(tieredckpt_policies.POLICIES)


def test_promotion_every_n_steps_takes_multiples() -> None:
    view = store(saved(1, 1))
    policy = promotion.EveryNSteps(n=10)
    assert [step for step in range(35) if policy.promotes(saved(2, step, held=False), TIER, view)] == [
        0,
        10,
        20,
        30,
    ]


def test_promotion_every_n_steps_takes_the_first_step_where_asked() -> None:
    new, other = saved(2, 7, held=False), saved(1, 5, on_line=False)
    assert promotion.EveryNSteps(n=10, first=True).promotes(new, TIER, store(other, new))
    assert not promotion.EveryNSteps(n=10, first=True).promotes(new, TIER, store(saved(1, 5), new))
    assert not promotion.EveryNSteps(n=10).promotes(new, TIER, store(new))


def test_promotion_by_time_counts_from_the_newest_step_there() -> None:
    policy = promotion.Every(interval=60)
    new = saved(9, 9, age=0, held=False)
    assert policy.promotes(new, TIER, store(new))
    assert policy.promotes(new, TIER, store(saved(1, 1, age=100), saved(2, 2, age=60), new))
    assert not policy.promotes(new, TIER, store(saved(1, 1, age=100), saved(2, 2, age=59), new))
    # An off-branch step is not one that a restore would take: it does not hold the next one back.
    assert policy.promotes(new, TIER, store(saved(1, 1, age=100), saved(2, 2, age=1, on_line=False), new))
    older = saved(3, 3, age=500, held=False)
    assert not policy.promotes(older, TIER, store(older, saved(4, 4, age=100)))
    # Even where a clock that was set back makes it look younger.
    assert not policy.promotes(older, TIER, store(older, saved(4, 4, age=1000)))
    # Nor does a clock that was ahead, by a year, keep the tier without a step for that year.
    assert policy.promotes(new, TIER, store(saved(4, 4, age=-365 * 86400), new))


@given(store_views())
def test_any_of_and_all_of_are_or_and_and(view: StoreView) -> None:
    parts = (promotion.EveryNSteps(n=2), promotion.EveryNSteps(n=3))
    for tier in view.tiers:
        for step in view.steps:
            said = [part.promotes(step, tier, view) for part in parts]
            assert promotion.AnyOf(policies=parts).promotes(step, tier, view) == (said[0] or said[1])
            assert promotion.AllOf(policies=parts).promotes(step, tier, view) == (said[0] and said[1])
            assert promotion.Always().promotes(step, tier, view)
            assert not promotion.Never().promotes(step, tier, view)


@given(store_views(), st.integers(1, 9))
def test_last_n_retains_the_newest_steps_of_the_line(view: StoreView, n: int) -> None:
    for tier in view.tiers:
        line = {step.serial for step in view.line_on(tier.name)}
        kept = retention.LastN(n=n).retains(tier, view)
        assert kept <= line
        assert len(kept) == min(n, len(line))
        assert all(serial > other for serial in kept for other in line - kept)


def test_after_a_rollback_last_n_counts_only_steps_that_a_restore_could_take() -> None:
    view = store(saved(1, 10), saved(2, 20), saved(3, 30, on_line=False), saved(4, 40, on_line=False), saved(5, 25))
    assert retention.LastN(n=2).retains(TIER, view) == {2, 5}
    assert retention.All().retains(TIER, view) == {1, 2, 3, 4, 5}


def test_every_k_retains_round_steps() -> None:
    view = store(saved(1, 0), saved(2, 5), saved(3, 10), saved(4, 20, on_line=False), saved(5, 30, held=False))
    assert retention.EveryK(k=10).retains(TIER, view) == {1, 3}


def test_best_retains_the_best_and_of_equals_the_newer() -> None:
    nan = float("nan")
    view = store(
        saved(1, 1, loss=2.0),
        saved(2, 2, loss=1.0),
        saved(3, 3, loss=1.0),
        saved(4, 4, loss=nan),
        saved(5, 5),
        saved(6, 6, loss=-float("inf")),
        saved(7, 7, loss=0.5, on_line=False),
        saved(8, 8, loss=0.1, held=False),
    )
    assert retention.Best(metric="loss").retains(TIER, view) == {3}
    assert retention.Best(metric="loss", n=2).retains(TIER, view) == {2, 3}
    assert retention.Best(metric="loss", n=9).retains(TIER, view) == {1, 2, 3}
    assert retention.Best(metric="loss", n=2, mode="max").retains(TIER, view) == {1, 3}
    assert retention.Best(metric="accuracy").retains(TIER, view) == frozenset()


def test_within_age_retains_the_young() -> None:
    view = store(saved(1, 1, age=61), saved(2, 2, age=60), saved(3, 3, age=1), saved(4, 4, on_line=False))
    assert retention.WithinAge(age=60).retains(TIER, view) == {2, 3}


def test_a_wrong_part_is_the_only_problem_that_is_told() -> None:
    parts: Any = [{"kind": "last_n", "n": 0}]
    with pytest.raises(Invalid) as raised:
        retention.Union(policies=parts)
    assert str(raised.value) == "Union.policies[0].n: should be greater than or equal to 1, not 0"
    with pytest.raises(Invalid, match="1 or more elements"):
        retention.Union(policies=())


@given(store_views())
def test_union_retains_what_any_part_retains(view: StoreView) -> None:
    parts = (retention.LastN(n=1), retention.EveryK(k=3), retention.WithinAge(age=1e5))
    for tier in view.tiers:
        expected = {serial for part in parts for serial in part.retains(tier, view)}
        assert retention.Union(policies=parts).retains(tier, view) == expected


def test_the_oldest_leaves_first() -> None:
    steps = (saved(7, 1), saved(3, 9), saved(5, 5))
    assert eviction.Oldest().order(steps, TIER, store(*steps)) == [3, 5, 7]


def due_steps(policy: schedule.EveryNSteps, asked: range, last: int | None) -> list[int]:
    due = []
    for step in asked:
        if policy.due(step, store(), Observed(NOW, last_save_step=last)):
            due.append(step)
            last = step
    return due


def test_a_save_is_due_at_every_multiple() -> None:
    assert due_steps(schedule.EveryNSteps(n=10), range(1, 45), None) == [10, 20, 30, 40]


def test_a_trainer_that_steps_over_a_multiple_saves_right_after_it() -> None:
    assert due_steps(schedule.EveryNSteps(n=10), range(7, 50, 7), None) == [14, 21, 35, 42]


def test_after_a_restore_the_next_multiple_is_due_and_not_the_restored_step() -> None:
    assert due_steps(schedule.EveryNSteps(n=10), range(20, 41), 20) == [30, 40]


def test_a_save_is_due_when_the_interval_has_passed() -> None:
    policy, view = schedule.Every(interval=60), store()
    assert not policy.due(5, view, Observed(NOW - 59))
    assert policy.due(5, view, Observed(NOW - 60))
    assert not policy.due(5, view, Observed(NOW - 1000, last_save_at=NOW - 59))
    assert policy.due(5, view, Observed(NOW - 1000, last_save_at=NOW - 60))


def test_a_clock_that_was_set_back_does_not_stop_saves() -> None:
    assert schedule.Every(interval=60).due(5, store(), Observed(NOW, last_save_at=NOW + 3600))


def _presets() -> list[str]:
    return sorted(p.name for p in (files(tieredckpt_policies) / "presets").iterdir() if p.name.endswith(".toml"))


@pytest.mark.parametrize("name", _presets())
def test_every_preset_is_a_complete_configuration(name: str, tmp_path: Path) -> None:
    copied = tmp_path / name
    copied.write_bytes((files(tieredckpt_policies) / "presets" / name).read_bytes())
    config = load(copied)
    assert config.tiers[0].kind == "ram"
    assert len(config.tiers) > 1
    assert probable_mistakes(config) == []
    assert load(tomllib.loads(to_toml(config))) == config


def test_presets_are_shipped() -> None:
    assert [name.removesuffix(".toml") for name in _presets()] == [
        "chfs-lustre",
        "cloud-s3",
        "frontier",
        "laptop",
        "lora",
        "preemptible",
        "single-node-nvme",
    ]


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "policies.md"


def test_the_guide_explains_every_preset_and_every_policy() -> None:
    told = set(re.findall(r"`([a-z0-9_-]+)`", "".join(re.findall(r"(?m)^\| (`[^|]*)\|", GUIDE.read_text("utf-8")))))
    kinds = {policy.model_fields["kind"].default for policy in tieredckpt_policies.POLICIES}
    assert told == kinds | {name.removesuffix(".toml") for name in _presets()}


def entry_point(policy: type[Policy]) -> tuple[str, str]:
    kind = policy.model_fields["kind"].default
    return f"{policy.question}.{kind}", f"{policy.__module__}:{policy.__qualname__}"


def test_the_package_declares_an_entry_point_for_every_policy() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    declared = tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"][GROUP]
    assert declared == dict(entry_point(policy) for policy in tieredckpt_policies.POLICIES)


class OnceSignalled(promotion.EveryNSteps):
    """Overrides the answer of a shipped policy, whose claim on it does not hold any more."""

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return bool(store.signals)


@pytest.mark.parametrize("combination", [promotion.AnyOf, promotion.AllOf])
def test_a_combination_answers_by_the_step_alone_if_all_its_policies_do(
    combination: type[promotion.AnyOf | promotion.AllOf],
) -> None:
    alone = promotion.EveryNSteps(n=2)
    assert answers_for_good(combination(policies=(alone, promotion.Never())))
    assert not answers_for_good(combination(policies=(alone, OnceSignalled(n=2))))
    assert not answers_for_good(combination(policies=(alone, promotion.Every(interval=1.0))))
