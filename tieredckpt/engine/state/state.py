"""The state that all of the engine shares: tiers, step table, branch, observation."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field

from tieredckpt.blobs.ram.owner import Place
from tieredckpt.config import StoreConfig
from tieredckpt.devices.memory import HostMemory
from tieredckpt.engine.notify import Notification
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.state import views
from tieredckpt.engine.state.branch import Branch
from tieredckpt.engine.state.membership import Membership, Role
from tieredckpt.engine.state.observation import Observation
from tieredckpt.engine.state.ram_gate import RamGate
from tieredckpt.engine.state.step_table import StepTable
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, TierUnavailable
from tieredckpt.events import Events, TierFailed
from tieredckpt.format.manifest import StepId, StepIndex, StepRecord
from tieredckpt.format.marker import StoreMarker
from tieredckpt.format.ocdbt import Extent
from tieredckpt.policy.base import Observed, StoreView, TierView

__all__ = ["DerivedState", "MergedRam", "Near", "RamOfRanksStep", "State", "lossy_hint"]

_log = logging.getLogger("tieredckpt")


@dataclass
class Identity:
    """Identity of the store, found out when it is opened; see `tieredckpt.engine.opening`."""

    marker: StoreMarker | None = None
    made_up: bool = False
    """The marker is new: no tier that answered at start had one."""
    places: dict[str, Place] = field(default_factory=dict)
    """By name, where the slower tiers are, as they were looked at when the store was opened."""
    noted: dict[str, Place] = field(default_factory=dict)
    """By location, what RAM's note says of the slower tiers; at opening, of those that may not be mounted."""


Near = Mapping[bytes, tuple[Tier, Extent]]
"""Places of chunks in the RAM of this machine, by digest."""


@dataclass(frozen=True, slots=True)
class MergedRam:
    """A step, its merged index, and its chunks in the RAM of this machine."""

    step: StepId
    tier: Tier
    """The nearest tier with an index of it."""
    index: StepIndex
    """Index of the whole step."""
    near: Callable[[], AbstractAsyncContextManager[Near]]
    """Keeps what this machine's RAM has of the step while it is read."""


@dataclass(frozen=True, slots=True)
class RamOfRanksStep(MergedRam):
    """A step of several ranks in the RAM of this machine, for a process that works alone."""

    take_out: Callable[[], Awaitable[None]]
    """Takes it out of there. Raises `Conflict` where another process uses that RAM, or has written to it, and
    `TierUnavailable`."""


@dataclass(slots=True)
class ReaderState:
    """Parts of the state that only a read-only process uses."""

    refresh: Callable[[], Awaitable[None]] | None = None
    """Lists the tiers again; None in a process that writes."""


