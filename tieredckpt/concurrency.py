"""Cancellation-safe waiting: shields work until it has finished."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from tieredckpt.errors import TierUnavailable

__all__ = [
    "begun_on_own_thread",
    "being_cancelled",
    "in_thread",
    "note",
    "on_own_thread",
    "on_own_thread_within",
    "outlast",
    "run_for",
    "shielded",
    "side_by_side",
    "together",
    "until_done",
    "whole",
]

T = TypeVar("T")


async def shielded(running: asyncio.Future[T]) -> T:
    """Await ``running``; a cancellation of the caller does not cancel it.

    A later error of it is noted (see `note`); `asyncio.shield` logs it, from Python 3.14 on.
    """
    if not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            running.add_done_callback(note)
            raise
    return running.result()


async def until_done(running: asyncio.Future[T], give_up: Callable[[], object]) -> T:
    """Await ``running``; when cancelled, call ``give_up`` and wait until it has ended."""
    try:
        return await shielded(running)
    except asyncio.CancelledError:
        give_up()
        await outlast(running)
        raise


async def in_thread(function: Callable[..., T], *arguments: Any, pool: Executor | None = None) -> T:
    """Run ``function(*arguments)`` on a thread of ``pool``; a cancellation is raised when the call has ended."""
    return await until_done(asyncio.get_running_loop().run_in_executor(pool, function, *arguments), lambda: None)


async def side_by_side(
    threads: int, work: Callable[[], object], give_up: Callable[[], object], pool: Executor | None = None
) -> None:
    """Run ``work()`` on so many ``threads`` of ``pool``; returns, or raises the first error, when all have ended.

    ``give_up`` makes those that run end soon; it is called, perhaps several times, after an error or a cancellation.
    """

    async def one() -> None:
        await until_done(asyncio.get_running_loop().run_in_executor(pool, work), give_up)

    await together(one() for _ in range(threads))


def on_own_thread(what: str, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """`begun_on_own_thread`, with a future for the running event loop."""
    return asyncio.wrap_future(begun_on_own_thread(what, function, *arguments))


def begun_on_own_thread(what: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run ``function(*arguments)`` on its own daemon thread: nobody waits if it hangs, not even the process."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # so that it can be set when nobody waits for it any more
    work = (outcome, function, *arguments)
    threading.Thread(target=run_for, args=work, name=f"tieredckpt {what}", daemon=True).start()
    return outcome


def run_for(outcome: Future[T], function: Callable[..., T], *arguments: Any) -> None:
    """Set the result of ``function(*arguments)``, or its error, as the ``outcome``."""
    try:
        result = function(*arguments)
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


async def on_own_thread_within(seconds: float, tier: str, what: str, function: Callable[..., T], *arguments: Any) -> T:
    """Run ``function(*arguments)`` on its own daemon thread; stop waiting if it hangs in the device.

    Raises `TierUnavailable` when it has not ended in ``seconds``. A cancellation stops the waiting at once, so the
    function must not touch the caller's memory.
    """
    try:
        async with asyncio.timeout(seconds):
            return await on_own_thread(what, function, *arguments)
    except TimeoutError:
        raise TierUnavailable(
            f"tier {tier!r}: {what} had not ended after {seconds:.1f} s; is its file system mounted and answering? "
            "If it is only slow, raise `deadline`"
        ) from None


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end and return its result; only then is a cancellation raised."""
    return await until_done(asyncio.ensure_future(work), lambda: None)


async def together(works: Iterable[Coroutine[Any, Any, None]], at_a_time: int | None = None) -> None:
    """Run works, at most ``at_a_time`` at once; the first error ends the others, and is raised when all have ended."""
    turns = None if at_a_time is None else asyncio.Semaphore(at_a_time)

    def start(work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        if turns is None:
            return asyncio.ensure_future(work)
        running = asyncio.ensure_future(_in_turn(work, turns))
        running.add_done_callback(lambda _: work.close())  # one that is cancelled before its turn has not begun
        return running

    tasks = list(map(start, works))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await outlast(asyncio.gather(*tasks, return_exceptions=True))


async def _in_turn(work: Coroutine[Any, Any, None], turns: asyncio.Semaphore) -> None:
    async with turns:
        await work


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


def being_cancelled() -> bool:
    """Whether the current task was cancelled while the call that it awaited raised another error.

    For loops that go on after errors: asyncio raises a cancellation once, and here that error replaced it.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def note(ended: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future that nobody awaits, or asyncio reports it as never retrieved."""
    if not ended.cancelled():
        ended.exception()
