"""The steps of a store as policies see them: by age and by tier, in values that never change.

A changed copy shares nearly everything with its original, and the view of a step is made when a policy looks at it: the
cost of a save does not grow with the number of steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter
from typing import overload

__all__ = ["Age", "ByAge", "Listing", "StepView", "StepViews"]

Age = tuple[int, int]
"""Serial and number of a step, as a `StepId` has them."""

_BLOCK = 512
"""Steps in a block at most."""

_FEW = 64
"""Most steps that are changed one by one; for more, all steps are sorted again."""


@dataclass(frozen=True, slots=True)
class StepView:
    """One saved step, as it is when the policy is asked."""

    step: int
    """The trainer's number; after a rollback it may occur again under a higher serial."""
    serial: int
    """The number of the save in the store's life; unique."""
    saved_at: float
    """Seconds since the epoch."""
    age: float
    """Seconds from ``saved_at`` to ``StoreView.now``."""
    nbytes: int
    """Bytes of all its arrays, before chunks are shared with other steps."""
    metrics: Mapping[str, float]
    tiers: tuple[str, ...]
    """Names of the tiers that hold it committed."""
    on_line: bool = True
    """False for a step off the branch: an earlier step was restored, and a save has forked there."""
    replicas: int = 1
    """On how many nodes the nearest tier has it: RAM with ``replicas`` outlives the loss of all but one of them."""


_age = attrgetter("serial", "step")


class ByAge(Sequence[StepView]):
    """Steps ascending by age. A copy with one change makes only one block again, and the tuple of all blocks."""

    __slots__ = ("_blocks", "_ends")

    def __init__(self, blocks: Iterable[tuple[StepView, ...]] = ()) -> None:
        self._blocks = tuple(blocks)
        self._ends: list[int] | None = None
        """Number of steps up to the end of each block; None until it is needed."""

    def changed(self, changes: Mapping[Age, StepView | None]) -> ByAge:
        """A copy with these steps as they are given, and without those that are None."""
        if len(changes) > _FEW:
            found = {**{_age(step): step for step in self}, **changes}
            steps = [step for age in sorted(found) if (step := found[age]) is not None]
            return ByAge(tuple(steps[i : i + _BLOCK]) for i in range(0, len(steps), _BLOCK))
        blocks = list(self._blocks)
        for age, step in changes.items():
            at = _block_of(blocks, age)
            block, end = blocks[at] if blocks else (), at + 1
            place, there = _place_of(block, age)
            block = block[:place] + (() if step is None else (step,)) + block[place + there :]
            if len(block) < _BLOCK // 4 and end < len(blocks):  # else deletions would leave many small ones
                block, end = block + blocks[end], end + 1
            half = len(block) // 2
            blocks[at:end] = [block[:half], block[half:]] if len(block) > _BLOCK else [block] if block else []
        return ByAge(blocks)

    def find(self, age: Age) -> StepView | None:
        """The step of that age; None if it is not there."""
        if not self._blocks:
            return None
        block = self._blocks[_block_of(self._blocks, age)]
        place, there = _place_of(block, age)
        return block[place] if there else None

    def _up_to(self) -> list[int]:
        if self._ends is None:
            self._ends = list(accumulate(map(len, self._blocks)))
        return self._ends

    @overload
    def __getitem__(self, place: int) -> StepView: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[StepView, ...]: ...

    def __getitem__(self, place: int | slice) -> StepView | tuple[StepView, ...]:
        chosen = range(len(self))[place]
        if isinstance(chosen, range):
            return tuple(self[each] for each in chosen)
        at = bisect_right(self._up_to(), chosen)
        return self._blocks[at][chosen - self._up_to()[at]]

    def __len__(self) -> int:
        return self._up_to()[-1] if self._blocks else 0

    def __iter__(self) -> Iterator[StepView]:
        return chain.from_iterable(self._blocks)

    def __reversed__(self) -> Iterator[StepView]:
        return chain.from_iterable(map(reversed, reversed(self._blocks)))


def _block_of(blocks: Sequence[tuple[StepView, ...]], age: Age) -> int:
    """The place of the block where a step of that age is, or would come."""
    if len(blocks) < 2:
        return 0
    return max(0, bisect_right(blocks, age, key=lambda block: _age(block[0])) - 1)


def _place_of(block: tuple[StepView, ...], age: Age) -> tuple[int, bool]:
    """The place of a step in its block, and whether it is there; checks the newest step first, which changes most."""
    newest = _age(block[-1]) if block else (-1, -1)
    if newest <= age:
        return len(block) - (newest == age), newest == age
    place = bisect_left(block, age, key=_age)
    return place, _age(block[place]) == age


