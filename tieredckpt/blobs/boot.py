"""Identify the current boot of this machine: shared memory and locks do not outlive a boot."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["boot_id"]


def boot_id() -> str:
    """The kernel's boot id; ``unknown`` where it tells none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return "unknown"
