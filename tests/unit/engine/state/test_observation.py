"""What schedules see of saves: `Observed`."""

from __future__ import annotations

import pytest

from tieredckpt.engine.state.observation import Observation

NOW = 1_800_000_000.0


def test_the_time_of_a_training_step_leaves_the_saves_out() -> None:
    observation = Observation(lambda: NOW)
    observation.observe_save(10, NOW, 5.0)
    observation.observe_save(20, NOW + 25, 5.0)
    assert observation.observed.step_seconds == pytest.approx(2.0)


def test_a_clock_that_was_set_back_tells_nothing_of_a_training_step() -> None:
    observation = Observation(lambda: NOW)
    observation.observe_save(1, NOW, 0.5)
    observation.observe_save(2, NOW - 86400, 0.5)
    assert observation.observed.step_seconds is None
    observation.observe_save(3, NOW - 86400 + 3, 1.0)
    assert observation.observed.step_seconds == pytest.approx(2.0)
