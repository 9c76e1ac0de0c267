"""Identify the current boot of this machine: shared memory and locks do not outlive a boot."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["boot_id"]


@cache
def boot_id() -> str:
    """The kernel's boot id; ``unknown`` where it tells none. Raises `OSError` if this process can open no file."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (FileNotFoundError, PermissionError):
        return "unknown"
