"""The roll is what looking at every tier anew would find, whatever came, went, or left the branch in between."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.records import first_record

from tieredckpt.config import PosixTier
from tieredckpt.engine.state.step_table import Line, StepTable
from tieredckpt.engine.state.views import step_view
from tieredckpt.engine.tier.sizes import Sizes
from tieredckpt.engine.tier.steps import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.structure import NoneNode
from tieredckpt.policy.views import StepView, StepViews, StoreView

STORE = "00000000-0000-4000-8000-000000000000"


async def _nowhere() -> Any:
    raise AssertionError("these tiers have no blob store")


def record(step: StepId, version: int) -> StepRecord:
    return first_record(
        NoneNode(),
        store=STORE,
        step=step.step,
        serial=step.serial,
        line=((step.serial, step.serial),),
        saved_at=1000.0 * step.serial,
        nbytes=version,
        metrics={"loss": step.serial},
    )


steps = st.builds(lambda serial: StepId(serial, serial % 4), st.integers(1, 12))
lines = st.lists(st.integers(1, 13), unique=True, max_size=6).map(
    lambda bounds: tuple(zip(sorted(bounds)[::2], sorted(bounds)[1::2], strict=False))
)


class RollMachine(RuleBasedStateMachine):
    """Three tiers get and lose steps while the line goes on, back, and elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        config = PosixTier(name="any", path="/nowhere")
        self.tiers = [Tier(name, index, config, _nowhere) for index, name in enumerate("abc")]
        self.roll = StepTable(self.tiers, step_view)
        self.line: Line = ()
        self.version = 0

    @rule(tier=st.integers(0, 2), step=steps)
    def comes(self, tier: int, step: StepId) -> None:
        self.version += 1
        self.tiers[tier].steps.held[step] = Held(record(step, self.version), "")

    @rule(tier=st.integers(0, 2), step=steps, how=st.sampled_from(["pop", "del", "popitem"]))
    def goes(self, tier: int, step: StepId, how: str) -> None:
        held = self.tiers[tier].steps.held
        if how == "pop":
            held.pop(step, None)
        elif held and how == "popitem":
            held.popitem()
        elif step in held:
            del held[step]

    @rule(tier=st.integers(0, 2), some=st.lists(steps), how=st.sampled_from(["update", "|=", "setdefault"]))
    def several_come(self, tier: int, some: list[StepId], how: str) -> None:
        held = self.tiers[tier].steps.held
        self.version += 1
        added = {step: Held(record(step, self.version), "") for step in some}
        if how == "update":
            held.update(added)
        elif how == "|=":
            held |= added
        else:
            for step, each in added.items():
                held.setdefault(step, each)

    @rule(tier=st.integers(0, 2))
    def all_go(self, tier: int) -> None:
        self.tiers[tier].steps.held.clear()

    @rule(line=lines)
    def the_line_moves(self, line: Line) -> None:
        self.line = line

    @rule(serial=st.integers(1, 13))
    def the_line_goes_on(self, serial: int) -> None:
        if not self.line or serial > self.line[-1][1]:
            self.line = (*self.line, (serial, serial))

    @invariant()
    def everybody_is_called(self) -> None:
        called = self.roll.call(self.line)
        expected: dict[StepId, StepView] = {}
        for step in sorted({step for tier in self.tiers for step in tier.steps.held}):
            holding = [tier for tier in self.tiers if step in tier.steps.held]
            on_line = any(first <= step.serial <= last for first, last in self.line)
            names = tuple(tier.name for tier in holding)
            expected[step] = step_view(step, holding[0].steps.held[step].record, names, on_line)
        assert list(called.records) == list(expected)
        assert called.views == tuple(expected.values())
        for step, held in called.records.items():
            assert held is next(tier.steps.held[step].record for tier in self.tiers if step in tier.steps.held)


TestRoll = RollMachine.TestCase
TestRoll.settings = settings(max_examples=60, stateful_step_count=30)


def views(*serials: int) -> tuple[StepView, ...]:
    return tuple(
        step_view(StepId(serial, serial), record(StepId(serial, serial), 1), ("a",) * (serial % 2), serial % 3 > 0)
        for serial in serials
    )


def test_steps_seen_one_by_one_are_the_steps_seen_together() -> None:
    plain = views(*range(1, 9))
    now = 5500.0
    lazy = StepViews(plain, now, {3: 2})
    made = tuple(lazy)
    assert [step.age for step in made] == [max(0.0, now - step.saved_at) for step in plain]
    assert [step.replicas for step in made] == [2 if step.serial == 3 else 1 for step in plain]
    assert tuple(reversed(StepViews(plain, now, {3: 2}))) == made[::-1]
    assert (lazy[2:5], lazy[-1], lazy[0], len(lazy)) == (made[2:5], made[-1], made[0], len(made))
    assert lazy == made
    assert made == lazy
    assert lazy != made[1:]
    first, second = StoreView(now, lazy, ()), StoreView(now, made, ())
    assert first == second
    for tier in ("a", "b"):
        assert first.on(tier) == second.on(tier)
        assert first.line_on(tier) == second.line_on(tier)
        assert first.serials_on(tier) == second.serials_on(tier) == {step.serial for step in second.on(tier)}
    assert first.newest == second.newest


class SizesMachine(RuleBasedStateMachine):
    """A dict of sizes whose sum is always known."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Sizes[int] = Sizes()
        self.model: dict[int, int] = {}

    @rule(key=st.integers(0, 3), nbytes=st.integers(0, 9))
    def put(self, key: int, nbytes: int) -> None:
        self.sizes[key] = self.model[key] = nbytes

    @rule(key=st.integers(0, 3))
    def pop(self, key: int) -> None:
        assert self.sizes.pop(key, None) == self.model.pop(key, None)

    @rule(some=st.dictionaries(st.integers(0, 3), st.integers(0, 9)))
    def update(self, some: dict[int, int]) -> None:
        self.sizes.update(some)
        self.model.update(some)

    @rule()
    def clear(self) -> None:
        self.sizes.clear()
        self.model.clear()

    @invariant()
    def both_are_alike(self) -> None:
        assert dict(self.sizes) == self.model
        assert self.sizes.total == sum(self.model.values())
        assert all((key in self.sizes) == (key in self.model) for key in range(4))


TestSizes = SizesMachine.TestCase
