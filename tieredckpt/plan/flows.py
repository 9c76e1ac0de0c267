"""Transfers that share tiers: max-min fair rates, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import simpy

__all__ = ["Flows", "Lane"]

_DONE = 1e-6
"""Bytes; a smaller remainder of a transfer is rounding."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A device in one direction: reads and writes of a tier take turns, each at its own speed."""

    device: str
    rate: float
    """Bytes a second of a transfer that has the device to itself."""


@dataclass(eq=False, slots=True)
class _Flow:
    lanes: tuple[Lane, ...]
    left: float
    wake: simpy.Event
    rate: float = 0.0
    limit: float = math.inf


@dataclass(eq=False)
class Flows:
    """All transfers under way."""

    env: simpy.Environment
    _flows: list[_Flow] = field(default_factory=list)
    _since: float = 0.0

    def move(
        self, nbytes: float, lanes: Sequence[Lane], limit: float = math.inf
    ) -> Generator[simpy.Event, object, None]:
        """Wait as long as ``nbytes`` take through all lanes at once; may be interrupted."""
        flow = _Flow(tuple(lanes), nbytes, self.env.event(), limit=limit)
        self._advance()
        self._flows.append(flow)
        self._share(flow)
        try:
            while flow.left > _DONE:
                yield self.env.timeout(flow.left / flow.rate) | flow.wake
                self._advance()
        finally:
            self._advance()
            self._flows.remove(flow)
            self._share(flow)

    def _advance(self) -> None:
        passed = self.env.now - self._since
        self._since = self.env.now
        for flow in self._flows:
            flow.left -= flow.rate * passed
            # A remainder that takes less than the clock's resolution is done.
            if flow.left <= flow.rate * max(1e-9, 4e-16 * self.env.now):
                flow.left = 0.0

    def _share(self, but: _Flow) -> None:
        """Raise all rates evenly until a device is busy, then the others'; wake flows whose rate changes."""
        open_flows = list(self._flows)
        room = {lane.device: 1.0 for flow in open_flows for lane in flow.lanes}
        while open_flows:
            costs = dict.fromkeys(room, 0.0)
            for flow in open_flows:
                for lane in flow.lanes:
                    costs[lane.device] += 1 / lane.rate
            levels = {device: room[device] / cost for device, cost in costs.items() if cost}
            level = min([*levels.values(), *(flow.limit for flow in open_flows)])
            full = {device for device, each in levels.items() if each <= level}
            frozen = [
                flow for flow in open_flows if flow.limit <= level or any(lane.device in full for lane in flow.lanes)
            ]
            for flow in frozen:
                open_flows.remove(flow)
                for lane in flow.lanes:
                    room[lane.device] = max(0.0, room[lane.device] - level / lane.rate)
                if flow is not but and flow.rate != level:
                    flow.wake.succeed()
                    flow.wake = self.env.event()
                flow.rate = level
