"""Ranks of torch.distributed: messages through the job's key-value store, bulk through gloo groups of their own.

Nothing of the trainer's is used: the store is reached by a connection of its own, and the gloo groups stand beside
those that torch counts, so that none is renamed and collectives of the trainer may run meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tieredckpt.engine.ranks.communicator import exchange
from tieredckpt.engine.transport.foreign_thread import ForeignThread
from tieredckpt.engine.transport.gloo import GlooBulk
from tieredckpt.engine.transport.mailbox import Mailbox
from tieredckpt.errors import Invalid, RanksUnavailable

__all__ = ["StoreCarrier", "TorchCommunicator"]

_log = logging.getLogger("tieredckpt")

_CALL_TIMEOUT = 60.0
_GLOO_TIMEOUT = 30.0


class TorchCommunicator(Mailbox):
    """A communicator for a training whose default process group is initialised; raises `Invalid` elsewhere.

    Args:
        name: the ranks that use the same one meet.
        node: see `Communicator`.
        bulk: whether to `send_bulk` and `recv_bulk`, over gloo.
    """

    def __init__(self, *, name: str = "tieredckpt", node: str | None = None, bulk: bool = True) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise Invalid("torch.distributed is not initialised; call init_process_group before the store is opened")
        store = dist.distributed_c10d._get_default_store()
        carrier = StoreCarrier(lambda: dist.PrefixStore(f"tieredckpt/{name}", _connection(store)))
        super().__init__(carrier, rank=dist.get_rank(), size=dist.get_world_size(), node=node)
        self._store = store
        self._wants_bulk = bulk and dist.is_gloo_available()
        self._gloo: GlooBulk | None = None

    async def open(self, *, timeout: float) -> None:
        """Meet the others; `bulk` is set if every rank could reach its neighbours by gloo."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        await super().open(timeout=timeout)
        if not self._wants_bulk or self.size == 1:
            return
        left = max(1.0, deadline - loop.time())
        met = b""
        try:
            await self._try_gloo(min(left, _GLOO_TIMEOUT))
            met = b"met"
        except (RuntimeError, TimeoutError, RanksUnavailable) as error:
            _log.warning("rank %d: gloo does not work, so nothing goes in bulk: %s", self.rank, error)
        left = max(1.0, deadline - loop.time())
        self.bulk = all(await exchange(self, "tieredckpt/gloo works", met, timeout=left))

    async def _try_gloo(self, timeout: float) -> None:
        thread = ForeignThread("tieredckpt gloo device")
        try:
            device = await thread.call(GlooBulk.find_device, timeout=timeout)
        finally:
            thread.close()
        prefix = f"tieredckpt/gloo/{self.session}"
        self._gloo = GlooBulk(self, lambda: dist.PrefixStore(prefix, _connection(self._store)), device)
        local_ranks = {(self.rank + 1) % self.size, (self.rank - 1) % self.size}
        await asyncio.gather(*(self._gloo.meet(peer, timeout=timeout) for peer in local_ranks))

    async def close(self) -> None:
        """End what is under way, and leave the session."""
        if self._gloo is not None:
            await self._gloo.close()
        await super().close()

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Over gloo."""
        await self._bulk.send_bulk(to, memory, tag=tag, timeout=timeout)

    async def recv_bulk(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Over gloo."""
        await self._bulk.recv_bulk(source, memory, tag=tag, timeout=timeout)

    @property
    def _bulk(self) -> GlooBulk:
        self.check_open()
        if not self.bulk or self._gloo is None:
            raise Invalid("this communicator sends nothing in bulk: gloo does not work between its ranks")
        return self._gloo


def _connection(store: Any) -> Any:
    """Another connection to the same store, so that no call of the trainer's is waited for."""
    return store.clone() if hasattr(store, "clone") else store  # older than torch 2.8: one for all


class StoreCarrier:
    """A carrier whose mailboxes are numbered values of a store of torch.distributed, with the count beside them.

    ``connect`` gives the store, on a thread of the carrier's: a new connection may take seconds.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._connected: Any = None
        self._thread = ForeignThread("tieredckpt store of torch")
        self._seen: dict[str, int] = {}
        self._due: dict[str, set[int]] = {}
        """By mailbox, the messages counted but not taken: the sender has not set them yet, or died in between."""
        self._kept: dict[str, list[bytes]] = {}
        """By mailbox, what was taken by a call that failed or came too late."""

    async def put(self, mailbox: str, name: str, message: bytes) -> None:
        await self._call(self._put, mailbox, message)

    async def take(self, mailbox: str) -> list[bytes]:
        await self._call(self._take, mailbox)
        return self._kept.pop(mailbox, [])

    async def drop(self, mailbox: str) -> None:
        await self.take(mailbox)
        await self._call(self._forget, mailbox)

    async def close(self) -> None:
        self._thread.close()

    async def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            await self._thread.call(function, *arguments, timeout=_CALL_TIMEOUT)
        except (RuntimeError, TimeoutError) as error:
            self._connected = None  # the next call connects again
            raise RanksUnavailable(f"the key-value store of torch.distributed does not answer: {error}") from error

    @property
    def _store(self) -> Any:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def _put(self, mailbox: str, message: bytes) -> None:
        self._store.set(f"{mailbox}/{self._store.add(f'{mailbox}/count', 1)}", message)

    def _take(self, mailbox: str) -> None:
        count = self._store.add(f"{mailbox}/count", 0)
        due = self._due.setdefault(mailbox, set())
        due.update(range(self._seen.get(mailbox, 0) + 1, count + 1))
        self._seen[mailbox] = count
        for number in sorted(due):
            key = f"{mailbox}/{number}"
            if self._store.check([key]):
                self._kept.setdefault(mailbox, []).append(self._store.get(key))
                due.discard(number)
                self._store.delete_key(key)

    def _forget(self, mailbox: str) -> None:
        self._store.delete_key(f"{mailbox}/count")
        self._seen.pop(mailbox, None)
        self._due.pop(mailbox, None)
