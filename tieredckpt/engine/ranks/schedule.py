"""Chooses the steps that all ranks save together, though their clocks and their measurements differ.

If the answer of a schedule does not depend on time, every rank asks it, and all get the same answer. If it does, rank 0
alone decides, and orders a step some way ahead: all save that step, or the first after it that they ask about. How far
ahead depends on how fast steps come, and doubles when an order came too late.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tieredckpt.engine import limits
from tieredckpt.engine.keeping.policies import save_is_due
from tieredckpt.engine.state.state import State

__all__ = ["SharedSchedule"]

_log = logging.getLogger("tieredckpt")

_FARTHEST = 60.0
_EVER = 1e9
"""Seconds after which everything that depends on time is due."""
_REMEMBERED = 10_000
"""Past steps that a rank remembers, to recognize an order that comes too late."""


class SharedSchedule:
    """The steps that all ranks are to save, as one rank knows them.

    `due` is called from the trainer's thread, perhaps while the engine's is in `received`: who removes an order has it.
    ``send`` sends an order to the other ranks; rank 0 alone calls it.
    """

    def __init__(self, state: State, *, coordinates: bool, send: Callable[[int], None]) -> None:
        self._state = state
        self._leads = coordinates
        self._send = send
        self._planned: deque[int] = deque()
        self._asked: deque[int] = deque(maxlen=_REMEMBERED)
        self._begin: tuple[float, int] | None = None
        """When a rank first asked about a step (monotonic), and about which."""
        self._ahead = limits.in_force.schedule_ahead
        self._last: int | None = None
        """The last step that was ordered; None if its save failed."""

    def due(self, step: int) -> bool:
        """Whether all ranks save after ``step``."""
        self._asked.append(step)
        self._begin = self._begin or (time.monotonic(), step)
        planned = next(iter(tuple(self._planned)), None)
        if planned is not None and step >= planned and self._take(planned):
            return True
        if save_is_due(self._state, step, after=0.0) and save_is_due(self._state, step, after=_EVER):
            return True
        if self._leads and not self._planned and save_is_due(self._state, step):
            at = step + self._steps_ahead(step)
            self._planned.append(at)
            self._last = at
            self._send(at)
        return False

    def _steps_ahead(self, step: int) -> int:
        assert self._begin is not None
        since, first = self._begin
        each = (time.monotonic() - since) / max(1, step - first)
        return max(1, math.ceil(self._ahead / max(each, 1e-6))) if step > first else 1

    def received(self, at: int) -> int | None:
        """Apply rank 0's order; returns the step to give up if this rank has passed it already."""
        late = self._passed(at)
        if late is None:
            self._planned.append(at)
            late = self._passed(at)  # before `due` could see the order
            if late is None or not self._take(at):
                return None
        _log.warning("the order to save step %d came too late", late)
        return late

    def _passed(self, at: int) -> int | None:
        return next((step for step in tuple(self._asked) if step >= at), None)

    def _take(self, at: int) -> bool:
        with suppress(ValueError):  # the other thread has it
            self._planned.remove(at)
            return True
        return False

    def failed(self, step: int) -> None:
        """Note that a save was aborted: if it was ordered, perhaps too late, so the next order has more time."""
        if self._last is not None and step >= self._last:
            self._last = None
            self._ahead = min(_FARTHEST, 2 * self._ahead)

    def reset(self) -> None:
        """Forget all orders: training goes on from another step."""
        self._planned.clear()
        self._asked.clear()
        self._begin = None
