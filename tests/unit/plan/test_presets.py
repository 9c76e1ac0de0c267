"""Every preset that is shipped can be planned and simulated, and keeps a failing job going."""

from __future__ import annotations

from pathlib import Path

import pytest
import tieredckpt_policies

from tieredckpt.config import load
from tieredckpt.plan.forecast import forecast
from tieredckpt.plan.scenario import Scenario, rungs
from tieredckpt.plan.simulate import simulate

PRESETS = sorted((Path(tieredckpt_policies.__file__).parent / "presets").glob("*.toml"))
HOUR = 3600.0
GB = 10**9


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_keeps_a_failing_job_going(preset: Path) -> None:
    config = load(preset)
    made = rungs(config, 10 * GB, 1, {tier.name: 2.0 * GB for tier in config.tiers}, {})
    asked = Scenario(config, 10 * GB, 10.0, 1, made, {"process": 5 * HOUR, "node": 10 * HOUR}, restart=60.0)
    expected, found = forecast(asked), simulate(asked, 60 * HOUR, seed=1)
    assert expected.ettr > 0.85
    assert found.ettr > 0.85
    assert sum(found.failures.values()) >= 5
    assert found.saves > 0
    worst = max(loss.worst for loss in expected.losses if loss.kind in ("process", "node"))
    assert found.from_nothing == 0
    # A schedule that learns from failures saves less often than the plan foresaw when they are rarer than it was told.
    assert found.lost_mean <= max(worst, found.interval) + asked.step_seconds
    assert found.lost_most < HOUR
