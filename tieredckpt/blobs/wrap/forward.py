"""The shape that all wrappers share: every verb of the inner store passes through one place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tieredckpt.blobs.base import BlobInfo, BlobStore, Buffer, Sweep, Traits

__all__ = ["Forward", "Operation"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a verb: its name, its key or prefix, and the most bytes that it moves."""

    verb: str
    key: str
    nbytes: int


class Forward:
    """A store that hands each verb to ``inner``; a wrapper overrides `around`, and a verb where it must.

    `list` passes `around` once for each object, so that nothing is held while its caller looks at one.
    """

    def __init__(self, inner: BlobStore) -> None:
        self._inner = inner

    @property
    def inner(self) -> BlobStore:
        """The store that is wrapped."""
        return self._inner

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    @property
    def location(self) -> str:
        return self._inner.location

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        """Make ``call``, which does the work of ``operation`` each time that it is called."""
        return await call()

    async def get(self, key: str, *, limit: int) -> bytes:
        return await self.around(Operation("get", key, limit), lambda: self._inner.get(key, limit=limit))

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        operation = Operation("get_into", key, into.nbytes)
        await self.around(operation, lambda: self._inner.get_into(key, offset, into))

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        operation = Operation("put", key, size_of(parts))
        await self.around(operation, lambda: self._inner.put(key, parts, create_only=create_only))

    async def stat(self, key: str) -> BlobInfo:
        return await self.around(Operation("stat", key, 0), lambda: self._inner.stat(key))

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        infos = self._inner.list(prefix)
        operation = Operation("list", prefix, 0)

        async def following() -> BlobInfo | None:
            return await anext(infos, None)

        while (info := await self.around(operation, following)) is not None:
            yield info

    async def delete(self, key: str) -> None:
        await self.around(Operation("delete", key, 0), lambda: self._inner.delete(key))

    async def sweep(self, age: float) -> int:
        """What `tieredckpt.blobs.base.Sweep` says; nothing where the inner store has not got the ability."""
        inner = self._inner
        if not isinstance(inner, Sweep):
            return 0
        return await self.around(Operation("sweep", "", 0), lambda: inner.sweep(age))

    async def close(self) -> None:
        await self._inner.close()


def size_of(parts: Sequence[Buffer]) -> int:
    """Bytes of all parts together."""
    return sum(memoryview(part).nbytes for part in parts)
