"""The base of all wrappers: every verb of the inner store passes through `Forward.around`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from tieredckpt.blobs.base import (
    BlobInfo,
    BlobStore,
    Buffer,
    Free,
    GetDigested,
    ListAtOnce,
    Stretch,
    Sweep,
    Traits,
    span,
)

__all__ = ["Forward", "Operation"]

T = TypeVar("T")

_LISTED_SECONDS = 0.25
"""Seconds after which a listing hands out its results so far: deadlines look for progress."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a verb: its name, its key or prefix, and the most bytes that it moves."""

    verb: str
    key: str
    nbytes: int


class Forward:
    """A store that forwards each verb to ``inner``; a wrapper overrides `around`, and single verbs where it must.

    `list` calls `around` once for each batch of objects, so that no limit is held while its caller looks at them.
    """

    _listed_at_once: ClassVar[int] = 512
    """Objects of a batch; a call of `around` for each object would cost more than listing it."""

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

    @property
    def responsive(self) -> bool:
        """Whether the store answers, judged by its last call, and by calls that take too long."""
        return getattr(self._inner, "responsive", True)

    @property
    def hanging(self) -> int:
        """How many calls hang in the device without a waiting caller, in a store that counts them."""
        return getattr(self._inner, "hanging", 0)

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        """Call ``call``, once or more; each call does the work of ``operation``."""
        return await call()

    async def get(self, key: str, *, limit: int) -> bytes:
        return await self.around(Operation("get", key, limit), lambda: self._inner.get(key, limit=limit))

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        operation = Operation("get_into", key, into.nbytes)
        await self.around(operation, lambda: self._inner.get_into(key, offset, into))

    async def get_digested(self, key: str, stretches: Sequence[Stretch]) -> Sequence[bytes]:
        """See `tieredckpt.blobs.base.GetDigested`; for an inner store whose traits have the ability."""
        inner = self._inner
        assert isinstance(inner, GetDigested)
        operation = Operation("get_into", key, span(stretches))
        return await self.around(operation, lambda: inner.get_digested(key, stretches))

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        operation = Operation("put", key, size_of(parts))
        await self.around(operation, lambda: self._inner.put(key, parts, create_only=create_only))

    async def stat(self, key: str) -> BlobInfo:
        return await self.around(Operation("stat", key, 0), lambda: self._inner.stat(key))

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        infos = self._inner.list(prefix)
        operation = Operation("list", prefix, 0)

        async def following() -> Sequence[BlobInfo]:
            found: list[BlobInfo] = []
            until = time.monotonic() + _LISTED_SECONDS
            async for info in infos:
                found.append(info)
                if len(found) >= self._listed_at_once or time.monotonic() > until:
                    break
            return found

        while found := await self.around(operation, following):
            for info in found:
                yield info

    async def list_at_once(self, prefix: str) -> Sequence[BlobInfo] | None:
        """See `tieredckpt.blobs.base.ListAtOnce`; None where the inner store lacks the ability."""
        inner = self._inner
        if not isinstance(inner, ListAtOnce):
            return None
        return await self.around(Operation("list", prefix, 0), lambda: inner.list_at_once(prefix))

    async def delete(self, key: str) -> None:
        await self.around(Operation("delete", key, 0), lambda: self._inner.delete(key))

    async def free(self) -> int | None:
        """See `tieredckpt.blobs.base.Free`; None where the inner store lacks the ability."""
        inner = self._inner
        if not isinstance(inner, Free):
            return None
        return await self.around(Operation("stat", "", 0), inner.free)

    async def sweep(self, age: float) -> int:
        """See `tieredckpt.blobs.base.Sweep`; does nothing where the inner store lacks the ability."""
        inner = self._inner
        if not isinstance(inner, Sweep):
            return 0
        return await self.around(Operation("sweep", "", 0), lambda: inner.sweep(age))

    async def close(self) -> None:
        await self._inner.close()


def size_of(parts: Sequence[Buffer]) -> int:
    """Bytes of all parts together."""
    return sum(memoryview(part).nbytes for part in parts)
