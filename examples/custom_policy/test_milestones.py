"""Tests that the policies keep the contract of all policies, and retain milestones."""

from __future__ import annotations

from milestone_policies import PromoteMilestones, RetainMilestones

from tieredckpt.policy import StepView, StoreView, TierView
from tieredckpt.testing.policies import PolicyTests


class TestMilestones(PolicyTests):
    policies = (PromoteMilestones(steps=(1, 10)), RetainMilestones(steps=(10,), newest=2))


def test_milestones_stay_beside_the_newest() -> None:
    tier = TierView("disk", 0, "node", None, 0, None, healthy=True)
    steps = tuple(StepView(step, step, 0.0, 0.0, 1, {}, ("disk",)) for step in range(5, 15))
    store = StoreView(0.0, steps, (tier,))
    assert RetainMilestones(steps=(10, 20), newest=2).retains(tier, store) == {10, 13, 14}