@dataclass
class State:
    """The engine's memory. Touched on the engine's loop alone."""

    config: StoreConfig
    tiers: tuple[Tier, ...]
    """Tiers with exact copies of steps, nearest first; see `derivations` for the others."""
    events: Events
    pool: ThreadPoolExecutor
    """Threads that copy, digest and encode."""
    scratch: Scratch
    read_only: bool
    host_memory: HostMemory = field(default_factory=HostMemory)
    """Host memory that devices can access: the slab, and buffers."""
    changed: Notification = field(default_factory=Notification)
    """Notified whenever a step or a tier changed."""
    branch: Branch = field(default_factory=Branch)
    identity: Identity = field(default_factory=Identity)
    observation: Observation = field(default_factory=Observation)
    membership: Membership = field(default_factory=Membership)
    deleting: Counter[StepId] = field(default_factory=Counter)
    """Steps that a person deletes at present, and by how many calls."""
    ram_of_ranks: dict[StepId, RamOfRanksStep] = field(default_factory=dict)
    """In a process that works alone: the steps that are whole in the RAM of ranks of this machine, and held by that."""
    reader: ReaderState = field(default_factory=ReaderState)
    fills: int = 0
    """How many restores have filled arrays of the program; a save before such a restore saw other values in them."""
    derivations: tuple[State, ...] = ()
    """The state of the derived steps of each tier with lossy rules, nearest first."""
    ram_gate: RamGate = field(init=False, default_factory=RamGate)
    _step_table: StepTable = field(init=False)

    def __post_init__(self) -> None:
        self._step_table = StepTable(self.tiers, views.step_view)

    # -- derived steps ------------------------------------------------------------------------------------

    @property
    def target(self) -> Tier:
        """The slowest tier; in the state of derived steps the one that holds them."""
        return self.tiers[-1]

    @property
    def derived(self) -> tuple[Tier, ...]:
        """The tiers that hold derived steps alone, nearest first."""
        return tuple(each.target for each in self.derivations)

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
        return self._step_table.records(self.branch.line)

    def waiting(self, tier: Tier) -> Iterator[StepId]:
        """The steps of the branch that a nearer tier holds and ``tier`` does not, and that may be due, newest first."""
        steps = self._step_table.views(self.branch.line).waiting(tier.name)
        return (StepId(step.serial, step.step) for step in reversed(steps))

    def refuse(self, step: StepId, tier: Tier) -> None:
        """Note that a step that is `waiting` is not due on a tier, whatever else changes."""
        self._step_table.refuse(step, tier.name)

    def left_by_ranks(self, step: StepId) -> RamOfRanksStep | None:
        """A step in the RAM of ranks, unless it is leaving, or another tier has another save under its identity."""
        found = self.ram_of_ranks.get(step)
        if found is None or step in self.tiers[0].steps.leaving:
            return None
        others = (tier.steps.held[step].record for tier in self.tiers[1:] if step in tier.steps.held)
        return found if all(other.saved_at == found.index.record.saved_at for other in others) else None

    def holders(self, step: StepId) -> list[Tier]:
        """The tiers that hold a step as it was saved, nearest first, those that fail, or do not answer, last."""
        holding = [tier for tier in self.tiers if step in tier.steps.held and not tier.derived]
        return sorted(holding, key=lambda tier: not tier.works)

    def on_line(self, serial: int) -> bool:
        """Whether a serial belongs to the branch that is trained."""
        return serial in self.branch

    def newest(self) -> StepId | None:
        """The newest step of the branch, which a restore takes."""
        return next((step for step in reversed(self.records()) if self.on_line(step.serial)), None)

    async def until_read(self, tier: Tier) -> None:
        """Wait for a tier that just comes back after a failure. Raises as `Tier.check_known`."""
        await self.changed.until(lambda: not tier.comes_back)
        tier.check_known()

    def refuse_half_deleted(self, steps: Iterable[StepId]) -> None:
        """Raise `TierUnavailable` for a step among these whose deletion failed on a tier: there it may be intact."""
        for step in steps:
            for tier in self.tiers:
                if isinstance(error := tier.steps.damaged.get(step), TierUnavailable):
                    raise TierUnavailable(f"{step} cannot be read: {error}") from error

    def find(self, step: int | None, serial: int | None = None, *, damaged: bool = False) -> StepId:
        """The step of that number (the newest without one); on the branch if there, else the newest such.

        Args:
            step: the trainer's number.
            serial: which of several saves of that number.
            damaged: count a step, too, whose commit cannot be read on any tier.

        Raises:
            NotFound: no tier holds it; the message lists what there is.
            Corrupt: its commit is damaged on all tiers that have it.
            TierUnavailable: no other tier has it than one where its deletion failed.
        """
        whole = set(self.records())
        unreadable = {found for tier in self.tiers for found in tier.steps.damaged.not_stale()} - whole

        def matching(among: set[StepId]) -> list[StepId]:
            return [found for found in among if step in (None, found.step) and serial in (None, found.serial)]

        if found := matching(whole | unreadable if damaged else whole):
            return max(found, key=lambda each: (self.on_line(each.serial), each))
        if (newest := max(matching(unreadable), default=None)) is not None:
            self.refuse_half_deleted((newest,))
            names = ", ".join(repr(tier.name) for tier in self.tiers if newest in tier.steps.damaged)
            raise Corrupt(f"{newest} cannot be read: its commit is damaged on tier {names}, and no other has one")
        wanted = "a step" if step is None else f"step {step}"
        wanted += "" if serial is None else f" of serial {serial}"
        held = ", ".join(str(each.step) for each in sorted(whole)) or "none"
        silent = [
            tier for tier in self.every_tier if (tier.never_read or not tier.answers) and not self.is_unused(tier)
        ]
        causes = ", ".join(f"{tier.name} ({tier.health.error or 'not opened yet'})" for tier in silent)
        hint = f"; not reachable at present: {causes}" if silent else ""
        raise NotFound(f"no tier holds {wanted} (held: {held}{hint}{lossy_hint(self.derived, step)})")

    @contextmanager
    def being_deleted(self, steps: Collection[StepId]) -> Iterator[None]:
        """Count copies of steps as gone, and begin no read of them, while a person deletes them."""
        self.deleting.update(steps)
        try:
            yield
        finally:
            self.deleting.subtract(steps)
            for step in steps:
                if not self.deleting[step]:
                    del self.deleting[step]

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
            return self.membership.role is not Role.AGENT
        return self.membership.rank == 0 and self.membership.role is not Role.TRAINER

    def collects(self, tier: Tier) -> bool:
        """Whether this process may delete packs there now. RAM has none: its extents come back with each step."""
        return not tier.in_memory and tier.answers and self.manages(tier)

    def is_unused(self, tier: Tier) -> bool:
        """Whether a tier is RAM that a reader does not find: it was released, or lost with its machine."""
        gone = tier.blobs is None and isinstance(tier.health.error, NotFound)
        return self.read_only and gone and tier.in_memory

    def check_writable(self, what: str) -> None:
        """Raise `Invalid` in a read-only store."""
        if self.read_only:
            raise Invalid(f"cannot {what}: the store was opened with read_only=True")

    def report(self, tier: Tier, error: Exception) -> None:
        """Note that a tier failed, and emit an event; its promoter brings it back."""
        if not self.manages(tier):  # the process that manages it reports its state
            _log.warning("tier %r, which another process manages, failed here: %s", tier.name, error)
            tier.health.fail_here(error)
            self.changed.notify()
            return
        delay = tier.health.fail(error)
        if self.is_unused(tier):
            _log.info("tier %r is not in use: %s", tier.name, error)
            return
        level = logging.ERROR if isinstance(error, Conflict) else logging.WARNING
        _log.log(level, "tier %r failed, next try in %.1f s: %s", tier.name, delay, error)
        self.events.emit(TierFailed(tier.name, error, delay))
        self.changed.notify()

    # -- policies -----------------------------------------------------------------------------------------

    def view(self, *, at_rest: bool = False) -> StoreView:
        """The view of the store for policies; with ``at_rest``, as it would be if no promotion were under way."""
        steps = self._step_table.views(self.branch.line)
        tiers = tuple(self.tier_view(tier, at_rest=at_rest) for tier in self.tiers)
        return views.store_view(steps, tiers, self.tiers[0], self.membership, self.observation)

    def tier_view(self, tier: Tier, *, at_rest: bool = False) -> TierView:
        """The view of a tier for policies; ``at_rest`` as for `view`."""
        return views.tier_view(tier, at_rest=at_rest)

    def observe(self, step: int | None = None) -> Observed:
        """The observations for schedules; see `Observation.observe`."""
        return self.observation.observe(step, self.branch, self.tiers)


