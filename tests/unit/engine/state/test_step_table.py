"""The step table is what looking at every tier anew would find, whatever came, went, or left the branch meanwhile."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.records import first_record

from tieredckpt.config import PosixTier
from tieredckpt.engine.state.step_table import Line, StepTable
from tieredckpt.engine.state.views import step_view
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.sizes import Sizes
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.structure import NoneNode
from tieredckpt.policy.steps import StepView

STORE = "00000000-0000-4000-8000-000000000000"


async def _nowhere() -> Any:
    raise AssertionError("these tiers have no blob store")


def _interrupted(*_: Any) -> StepView:
    raise KeyboardInterrupt


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


steps = st.builds(StepId, st.integers(1, 12), st.integers(0, 1))
lines = st.lists(st.integers(1, 13), unique=True, max_size=6).map(
    lambda bounds: tuple(zip(sorted(bounds)[::2], sorted(bounds)[1::2], strict=False))
)


class StepTableMachine(RuleBasedStateMachine):
    """Three tiers get and lose steps while the line goes on, back, and elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        config = PosixTier(name="any", path="/nowhere")
        self.tiers = [Tier(name, index, config, _nowhere) for index, name in enumerate("abc")]
        self.table = StepTable(self.tiers, step_view)
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

    @rule(tier=st.integers(0, 2), step=steps)
    def a_signal_ends_a_renewal(self, tier: int, step: StepId) -> None:
        """What came was taken from the news of its tier, and is not in the table yet."""
        self.comes(tier, step)
        self.table._describe = _interrupted
        with suppress(KeyboardInterrupt):
            self.table.views(self.line)
        self.table._describe = step_view

    @invariant()
    def everybody_is_called(self) -> None:
        self.check()

    @invariant()
    def a_call_that_interrupts_a_renewal_waits_for_nothing(self) -> None:
        with self.table._guards_table:
            self.check()

    def check(self) -> None:
        views, records = self.table.views(self.line), self.table.records(self.line)
        expected: dict[StepId, StepView] = {}
        for step in sorted({step for tier in self.tiers for step in tier.steps.held}):
            holding = [tier for tier in self.tiers if step in tier.steps.held]
            on_line = any(first <= step.serial <= last for first, last in self.line)
            names = tuple(tier.name for tier in holding)
            expected[step] = step_view(step, holding[0].steps.held[step].record, names, on_line)
        steps = list(expected.values())
        assert list(records) == list(expected)
        for step, held in records.items():
            assert held is next(tier.steps.held[step].record for tier in self.tiers if step in tier.steps.held)
        assert list(views.steps) == steps
        for place, name in enumerate("abc"):
            nearer = set("abc"[:place])
            assert list(views.on(name)) == [step for step in steps if name in step.tiers]
            assert list(views.on(name, line=True)) == [step for step in steps if name in step.tiers and step.on_line]
            assert list(views.waiting(name)) == [
                step for step in steps if step.on_line and name not in step.tiers and nearer & set(step.tiers)
            ]


TestStepTable = StepTableMachine.TestCase
TestStepTable.settings = settings(max_examples=60, stateful_step_count=30)


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
