"""Which step is exported next: the newest that is wanted and would stay, without asking policies over and over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import pytest
from support.records import first_record

from tieredckpt.config import ExportConfig, PosixTier, RamTier
from tieredckpt.engine.exporting import due
from tieredckpt.engine.exporting.places import Record
from tieredckpt.engine.state.branch import Branch
from tieredckpt.engine.state.membership import Membership
from tieredckpt.engine.state.observation import Observation
from tieredckpt.engine.state.views import tier_view
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId
from tieredckpt.policy import Promotion, Retention, StepView, StoreView, TierView

NAME = "hf"


def record(step: int, serial: int | None = None) -> Record:
    about: dict[str, Any] = {"export": NAME, "format": "safetensors", "store": "0" * 32, "saved_at": 0.0, "nbytes": 1}
    return Record(step=step, serial=serial or step, metrics={}, **about)


class Early(Promotion):
    """What was saved first."""

    kind: Literal["test_early"] = "test_early"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return step.serial < 5


class Pairs(Retention):
    """All exports, if there are two or more."""

    kind: Literal["test_pairs"] = "test_pairs"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        found = frozenset(step.serial for step in store.steps if tier.name in step.tiers)
        return found if len(found) > 1 else frozenset()


async def _nowhere() -> Any:
    raise AssertionError("this tier has no blob store")


def store_of(steps: dict[int, float]) -> Any:
    """The engine's state with steps of these losses on one tier."""
    return saves_of([(step, step) for step in steps], losses=steps)


def saves_of(
    saves: Iterable[tuple[int, int]], *, losses: Mapping[int, float] = MappingProxyType({}), **settings: Any
) -> Any:
    """The engine's state with saves, by serial and number, on one tier; ``settings`` are its parts."""
    tier = Tier("ram", 0, settings.get("tier", PosixTier(name="ram", path="/nowhere")), _nowhere)
    for serial, step in saves:
        held = first_record(None, step=step, serial=serial, nbytes=1, metrics={"loss": losses.get(step, 0.0)})
        tier.steps.held[held.id] = Held(held, "")
    return SimpleNamespace(
        tiers=(tier,),
        branch=Branch(line=settings.get("line", ((1, max(serial for serial, _ in saves)),))),
        membership=Membership(size=settings.get("ranks", 1)),
        observation=Observation(),
        tier_view=tier_view,
    )


def exported(state: Any, export: ExportConfig, there: dict[int, Record] | None = None) -> due.Exported:
    found = due.Exported(state, export)
    found.update(there or {})
    return found


def export_of(**settings: Any) -> ExportConfig:
    return ExportConfig(name=NAME, format="safetensors", to="/nowhere", **settings)


def order(state: Any, export: ExportConfig, there: dict[int, Record] | None = None) -> list[int]:
    """The steps that are exported, one after the other."""
    found = exported(state, export, there)
    made = []
    while (step := due.next_due(state, export, found, (), busy=False)) is not None:
        found[step.step] = record(step.step, step.serial)
        made.append(step.step)
        assert len(made) < 100
        for left in due.not_kept(state, export, found):
            del found[left.step]
    return made


def test_policies_are_asked_once_about_each_step_however_many_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    export = export_of(keep=2)
    calls = {"promotes": 0, "retains": 0}

    def counted(policy: Any, name: str) -> None:
        function = getattr(type(policy), name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(type(policy), name, call)

    counted(export.when, "promotes")
    counted(export.keep, "retains")
    state = store_of(dict.fromkeys(range(1, 301), 1.0))
    there = exported(state, export, {step: record(step) for step in (299, 300)})
    assert due.next_due(state, export, there, (), busy=False) is None
    assert calls["promotes"] <= 300
    assert calls["retains"] <= 2


def test_the_newest_is_first_and_what_would_not_stay_is_not_exported() -> None:
    state = store_of(dict.fromkeys(range(1, 8), 1.0))
    assert order(state, export_of(keep=3)) == [7, 6, 5]
    assert order(state, export_of()) == [7, 6, 5, 4, 3, 2, 1]
    assert order(state, export_of(when={"kind": "every_n_steps", "n": 3}, keep=1)) == [6]
    assert order(state, export_of(keep=2), {7: record(7)}) == [6]


def test_an_export_of_a_later_save_takes_the_place_of_that_of_an_earlier_one() -> None:
    state = saves_of([(1, 1), (2, 2), (5, 2)])
    there = exported(state, export_of(), {2: record(2, 2)})
    there[2] = record(2, 5)
    assert [step.serial for step in there.view().steps if due.tier_name(export_of()) in step.tiers] == [5]
    assert [*there.waiting(())] == [StepId(1, 1)]


def test_of_several_saves_of_one_number_the_last_of_the_branch_that_can_be_is_exported() -> None:
    """Only if the policy wants just that one."""
    twice = saves_of([(1, 1), (2, 2), (5, 2)])
    assert order(twice, export_of()) == [2, 1]
    assert order(twice, export_of(when=Early())) == [1]
    stuck = due.next_due(twice, export_of(), exported(twice, export_of()), {StepId(5, 2)}, busy=False)
    assert stuck == StepId(2, 2)
    went_back = saves_of([(1, 1), (2, 2), (3, 3), (4, 3)], line=((1, 3),))  # the branch continues serial 3
    assert due.next_due(went_back, export_of(), exported(went_back, export_of()), (), busy=False) == StepId(3, 3)


def test_of_several_ranks_what_lies_in_the_ram_of_each_is_not_exported() -> None:
    ram = RamTier(name="ram", path=Path("/nowhere"))
    assert order(saves_of([(1, 1)], tier=ram), export_of()) == [1]
    assert order(saves_of([(1, 1)], tier=ram, ranks=2), export_of()) == []


def test_what_keep_would_let_go_if_it_were_there_alone_is_not_exported() -> None:
    """Else it would be made, and deleted, for ever."""
    state = store_of({1: 1.0, 2: 1.0})
    assert order(state, export_of(keep=Pairs())) == []
    assert order(state, export_of(keep=Pairs()), {1: record(1)}) == [2]


def test_of_many_steps_that_wait_the_best_alone_is_exported() -> None:
    """Not each of those that are better than the newer ones, to be deleted at once."""
    state = store_of({1: 4.0, 2: 1.0, 3: 2.0, 4: 3.0})
    assert order(state, export_of(keep={"kind": "best", "metric": "loss", "n": 1, "mode": "min"})) == [2]
