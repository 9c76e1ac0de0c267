"""A look at a store that was looked at before finds the same step due as a first look does."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.records import first_record

from tieredckpt.config import ExportConfig, PosixTier, StoreConfig
from tieredckpt.engine.exporting import due
from tieredckpt.engine.exporting.places import Record
from tieredckpt.engine.keeping.policies import any_due
from tieredckpt.engine.promoting.promoter import Promoter
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.events import Events
from tieredckpt.format.manifest import StepId
from tieredckpt.policy import Promotion, Retention, StepView, StoreView, TierView, parse


class OddBytes(Promotion):
    """Steps of an odd number of bytes go to the tier."""

    kind: Literal["odd_bytes"] = "odd_bytes"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return step.nbytes % 2 == 1

    def by_step_alone(self) -> bool:
        return True


PROMOTIONS = [
    OddBytes(),
    *(
        parse(Promotion, table)
        for table in (
            "always",
            "never",
            "when_idle",
            "first_and_last",
            {"kind": "every_n_steps", "n": 2},
            {"kind": "every_n_steps", "n": 2, "first": True},
            {"kind": "every", "interval": 2000},
            {"kind": "best", "metric": "loss"},
            {"kind": "any_of", "policies": [{"kind": "every_n_steps", "n": 2}, {"kind": "best", "metric": "loss"}]},
            {"kind": "all_of", "policies": [OddBytes(), {"kind": "every_n_steps", "n": 2}]},
        )
    ),
]
RETENTIONS = [
    parse(Retention, kind) for kind in ("all", {"kind": "last_n", "n": 2}, {"kind": "best", "metric": "loss"})
]

promotions, retentions = st.sampled_from(PROMOTIONS), st.sampled_from(RETENTIONS)
steps = st.integers(1, 9).map(lambda serial: StepId(serial, 1 + serial % 4))  # a serial is of one step


async def _nowhere() -> Any:
    raise AssertionError("these tiers have no blob store")


def state_of(tiers: tuple[Tier, ...]) -> State:
    nothing = cast(Any, None)
    config = StoreConfig.model_construct()
    return State(config=config, tiers=tiers, events=Events(), pool=nothing, scratch=nothing, read_only=False)


class LooksMachine(RuleBasedStateMachine):
    """Three tiers and an export get and lose steps, and whoever promotes looks after each change."""

    @initialize(asked=st.lists(promotions, min_size=3, max_size=3), kept=st.lists(retentions, min_size=3, max_size=3))
    def open(self, asked: list[Promotion], kept: list[Retention]) -> None:
        self.version = 0
        self.tiers = tuple(
            Tier(name, index, PosixTier(name=name, path="/nowhere", promote=asked[index], retain=kept[index]), _nowhere)
            for index, name in enumerate("abc")
        )
        self.state = state_of(self.tiers)
        self.export = ExportConfig(name="hf", format="safetensors", to="/nowhere", when=asked[0], keep=kept[0])
        self.exported = due.Exported(self.state, self.export)
        self.stuck: set[StepId] = set()

    @rule(tier=st.integers(0, 2), step=steps, loss=st.integers(0, 3))
    def comes(self, tier: int, step: StepId, loss: int) -> None:
        self.version += 1
        about = {"saved_at": 1000.0 * step.serial, "nbytes": self.version, "metrics": {"loss": loss}}
        record = first_record(None, step=step.step, serial=step.serial, **about)
        self.tiers[tier].steps.held[step] = Held(record, "")

    @rule(tier=st.integers(0, 2), step=steps, left=st.booleans())
    def goes(self, tier: int, step: StepId, left: bool) -> None:
        self.tiers[tier].steps.held.pop(step, None)
        (self.tiers[tier].steps.tombstones.add if left else self.tiers[tier].steps.tombstones.discard)(step)

    @rule(tier=st.integers(0, 2), step=steps, lacks=st.booleans())
    def is_impaired(self, tier: int, step: StepId, lacks: bool) -> None:
        impaired = self.tiers[tier].steps.impaired
        impaired.update({step: {""}}) if lacks else impaired.pop(step, None)

    @rule(step=steps)
    def gets_stuck(self, step: StepId) -> None:
        self.stuck ^= {step}

    @rule(first=st.integers(1, 9), last=st.integers(1, 9))
    def the_line_moves(self, first: int, last: int) -> None:
        self.state.branch.line = ((first, max(first, last)),)

    @rule(step=steps, loss=st.integers(0, 3))
    def is_exported(self, step: StepId, loss: int) -> None:
        about: dict[str, Any] = {"export": "hf", "format": "safetensors", "store": "0" * 32, "saved_at": 1.0}
        number, serial = step.step, step.serial
        self.exported[number] = Record(step=number, serial=serial, nbytes=1, metrics={"loss": float(loss)}, **about)

    @rule(number=st.integers(1, 4))
    def an_export_goes(self, number: int) -> None:
        self.exported.pop(number, None)

    @rule()
    def all_exports_go(self) -> None:
        self.exported.clear()

    @invariant()
    def finds_what_a_first_look_finds(self) -> None:
        if not hasattr(self, "state"):
            return
        first = state_of(self.tiers)
        first.branch = self.state.branch
        for tier in self.tiers:
            looks = [Promoter(state, *cast(Any, (None, tier, None, None))) for state in (self.state, first)]
            assert looks[0].next_due() == looks[1].next_due()
        assert any_due(self.state) == any_due(first)
        there = due.Exported(first, self.export)
        there.update(self.exported)
        found = due.next_due(self.state, self.export, self.exported, self.stuck, busy=False)
        assert found == due.next_due(first, self.export, there, self.stuck, busy=False)
        assert due.not_kept(self.state, self.export, self.exported) == due.not_kept(first, self.export, there)


TestLooks = LooksMachine.TestCase
TestLooks.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


def asked_about(state: State, tier: Tier, asked: list[int]) -> list[int]:
    """The steps that a look asks the tier's policy about."""
    asked.clear()
    Promoter(state, *cast(Any, (None, tier, None, None))).next_due()
    return sorted(asked)


