"""Describes the machine, and the versions of the measured packages."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tieredckpt.blobs.memory import memory_limit
from tieredckpt.format import crc, digest

__all__ = ["describe_machine", "versions"]

_NATIVE = {"CRC-32C": crc.NATIVE, "XXH3": digest.NATIVE}
_PACKAGES = ("tieredckpt", "numpy", "tensorstore", "xxhash", "jax", "orbax-checkpoint", "torch", "safetensors")


def describe_machine(folder: Path) -> dict[str, str | int]:
    """Processor, cores, memory, system, and the file system of ``folder``."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device, kind = _file_system(folder.resolve())
    return {
        "processor": _processor(),
        "cores": usable or 1,
        "memory": memory_limit()[0],
        "system": f"{platform.system()} {platform.release()}",
        "file_system": kind,
        "device": device,
        "python": platform.python_version(),
        "native": ", ".join(name for name, built in _NATIVE.items() if built) or "none",
    }


def versions() -> dict[str, str]:
    """Versions of the measured packages that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> tuple[str, str]:
    """Device and type of the file system of ``folder``."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()]
    except OSError:
        return "unknown", "unknown"
    above = {str(folder), *map(str, folder.parents)}
    found = [(len(at), device, kind) for device, at, kind, *_ in mounts if at in above]
    return max(found)[1:] if found else ("unknown", "unknown")
