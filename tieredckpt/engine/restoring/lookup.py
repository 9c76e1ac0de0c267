"""Chooses the step that a restore takes."""

from __future__ import annotations

import logging

import msgspec

from tieredckpt.engine.restoring.moved import Moved, has_moved, places
from tieredckpt.engine.restoring.source import ask_again, report_silent
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["StepCopy", "Wanted", "copies", "find_derived", "look_up", "never_read"]

_log = logging.getLogger("tieredckpt")

StepCopy = tuple[StepId, StepRecord | None, State | None]
"""A step as it was saved, with its record, or a lossy copy of it, with the derivation that has it."""


class Wanted(msgspec.Struct, frozen=True):
    """The step that a caller of `restore` wants; all ranks must want the same."""

    step: int | None
    whole: bool
    """Whether all keys are wanted."""
    resume: bool | None
    """Whether the caller trains on from it; None where it did not say."""

    @property
    def to_train_on(self) -> bool:
        """Whether a later save may continue the restored step."""
        return self.whole and self.resume is not False


async def copies(state: State, step: int | None, tier: str | None = None) -> list[StepCopy]:
    """Candidates of ``restore(lossy=True)``: the exact step, then each lossy copy, nearest first.

    Without a number, the lossy copies of a newer step take the place of both. ``tier`` names the one tier whose lossy
    copy is wanted. Raises as `look_up` where there is nothing to take.
    """
    error: TieredCkptError | None = None
    exact = None
    try:
        if tier is not None:
            raise NotFound(f"tier {tier!r} holds no lossy copy of that step any more")
        exact = await look_up(state, step)
    except (Corrupt, NotFound, TierUnavailable) as why:
        error = why
    derived = find_derived(state, step, tier)
    if exact is not None and (step is not None or not derived or exact[0] >= derived[0][0]):
        return [(*exact, None), *((each, None, derivation) for each, derivation in find_derived(state, exact[0]))]
    if error is not None and not derived:
        raise error
    return [(each, None, derivation) for each, derivation in derived]


def find_derived(
    state: State,
    step: int | StepId | None,
    tier: str | None = None,
    *,
    serial: int | None = None,
    damaged: bool = False,
) -> list[tuple[StepId, State]]:
    """The lossy copies of that step, or of the newest, each with the derivation that has it, nearest tier first.

    A number that was saved on several branches means that of the branch, else the newest. ``tier`` is the only one to
    ask, ``serial`` which of several saves; with ``damaged``, copies count whose commit cannot be read.
    """
    found = [
        (held, each)
        for each in state.derivations
        for held in (*each.target.steps.held, *(each.target.steps.damaged.not_stale() if damaged else ()))
        if step in (None, held, held.step) and serial in (None, held.serial) and tier in (None, each.target.name)
    ]
    order = ((step is not None and state.on_line(held.serial), held) for held, _ in found)
    chosen = max(order, default=(False, None))[1]
    return [copy for copy in found if copy[0] == chosen]


async def look_up(state: State, step: int | None) -> tuple[StepId, StepRecord] | None:
    """The step of that number, or the newest; None when the store is empty. Raises as `Together.look_up`."""
    records = state.records()
    if step is None and not records:
        if silent := never_read(state):
            raise TierUnavailable(
                f"no tier that answers holds a step, and {', '.join(repr(tier.name) for tier in silent)} cannot be "
                f"read ({silent[0].health.error}); to start afresh all the same, take it out of the configuration"
            )
        damaged = {step: tier.name for tier in state.tiers for step in tier.steps.damaged.not_stale()}
        if damaged:
            state.refuse_half_deleted(damaged)
            raise Corrupt(
                f"no step can be read: the commit of {max(damaged)} on tier {damaged[max(damaged)]!r}"
                + (f" and of {len(damaged) - 1} other steps are" if len(damaged) > 1 else " is")
                + " damaged; to start afresh all the same, move what is there out of the tier"
            )
        if any(tier.steps.held for tier in state.derived):
            state.find(None)  # which tells what there is
        return None
    found = (state.newest() if step is None else None) or state.find(step)
    record = await _whole_record(state, found)
    # An unreadable step is in quarantine now: the next search finds another one.
    return await look_up(state, step) if record is None else (found, record)


def never_read(state: State) -> list[Tier]:
    """The tiers that have not answered since the opening, and may hold steps that nobody knows of."""
    silent = [tier for tier in state.every_tier if tier.never_read]
    return [tier for tier in silent if not (state.read_only and isinstance(tier.health.error, NotFound))]


async def _whole_record(state: State, step: StepId) -> StepRecord | None:
    """The complete record of a step; None if its commit is unreadable on every tier that should hold it.

    Raises `TierUnavailable` when a tier that may have it does not answer.
    """
    silent: dict[str, TierUnavailable] = {}
    before = places(state, step)
    asked = state.holders(step)
    for tier in asked:
        held = tier.steps.held.get(step)
        if held is None:
            continue  # it left while another tier was asked
        if held.whole:
            return held.record
        try:
            record = (await step_index.load(tier, step)).record
        except (Corrupt, NotFound) as error:
            silent.pop(tier.name, None)
            if await has_moved(state, step, before):
                raise Moved(f"{step} was evicted while it was read, or committed anew; try again") from error
            _log.warning("tier %r: %s cannot be read there: %s", tier.name, step, error)
            tier.quarantine(step, error)
            state.changed.notify()  # its tier is to get it anew
        except TierUnavailable as error:
            report_silent(state, tier, error)
            ask_again(asked, tier, error)
            silent[tier.name] = error
        else:
            if tier.steps.held.get(step) is held:  # and neither left meanwhile nor was committed anew
                tier.steps.held[step] = Held(record, held.btree_key)
            return record
    if silent:
        raise [*silent.values()][-1]
    return None
