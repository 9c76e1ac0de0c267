"""How a store opens and closes, from any event loop or none: what `CheckpointStore` builds on."""

from __future__ import annotations

from typing import Literal

from tieredckpt.blobs.settle import in_thread
from tieredckpt.capturing import Captures
from tieredckpt.config import StoreConfig
from tieredckpt.engine.coordinators.auto import coordinator_of
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.ranks import Coordinator
from tieredckpt.errors import Closed, Conflict, Invalid
from tieredckpt.events import Events
from tieredckpt.opened import Opened, Place, calling_line, close_blocking, closed

__all__ = ["StoreLife"]


class StoreLife:
    """A store's engine, and the loop that it runs on, from the opening to the close."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        read_only: bool,
        ranks: Coordinator | Literal["auto"] | None,
        takeover: bool = False,
    ) -> None:
        self._config = config
        self._ranks = None if read_only else ranks
        self._takeover = takeover
        self._where = calling_line()
        self._events = Events()
        self._engine = Engine(config, self._events, read_only=read_only)
        self._place = Place.of(config, getattr(self._ranks, "rank", None), read_only=read_only)
        self._loop: EngineLoop | None = None
        self._opened: Opened | None = None
        self._captures = Captures(self._engine, self._events)

    async def _open(self) -> None:
        loop, opened = self._new_loop()
        try:
            for other in self._in_the_way(opened):
                await closed(other, clean=True)
            await loop.call(opened.start(await in_thread(coordinator_of, self._ranks, self._config)))
        except GeneratorExit:  # nothing can be awaited any more
            opened.begin_closing(clean=False)
            raise
        except BaseException as error:
            await closed(opened, clean=False)
            self._explain(error, opened)
            raise

    def open_blocking(self) -> None:
        """Open without an event loop; for `SyncStore`."""
        loop, opened = self._new_loop()
        try:
            for other in self._in_the_way(opened):
                close_blocking(other, clean=True)
            loop.call_blocking(opened.start(coordinator_of(self._ranks, self._config)))
        except BaseException as error:
            close_blocking(opened, clean=False)
            self._explain(error, opened)
            raise

    def _new_loop(self) -> tuple[EngineLoop, Opened]:
        if self._loop is not None:
            raise Invalid("this store was opened before; make a new one with CheckpointStore.open")
        self._loop = EngineLoop("tieredckpt engine")
        self._opened = Opened(self._loop, self._engine, self._captures, self._config, self._place, self._where)
        return self._loop, self._opened

    def _in_the_way(self, opened: Opened) -> list[Opened]:
        """The stores of this process that are to be closed before this one opens."""
        others = [other for other in self._place.writers() if other is not opened]
        return [other for other in others if self._takeover or other.abandoned]

    def _explain(self, error: BaseException, opened: Opened) -> None:
        """Raise a `Conflict` anew that a store of this process is behind, with where that was opened."""
        others = [other.where for other in self._place.writers() if other is not opened]
        if isinstance(error, Conflict) and others:
            raise Conflict(
                f"{error}. This process itself opened it at {', '.join(others)} and has not closed it: close that "
                f"store, or open this one with takeover=True, which does so first"
            ) from error

    def close_blocking(self, *, clean: bool) -> None:
        """Close without an event loop; for `SyncStore`."""
        if self._opened is not None and not self._opened.thread.was_forked:
            close_blocking(self._opened, clean=clean)

    async def _close(self, *, clean: bool) -> None:
        if self._opened is not None and not self._opened.thread.was_forked:
            await closed(self._opened, clean=clean)

    @property
    def engine_loop(self) -> EngineLoop:
        """Where the store's work runs. Raises `Closed` before opening, and in a process that was forked since."""
        if self._loop is None:
            raise Closed("the store is not open yet: use `async with`, or await it")
        self._loop.thread.check_process()
        return self._loop

    @property
    def captures(self) -> Captures:
        """The saves under way behind the trainer; for the library's own parts."""
        return self._captures

    @property
    def engine(self) -> Engine:
        """What does the work; for the library's own parts."""
        return self._engine
