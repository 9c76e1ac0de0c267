"""The steps of one tier, and the state of each: held, damaged, leaving, stuck, indeterminate, or a tombstone."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from tieredckpt.engine.tier.catalog_cache import Catalogued
from tieredckpt.engine.tier.held import Held, HeldSteps
from tieredckpt.engine.tier.index_cache import RecentIndexes, packs_of
from tieredckpt.engine.wire_types import Failure
from tieredckpt.errors import Conflict, Corrupt, TieredCkptError, TierUnavailable
from tieredckpt.format.manifest import ArrayIndex, StepId, StepIndex, StepRecord

__all__ = [
    "DamagedSteps",
    "IndeterminateCommit",
    "IndeterminateDelete",
    "Stale",
    "Steps",
    "Unreadable",
]


class IndeterminateDelete(TierUnavailable):
    """A deletion failed: the step is there or not, which shows when its tier works again.

    Stands among the damaged steps of a tier, with the step as it was held.
    """

    def __init__(self, message: str, held: Held) -> None:
        super().__init__(message)
        self.held = held


class Stale(Conflict):
    """The training went on elsewhere from an older step, and a slower tier holds another save in the place of this one.

    Stands among the damaged steps of a tier, for it is no copy of that step; it keeps its packs until it is evicted.
    """

    def __init__(self, message: str, btree_key: str, stamp: Hashable) -> None:
        super().__init__(message)
        self.btree_key = btree_key
        self.stamp = stamp
        """Of its commit, as `Catalogued.stamps` had it; None where the store tells none."""


class Unreadable(Corrupt):
    """A file of a step's commit cannot be read (EIO, no permission), though its tier works: the step may be whole."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.since = time.monotonic()
        """When it was read last (monotonic seconds)."""


class DamagedSteps(dict[StepId, TieredCkptError]):
    """The steps whose commit is there and cannot be read, and the packs that each may use all the same.

    A step that is put here by anything but `quarantine` keeps no packs; one that is `Stale` keeps them for good.
    """

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[StepId, tuple[float, frozenset[str]]] = {}
        self._any: dict[StepId, tuple[float, frozenset[str]]] = {}

    def quarantine(self, step: StepId, error: TieredCkptError, packs: Iterable[str], *, exactly: bool = False) -> None:
        """Count a step among them; ``packs`` are ``exactly`` those that it uses, or all that there are."""
        self[step] = error
        self._own.pop(step, None)
        self._any.pop(step, None)
        if exactly:
            self._own[step] = time.monotonic(), frozenset(packs)
        else:
            self._any[step] = time.monotonic(), frozenset(packs)

    def own_packs(self, seconds: float) -> set[str]:
        """The packs that unreadable steps are known to use, of those that are here less than ``seconds``."""
        now = time.monotonic()
        own = (self._own[step] for step in self._own.keys() & self.not_stale())
        return {key for since, packs in own for key in packs if now - since < seconds}

    def stale(self) -> dict[StepId, frozenset[str]]:
        """The steps that are `Stale`, and the packs of each."""
        return {step: self._own[step][1] for step, error in self.items() if isinstance(error, Stale)}

    def not_stale(self) -> set[StepId]:
        """The steps that cannot be read."""
        return {step for step, error in self.items() if not isinstance(error, Stale)}

    def told(self) -> tuple[tuple[StepId, Failure], ...]:
        """For another process: each step, and what is wrong with it."""
        return tuple((step, Failure.of(error)) for step, error in self.items())

    def adopt(self, told: Iterable[tuple[StepId, Failure]]) -> None:
        """Take over what another process has `told`, which manages the tier and keeps the packs."""
        self.clear()
        for step, failure in told:
            error = failure.error()
            stale = isinstance(error, Conflict)
            self.quarantine(step, Stale(failure.text, "", None) if stale else error, (), exactly=stale)

    def any_packs(self, seconds: float) -> set[str]:
        """All packs of the tier at the moment when steps with unknown packs came here, less than ``seconds`` ago.

        For a step that is `Unreadable` they count as long as it is here: it is neither torn nor lost.
        """
        now = time.monotonic()
        self._any = {
            step: known
            for step, known in self._any.items()
            if step in self and (now - known[0] < seconds or isinstance(self[step], Unreadable))
        }
        return {key for _, packs in self._any.values() for key in packs}


@dataclass(frozen=True, slots=True)
class IndeterminateCommit:
    """A commit that failed: it may have succeeded all the same, or may yet (`Steps.commits_come_late`)."""

    packs: frozenset[str]
    """That it refers to."""
    btree_keys: frozenset[str]
    """Keys of its index nodes, and of failed commits before it; they identify commits of this process."""
    since: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        """Seconds."""
        return time.monotonic() - self.since