@dataclass(kw_only=True)
class DerivedState(State):
    """The state with which the derived steps of one tier are made, kept and read.

    It shares all parts with the exact state but the tiers: its own is the last, behind those that hold exact steps to
    derive from.
    """

    exact: State
    """The state of the exact steps."""

    @classmethod
    def of(cls, state: State, tier: Tier) -> DerivedState:
        """The state of steps that are derived from ``state`` for ``tier``. Call it before there are derived steps.

        With several ranks it derives from tiers that all ranks see, for no rank's RAM holds a whole step.
        """
        alone = state.membership.size == 1
        nearer = [each for each in state.tiers if each.place < tier.place and (alone or each.shared)]
        tier.index = len(nearer)
        shared = {each.name: getattr(state, each.name) for each in dataclasses.fields(State) if each.init}
        derived = cls(**shared | {"tiers": (*nearer, tier), "derivations": ()}, exact=state)
        derived.ram_gate = state.ram_gate
        return derived


def lossy_hint(derived: Iterable[Tier], step: int | None) -> str:
    """Name the lossy copies of a step, for a message that no tier holds it as it was saved."""
    found = [tier.name for tier in derived for each in tier.steps.held if step in (None, each.step)]
    names = ", ".join(map(repr, dict.fromkeys(found)))
    return f"; a lossy copy is on {names}: pass lossy=True (--lossy) to restore that" if found else ""
