"""What the parts of the engine share: the tiers, the branch that is trained, and views of both."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tieredckpt.blobs.wrap import Metered
from tieredckpt.config import StoreConfig
from tieredckpt.devices.memory import HostMemory
from tieredckpt.engine import limits
from tieredckpt.engine.notify import Notification
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.state.branch import Branch
from tieredckpt.engine.state.failures import failure_history
from tieredckpt.engine.state.identity import Identity
from tieredckpt.engine.state.membership import Membership
from tieredckpt.engine.state.merged_ram import MergedRam
from tieredckpt.engine.state.observation import Observation
from tieredckpt.engine.state.step_table import StepTable
from tieredckpt.engine.tier.lease import Holder
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound
from tieredckpt.events import Events, StepPromoted, TierFailed
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.policy.base import Observed, StepView, StoreView, TierView
from tieredckpt.policy.views import StepViews

__all__ = ["GiveWay", "Role", "State", "numbers"]

_log = logging.getLogger("tieredckpt")


class GiveWay(Protocol):
    """What reads a step from RAM, and leaves that for a save."""

    async def __call__(self, *, must: bool) -> None:
        """Release the step in RAM, if another tier has it; with ``must`` in any case."""


class Role(enum.Enum):
    """What a process does for a store."""

    WHOLE = "saves and promotes"
    TRAINER = "saves, and has an agent that promotes"
    AGENT = "promotes what a trainer saves"


@dataclass
class State:
    """The engine's memory. Touched on the engine's loop alone."""

    config: StoreConfig
    tiers: tuple[Tier, ...]
    """Those that hold steps as they were saved, nearest first: what is asked of them is asked of exact copies."""
    events: Events
    pool: ThreadPoolExecutor
    """The threads that copy, digest and encode."""
    scratch: Scratch
    read_only: bool
    host_memory: HostMemory = field(default_factory=HostMemory)
    """What devices reach of the slab, and their buffers."""
    changed: Notification = field(default_factory=Notification)
    """Beats whenever a step or a tier changed."""
    branch: Branch = field(default_factory=Branch)
    identity: Identity = field(default_factory=Identity)
    observation: Observation = field(default_factory=Observation)
    membership: Membership = field(default_factory=Membership)
    role: Role = Role.WHOLE
    deleting: set[StepId] = field(default_factory=set)
    """Steps that a person deletes at present."""
    read_only_steps: dict[StepId, MergedRam] = field(default_factory=dict)
    """Steps that are whole in the RAM of ranks of this machine, for a reader."""
    look_anew: Callable[[], Awaitable[None]] | None = None
    """Where nothing is written: makes what is known fresh."""
    fills: int = 0
    """Restores so far that fill arrays of the program: these are not as saves before saw them."""
    _copying: int = 0
    """How many saves copy to RAM at present."""
    _yielding: list[GiveWay] = field(default_factory=list)
    derivations: tuple[State, ...] = ()
    """One for each tier with lossy rules, which is the last of its tiers, behind those that it may be derived from.

    What is done to the derived steps of that tier is done with this state, which shares all else with the exact one.
    """
    exact: State | None = None
    """Of a derivation, the state of the exact steps."""
    _step_table: StepTable = field(init=False)

    def __post_init__(self) -> None:
        self._step_table = StepTable(self.tiers, _described)

    # -- derived steps ------------------------------------------------------------------------------------

    def derivation(self, tier: Tier) -> State:
        """The state with which derived steps on a tier are made, kept and read. Call it before there are any.

        Of several ranks it derives from tiers that all see, for a step is nowhere whole in their RAM.
        """
        alone = self.membership.size == 1
        nearer = [each for each in self.tiers if each.place < tier.place and (alone or each.shared)]
        tier.index = len(nearer)
        return dataclasses.replace(self, tiers=(*nearer, tier), derivations=(), exact=self)

    @property
    def derived(self) -> tuple[Tier, ...]:
        """The tiers that hold derived steps alone, nearest first."""
        return tuple(each.tiers[-1] for each in self.derivations)

    @property
    def every_tier(self) -> tuple[Tier, ...]:
        """All tiers of the configuration, in its order."""
        return tuple(sorted((*self.tiers, *self.derived), key=lambda tier: tier.place))

    def any_tier(self, name: str) -> Tier:
        """The tier of that name, whatever it holds. Raises as `tier`."""
        return next((tier for tier in self.derived if tier.name == name), None) or self.tier(name)

    # -- steps --------------------------------------------------------------------------------------------

    def records(self) -> dict[StepId, StepRecord]:
        """Every step that some tier holds, by age; not to be changed. From any thread."""
        return self._step_table.call(self.branch.line).records

    def holders(self, step: StepId) -> list[Tier]:
        """The tiers that hold a step as it was saved, nearest first, those that fail, or do not answer, last."""
        holding = [tier for tier in self.tiers if step in tier.steps.held and not tier.derived]
        return sorted(holding, key=lambda tier: not (tier.healthy and tier.responsive))

    def on_line(self, serial: int) -> bool:
        """Whether a serial belongs to the branch that is trained."""
        return serial in self.branch

    def newest(self) -> StepId | None:
        """What a restore takes: the newest step of the branch."""
        return next((step for step in reversed(self.records()) if self.on_line(step.serial)), None)

    def find(self, step: int | None, serial: int | None = None, *, damaged: bool = False) -> StepId:
        """The step of that number (the newest without one); on the branch if there, else the newest such.

        Args:
            step: the trainer's number.
            serial: which of several saves of that number.
            damaged: count a step, too, whose commit cannot be read on any tier.

        Raises:
            NotFound: no tier holds it; the message lists what there is.
            Corrupt: its commit is damaged on all tiers that have it.
        """
        whole = set(self.records())
        unreadable = {found for tier in self.tiers for found in tier.steps.damaged} - whole

        def matching(among: set[StepId]) -> list[StepId]:
            return [found for found in among if step in (None, found.step) and serial in (None, found.serial)]

        if found := matching(whole | unreadable if damaged else whole):
            return max(found, key=lambda each: (self.on_line(each.serial), each))
        if found := matching(unreadable):
            names = ", ".join(repr(tier.name) for tier in self.tiers if max(found) in tier.steps.damaged)
            raise Corrupt(f"{max(found)} cannot be read: its commit is damaged on tier {names}, and no other has one")
        wanted = "a step" if step is None else f"step {step}"
        wanted += "" if serial is None else f" of serial {serial}"
        held = ", ".join(str(each.step) for each in sorted(whole)) or "none"
        silent = [tier.name for tier in self.tiers if not tier.healthy]
        hint = f"; not reachable at present: {', '.join(silent)}" if silent else ""
        raise NotFound(f"no tier holds {wanted} (held: {held}{hint}{self.lossy_hint(step)})")

    def lossy_hint(self, step: int | None) -> str:
        """For a message that a step cannot be had as it was saved: where there are lossy copies of it."""
        found = [tier.name for tier in self.derived for each in tier.steps.held if step in (None, each.step)]
        names = ", ".join(map(repr, dict.fromkeys(found)))
        return f"; a lossy copy is on {names}: pass lossy=True (--lossy) to restore that" if found else ""

    def adopt_line(self, dead: Sequence[Holder] = ()) -> None:
        """Continue from the newest step there is, as after a restart; ``dead`` are writers that others found so."""
        records = self.records()
        newest = max(records, default=None)
        self.branch.adopt(records[newest].line if newest else (), newest)
        every = (*self.tiers, *self.derived)
        serials = [step.serial for tier in every for step in (*tier.steps.held, *tier.steps.damaged)]
        blind = any(tier.marker is None for tier in every)
        self.branch.last_serial = max(self.branch.last_serial, *serials, 0) + (
            limits.in_force.serials_skipped if blind else 0
        )
        stale_holders = [holder for tier in every if tier.lease is not None for holder in tier.lease.stale_holders]
        self.observation.history = failure_history(records[newest] if newest else None, [*stale_holders, *dead])

    def adopt_if_gone(self, step: StepId) -> None:
        """Continue from the newest save that is left, as after a restart, where the newest of the branch is no more."""
        records = self.records()
        if step == self.branch.newest and step not in records:
            newest = max(records, default=None)
            if newest is not None and not self.on_line(newest.serial):
                _log.warning("%s is gone; training continues from %s, which was off the branch", step, newest)
            # What is trained has not changed.
            self.branch.adopt(records[newest].line if newest else (), newest, self.branch.lossy)

    @contextmanager
    def being_deleted(self, steps: Collection[StepId]) -> Iterator[None]:
        """Count copies of steps as gone, and begin no read of them, while a person deletes them."""
        self.deleting.update(steps)
        try:
            yield
        finally:
            self.deleting.difference_update(steps)

    def meet(self, tier: Tier) -> None:
        """Take up what a tier holds that could not be read at start."""
        if not self.branch.line:  # nothing was found then, and nothing was saved since
            self.adopt_line()
        found = (step.serial for step in (*tier.steps.held, *tier.steps.damaged))
        self.branch.last_serial = max(self.branch.last_serial, *found, 0)

    # -- tiers --------------------------------------------------------------------------------------------

    def tier(self, name: str) -> Tier:
        """The tier of that name. Raises `NotFound` with the names there are, `Invalid` for what is no name."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        if name in (tier.name for tier in self.derived):
            raise Invalid(
                f"tier {name!r} has `lossy` rules, so no step as it was saved comes there: name another tier, or ask "
                f"for what it holds by `flush`, `steps` or restore(lossy=True)"
            )
        names = [tier.name for tier in self.tiers]
        if not isinstance(name, str):
            raise Invalid(f"a tier is given by its name, not {name!r} (tiers: {', '.join(names)})")
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise NotFound(f"there is no tier {name!r} (tiers: {', '.join(names)}){hint}")

    def manages(self, tier: Tier) -> bool:
        """Whether this process decides what goes to a tier and leaves it.

        Of shared tiers, rank 0 does for all; beside an agent, the trainer has RAM and the agent all others.
        """
        if not tier.shared:
            return self.role is not Role.AGENT
        return self.membership.rank == 0 and self.role is not Role.TRAINER

    def collects(self, tier: Tier) -> bool:
        """Whether this process may delete packs there now. RAM has none: its extents come back with each step."""
        return not tier.in_memory and tier.answers and self.manages(tier)

    def is_unused(self, tier: Tier) -> bool:
        """Whether a tier is RAM that a reader does not find: it was released, or lost with its machine."""
        gone = tier.blobs is None and isinstance(tier.health.error, NotFound)
        return self.read_only and gone and tier.in_memory

    def check_writable(self, what: str) -> None:
        """Raise `Invalid` in a store that is only looked at."""
        if self.read_only:
            raise Invalid(f"cannot {what}: the store was opened with read_only=True")

    def report(self, tier: Tier, error: Exception) -> None:
        """Note that a tier failed, and emit an event; its promoter brings it back."""
        if not self.manages(tier):  # the process that manages it reports its state
            _log.warning("tier %r, which another process manages, failed here: %s", tier.name, error)
            return
        delay = tier.health.fail(error)
        if self.is_unused(tier):
            _log.info("tier %r is not in use: %s", tier.name, error)
            return
        level = logging.ERROR if isinstance(error, Conflict) else logging.WARNING
        _log.log(level, "tier %r failed, next try in %.1f s: %s", tier.name, delay, error)
        self.events.emit(TierFailed(tier.name, error, delay))
        self.changed.notify()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Keep what can wait (`quiet`) from the memory while the block copies a tree, for which a training waits."""
        self._copying += 1
        try:
            yield
        finally:
            self._copying -= 1
            self.changed.notify()

    async def quiet(self) -> None:
        """Return when no save copies to RAM."""
        await self.changed.until(lambda: not self._copying)

    @contextmanager
    def yielding(self, give_way: GiveWay) -> Iterator[None]:
        """Call ``give_way`` when a save needs memory of RAM, while the block runs."""
        self._yielding.append(give_way)
        try:
            yield
        finally:
            self._yielding.remove(give_way)

    async def make_readers_yield(self, *, must: bool) -> None:
        """Ask every reader of RAM that can wait to release its step; see `GiveWay`."""
        for give_way in tuple(self._yielding):
            await give_way(must=must)

    # -- views for policies -------------------------------------------------------------------------------

    def view(self, *, and_on: tuple[StepId, Tier] | None = None, at_rest: bool = False) -> StoreView:
        """What policies see; with ``and_on``, as if that tier held that step too.

        With ``at_rest``, as it would be if no promotion were under way.
        """
        now = self.observation.now()
        steps = self._step_table.call(self.branch.line).views
        if and_on is not None:
            steps = tuple(self._as_if(view, *and_on) if view.serial == and_on[0].serial else view for view in steps)
        replicas = {
            step.serial: nodes
            for step, nodes in tuple(self.membership.replicated.items())
            if step in self.tiers[0].steps.held
        }
        tiers = tuple(self.tier_view(tier, at_rest=at_rest) for tier in self.tiers)
        return StoreView(now, StepViews(steps, now, replicas), tiers, frozenset(self.observation.signals))

    def _as_if(self, view: StepView, step: StepId, tier: Tier) -> StepView:
        names = tuple(each.name for each in self.tiers if step in each.steps.held or each is tier)
        return dataclasses.replace(view, tiers=names)

    def tier_view(self, tier: Tier, *, at_rest: bool = False) -> TierView:
        return TierView(
            name=tier.name,
            index=tier.index,
            survives=tier.survives.shown,
            capacity=tier.capacity,
            used=tier.used,
            write_bandwidth=self.write_bandwidth(tier),
            healthy=tier.healthy,
            promoting=tier.steps.promotions > 0 and not at_rest,
        )

    def write_bandwidth(self, tier: Tier) -> float | None:
        """Bytes a second seen lately by whoever writes to the tier; None before the first write, and for RAM."""
        if tier.remote.bandwidth:
            return tier.remote.bandwidth
        return tier.blobs.usage().write_bandwidth if isinstance(tier.blobs, Metered) else None

    @contextmanager
    def promoting(self, tier: Tier) -> Iterator[None]:
        """Show policies a promotion to the tier while the block runs."""
        tier.steps.promotions += 1
        try:
            yield
            self.observation.promotions_ended += 1
        except BaseException:
            if tier.health.error is None:  # or a tier that fails on and on would end some on and on
                self.observation.promotions_ended += 1
            raise
        finally:
            tier.steps.promotions -= 1
            self.changed.notify()

    def observe(self, step: int | None = None) -> Observed:
        """What schedules see; see `Observation.observe`."""
        return self.observation.observe(step, self.branch, self.tiers)

    def tell_promoted(self, record: StepRecord, tier: Tier, written: int, begin: float, *, again: bool = False) -> None:
        """Tell that a step was committed on a slower tier, ``again`` or for the first time.

        ``written`` are the bytes of the packs that this process wrote for it, and ``begin`` is when the work began,
        on the monotonic clock.
        """
        lag = 0.0 if again else self.observation.observe_promotion(record, tier)
        seconds = time.monotonic() - begin
        self.events.emit(StepPromoted(record.step, record.serial, tier.name, record.nbytes, written, seconds, lag))
        self.changed.notify()


def _described(step: StepId, record: StepRecord, tiers: tuple[str, ...], on_line: bool) -> StepView:
    metrics = numbers(record.metrics)
    return StepView(step.step, step.serial, record.saved_at, 0.0, record.nbytes, metrics, tiers, on_line)


def numbers(metrics: Mapping[str, float | str]) -> dict[str, float]:
    """The metrics of a record; what a hostile store gives for a number that is none is left out."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str) or _is_number(value)}


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text)) or text == "nan"
    except ValueError:
        return False
