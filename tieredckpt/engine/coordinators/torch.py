"""Ranks of torch.distributed: messages through the job's key-value store, bulk through a gloo group of their own.

Nothing of the trainer's is used: the store is reached by a connection of its own, and the gloo group stands beside
those that torch counts, so that none is renamed and collectives of the trainer may run meanwhile.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tieredckpt.blobs.settle import in_thread, settle
from tieredckpt.engine.coordinators.aside import Aside
from tieredckpt.engine.coordinators.mailbox import Mailbox
from tieredckpt.engine.ranks import exchange
from tieredckpt.errors import Invalid, RanksUnavailable

__all__ = ["StoreCarrier", "TorchRanks"]

_log = logging.getLogger("tieredckpt")

_CALL_TIMEOUT = 60.0
_GROUP_TIMEOUT = 30.0
_WAITS_AT_ONCE = 32


class TorchRanks(Mailbox):
    """A coordinator for a training whose default process group is initialised; raises `Invalid` elsewhere.

    A transfer in bulk that is cancelled ends at its deadline at the latest.

    Args:
        name: the ranks that use the same one meet.
        node: see `Coordinator`.
        bulk: whether to make a gloo group for `send` and `receive`.
    """

    def __init__(self, *, name: str = "tieredckpt", node: str | None = None, bulk: bool = True) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise Invalid("torch.distributed is not initialised; call init_process_group before the store is opened")
        store = dist.distributed_c10d._get_default_store()
        carrier = StoreCarrier(lambda: dist.PrefixStore(f"tieredckpt/{name}", _connection(store)))
        super().__init__(carrier, rank=dist.get_rank(), size=dist.get_world_size(), node=node)
        self._store = store
        self._wants_bulk = bulk and dist.is_gloo_available()
        self._group: Any = None
        self._gloo: Aside | None = None
        self._waits: ThreadPoolExecutor | None = None

    async def open(self, *, timeout: float) -> None:
        """Meet the others, and make the group for bulk with them."""
        begin = time.monotonic()
        await super().open(timeout=timeout)
        if not self._wants_bulk or self.size == 1:
            return
        left = max(1.0, timeout - (time.monotonic() - begin))
        self._gloo = Aside("tieredckpt gloo")
        self._waits = ThreadPoolExecutor(_WAITS_AT_ONCE, thread_name_prefix="tieredckpt-gloo")
        try:
            self._group = await self._gloo.call(self._make_group, min(left, _GROUP_TIMEOUT), timeout=left)
        except (RuntimeError, TimeoutError) as error:
            _log.warning("rank %d: no gloo group could be made, so nothing goes in bulk: %s", self.rank, error)
        made = await exchange(self, "tieredckpt/gloo", b"" if self._group is None else b"made", timeout=left)
        self.bulk = all(made)

    def _make_group(self, timeout: float) -> Any:
        store = dist.PrefixStore(f"tieredckpt/gloo/{self.session}", _connection(self._store))
        return dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=timeout))

    async def close(self) -> None:
        """Leave the session, and end the group."""
        await super().close()
        if self._gloo is None or self._waits is None:
            return
        if hasattr(self._group, "abort"):
            with suppress(RuntimeError, TimeoutError):
                await self._gloo.call(self._group.abort, timeout=_CALL_TIMEOUT)  # ends what is still waited for
        self._gloo.close()
        self._waits.shutdown(wait=False)
        self._gloo = self._waits = self._group = None

    async def send(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """By gloo, straight from the memory."""
        await self._transfer("send", to, memory, tag, timeout)

    async def receive(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """By gloo, straight into the memory."""
        await self._transfer("recv", source, memory, tag, timeout)

    async def _transfer(self, verb: str, peer: int, memory: memoryview, tag: int, timeout: float) -> None:
        self.check_open()
        if not self.bulk or self._gloo is None:
            raise Invalid("this coordinator sends nothing in bulk: it has no gloo group")
        if not len(memory):
            return
        deadline = time.monotonic() + timeout
        tensor = _tensor_over(memory)

        def begin() -> Any:
            return getattr(self._group, verb)([tensor], peer, tag)

        def wait(work: Any) -> None:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

        try:
            # All transfers begin on one thread, in the order of the calls.
            work = await settle(asyncio.ensure_future(self._gloo.call(begin, timeout=_CALL_TIMEOUT)), lambda: None)
            await in_thread(wait, work, pool=self._waits)
        except (RuntimeError, TimeoutError) as error:
            raise RanksUnavailable(
                f"{len(memory)} bytes could not be {'sent to' if verb == 'send' else 'received from'} rank {peer} "
                f"within {timeout:.1f} s: {error}",
                [peer],
            ) from error


def _connection(store: Any) -> Any:
    """Another connection to the same store, so that no call of the trainer's is waited for."""
    return store.clone() if hasattr(store, "clone") else store  # older than torch 2.8: one for all


def _tensor_over(memory: memoryview) -> torch.Tensor:
    """The bytes as a tensor, read-only ones as well, which torch would take with a warning."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_ubyte * len(memory)).from_address(address), dtype=torch.uint8)


class StoreCarrier:
    """A carrier whose boxes are numbered values of a store of torch.distributed, with the count beside them.

    ``connect`` gives the store, on a thread of the carrier's: a new connection may take seconds.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._connected: Any = None
        self._aside = Aside("tieredckpt store of torch")
        self._seen: dict[str, int] = {}
        self._due: dict[str, set[int]] = {}
        """By box, what was counted and not taken: who counted it has not set it yet, or died in between."""
        self._kept: dict[str, list[bytes]] = {}
        """By box, what was taken by a call that failed or came too late."""

    async def put(self, box: str, name: str, letter: bytes) -> None:
        await self._call(self._put, box, letter)

    async def take(self, box: str) -> list[bytes]:
        await self._call(self._take, box)
        return self._kept.pop(box, [])

    async def drop(self, box: str) -> None:
        await self.take(box)
        await self._call(self._forget, box)

    async def close(self) -> None:
        self._aside.close()

    async def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            await self._aside.call(function, *arguments, timeout=_CALL_TIMEOUT)
        except (RuntimeError, TimeoutError) as error:
            raise RanksUnavailable(f"the key-value store of torch.distributed does not answer: {error}") from error

    @property
    def _store(self) -> Any:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def _put(self, box: str, letter: bytes) -> None:
        self._store.set(f"{box}/{self._store.add(f'{box}/count', 1)}", letter)

    def _take(self, box: str) -> None:
        count = self._store.add(f"{box}/count", 0)
        due = self._due.setdefault(box, set())
        due.update(range(self._seen.get(box, 0) + 1, count + 1))
        self._seen[box] = count
        for number in sorted(due):
            key = f"{box}/{number}"
            if self._store.check([key]):
                self._kept.setdefault(box, []).append(self._store.get(key))
                due.discard(number)
                self._store.delete_key(key)

    def _forget(self, box: str) -> None:
        self._store.delete_key(f"{box}/count")
        self._seen.pop(box, None)
        self._due.pop(box, None)
