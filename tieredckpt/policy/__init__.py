"""Policies: the questions they answer (`base`) and the frozen views they see (`views`)."""

from __future__ import annotations

from tieredckpt.policy.base import (
    GROUP,
    QUESTIONS,
    AnyEviction,
    AnyPromotion,
    AnyRetention,
    AnySchedule,
    Eviction,
    Observed,
    Policy,
    Promotion,
    Retention,
    Schedule,
    StepView,
    StoreView,
    TierView,
    decided,
    offer,
    parse,
    register,
    registered,
)

__all__ = [
    "GROUP",
    "QUESTIONS",
    "AnyEviction",
    "AnyPromotion",
    "AnyRetention",
    "AnySchedule",
    "Eviction",
    "Observed",
    "Policy",
    "Promotion",
    "Retention",
    "Schedule",
    "StepView",
    "StoreView",
    "TierView",
    "decided",
    "offer",
    "parse",
    "register",
    "registered",
]
