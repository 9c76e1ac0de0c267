"""A policy that gives None has no `return` where it needs one: it counts as one that fails, and is named in the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import pytest
from support.scenes import config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.policy import base
from tieredckpt.policy.base import Observed, Promotion, Schedule, StepView, StoreView, TierView


class WithoutReturn(Promotion):
    kind: Literal["test_without_return"] = "test_without_return"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> Any:
        pass


class NeverReturns(Schedule):
    kind: Literal["test_without_return"] = "test_without_return"

    def due(self, step: int, store: StoreView, observed: Observed) -> Any:
        pass


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_offered", dict(base._offered))
    base.register(WithoutReturn)
    base.register(NeverReturns)


@pytest.mark.parametrize(
    "promote",
    [
        "test_without_return",
        {"kind": "all_of", "policies": ["always", "test_without_return"]},
        {"kind": "any_of", "policies": ["never", "test_without_return"]},
    ],
    ids=["alone", "all_of", "any_of"],
)
async def test_a_promotion_without_an_answer_is_named_and_the_step_is_promoted(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture, promote: Any
) -> None:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path, promote=promote)}
    with caplog.at_level(logging.ERROR, "tieredckpt"):
        async with CheckpointStore.open(config(tiers)) as store:
            await store.save(1, tree(1))
            await store.flush()
            assert await store.where(1) == ("ram", "disk")
    assert "test_without_return: promotes() gave None" in caplog.text


async def test_a_schedule_without_an_answer_is_named_and_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config({"disk": folder(tmp_path)}, schedule="test_without_return")
    with caplog.at_level(logging.ERROR, "tieredckpt"):
        async with CheckpointStore.open(settings) as store:
            assert store.due(1)
    assert "test_without_return: due() gave None" in caplog.text
