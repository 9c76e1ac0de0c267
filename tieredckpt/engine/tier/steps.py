"""Collections of what a tier holds that keep their sums and changes: sizes with a total, steps with news."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["DamagedSteps", "Held", "HeldSteps", "Sizes"]

K = TypeVar("K")


class Sizes(MutableMapping[K, int]):
    """Bytes by key, and how many those are together."""

    def __init__(self) -> None:
        self._of: dict[K, int] = {}
        self.total = 0

    def __getitem__(self, key: K) -> int:
        return self._of[key]

    def __setitem__(self, key: K, nbytes: int) -> None:
        self.total += nbytes - self._of.get(key, 0)
        self._of[key] = nbytes

    def __delitem__(self, key: K) -> None:
        self.total -= self._of.pop(key)

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def __iter__(self) -> Iterator[K]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def clear(self) -> None:
        self._of.clear()
        self.total = 0


@dataclass(frozen=True, slots=True)
class Held:
    """A step as one tier holds it."""

    record: StepRecord
    btree_key: str
    """Empty in the RAM of a rank that has no part of a step which other ranks hold."""
    whole: bool = True
    """Whether the record was read from the step, and not from a catalog, which has no structure, say."""


class HeldSteps(dict[StepId, Held]):
    """The steps that a tier holds, and which of them came or went since somebody asked.

    Changed on the engine's loop; `news` may be taken by another thread, of which there is one at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed: set[StepId] | None = None
        """None until somebody asks: of a tier that nobody asks about, nothing piles up."""

    def news(self) -> set[StepId]:
        """The steps that came, went or were replaced since the last call; at the first one all."""
        if self._changed is None:
            self._changed = set()
            return set(self)
        found: set[StepId] = set()
        while True:
            try:
                found.add(self._changed.pop())
            except KeyError:
                return found

    def _tell(self, *steps: StepId) -> None:
        if self._changed is not None:
            self._changed.update(steps)

    # Each tells of a change when it has been made: who looks before is told, and who looks between looks again.

    def __setitem__(self, step: StepId, held: Held) -> None:
        super().__setitem__(step, held)
        self._tell(step)

    def __delitem__(self, step: StepId) -> None:
        super().__delitem__(step)
        self._tell(step)

    def pop(self, step: StepId, *default: Any) -> Any:
        found = super().pop(step, *default)
        self._tell(step)
        return found

    def popitem(self) -> tuple[StepId, Held]:
        step, held = super().popitem()
        self._tell(step)
        return step, held

    def clear(self) -> None:
        gone = tuple(self)
        super().clear()
        self._tell(*gone)

    def setdefault(self, step: StepId, held: Held) -> Held:
        if step not in self:
            self[step] = held
        return self[step]

    def update(self, *others: Any, **none: Any) -> None:
        added = dict(*others, **none)
        super().update(added)
        self._tell(*added)

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self


class DamagedSteps(dict[StepId, TieredCkptError]):
    """The steps whose commit is there and cannot be read, and the packs that each may use all the same.

    A step that is put here by anything but `quarantine` keeps no packs.
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
            self._own[step] = time.time(), frozenset(packs)
        else:
            self._any[step] = time.monotonic(), frozenset(packs)

    def own_packs(self) -> dict[str, float]:
        """The packs that they are known to use, and since when they are here (epoch seconds)."""
        return {key: since for step, (since, packs) in self._own.items() if step in self for key in packs}

    def any_packs(self, seconds: float) -> set[str]:
        """The packs that there were when steps came here, less than so long ago, of which nothing is known."""
        now = time.monotonic()
        self._any = {step: known for step, known in self._any.items() if step in self and now - known[0] < seconds}
        return {key for _, packs in self._any.values() for key in packs}
