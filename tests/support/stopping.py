"""Calls of a store stopped at any of their awaits, and what shows that it let go of everything."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from support.insight import bytes_of_listed_steps, slab_of
from support.scenes import SOON, assert_restored, tree
from tieredckpt import CheckpointStore
from tieredckpt._opened import Opened
from tieredckpt.config import StoreConfig
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.promoting import pack_writer
from tieredckpt.engine.restoring import reader
from tieredckpt.engine.saving import cells
from tieredckpt.format.digest import CopyDigester

AWAITS = (*range(1, 18), *range(18, 300, 9))
"""Where calls are stopped: one by one, then in strides; no call here has so many."""


class StopsAt:
    """Runs a coroutine, and cancels its task when it suspends for the ``nth`` time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], nth: int) -> None:
        self._coroutine = coroutine
        self._left = nth

    @property
    def struck(self) -> bool:
        return self._left <= 0

    def __await__(self) -> Generator[Any, Any, Any]:
        go_on: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            try:
                awaited = go_on(value)
            except StopIteration as end:
                return end.value
            self._left -= 1
            if not self._left:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                go_on, value = self._coroutine.send, (yield awaited)
            except BaseException as error:
                go_on, value = self._coroutine.throw, error


@contextmanager
def stopped_at(nth: int) -> Iterator[list[StopsAt]]:
    """Cancel the next work of an engine at its ``nth`` suspension."""
    started: list[StopsAt] = []

    async def run(stops: StopsAt) -> Any:
        return await stops

    def start(loop: EngineLoop, coroutine: Coroutine[Any, Any, Any], **how: Any) -> Any:
        if started:
            return submit(loop, coroutine, **how)
        started.append(StopsAt(coroutine, nth))
        return submit(loop, run(started[0]), **how)

    with pytest.MonkeyPatch.context() as patch:
        submit = EngineLoop.submit
        patch.setattr(EngineLoop, "submit", start)
        yield started


@contextmanager
def closing_stopped_at(nth: int) -> Iterator[list[StopsAt]]:
    """Cancel the next closing of a store at its ``nth`` suspension."""
    started: list[StopsAt] = []

    async def stopped(opened: Opened, *, clean: bool) -> None:
        started.append(StopsAt(close(opened, clean=clean), nth))
        await started[-1]

    with pytest.MonkeyPatch.context() as patch:
        close = Opened._close
        patch.setattr(Opened, "_close", stopped)
        yield started


class Touched:
    """How many threads work on the memory of trees, or of the slab, at this moment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()
        self._guards_count = threading.Lock()
        for owner, name in (
            (cells, "copy_and_digest"),
            (reader, "deliver"),
            (CopyDigester, "copy"),
            (pack_writer, "seal"),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._add(1)
            try:
                assert self.gate.wait(SOON)
                return function(*arguments)
            finally:
                self._add(-1)

        return counted

    def _add(self, one: int) -> None:
        with self._guards_count:
            self.now += one
            self.calls += one > 0


class Scene:
    """A store with a few steps in it, each the tree of its number, and another to save."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.last = 0

    async def another(self) -> int:
        """A new step, on every tier."""
        step = self.next_step()
        await self.store.save(step, tree(step))
        await self.store.flush()
        return step

    def next_step(self) -> int:
        self.last += 1
        return self.last

    async def assert_usable(self) -> None:
        """Whatever is listed is whole, a save and a restore work, and no memory is held."""
        async with asyncio.timeout(SOON):
            step = await self.another()
            for info in await self.store.steps():
                assert_restored(await self.store.restore(info.step, resume=False), tree(info.step))
            assert [found.problem for found in await self.store.verify(step)] == ["", ""]
            await self.store.collect()
            state = self.store._life.engine.state
            assert slab_of(self.store).used == await bytes_of_listed_steps(self.store)
            assert state.scratch.slab.used == 0
            assert not any(tier.steps.readers for tier in state.tiers)


@asynccontextmanager
async def staged(settings: StoreConfig) -> AsyncIterator[Scene]:
    async with CheckpointStore.open(settings) as store:
        scene = Scene(store)
        await scene.another()
        yield scene
