"""What the parts of the engine share: the tiers, the branch that is trained, and views of both."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tieredckpt.blobs.ram_owner import Place
from tieredckpt.config import StoreConfig
from tieredckpt.engine.branches import Branch, Origin
from tieredckpt.engine.history import History, history_of
from tieredckpt.engine.lease import Holder
from tieredckpt.engine.pulse import Pulse
from tieredckpt.engine.roll import Roll
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, TieredCkptError
from tieredckpt.events import Events, StepPromoted, TierFailed
from tieredckpt.format.manifest import StepId, StepIndex, StepRecord, StoreMarker
from tieredckpt.policy import Observed, StepView, StoreView, TierView
from tieredckpt.policyviews import StepViews

if TYPE_CHECKING:
    from tieredckpt.engine.agent.streaming import AgentsTiers
    from tieredckpt.engine.source import ChosenStep

__all__ = ["Role", "State", "Streamed", "blend", "numbers"]

_log = logging.getLogger("tieredckpt")

_SERIALS_SKIPPED_WHEN_BLIND = 10_000
"""A tier that cannot be read at start may hold serials that nobody knows of; new ones keep clear of them."""


class Role(enum.Enum):
    """What a process does for a store."""

    WHOLE = "saves and promotes"
    TRAINER = "saves, and has an agent that promotes"
    AGENT = "promotes what a trainer saves"


@dataclass(frozen=True, slots=True)
class Streamed:
    """A rank's part of a step that its RAM could not hold: written to a shared tier, and not committed there yet."""

    tier: Tier
    index: StepIndex
    packs: frozenset[str]
    """To which the part refers: those written for it, and older ones."""