@dataclass
class Steps:
    """States of the steps of one tier. Each method is a transition of a step from one state to another.

    A new scan may exchange every table but ``held`` during an await: only who keeps the scan away may keep one.
    """

    held: HeldSteps = field(default_factory=HeldSteps)
    parts: dict[StepId, Held] = field(default_factory=dict)
    """In a rank's RAM: its parts of steps that are not known to be complete."""
    damaged: DamagedSteps = field(default_factory=DamagedSteps)
    impaired: dict[StepId, set[bytes | str]] = field(default_factory=dict)
    """Steps, also damaged ones, that are no good copies, and what each is known to lack here: digests of chunks, keys
    of packs and of manifests; an empty key if another process tells so. Digests stay until the step is verified or
    copied there again."""
    leaving: set[StepId] = field(default_factory=set)
    """Steps that are being retracted; they do not count as copies any more."""
    tombstones: set[StepId] = field(default_factory=set)
    """Steps evicted from here that other tiers hold; only a person promotes them here again."""
    stuck: dict[StepId, TieredCkptError] = field(default_factory=dict)
    """Steps that are due here and cannot be copied, and the error in their bytes on other tiers."""
    indeterminate: dict[StepId, IndeterminateCommit] = field(default_factory=dict)
    """Steps with a commit that failed; one that may come late keeps its step here whatever else happens to that."""
    commits_come_late: bool = False
    """Whether something between here and the store may pass a commit on after its sender has given it up."""
    deletions: dict[StepId, float] = field(default_factory=dict)
    """Steps with a deletion that failed and may come late, and since when (monotonic): none is committed anew here."""
    pinned: set[StepId] = field(default_factory=set)
    """Steps that stay here until a person takes the pin away; some may not be here."""
    readers: dict[StepId, int] = field(default_factory=dict)
    """How many readers each step has."""
    scanning: bool = False
    """Whether the tier is being scanned: it may hold steps that are not known yet."""
    promotions: int = 0
    """How many promotions to the tier are under way."""
    promotion_seconds: float | None = None
    """From a save to its commit here, a recent mean; None before the first."""
    indexes: RecentIndexes = field(default_factory=RecentIndexes)
    catalogued: Catalogued = field(default_factory=Catalogued)
    _turns: WeakValueDictionary[StepId, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def exchange(self, read: Steps) -> None:
        """Replace what is known of the content of the tier by what was ``read``, and not used afterwards."""
        self.held.exchange(read.held)
        self.parts, self.damaged = read.parts, read.damaged
        self.impaired = {step: lacking for step, lacking in read.impaired.items() if read.keeps(step)}
        self.indexes, self.catalogued = read.indexes, read.catalogued
        self.pinned |= read.pinned  # one that is being put was not listed yet
        for step in tuple(self.indeterminate):
            self.resolve(step)

    def own(self, step: StepId) -> Held | None:
        """The step, or a rank's part of it, as this tier itself stores it; None where it does not."""
        held = self.held.get(step) or self.parts.get(step)
        return held if held is not None and held.btree_key else None

    def known(self) -> set[StepId]:
        """The steps that are here, readable or not, and a rank's parts of steps."""
        return self.held.keys() | self.parts.keys() | self.damaged.keys()

    def has_own(self, step: StepId) -> bool:
        """Whether this tier itself stores the step, or a rank's part of it."""
        return self.own(step) is not None

    def keeps(self, step: StepId) -> bool:
        """Whether the tier has the step, readable or not, and is not retracting it."""
        return (step in self.held or step in self.damaged) and step not in self.leaving

    def has_good(self, step: StepId) -> bool:
        """Whether the tier has a good copy of the step, as far as is known."""
        return step in self.held and step not in self.impaired

    def has_chunks(self, step: StepId) -> bool:
        """As `has_good`, or only its commit is damaged: this process may know the index."""
        return step in self.held and self.impaired.get(step, set()) <= {step.manifest_key}

    def impair(self, step: StepId, lacking: Iterable[bytes | str]) -> None:
        """Count the copy of a step, if it is held here, as no good one, as `impaired` has it."""
        if step in self.held:
            self.impaired.setdefault(step, set()).update(lacking)

    def lacking(self, step: StepId) -> frozenset[bytes | str]:
        """What the copy of a step is known to lack now; for `mend`, once all of it is there."""
        return frozenset(self.impaired.get(step, ()))

    def mend(self, step: StepId, present: Iterable[bytes | str]) -> None:
        """Note what the copy of a step lacks no more; it is a good one if that is all."""
        if (lacking := self.impaired.get(step)) is not None:
            lacking.difference_update(present)
            if not lacking:
                del self.impaired[step]

    def to_mend(self) -> set[StepId]:
        """The steps without a good copy here that are to be copied here again from another tier."""
        return self.damaged.keys() | self.impaired.keys()

    def may_have(self, step: StepId) -> bool:
        """Whether this process knows why a commit of the step may be on the tier: held, damaged, left or given up."""
        known = (self.held, self.damaged, self.tombstones, self.indeterminate, self.deletions)
        return any(step in steps for steps in known)

    def turn(self, step: StepId) -> asyncio.Lock:
        """The lock for putting or deleting the step's manifest, so that two such calls have an order."""
        return self._turns.setdefault(step, asyncio.Lock())

    def begin_read(self, step: StepId) -> None:
        """Count one reader more of a step."""
        self.readers[step] = self.readers.get(step, 0) + 1

    def end_read(self, step: StepId) -> None:
        """Count one reader less of a step."""
        self.readers[step] -= 1
        if not self.readers[step]:
            del self.readers[step]

    def set_apart(self) -> None:
        """Count the steps here as parts of one rank and none as held, until the parts of the other ranks are known."""
        self.parts.update(self.held)
        self.held.clear()

    def agree(self, record: StepRecord) -> None:
        """Count a step as held after all ranks have agreed on its commit; ``record`` describes it."""
        part = self.parts.pop(record.id, None) or self.held.get(record.id)
        self.held[record.id] = Held(record, part.btree_key if part is not None else "")

    def know(self, record: StepRecord, arrays: Mapping[str, ArrayIndex], btree_key: str, nbytes: int) -> frozenset[str]:
        """Count a step as held after its commit, of ``nbytes`` with its index nodes at ``btree_key``.

        A rank's part counts as such. Returns the packs that it refers to.
        """
        step = record.id
        if record.rank is None:
            self.held[step] = Held(record, btree_key)
        elif (agreed := self.held.get(step)) is not None:  # by all ranks, and its part was repaired
            self.held[step] = Held(agreed.record, btree_key)
        else:
            self.parts[step] = Held(record, btree_key)
        self.damaged.pop(step, None)
        self.mend(step, (step.manifest_key,))
        self.stuck.pop(step, None)
        self.resolve(step)
        self.tombstones.discard(step)
        self.catalogued.forget(step)
        self.indexes.nbytes[step] = nbytes
        self.indexes.remember(step, StepIndex(record, dict(arrays)))
        self.indexes.packs[step] = packs = packs_of(arrays)
        return packs

    def unstick(self, kind: type[TieredCkptError]) -> None:
        """Count no step as stuck by errors of a kind, whose reason has gone."""
        for step in [step for step, error in self.stuck.items() if isinstance(error, kind)]:
            del self.stuck[step]

    def mark_indeterminate(self, step: StepId, packs: frozenset[str], btree_key: str) -> None:
        """Note that a commit failed and may have happened; the arguments are those of `IndeterminateCommit`."""
        btree_keys = frozenset({btree_key})
        if (before := self.indeterminate.get(step)) is not None:
            packs, btree_keys = packs | before.packs, btree_keys | before.btree_keys
        self.indeterminate[step] = IndeterminateCommit(packs, btree_keys)
        self.indexes.forget(step)

    def resolve(self, step: StepId, grace: float = math.inf) -> None:
        """Forget the failed commit of a step, whose state is known.

        Where commits may come late, it stays until it is ``grace`` seconds old; without ``grace``, it stays.
        """
        if (commit := self.indeterminate.get(step)) is not None and (not self.commits_come_late or commit.age >= grace):
            del self.indeterminate[step]

    def late_packs(self) -> set[str]:
        """The packs of commits that may come late, or have replaced one that is misread."""
        there, late = self.damaged.keys() | self.held.keys(), self.commits_come_late
        return {key for step, each in self.indeterminate.items() if late or step in there for key in each.packs}

    def quarantine(self, step: StepId, error: TieredCkptError, packs: Iterable[str]) -> None:
        """Count a step as not held, for its commit turned out unreadable; ``packs`` are all of the tier."""
        if self.held.pop(step, None) is not None:
            own = self.indexes.forget(step)
            self.damaged.quarantine(step, error, packs if own is None else own, exactly=own is not None)
            if not isinstance(error, IndeterminateDelete):  # else it is read before it counts as held again
                self.mend(step, (step.manifest_key,))
            self.catalogued.forget(step)

    def drop(self, step: StepId) -> str | None:
        """Forget a step whose manifest is gone; returns the key of its index nodes, for the caller to delete."""
        held = self.held.pop(step, self.parts.pop(step, None))
        self.resolve(step)
        self.catalogued.forget(step)
        self.damaged.pop(step, None)
        self.impaired.pop(step, None)
        self.indexes.forget(step)
        self.indexes.nbytes.pop(step, None)
        return held.btree_key if held is not None else None
