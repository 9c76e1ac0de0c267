"""When several ranks save: at the same step, though their clocks and what they have measured differ.

A schedule whose answer does not hang on the time is asked on every rank, and all have the same answer. Where it
does, rank 0 alone decides, and tells the others a step some way ahead: the first that a rank asks about from there
on is the one that all save. How far ahead depends on how fast steps come, and grows when it proved too near.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable

from tieredckpt.engine import limits
from tieredckpt.engine.keeping.policies import save_is_due
from tieredckpt.engine.state.state import State

__all__ = ["Plan"]

_log = logging.getLogger("tieredckpt")

_FARTHEST = 60.0
_EVER = 1e9
"""Seconds after which everything that hangs on the time is due."""
_REMEMBERED = 10_000
"""Steps that were asked about, for an order that comes too late."""


class Plan:
    """The steps that are to be saved, as one rank knows them. `due` is called from the trainer's thread.

    ``tell`` lets the other ranks know; of rank 0 alone.
    """

    def __init__(self, state: State, *, coordinates: bool, tell: Callable[[int], None]) -> None:
        self._state = state
        self._leads = coordinates
        self._tell = tell
        self._planned: deque[int] = deque()
        self._asked: deque[int] = deque(maxlen=_REMEMBERED)
        self._begin: tuple[float, int] | None = None
        """When the first step was asked about, and which."""
        self._ahead = limits.in_force.schedule_ahead
        self._last: int | None = None
        """What was ordered last, and has not failed."""

    def due(self, step: int) -> bool:
        """Whether all ranks save after ``step``."""
        self._asked.append(step)
        self._begin = self._begin or (time.monotonic(), step)
        if self._planned and step >= self._planned[0]:
            self._planned.popleft()
            return True
        if save_is_due(self._state, step, after=0.0) and save_is_due(self._state, step, after=_EVER):
            return True
        if self._leads and not self._planned and save_is_due(self._state, step):
            at = step + self._steps_ahead(step)
            self._planned.append(at)
            self._last = at
            self._tell(at)
        return False

    def _steps_ahead(self, step: int) -> int:
        assert self._begin is not None
        since, first = self._begin
        each = (time.monotonic() - since) / max(1, step - first)
        return max(1, math.ceil(self._ahead / max(each, 1e-6))) if step > first else 1

    def told(self, at: int) -> int | None:
        """Apply rank 0's order; returns a step that this rank has passed already, to be given up."""
        late = next((step for step in tuple(self._asked) if step >= at), None)
        if late is None:
            self._planned.append(at)
            return None
        _log.warning("the order to save step %d came too late", late)
        return late

    def failed(self, step: int) -> None:
        """A save was not agreed on: if it was ordered, the order may have come too late, and the next has more time."""
        if self._last is not None and step >= self._last:
            self._last = None
            self._ahead = min(_FARTHEST, 2 * self._ahead)

    def reset(self) -> None:
        """Forget what was planned: training goes on from another step."""
        self._planned.clear()
        self._asked.clear()
        self._begin = None
