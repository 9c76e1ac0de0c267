"""The peak memory of this process, and the present memory of its children; see proc(5)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

__all__ = ["peak_since", "resident"]

_SELF = Path("/proc/self")


def resident() -> int:
    """Bytes of memory of this process now; resets its high-water mark. 0 where /proc cannot tell."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))  # else freed memory that glibc keeps would count
    with contextlib.suppress(OSError):
        (_SELF / "clear_refs").write_text("5")
    return _field(_SELF, "VmRSS")


def peak_since(before: int) -> int:
    """Peak bytes of this process above ``before`` since `resident`, plus the private memory of its children."""
    return _field(_SELF, "VmHWM") - before + sum(_field(child, "RssAnon") for child in _children())


def _children() -> list[Path]:
    found: list[Path] = []
    waiting = [str(os.getpid())]
    while waiting:
        for task in Path("/proc", waiting.pop(), "task").glob("*/children"):
            with contextlib.suppress(OSError):
                numbers = task.read_text().split()
                found += [Path("/proc", number) for number in numbers]
                waiting += numbers
    return found


def _field(process: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in (process / "status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10
    return 0
