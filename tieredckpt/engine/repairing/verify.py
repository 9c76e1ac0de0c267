"""Verifies a step on its tiers, and repairs it on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.repairing.check import Checked, find_damage
from tieredckpt.engine.repairing.repair import repair_chunks, repair_index
from tieredckpt.engine.restoring.lookup import find_derived
from tieredckpt.engine.restoring.moved import Moved, has_moved, places
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, StepIndex

__all__ = ["Verified", "Verifier", "to_verify"]


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of verifying a step on a tier."""

    id: StepId | None
    """None for what belongs to no step: a tier's marker, the footers of its packs."""
    tier: str
    nbytes: int
    damaged: tuple[str, ...]
    """Keys of the arrays with a chunk that is not as it was saved; ``tieredckpt/step.json`` for the index.

    Without a step, the files of the tier.
    """
    repaired: bool
    problem: str
    """Description of the damage, or why the tier could not be read; empty if the whole step is intact."""
    lost: tuple[str, ...] = ()
    """Damaged arrays that no tier has intact, as an attempt to repair them has shown."""

    @property
    def intact(self) -> bool:
        """Whether the tier now has all of the step as it was saved."""
        return self.repaired or not self.problem


def to_verify(state: State, number: int | None, serial: int | None, name: str | None) -> tuple[StepId, list[Tier]]:
    """The step of that number, else the newest, and the tiers that have it, exact or lossy; a named tier alone.

    Raises `NotFound`, and `Corrupt` where no step can be read and ``number`` names none.
    """
    damaged = number is not None
    try:
        of_tier = next((each for each in state.derivations if each.target.name == name), state)
        step = of_tier.find(number, serial, damaged=damaged)
    except NotFound:
        copies = find_derived(state, number, serial=serial, damaged=damaged) if name is None else []
        if not copies:
            raise
        step = copies[0][0]
    tiers = state.every_tier if name is None else (state.any_tier(name),)
    having = [tier for tier in tiers if tier.steps.has_own(step) or step in tier.steps.damaged.not_stale()]
    if not having and step in state.ram_of_ranks:
        raise NotFound(f"{step} is only in the RAM of ranks on this machine, where a restore verifies it")
    if not having:
        raise NotFound(f"{step} is not on {'any tier' if name is None else f'tier {name!r}'}")
    return step, having


@dataclass(frozen=True, slots=True)
class Verifier:
    """Verifies what tiers hold, and repairs it on request."""

    state: State
    collector: Collector
    repair: bool
    """Whether to repair what is damaged, from whichever tier has it; on the tiers that this rank manages."""
    progress: Callable[[int], None] | None = None
    """Called with the bytes of each part that was read, from any thread."""

    def repairs(self, tier: Tier) -> bool:
        """Whether damage on a tier is repaired."""
        return self.repair and self.state.manages(tier)

    async def on(self, step: StepId, tier: Tier, checked: Checked | None = None) -> Verified:
        """Read all of a step on a tier that holds it, compare every digest, and repair what is damaged if asked.

        What is ``checked`` is not read again. Raises `NotFound` when the step left the tier meanwhile.
        """
        before = places(self.state, step)
        found = await self._on(step, tier, checked)
        if found.problem and await has_moved(self.state, step, before):
            raise _left(step, tier)
        if found.intact:
            self._retry_promotions(step)
        return found

    def _retry_promotions(self, step: StepId) -> None:
        """Retry the promotions of a step that failed because its bytes were wrong: a tier has them intact."""
        for tier in self.state.every_tier:
            tier.steps.stuck.pop(step, None)
        self.state.changed.notify()

    async def _on(self, step: StepId, tier: Tier, checked: Checked | None) -> Verified:
        record = self.state.records().get(step)
        nbytes = record.nbytes if record is not None else 0
        held, lacking = tier.steps.own(step), tier.steps.lacking(step)
        remembered = tier.steps.indexes.get(step)
        try:
            if step in tier.steps.damaged and not tier.in_memory and tier.blobs is not None:
                await self.collector.evictor.look_again(step, tier)
            if step in tier.steps.damaged:
                raise tier.steps.damaged[step]
            damage = await find_damage(self.state, step, tier, self.progress, checked)
        except TierUnavailable as error:
            return Verified(step, tier.name, nbytes, (), False, str(error))
        except TieredCkptError as error:
            known = None if step_index.is_replaced(tier, step, held) else remembered
            return await self._with_another_index(step, tier, nbytes, error, known)
        if not damage:
            tier.steps.mend(step, lacking)  # not what was found while this read it, perhaps before it lost that
            return Verified(step, tier.name, nbytes, (), False, "")
        repairs = self.repairs(tier)
        unrepaired = await repair_chunks(self.state, self.collector, step, damage) if repairs else []
        if repairs and not tier.steps.keeps(step):
            raise _left(step, tier)
        if repairs and not unrepaired:
            tier.steps.mend(step, lacking)
        if not repairs:
            for found in damage:
                found.tier.packs.doubt((found.digest,))
        keys = tuple(sorted({found.key for found in damage}))
        gone = {digest for each in unrepaired if isinstance(each.error, Corrupt) for digest in each.digests}
        lost = {found.key for found in damage if found.digest in gone}
        problem = str(unrepaired[0].error if unrepaired else damage[0].error)
        return Verified(step, tier.name, nbytes, keys, repairs and not unrepaired, problem, tuple(sorted(lost)))

    async def _with_another_index(
        self, step: StepId, tier: Tier, nbytes: int, error: TieredCkptError, remembered: StepIndex | None
    ) -> Verified:
        if not tier.steps.keeps(step):
            raise _left(step, tier) from error  # and is not to come back
        repairs, repaired, problem = self.repairs(tier), False, str(error)
        if repairs:
            try:
                await repair_index(self.state, self.collector, step, tier, error, remembered)
                repaired = step in tier.steps.held
            except TieredCkptError as failed:
                if not tier.steps.keeps(step):
                    raise _left(step, tier) from failed
                problem = f"{error}; it could not be committed anew: {failed}"
                if not (tier.in_memory or await _is_readable(tier, step)):  # RAM is read by what is remembered
                    tier.steps.impair(step, (step.manifest_key,))  # it is held still, and is no good copy
                    self.state.changed.notify()  # a promotion commits it anew, perhaps
        lost = () if not repairs or self.state.holders(step) else (layout.STEP_RECORD,)
        return Verified(step, tier.name, nbytes, (layout.STEP_RECORD,), repaired, problem, lost)


def _left(step: StepId, tier: Tier) -> Moved:
    return Moved(f"{step} left tier {tier.name!r} while it was verified")


async def _is_readable(tier: Tier, step: StepId) -> bool:
    """Whether a commit can be read after all: it was only misread, or there is a new one, even though that failed."""
    held = tier.steps.own(step)
    try:
        await step_index.load_anew(tier, step)
    except TieredCkptError:
        return step_index.is_replaced(tier, step, held)
    return True
