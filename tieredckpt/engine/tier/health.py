"""Whether a tier works: its last failure, and when it is tried again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tieredckpt.engine import limits

__all__ = ["Health"]


@dataclass
class Health:
    """Last failure of a tier, until an operation succeeds."""

    error: Exception | None = None
    note: str = ""
    """Note for people about a tier that works."""
    retry_at: float = 0.0
    """Not to be tried before, on the monotonic clock."""
    _failures: int = 0

    def fail(self, error: Exception) -> float:
        """Note a failure; returns the seconds until the next try."""
        self.error = error
        delay = min(limits.in_force.last_retry, limits.in_force.first_retry * 2.0**self._failures)
        self._failures += 1
        self.retry_at = time.monotonic() + delay
        return delay

    def recover(self) -> bool:
        """Note a success; True when the tier had failed before."""
        failed, self.error, self._failures = self.error is not None, None, 0
        return failed