_NONE = ByAge()


class Listing:
    """All steps of a store, those on each tier, and those that wait for it; without their ages and replicas.

    Args:
        names: the tiers, nearest first.
    """

    __slots__ = ("_lists", "_names")

    def __init__(self, names: tuple[str, ...], _lists: Mapping[tuple[str, str], ByAge] | None = None) -> None:
        self._names = names
        self._lists = _lists or {}

    def changed(self, changes: Mapping[Age, StepView | None]) -> Listing:
        """A copy with these steps as they are given, and without those that are None."""
        moves: defaultdict[tuple[str, str], dict[Age, StepView | None]] = defaultdict(dict)
        for age, step in changes.items():
            for key in self._keys(self.steps.find(age)):
                moves[key][age] = None
            for key in self._keys(step):
                moves[key][age] = step
        return Listing(self._names, {**self._lists, **{key: self._list(*key).changed(moves[key]) for key in moves}})

    def _keys(self, step: StepView | None) -> Iterator[tuple[str, str]]:
        if step is None:
            return
        yield "all", ""
        nearer = False
        for name in self._names:
            if name in step.tiers:
                nearer = True
                yield "on", name
                if step.on_line:
                    yield "line", name
            elif nearer and step.on_line:
                yield "waiting", name

    def _list(self, which: str, tier: str) -> ByAge:
        return self._lists.get((which, tier), _NONE)

    @property
    def steps(self) -> ByAge:
        """Every step."""
        return self._list("all", "")

    def on(self, tier: str, *, line: bool = False) -> ByAge:
        """The steps that a tier holds; with ``line`` only those that are not off-branch."""
        return self._list("line" if line else "on", tier)

    def waiting(self, tier: str) -> ByAge:
        """The steps, none of them off-branch or `refused`, that a nearer tier holds and this one does not."""
        return self._list("waiting", tier)

    def refused(self, tier: str, step: Age) -> Listing:
        """A copy in which a step does not wait for a tier, until the step changes."""
        waiting = self.waiting(tier).changed({step: None})
        return Listing(self._names, {**self._lists, ("waiting", tier): waiting})


class StepViews(Sequence[StepView]):
    """Views of steps at one time, each made when it is looked at.

    A policy that looks at the newest of ten thousand steps does not pay for all of them.

    Args:
        listing: of the store.
        now: when they are looked at, in seconds since the epoch.
        replicas: by serial, of the steps that more than one node has.
    """

    __slots__ = ("_listing", "_made", "_now", "_replicas", "_steps")

    def __init__(self, listing: Listing, now: float, replicas: Mapping[int, int]) -> None:
        self._listing, self._now, self._replicas = listing, now, replicas
        self._steps = listing.steps
        self._made: dict[int, StepView] = {}
        """By the identity of the step in the listing."""

    def _seen(self, step: StepView) -> StepView:
        found = self._made.get(id(step))
        if found is None:
            found = self._made[id(step)] = StepView(
                step.step,
                step.serial,
                step.saved_at,
                max(0.0, self._now - step.saved_at),
                step.nbytes,
                step.metrics,
                step.tiers,
                step.on_line,
                self._replicas.get(step.serial, 1),
            )
        return found

    @overload
    def __getitem__(self, place: int) -> StepView: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[StepView, ...]: ...

    def __getitem__(self, place: int | slice) -> StepView | tuple[StepView, ...]:
        if isinstance(place, slice):
            return tuple(map(self._seen, self._steps[place]))
        return self._seen(self._steps[place])

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepView]:
        return map(self._seen, self._steps)

    def __reversed__(self) -> Iterator[StepView]:
        return map(self._seen, reversed(self._steps))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (StepViews, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def find(self, age: Age) -> StepView | None:
        """The step of that age; None if it is not there."""
        step = self._steps.find(age)
        return None if step is None else self._seen(step)

    def changed(self, step: StepView) -> StepViews:
        """A copy with this view of a step instead of another."""
        return StepViews(self._listing.changed({_age(step): step}), self._now, self._replicas)

    def serials_on(self, tier: str) -> frozenset[int]:
        """The serials of the steps that a tier holds."""
        return frozenset([step.serial for step in self._listing.on(tier)])

    def on(self, tier: str, *, line: bool = False) -> StepViews:
        """The steps that a tier holds; with ``line`` only those that are not off-branch."""
        found = StepViews(self._listing, self._now, self._replicas)
        found._steps, found._made = self._listing.on(tier, line=line), self._made
        return found
