"""A store whose objects are below a folder of another store."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence

from tieredckpt.blobs.base import BlobInfo, BlobStore, Buffer, Stretch
from tieredckpt.blobs.wrap.forward import Forward

__all__ = ["Below"]


class Below(Forward):
    """Puts every key below ``folder``, which ends with a slash. Its location is that of the inner store."""

    def __init__(self, inner: BlobStore, folder: str) -> None:
        super().__init__(inner)
        self._folder = folder

    async def get(self, key: str, *, limit: int) -> bytes:
        return await super().get(self._folder + key, limit=limit)

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        await super().get_into(self._folder + key, offset, into)

    async def get_digested(self, key: str, stretches: Sequence[Stretch]) -> Sequence[bytes]:
        return await super().get_digested(self._folder + key, stretches)

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        await super().put(self._folder + key, parts, create_only=create_only)

    async def stat(self, key: str) -> BlobInfo:
        return self._without(await super().stat(self._folder + key))

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        async for info in super().list(self._folder + prefix):
            yield self._without(info)

    async def list_at_once(self, prefix: str) -> Sequence[BlobInfo] | None:
        found = await super().list_at_once(self._folder + prefix)
        return None if found is None else [self._without(info) for info in found]

    async def delete(self, key: str) -> None:
        await super().delete(self._folder + key)

    def _without(self, info: BlobInfo) -> BlobInfo:
        return dataclasses.replace(info, key=info.key.removeprefix(self._folder))
