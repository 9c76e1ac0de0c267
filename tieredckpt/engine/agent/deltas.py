"""State deltas between trainer and agent: each sends the changes of its tiers, and the other applies them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from tieredckpt._decoders import converted
from tieredckpt.config import StoreConfig, dump_with_secrets
from tieredckpt.engine.agent.messages import Happened, InRam, OnTier
from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.views import write_bandwidth
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import Failure, StepOnTier
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

__all__ = [
    "VERSION",
    "Deltas",
    "adopt_ram",
    "adopt_tier",
    "event_of",
    "happened",
    "ram_deltas",
    "settings_of",
    "tier_deltas",
]

D = TypeVar("D", bound=InRam | OnTier)

VERSION = version("tieredckpt")
"""Version of the library; a trainer and its agent run the same one."""

_TRAINERS_OWN = {"name", "threads", "schedule", "when_full", "promote_in", "agent_log", "rack"}
"""Settings that do not change what an agent does."""

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
    """Hash of the settings that change an agent's behaviour; equal for configurations whose agents behave the same."""
    dumped = {name: value for name, value in dump_with_secrets(config).items() if name not in _TRAINERS_OWN}
    ram, *slower = dumped.pop("tiers")
    relevant = [dumped, ram["name"], ram["promote"], ram["retain"], slower]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


class Deltas(Generic[D]):
    """The changes of a tier since the other side was last told of it.

    ``tell(anew, came, gone)`` makes the message: whether it has the whole state, and the steps that came and went.
    """

    def __init__(self, tier: Tier, tell: Callable[[bool, tuple[StepOnTier, ...], tuple[StepId, ...]], D]) -> None:
        self._tier = tier
        self._tell = tell
        self._sent: dict[StepId, str] | None = None
        self._last: D | None = None
        """The last message, without its steps."""

    def take(self) -> D | None:
        """The changes since the last call; None if there are none. A step that was committed again has come."""
        anew, sent, held = self._sent is None, self._sent or {}, self._tier.steps.held
        came = tuple(
            StepOnTier.of(each.record, each.btree_key)
            for step, each in held.items()
            if sent.get(step) != each.btree_key
        )
        gone = tuple(step for step in sent if step not in held)
        moved = bool(anew or came or gone)
        if moved:
            self._sent = {step: each.btree_key for step, each in held.items()}
        delta = self._tell(anew, came, gone)
        rest = msgspec.structs.replace(delta, anew=False, held=(), gone=())
        same, self._last = rest == self._last, rest
        return delta if moved or not same else None


def ram_deltas(state: State) -> Deltas[InRam]:
    """Deltas of RAM, the branch and the signals, which the trainer sends."""

    def tell(anew: bool, held: tuple[StepOnTier, ...], gone: tuple[StepId, ...]) -> InRam:
        signals, used = tuple(sorted(state.observation.signals)), state.tiers[0].used
        return InRam(anew, held, gone, state.branch.line, state.branch.last_serial, signals, used)

    return Deltas(state.tiers[0], tell)


def tier_deltas(state: State, tier: Tier) -> Deltas[OnTier]:
    """Deltas of one slower tier, which the agent sends."""

    def tell(anew: bool, held: tuple[StepOnTier, ...], gone: tuple[StepId, ...]) -> OnTier:
        return OnTier(
            tier=tier.name,
            anew=anew,
            known=tier.marker is not None,
            marker=state.identity.marker,
            held=held,
            gone=gone,
            damaged=tier.steps.damaged.told(),
            impaired=tuple(tier.steps.impaired),
            stuck=tuple((step, Failure.of(error)) for step, error in tier.steps.stuck.items()),
            tombstones=tuple(tier.steps.tombstones),
            used=tier.used,
            bandwidth=write_bandwidth(tier),
            promotions=tier.steps.promotions,
            note=tier.health.note,
            failure=None if tier.health.error is None else Failure.of(tier.health.error),
        )

    return Deltas(tier, tell)


def _adopt_steps(tier: Tier, delta: InRam | OnTier) -> None:
    if delta.anew:
        tier.clear()
    for step in delta.gone:
        tier.steps.drop(step)
    for held in delta.held:
        tier.steps.drop(held.id)  # with what is remembered of its index, if it was committed anew
        tier.steps.held[held.id] = Held(held.record, held.btree_key, whole=False)


def adopt_ram(state: State, delta: InRam) -> None:
    """At the agent: apply a delta of RAM, the branch and the signals."""
    _adopt_steps(state.tiers[0], delta)
    state.branch.line, state.branch.last_serial = delta.line, delta.last_serial
    state.observation.signals, state.tiers[0].remote.used = set(delta.signals), delta.used
    state.changed.notify()


def adopt_tier(state: State, delta: OnTier) -> Tier:
    """At the trainer: apply a delta of a slower tier; returns the tier."""
    tier = state.any_tier(delta.tier)
    _adopt_steps(tier, delta)
    tier.steps.damaged.adopt(delta.damaged)
    tier.steps.impaired = {step: {""} for step in delta.impaired}
    tier.steps.stuck.clear()
    tier.steps.stuck.update({step: failure.error() for step, failure in delta.stuck})
    tier.steps.tombstones = set(delta.tombstones)
    tier.remote.used, tier.remote.bandwidth, tier.steps.promotions = delta.used, delta.bandwidth, delta.promotions
    tier.health.note = delta.note
    tier.health.error = None if delta.failure is None else delta.failure.error()
    tier.marker = state.identity.marker if delta.known else None
    state.changed.notify()
    return tier


def happened(event: Event) -> Happened | None:
    """Encode an event of the agent for the trainer; None for an event that stays with the agent."""
    if type(event).__name__ not in _EVENTS:
        return None
    fields: dict[str, Any] = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if isinstance(event, TierFailed | ExportFailed):
        fields["error"] = Failure.of(event.error)
    return Happened(type(event).__name__, fields)


def event_of(message: Happened) -> Event:
    """Decode an agent event for the trainer's listeners. Raises `Corrupt` if it is no event of an agent."""
    kind = _EVENTS.get(message.kind)
    try:
        if kind is None:
            raise Corrupt(f"{message.kind!r} is no event of an agent")
        fields = dict(message.fields)
        if kind in (TierFailed, ExportFailed):  # an exception has no type that could be converted to
            failure: Any = converted(fields.pop("error", None), Failure).error()
            others = [(name, of) for name, of in get_type_hints(kind).items() if name != "error"]
            return kind(error=failure, **{name: converted(fields.get(name), of) for name, of in others})
        event: Event = converted(fields, kind)
        return event
    except msgspec.ValidationError as error:
        raise Corrupt(f"an agent's {message.kind} cannot be read: {error}") from error
