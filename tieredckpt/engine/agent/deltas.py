"""What trainer and agent know of each other's tiers: changes are told by one and taken over by the other."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from importlib.metadata import version
from typing import Any, get_type_hints

import msgspec

from tieredckpt._decoders import converted
from tieredckpt.config import StoreConfig, dump_with_secrets
from tieredckpt.engine.agent.messages import Happened, InRam, OnTier
from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.views import write_bandwidth
from tieredckpt.engine.tier.steps import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import Failure, HeldStep, brief
from tieredckpt.errors import Corrupt
from tieredckpt.events import (
    ChunkRepaired,
    Event,
    ExportFailed,
    RetentionCut,
    StepEvicted,
    StepExported,
    StepPromoted,
    TierFailed,
    TierHangs,
    TierRecovered,
)
from tieredckpt.format.manifest import StepId

__all__ = ["VERSION", "RamDelta", "TierNews", "adopt_ram", "adopt_tier", "event_of", "happened", "settings_of"]

VERSION = version("tieredckpt")
"""Of the library: a trainer and its agent run one."""

_TRAINERS_OWN = {"name", "threads", "schedule", "when_full", "promote_in", "agent_log", "rack"}
"""Settings that an agent does not go by."""

_EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        ChunkRepaired,
        ExportFailed,
        RetentionCut,
        StepEvicted,
        StepExported,
        StepPromoted,
        TierFailed,
        TierHangs,
        TierRecovered,
    )
}


def settings_of(config: StoreConfig) -> str:
    """What an agent goes by, in a few letters: the same for two configurations by which agents do the same."""
    dumped = {name: value for name, value in dump_with_secrets(config).items() if name not in _TRAINERS_OWN}
    ram, *slower = dumped.pop("tiers")
    told = [dumped, ram["name"], ram["promote"], ram["retain"], slower]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


class _Steps:
    """The steps of a tier that the other side was told of."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._told: dict[StepId, str] | None = None

    def changes(self) -> tuple[bool, tuple[HeldStep, ...], tuple[StepId, ...]]:
        """Whether nothing was told before, what is new or committed anew since, and what has gone."""
        anew, told = self._told is None, self._told or {}
        held = self.tier.steps.held
        new = tuple(
            HeldStep(brief(each.record), each.btree_key)
            for step, each in held.items()
            if told.get(step) != each.btree_key
        )
        gone = tuple(step for step in told if step not in held)
        if anew or new or gone:
            self._told = {step: each.btree_key for step, each in held.items()}
        return anew, new, gone


class RamDelta:
    """What the trainer tells of RAM, the branch and its signals."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._steps = _Steps(state.tiers[0])
        self._last: InRam | None = None

    def take(self) -> InRam | None:
        """What changed since the last call; None for nothing."""
        state = self._state
        anew, held, gone = self._steps.changes()
        signals, used = tuple(sorted(state.observation.signals)), state.tiers[0].used
        news = InRam(anew, held, gone, state.branch.line, state.branch.last_serial, signals, used)
        rest = msgspec.structs.replace(news, anew=False, held=(), gone=())
        if not (anew or held or gone) and rest == self._last:
            return None
        self._last = rest
        return news


class TierNews:
    """What the agent tells of one slower tier."""

    def __init__(self, state: State, tier: Tier) -> None:
        self._state = state
        self._tier = tier
        self._steps = _Steps(tier)
        self._last: OnTier | None = None

    def take(self) -> OnTier | None:
        """What changed since the last call; None for nothing."""
        tier = self._tier
        anew, held, gone = self._steps.changes()
        news = OnTier(
            tier=tier.name,
            anew=anew,
            known=tier.marker is not None,
            marker=self._state.identity.marker,
            held=held,
            gone=gone,
            damaged=tuple((step, str(error)) for step, error in tier.steps.damaged.items()),
            stuck=tuple((step, Failure.of(error)) for step, error in tier.steps.stuck.items()),
            tombstones=tuple(tier.steps.tombstones),
            used=tier.used,
            bandwidth=write_bandwidth(tier),
            promotions=tier.steps.promotions,
            note=tier.health.note,
            failure=None if tier.health.error is None else Failure.of(tier.health.error),
        )
        rest = msgspec.structs.replace(news, anew=False, held=(), gone=())
        if not (anew or held or gone) and rest == self._last:
            return None
        self._last = rest
        return news


def _adopt_steps(tier: Tier, news: InRam | OnTier) -> None:
    if news.anew:
        tier.clear()
    for step in news.gone:
        tier.steps.drop(step)
    for held in news.held:
        tier.steps.drop(held.id)  # with what is remembered of its index, if it was committed anew
        tier.steps.held[held.id] = Held(held.record, held.btree_key, whole=False)


def adopt_ram(state: State, news: InRam) -> None:
    """At the agent: know of RAM, the branch and the signals what the trainer knows."""
    _adopt_steps(state.tiers[0], news)
    state.branch.line, state.branch.last_serial = news.line, news.last_serial
    state.observation.signals, state.tiers[0].remote.used = set(news.signals), news.used
    state.changed.notify()


def adopt_tier(state: State, news: OnTier) -> Tier:
    """At the trainer: know of a slower tier what the agent knows."""
    tier = state.any_tier(news.tier)
    _adopt_steps(tier, news)
    tier.steps.damaged.clear()
    tier.steps.damaged.update({step: Corrupt(text) for step, text in news.damaged})
    tier.steps.stuck.clear()
    tier.steps.stuck.update({step: failure.error() for step, failure in news.stuck})
    tier.steps.tombstones = set(news.tombstones)
    tier.remote.used, tier.remote.bandwidth, tier.steps.promotions = news.used, news.bandwidth, news.promotions
    tier.health.note = news.note
    tier.health.error = None if news.failure is None else news.failure.error()
    tier.marker = state.identity.marker if news.known else None
    state.changed.notify()
    return tier


def happened(event: Event) -> Happened | None:
    """An event of the agent, for the trainer; None for one that is none of its."""
    if type(event).__name__ not in _EVENTS:
        return None
    fields: dict[str, Any] = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if isinstance(event, TierFailed | ExportFailed):
        fields["error"] = Failure.of(event.error)
    return Happened(type(event).__name__, fields)


def event_of(news: Happened) -> Event:
    """The event as the trainer's listeners get it. Raises `Corrupt` for what is none."""
    kind = _EVENTS.get(news.kind)
    try:
        if kind is None:
            raise Corrupt(f"{news.kind!r} is no event of an agent")
        fields = dict(news.fields)
        if kind in (TierFailed, ExportFailed):  # an exception has no type that could be converted to
            failure: Any = converted(fields.pop("error", None), Failure).error()
            others = [(name, of) for name, of in get_type_hints(kind).items() if name != "error"]
            return kind(error=failure, **{name: converted(fields.get(name), of) for name, of in others})
        event: Event = converted(fields, kind)
        return event
    except msgspec.ValidationError as error:
        raise Corrupt(f"an agent's {news.kind} cannot be read: {error}") from error
