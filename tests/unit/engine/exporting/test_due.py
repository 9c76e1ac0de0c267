"""Which step is exported next: the newest that is wanted and would stay, without asking policies over and over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.records import first_record

from tieredckpt.config import ExportConfig, PosixTier
from tieredckpt.engine.exporting import due
from tieredckpt.engine.exporting.places import Record
from tieredckpt.engine.state.branch import Branch
from tieredckpt.engine.state.membership import Membership
from tieredckpt.engine.state.observation import Observation
from tieredckpt.engine.state.views import tier_view
from tieredckpt.engine.tier.steps import Held
from tieredckpt.engine.tier.tier import Tier

NAME = "hf"


def record(step: int) -> Record:
    about = {"export": NAME, "format": "safetensors", "store": "0" * 32, "saved_at": 0.0, "nbytes": 1}
    return Record(step=step, serial=step, metrics={}, **about)  # type: ignore[arg-type]


async def _nowhere() -> Any:
    raise AssertionError("this tier has no blob store")


def store_of(steps: dict[int, float]) -> Any:
    """The engine's state with steps of these losses on one tier."""
    tier = Tier("ram", 0, PosixTier(name="ram", path="/nowhere"), _nowhere)
    for step, loss in steps.items():
        held = first_record(None, step=step, serial=step, nbytes=1, metrics={"loss": loss})
        tier.steps.held[held.id] = Held(held, "")
    return SimpleNamespace(
        tiers=(tier,),
        branch=Branch(line=((1, max(steps)),)),
        membership=Membership(),
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
        found[step.step] = record(step.step)
        made.append(step.step)
        for left in due.leaving(state, export, found):
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


def test_of_many_steps_that_wait_the_best_alone_is_exported() -> None:
    """Not each of those that are better than the newer ones, to be deleted at once."""
    state = store_of({1: 4.0, 2: 1.0, 3: 2.0, 4: 3.0})
    assert order(state, export_of(keep={"kind": "best", "metric": "loss", "n": 1, "mode": "min"})) == [2]
