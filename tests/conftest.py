"""What holds for every test: reproducible properties in CI, and nothing left behind by a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

# Deadlines and speed checks measure the machine that happens to run the tests.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

_SHARED_MEMORY = Path("/dev/shm")
_GRACE = 5.0
"""Seconds that what ends by itself, or belongs to a run beside this one, is given to go away."""


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail the run that leaves files of this library in shared memory, or child processes, behind."""
    before = _names_in_shared_memory()
    yield
    names = _names_in_shared_memory() - before
    deadline = time.monotonic() + _GRACE
    while True:
        names &= _names_in_shared_memory()
        children = _children()
        if not names and not children:
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    left = [str(_SHARED_MEMORY / name) for name in sorted(names)] + [f"process {child}" for child in children]
    pytest.fail("the tests left behind: " + ", ".join(left))


def _names_in_shared_memory() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.glob("tieredckpt*")}


def _children() -> list[str]:
    """Child processes by number and command line; multiprocessing's own tracker ends with its parent."""
    children = []
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and "multiprocessing.resource_tracker" not in line:
                children.append(f"{child.pid}: {line}")
        except psutil.NoSuchProcess:
            continue
    return children
