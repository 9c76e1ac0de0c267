"""What a process and the folders of its store take over a long run, whether any of it grows, and where tasks wait.

A leak is told from noise by two medians: that of the first third of the samples after a warm-up, and that of the
last third. One sample that was taken at a bad moment moves neither.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from support.scenes import files_below

__all__ = ["ALLOWED", "Trend", "count_tasks", "sample", "trends", "where_tasks_are"]

Sample = Mapping[str, int]
"""A value of every gauge."""

ALLOWED: Mapping[str, tuple[float, int]] = {
    "resident memory (bytes)": (0.05, 8 << 20),
    "shared memory (bytes)": (0.25, 64 << 10),
    "bytes of files": (0.25, 256 << 10),
    "files": (0.25, 8),
    "descriptors": (0.0, 4),
    "threads": (0.0, 16),
    "tasks": (0.0, 3),
}
"""By how much each may be more at the end: a share of what it was, and so much besides. What is retained varies
with what was promoted last, and pools start their threads one by one as they are first needed, some of them late.
"""

_WARM_UP = 0.2
"""Of the samples, the share that is not judged: caches, pools and scratch memory fill."""

_FEWEST = 9


def sample(tasks: int, memory: Path, folders: Iterable[Path]) -> dict[str, int]:
    """What this process takes now.

    Args:
        tasks: how many tasks its event loops have.
        memory: the folder of its store in shared memory.
        folders: of the slower tiers; files that go while they are counted count or do not.
    """
    gc.collect()
    process = psutil.Process()
    sizes = [size for folder in folders for size in _sizes(folder)]
    values = (
        process.memory_info().rss,
        sum(_sizes(memory)),
        sum(sizes),
        len(sizes),
        process.num_fds(),
        process.num_threads(),
        tasks,
    )
    return dict(zip(ALLOWED, values, strict=True))


def _sizes(folder: Path) -> list[int]:
    """The bytes that each file below a folder takes where it lies."""
    found = []
    for file in files_below(folder):
        with suppress(FileNotFoundError):
            found.append(file.stat().st_blocks * 512)
    return found


@dataclass(frozen=True, slots=True)
class Trend:
    """One gauge over a run."""

    gauge: str
    early: float
    late: float
    most: int

    @property
    def grows(self) -> bool:
        """Whether it was more at the end than a run that leaks nothing explains."""
        share, constant = ALLOWED[self.gauge]
        return self.late - self.early > share * self.early + constant

    def __str__(self) -> str:
        return f"{self.gauge} went from {self.early:,.0f} to {self.late:,.0f}, at most {self.most:,}"


def trends(samples: Sequence[Sample]) -> tuple[Trend, ...]:
    """Every gauge's course; none where there are too few samples to tell."""
    judged = samples[round(len(samples) * _WARM_UP) :]
    if len(judged) < _FEWEST:
        return ()
    third = len(judged) // 3
    return tuple(
        Trend(
            gauge,
            statistics.median(each[gauge] for each in judged[:third]),
            statistics.median(each[gauge] for each in judged[-third:]),
            max(each[gauge] for each in judged),
        )
        for gauge in ALLOWED
    )


async def count_tasks() -> int:
    """How many tasks the running loop has."""
    return len(asyncio.all_tasks())


async def where_tasks_are() -> str:
    """Where each task of the running loop waits, the innermost frames first."""
    found = []
    for task in asyncio.all_tasks():
        frames = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in _awaited(task)]
        at = " < ".join(f"{Path(file).stem}.{name}:{line}" for file, line, name in reversed(frames))
        found.append(f"{task.get_name()}: {at}")
    return "\n".join(sorted(found))


def _awaited(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of what a task awaits, which `asyncio.Task.get_stack` leaves out but for the first."""
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame
        coroutine = coroutine.cr_await