class Noted(OddBytes):
    """As `OddBytes`; notes what it is asked about."""

    kind: Literal["noted"] = "noted"  # type: ignore[assignment]
    alone: bool = True

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        ASKED.append(step.step)
        return False

    def by_step_alone(self) -> bool:
        return self.alone


class Fails(OddBytes):
    """As `Noted`, and fails to say whether it answers by the step alone."""

    kind: Literal["fails"] = "fails"  # type: ignore[assignment]

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        ASKED.append(step.step)
        return False

    def by_step_alone(self) -> bool:
        raise RuntimeError("no claim")


class Overrides(Fails):
    """Says nothing of its own answer."""

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        ASKED.append(step.step)
        return False


ASKED: list[int] = []


def test_a_policy_by_the_step_alone_is_asked_about_changed_steps_only() -> None:
    """Else the cost of a save would grow with the steps that a nearer tier holds."""
    for alone in (True, False):
        near, far = (
            Tier(name, index, PosixTier(name=name, path="/nowhere", promote=Noted(alone=alone)), _nowhere)
            for index, name in enumerate("ab")
        )
        state = state_of((near, far))
        state.branch.line = ((1, 100),)
        for number in range(1, 51):
            record = first_record(None, step=number, serial=number)
            near.steps.held[record.id] = Held(record, "")
        assert asked_about(state, far, ASKED) == list(range(1, 51))
        again = [] if alone else list(range(1, 51))
        assert asked_about(state, far, ASKED) == again
        record = first_record(None, step=51, serial=51)
        near.steps.held[record.id] = Held(record, "")
        near.steps.held[StepId(7, 7)] = Held(first_record(None, step=7, serial=7, nbytes=2), "")
        assert asked_about(state, far, ASKED) == sorted({*again, 7, 51})


@pytest.mark.parametrize(("policy", "fails"), [(Fails(), True), (Overrides(), False)], ids=["fails", "overrides"])
def test_a_refusal_stays_one_whose_policy_does_not_say_how_long_it_holds(
    policy: Promotion, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = (
        Tier(name, index, PosixTier(name=name, path="/nowhere", promote=policy), _nowhere)
        for index, name in enumerate("ab")
    )
    state = state_of((near, far))
    state.branch.line = ((1, 100),)
    near.steps.held[StepId(1, 1)] = Held(first_record(None, step=1, serial=1), "")
    for _ in range(2):
        assert any_due(state) is None
        assert asked_about(state, far, ASKED) == [1]
    assert ("by_step_alone() failed" in caplog.text) is fails


@pytest.mark.parametrize("keep", ["all", 2], ids=["all", "last_n"])
@pytest.mark.parametrize("when", ["never", "first_and_last"])
def test_what_looks_for_exports_remember_does_not_grow_with_saves(when: str, keep: Any) -> None:
    """Not even while nothing is wanted."""
    (tier,) = tiers = (Tier("a", 0, PosixTier(name="a", path="/nowhere"), _nowhere),)
    state = state_of(tiers)
    state.branch.line = ((1, 2000),)
    export = ExportConfig(name="hf", format="safetensors", to="/nowhere", when=parse(Promotion, when), keep=keep)
    exported = due.Exported(state, export)
    about: dict[str, Any] = {"export": "hf", "format": "safetensors", "store": "0" * 32, "saved_at": 1.0}
    for number in range(1, 1001):
        record = first_record(None, step=number, serial=number)
        tier.steps.held[record.id] = Held(record, "")
        tier.steps.held.pop(StepId(number - 10, number - 10), None)
        found = due.next_due(state, export, exported, (), busy=False)
        if found is not None:
            exported[found.step] = Record(step=found.step, serial=found.serial, nbytes=1, metrics={}, **about)
        due.not_kept(state, export, exported)
    assert len(exported) == (when != "never")
    assert sum(map(len, tier.steps.held._changed.values())) < 10
