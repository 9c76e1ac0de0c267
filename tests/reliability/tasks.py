"""What the tasks of an event loop are doing, for a run that has to say why it stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["count_tasks", "where_tasks_are"]


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