@dataclass
class State:
    """The engine's memory. Touched on the engine's loop alone."""

    config: StoreConfig
    tiers: tuple[Tier, ...]
    events: Events
    pool: ThreadPoolExecutor
    """The threads that copy, digest and encode."""
    scratch: Scratch
    read_only: bool
    marker: StoreMarker | None = None
    made_up: bool = False
    """The marker is new: no tier that answered at start had one."""
    changed: Pulse = field(default_factory=Pulse)
    """Beats whenever a step or a tier changed."""
    branch: Branch = field(default_factory=Branch)
    last_serial: int = 0
    observed: Observed = field(default_factory=lambda: Observed(started_at=time.time()))
    history: History = field(default_factory=History)
    """What is known of the trainers before this one."""
    signals: set[str] = field(default_factory=set)
    """What the trainer has raised; changed from its thread, or from a signal handler there."""
    promotions_ended: int = 0
    """How many promotions there have been, those left out that failed to a tier which had failed before."""
    places: dict[str, Place] = field(default_factory=dict)
    """By name, where the slower tiers are, as they were looked at when the store was opened."""
    noted: dict[str, Place] = field(default_factory=dict)
    """By location, what RAM's note says of the slower tiers; at opening, of those that may not be mounted."""
    rank: int = 0
    neighbours: tuple[int, ...] = (0,)
    """The ranks of this machine, this one included."""
    role: Role = Role.WHOLE
    agents_tiers: AgentsTiers | None = None
    """At a trainer with an agent: how it streams to tiers that the agent manages."""
    ranks: int = 1
    """How many ranks this store has; they make every step together."""
    streamed: dict[StepId, Streamed] = field(default_factory=dict)
    """This rank's parts of steps that RAM could not hold, until they are committed."""
    undecided: set[StepId] = field(default_factory=set)
    """Steps that this rank saved, and the ranks have not agreed on yet."""
    failed: dict[StepId, TieredCkptError] = field(default_factory=dict)
    """Steps that this rank saved, and the ranks did not agree on."""
    replicated: dict[StepId, int] = field(default_factory=dict)
    """Steps whose parts all lie in the RAM of several nodes, and of how many."""
    chosen: ChosenStep | None = None
    """Of several ranks: the step that all restore at present, or restored last."""
    looked_on: dict[StepId, ChosenStep] = field(default_factory=dict)
    """Steps that are whole in the RAM of ranks of this machine, for a process that only looks on."""
    look_anew: Callable[[], Awaitable[None]] | None = None
    """Where nothing is written: makes what is known fresh."""
    saving: dict[int, tuple[float, Origin | None]] = field(default_factory=dict)
    """Steps whose save has returned and is still being made (``capture="reference"``): since when, and what was
    restored last before."""
    _roll: Roll = field(init=False)

    def __post_init__(self) -> None:
        self._roll = Roll(self.tiers, _described)

    # -- steps --------------------------------------------------------------------------------------------

    def records(self) -> dict[StepId, StepRecord]:
        """Every step that some tier holds, by age; not to be changed. From any thread."""
        return self._roll.call(self.branch.line).records

    def holders(self, step: StepId) -> list[Tier]:
        """The tiers that hold a step, nearest first, those that fail at present, or do not answer, last."""
        holding = [tier for tier in self.tiers if step in tier.held]
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
        unreadable = {found for tier in self.tiers for found in tier.damaged} - whole

        def matching(among: set[StepId]) -> list[StepId]:
            return [found for found in among if step in (None, found.step) and serial in (None, found.serial)]

        if found := matching(whole | unreadable if damaged else whole):
            return max(found, key=lambda each: (self.on_line(each.serial), each))
        if found := matching(unreadable):
            names = ", ".join(repr(tier.name) for tier in self.tiers if max(found) in tier.damaged)
            raise Corrupt(f"{max(found)} cannot be read: its commit is damaged on tier {names}, and no other has one")
        wanted = "a step" if step is None else f"step {step}"
        wanted += "" if serial is None else f" of serial {serial}"
        held = ", ".join(str(each.step) for each in sorted(whole)) or "none"
        silent = [tier.name for tier in self.tiers if not tier.healthy]
        hint = f"; not reachable at present: {', '.join(silent)}" if silent else ""
        raise NotFound(f"no tier holds {wanted} (held: {held}{hint})")

    def adopt_line(self, dead: Sequence[Holder] = ()) -> None:
        """Continue from the newest step there is, as after a restart; ``dead`` are writers that others found so."""
        records = self.records()
        newest = max(records, default=None)
        self.branch.adopt(records[newest].line if newest else (), newest)
        serials = [step.serial for tier in self.tiers for step in (*tier.held, *tier.damaged)]
        blind = any(tier.marker is None for tier in self.tiers)
        self.last_serial = max(self.last_serial, *serials, 0) + (_SERIALS_SKIPPED_WHEN_BLIND if blind else 0)
        left_behind = [holder for tier in self.tiers if tier.lease is not None for holder in tier.lease.left_behind]
        self.history = history_of(records[newest] if newest else None, [*left_behind, *dead])

    def meet(self, tier: Tier) -> None:
        """Take up what a tier holds that could not be read at start."""
        if not self.branch.line:  # nothing was found then, and nothing was saved since
            self.adopt_line()
        self.last_serial = max([self.last_serial, *(step.serial for step in (*tier.held, *tier.damaged))])

    # -- tiers --------------------------------------------------------------------------------------------

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank answers for what former ranks left on its machine."""
        return self.neighbours[0] == self.rank

    def tier(self, name: str) -> Tier:
        """The tier of that name. Raises `NotFound` with the names there are, `Invalid` for what is no name."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
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
        if tier.config.kind == "ram":
            return self.role is not Role.AGENT
        return self.rank == 0 and self.role is not Role.TRAINER

    def packs_streamed_to(self, tier: Tier) -> set[str]:
        """Packs of a tier to which saves of several ranks refer that are not committed there yet."""
        return tier.streamed_to.union(*(part.packs for part in self.streamed.values() if part.tier is tier))

    def check_writable(self, what: str) -> None:
        """Raise `Invalid` in a store that is only looked at."""
        if self.read_only:
            raise Invalid(f"cannot {what}: the store was opened with read_only=True")

    def report(self, tier: Tier, error: Exception) -> None:
        """Note that a tier failed, and tell everybody; its promoter brings it back."""
        if not self.manages(tier):  # whoever does tells how it is
            _log.warning("tier %r, which another process manages, failed here: %s", tier.name, error)
            return
        delay = tier.fail(error)
        if self.read_only and tier.is_unused:
            _log.info("tier %r is not in use: %s", tier.name, error)
            return
        level = logging.ERROR if isinstance(error, Conflict) else logging.WARNING
        _log.log(level, "tier %r failed, next try in %.1f s: %s", tier.name, delay, error)
        self.events.emit(TierFailed(tier.name, error, delay))
        self.changed.beat()

    # -- signals ------------------------------------------------------------------------------------------

    def signal(self, name: str, *, on: bool) -> None:
        """Let policies see a signal, or no more, from now on; from any thread or signal handler.

        A lock could wait for the code that a handler has interrupted, so these are one step each. Raises `Invalid`
        for what is no name.
        """
        if not isinstance(name, str) or not name:
            raise Invalid(f"a signal is a name such as 'preempt', not {name!r}")
        (self.signals.add if on else self.signals.discard)(name)

    # -- what policies see of the trainer -----------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def observe_save(self, step: int, saved_at: float, seconds: float) -> None:
        """Learn from a save that has just been made, for which the trainer waited so many seconds."""
        before = self.observed
        step_seconds = before.step_seconds
        if before.last_save_step is not None and before.last_save_at is not None and step > before.last_save_step:
            each = (saved_at - before.last_save_at) / (step - before.last_save_step)
            step_seconds = blend(step_seconds, each)
        self.observed = dataclasses.replace(
            before,
            last_save_step=step,
            last_save_at=saved_at,
            save_count=before.save_count + 1,
            stall_seconds=blend(before.stall_seconds, seconds),
            stalled_seconds=before.stalled_seconds + seconds,
            step_seconds=step_seconds,
        )

    # -- views for policies -------------------------------------------------------------------------------

    def view(self, *, and_on: tuple[StepId, Tier] | None = None, at_rest: bool = False) -> StoreView:
        """What policies see; with ``and_on``, as if that tier held that step too.

        With ``at_rest``, as it would be if no promotion were under way.
        """
        now = self.now()
        steps = self._roll.call(self.branch.line).views
        if and_on is not None:
            steps = tuple(self._as_if(view, *and_on) if view.serial == and_on[0].serial else view for view in steps)
        replicas = {step.serial: nodes for step, nodes in tuple(self.replicated.items()) if step in self.tiers[0].held}
        tiers = tuple(self.tier_view(tier, at_rest=at_rest) for tier in self.tiers)
        return StoreView(now, StepViews(steps, now, replicas), tiers, frozenset(self.signals))

    def _as_if(self, view: StepView, step: StepId, tier: Tier) -> StepView:
        names = tuple(each.name for each in self.tiers if step in each.held or each is tier)
        return dataclasses.replace(view, tiers=names)

    def tier_view(self, tier: Tier, *, at_rest: bool = False) -> TierView:
        return TierView(
            name=tier.name,
            index=tier.index,
            survives=tier.survives.shown,
            capacity=tier.capacity,
            used=tier.used,
            write_bandwidth=tier.write_bandwidth,
            healthy=tier.healthy,
            promoting=tier.promotions > 0 and not at_rest,
        )

    @contextmanager
    def promoting(self, tier: Tier) -> Iterator[None]:
        """Let policies see that a promotion to the tier is under way."""
        tier.promotions += 1
        try:
            yield
            self.promotions_ended += 1
        except BaseException:
            if tier.error is None:  # or a tier that fails on and on would end some on and on
                self.promotions_ended += 1
            raise
        finally:
            tier.promotions -= 1
            self.changed.beat()

    def observe_promotion(self, step: StepRecord, tier: Tier) -> float:
        """Learn from a step that has just been committed on a slower tier how long after its save; returns that.

        Steps of earlier trainers teach nothing: what kept them was not the tier.
        """
        seconds = max(0.0, self.now() - step.saved_at)
        if step.saved_at >= self.observed.started_at:
            tier.promotion_seconds = blend(tier.promotion_seconds, seconds)
        return seconds

    def tell_promoted(self, record: StepRecord, tier: Tier, written: int, begin: float, *, again: bool = False) -> None:
        """Tell that a step was committed on a slower tier, ``again`` or for the first time.

        ``written`` are the bytes of the packs that this process wrote for it, and ``begin`` is when the work began,
        on the monotonic clock.
        """
        lag = 0.0 if again else self.observe_promotion(record, tier)
        seconds = time.monotonic() - begin
        self.events.emit(StepPromoted(record.step, record.serial, tier.name, record.nbytes, written, seconds, lag))
        self.changed.beat()

    def observe(self, step: int | None = None) -> Observed:
        """What schedules see, of which one is asked about ``step``."""
        observed, branch = self.observed, self.branch
        last, newest = observed.last_save_step, branch.newest
        if last is None and newest is not None:
            last = newest.step
        if step is not None and (restored := branch.due_from(step)) is not None:
            last = restored
        for saving, (at, origin) in tuple(self.saving.items()):  # at once: asked from the trainer's thread
            last = saving if origin is branch.origin else last
            observed = dataclasses.replace(observed, last_save_at=at)
        observed = dataclasses.replace(observed, last_save_step=last)
        seen = [tier.promotion_seconds for tier in self.tiers if tier.healthy and tier.promotion_seconds is not None]
        return dataclasses.replace(
            observed,
            promotion_seconds=seen[-1] if seen else None,
            failures=self.history.failures,
            trained_seconds=self.history.trained_seconds + max(0.0, self.now() - observed.started_at),
            stalled_seconds=self.history.stalled_seconds + observed.stalled_seconds,
            lost_seconds=self.history.lost_seconds,
        )


def _described(step: StepId, record: StepRecord, tiers: tuple[str, ...], on_line: bool) -> StepView:
    metrics = numbers(record.metrics)
    return StepView(step.step, step.serial, record.saved_at, 0.0, record.nbytes, metrics, tiers, on_line)


def blend(mean: float | None, value: float) -> float:
    """A recent mean with one more value, or its first: the last three weigh two thirds."""
    return value if mean is None else 0.7 * mean + 0.3 * value


def numbers(metrics: Mapping[str, float | str]) -> dict[str, float]:
    """The metrics of a record; what a hostile store gives for a number that is none is left out."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str) or _is_number(value)}


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text)) or text == "nan"
    except ValueError:
        return False
