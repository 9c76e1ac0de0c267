"""A store from its opening to its close, and how calls reach its engine, from any event loop or none.

The base of `CheckpointStore` and `SyncStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, TypeVar

from tieredckpt import _opened as opened
from tieredckpt._arguments import checked_patterns, checked_step
from tieredckpt.checkpoint import Checkpoint, Restored
from tieredckpt.config import StoreConfig
from tieredckpt.devices.current import Current
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.ranks.communicator import Communicator
from tieredckpt.engine.transport.auto import communicator_of
from tieredckpt.errors import Closed, Invalid
from tieredckpt.events import Events

__all__ = ["StoreLife"]

T = TypeVar("T")


class StoreLife:
    """A store's engine and its loop, from the opening to the close."""

    def __init__(
        self, config: StoreConfig, *, read_only: bool, ranks: Communicator | Literal["auto"] | None, takeover: bool
    ) -> None:
        self.config = config
        self.events = Events()
        self.engine = Engine(config, self.events, read_only=read_only)
        self._ranks = None if read_only else ranks
        self._takeover = takeover
        self._read_only = read_only
        self._where = opened.calling_line()
        self._loop: EngineLoop | None = None
        self._opened: opened.Opened | None = None

    async def open(self) -> None:
        """Open the store. Raises as `CheckpointStore.open`, and `Invalid` for one that was opened before."""
        find_ranks = partial(communicator_of, self._ranks, self.config)
        await opened.open_store(*self._new_loop(), find_ranks, takeover=self._takeover)

    def open_blocking(self) -> None:
        """`open` without an event loop."""
        find_ranks = partial(communicator_of, self._ranks, self.config)
        opened.open_blocking(*self._new_loop(), find_ranks, takeover=self._takeover)

    def _new_loop(self) -> tuple[EngineLoop, opened.Opened]:
        if self._loop is not None:
            raise Invalid("this store was opened before; make a new one with CheckpointStore.open")
        self._loop = EngineLoop("tieredckpt engine")
        place = opened.Place.of(self.config, getattr(self._ranks, "rank", None), read_only=self._read_only)
        self._opened = opened.Opened(self._loop, self.engine, self.config, place, self._where)
        return self._loop, self._opened

    async def close(self, *, clean: bool) -> None:
        """Close the store; ``clean``: wait for what is still to be promoted."""
        if self._opened is not None and not self._opened.thread.was_forked:
            await opened.close_store(self._opened, clean=clean)

    def close_blocking(self, *, clean: bool) -> None:
        """`close` without an event loop."""
        if self._opened is not None and not self._opened.thread.was_forked:
            opened.close_blocking(self._opened, clean=clean)

    @property
    def loop(self) -> EngineLoop:
        """The loop that runs the store's work. Raises `Closed` before opening, and in a process forked since."""
        if self._loop is None:
            raise Closed(
                "the store is not open yet: use `async with`, or await it; a blocking one opens with `with`, or as "
                "CheckpointStore.open_sync"
            )
        self._loop.thread.check_process()
        return self._loop

    @property
    def open_engine(self) -> Engine:
        """The engine. Raises as `loop`; `Closed` also while it is being opened, or if that failed."""
        self.loop  # noqa: B018  # raises
        if not self.engine.prepared:
            raise Closed("the store is not open: its opening has not ended, or failed")
        return self.engine

    async def call(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """The result of ``work`` on the engine's loop. Raises as `loop`, and what the work raises."""
        loop = self.loop
        return await loop.call(work(self.engine))

    async def change(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """`call`, for work that may wait for saves under way: confirms lazy ones first, or it would wait for ever."""
        async with self.open_engine.pending.confirming():
            return await self.call(work)

    async def look(
        self, work: Callable[[Engine], Coroutine[Any, Any, T]], *, packs: bool = False, repair: bool = False
    ) -> T:
        """`call`, for work that tells what the store holds now.

        ``packs``: also how much of each tier it takes. ``repair``: it may wait as that of `change`.
        """
        looked = self.change if repair else self.call
        return await looked(lambda engine: engine.mode.looking(lambda: work(engine), packs=packs))

    async def save(self, caller: Current, step: int, *call: Any) -> Checkpoint:
        """`CheckpointStore.save` for the ``caller``; may run on another thread than the caller's."""
        step = checked_step(step)
        loop, engine = self.loop, self.open_engine
        return Checkpoint(step, engine, loop, *await engine.pending.save(loop, caller.streams, step, *call))

    async def restore(self, caller: Current, step: Any, keys: Any, *how: Any) -> Restored | None:
        """`CheckpointStore.restore` for the ``caller``; may run on another thread than the caller's."""
        step = None if step is None else checked_step(step)
        keys = None if keys is None else checked_patterns("keys", keys)
        loop, engine = self.loop, self.open_engine
        await engine.pending.confirm()  # it may change what is being copied
        await loop.call(engine.pending.settled(step))  # or the newest step would be one before them
        return await loop.call(engine.restorer.restore(loop, caller, step, keys, *how))
