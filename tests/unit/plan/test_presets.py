"""Every preset that is shipped can be planned and simulated, and keeps a failing job going."""

from __future__ import annotations

from pathlib import Path

import pytest
import tieredckpt_policies

from tieredckpt.blobs.base import Survives
from tieredckpt.config import load
from tieredckpt.config.kinds import kind_of
from tieredckpt.plan.forecast import forecast
from tieredckpt.plan.scenario import Scenario, doubts, rungs
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


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_for_several_nodes_works_on_them_as_it_is_written(preset: Path) -> None:
    config = load(preset)
    if preset.stem in ("laptop", "lora", "single-node-nvme"):  # of one machine, and told to be
        assert doubts(config, 2, 10 * GB)
        return
    assert doubts(config, 16, 10 * GB) == []
    made = rungs(config, 10 * GB, 16, {}, {})
    asked = Scenario(config, 10 * GB, 10.0, 16, made, {"node": 5 * HOUR}, restart=60.0)
    found = simulate(asked, 60 * HOUR, seed=1)
    assert found.failures["node"] >= 5
    assert found.from_nothing == 0
    shared = {tier.name for tier in config.tiers if kind_of(tier).survives(tier) is Survives.SITE}
    copied = {rung.name for rung in made if asked.copied_after(rung) is not None}
    assert found.restores.keys() <= shared | copied
