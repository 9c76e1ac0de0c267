"""Other limits than those that are in force, as long as a test runs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tieredckpt.engine import limits

__all__ = ["descriptors_left", "limit"]


def limit(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Put other values in the place of some; see `tieredckpt.engine.limits.Limits`."""
    patch.setattr(limits, "in_force", replace(limits.in_force, **changes))


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Leave this process so many free file descriptors."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]  # the lowest ones
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], most))
    try:
        for fd in free:
            os.close(fd)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
