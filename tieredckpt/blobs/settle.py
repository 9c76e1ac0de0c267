"""Waiting that a cancellation does not cut short, for work that uses the caller's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["note", "outlast", "settle"]

T = TypeVar("T")


async def settle(running: asyncio.Future[T], give_up: Callable[[], object]) -> T:
    """The result of ``running``; when cancelled, make it give up, and wait until it has."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        give_up()
        await outlast(running)
        raise


async def outlast(running: asyncio.Future[Any]) -> None:
    """Wait until ``running`` has ended, whatever it ends with; only then is a cancellation raised."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    note(running)
    if cancelled is not None:
        raise cancelled


def note(ended: asyncio.Future[Any]) -> None:
    """Take note of the error of a future that nobody awaits, or asyncio reports it as never retrieved."""
    if not ended.cancelled():
        ended.exception()
