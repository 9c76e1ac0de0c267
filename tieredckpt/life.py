"""How a store opens and closes, from any event loop or none: what `CheckpointStore` builds on."""

from __future__ import annotations

from functools import partial
from typing import Literal

from tieredckpt import opened
from tieredckpt.capturing import Captures
from tieredckpt.config import StoreConfig
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.ranks.communicator import Coordinator
from tieredckpt.engine.transport.auto import coordinator_of
from tieredckpt.errors import Closed, Invalid
from tieredckpt.events import Events

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
        self._read_only = read_only
        self._where = opened.calling_line()
        self._events = Events()
        self._engine = Engine(config, self._events, read_only=read_only)
        self._loop: EngineLoop | None = None
        self._opened: opened.Opened | None = None
        self._captures = Captures(self._engine, self._events)

    async def _open(self) -> None:
        find_ranks = partial(coordinator_of, self._ranks, self._config)
        await opened.open_store(*self._new_loop(), find_ranks, takeover=self._takeover)

    def open_blocking(self) -> None:
        """Open without an event loop; for `SyncStore`."""
        find_ranks = partial(coordinator_of, self._ranks, self._config)
        opened.open_blocking(*self._new_loop(), find_ranks, takeover=self._takeover)

    def _new_loop(self) -> tuple[EngineLoop, opened.Opened]:
        if self._loop is not None:
            raise Invalid("this store was opened before; make a new one with CheckpointStore.open")
        self._loop = EngineLoop("tieredckpt engine")
        place = opened.Place.of(self._config, getattr(self._ranks, "rank", None), read_only=self._read_only)
        self._opened = opened.Opened(self._loop, self._engine, self._captures, self._config, place, self._where)
        return self._loop, self._opened

    def close_blocking(self, *, clean: bool) -> None:
        """Close without an event loop; for `SyncStore`."""
        if self._opened is not None and not self._opened.thread.was_forked:
            opened.close_blocking(self._opened, clean=clean)

    async def _close(self, *, clean: bool) -> None:
        if self._opened is not None and not self._opened.thread.was_forked:
            await opened.close_store(self._opened, clean=clean)

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
