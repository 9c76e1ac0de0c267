"""Ranks of jax.distributed: messages through the key-value service of its coordinator process.

JAX has no public way to that service; the client is where other checkpoint libraries take it from. No devices and
no compiled programs take part, so nothing goes in bulk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import distributed

from tieredckpt.engine.transport.foreign_thread import ForeignThread
from tieredckpt.engine.transport.mailbox import Mailbox
from tieredckpt.errors import Invalid, RanksUnavailable

__all__ = ["JaxCommunicator"]

_CALL_TIMEOUT = 60.0


class JaxCommunicator(Mailbox):
    """A communicator for a training that has called `jax.distributed.initialize`; raises `Invalid` elsewhere.

    Args:
        name: the ranks that use the same one meet.
        node: see `Communicator`.
    """

    def __init__(self, *, name: str = "tieredckpt", node: str | None = None) -> None:
        job = distributed.global_state
        if job.client is None:
            raise Invalid("jax.distributed is not initialised; call jax.distributed.initialize before opening a store")
        carrier = _Service(job.client, f"tieredckpt/{name}/")
        super().__init__(carrier, rank=job.process_id, size=job.num_processes, node=node)


class _Service:
    """A carrier whose mailboxes are directories of the key-value service."""

    def __init__(self, client: Any, folder: str) -> None:
        self._client = client
        self._folder = folder
        self._thread = ForeignThread("tieredckpt service of jax")
        self._kept: dict[str, list[bytes]] = {}
        """By mailbox, what was taken by a call that failed or came too late."""
        self._taken: set[str] = set()
        """Keys of messages that were taken and may be there still."""

    async def put(self, mailbox: str, name: str, message: bytes) -> None:
        await self._call(self._put, f"{self._folder}{mailbox}/{name}", message)

    async def take(self, mailbox: str) -> list[bytes]:
        await self._call(self._take, mailbox)
        return self._kept.pop(mailbox, [])

    async def drop(self, mailbox: str) -> None:
        await self.take(mailbox)

    async def close(self) -> None:
        self._thread.close()

    async def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            await self._thread.call(function, *arguments, timeout=_CALL_TIMEOUT)
        except (RuntimeError, TimeoutError) as error:  # JAX's own is a RuntimeError
            raise RanksUnavailable(f"the key-value service of jax.distributed does not answer: {error}") from error

    def _put(self, key: str, message: bytes) -> None:
        self._client.key_value_set_bytes(key, message, allow_overwrite=True)

    def _take(self, mailbox: str) -> None:
        for key, message in self._client.key_value_dir_get_bytes(f"{self._folder}{mailbox}/"):
            if key not in self._taken:
                self._taken.add(key)
                self._kept.setdefault(mailbox, []).append(message)
            self._client.key_value_delete(key)
            self._taken.discard(key)
