"""The memory limit of this process: the machine's memory, and the limits of its cgroups; and its address space.

See cgroups(7). The limits of all parents bind a group too. Inside a container the mounted tree may begin at the
container's own group, so every path that may apply is checked.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["addresses_left", "memory_limit"]


def memory_limit(
    *, groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> tuple[int, str]:
    """Bytes of memory that this process may use, and what sets that limit (a cgroup or the machine).

    Args:
        groups: where the cgroups are mounted, of version 1, 2 or both.
        membership: the file that tells which of them the process is in.
    """
    limit, source = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine's memory"
    for path in _limit_files(groups, membership):
        with contextlib.suppress(OSError, ValueError):  # a file that is missing, or says "max"
            value = int(path.read_text())
            if value < limit:
                limit, source = value, f"the cgroup limit in {path}"
    return limit, source


def addresses_left() -> int:
    """Bytes that this process may still map: batch systems limit them with ``ulimit -v``."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    mapped = 0
    with contextlib.suppress(OSError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return max(0, limit - mapped)


def _limit_files(groups: Path, membership: Path) -> Iterator[Path]:
    of_version_1, of_version_2 = ["/"], ["/"]
    with contextlib.suppress(OSError, ValueError):
        for line in membership.read_text(errors="surrogateescape").splitlines():
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0":
                of_version_2.append(path)
            elif "memory" in controllers.split(","):
                of_version_1.append(path)
    for path in of_version_1:
        yield from _upwards(groups / "memory", path, "memory.limit_in_bytes")
    for path in of_version_2:
        yield from _upwards(groups, path, "memory.max")


def _upwards(root: Path, path: str, name: str) -> Iterator[Path]:
    group = Path(os.path.normpath(root / path.lstrip("/")))
    while group != root and root in group.parents:
        yield group / name
        group = group.parent
    yield root / name
