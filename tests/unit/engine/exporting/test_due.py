"""Which step is exported next: the newest that is wanted and would stay, without asking policies over and over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tieredckpt.config import ExportConfig
from tieredckpt.engine.exporting import due
from tieredckpt.engine.exporting.places import Record
from tieredckpt.format.manifest import StepId
from tieredckpt.policy.base import StepView, StoreView

NAME = "hf"


def record(step: int) -> Record:
    about = {"export": NAME, "format": "safetensors", "store": "0" * 32, "saved_at": 0.0, "nbytes": 1}
    return Record(step=step, serial=step, metrics={}, **about)  # type: ignore[arg-type]


def store_of(steps: dict[int, float]) -> Any:
    """The engine's state with steps of these losses on one tier."""
    ids = [StepId(step, step) for step in steps]
    views = tuple(
        StepView(
            step=step,
            serial=step,
            saved_at=0.0,
            age=0.0,
            nbytes=1,
            metrics={"loss": loss},
            tiers=("ram",),
            on_line=True,
        )
        for step, loss in steps.items()
    )
    tier = SimpleNamespace(steps=SimpleNamespace(held=set(ids)), shared=False)
    return SimpleNamespace(
        records=lambda: dict.fromkeys(ids),
        on_line=lambda serial: True,
        tiers=[tier],
        membership=SimpleNamespace(size=1),
        view=lambda at_rest: StoreView(0.0, views, (), frozenset()),
    )


def export_of(**settings: Any) -> ExportConfig:
    return ExportConfig(name=NAME, format="safetensors", to="/nowhere", **settings)


def order(state: Any, export: ExportConfig, there: dict[int, Record] | None = None) -> list[int]:
    """The steps that are exported, one after the other."""
    found = dict(there or {})
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
    there = {step: record(step) for step in (299, 300)}
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
