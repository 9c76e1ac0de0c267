"""A blob store over any TensorStore key-value store: memory, file, gcs, s3, or what a custom build adds.

TensorStore runs on its own threads and returns futures, which are awaited. Large copies in this process (joining parts,
filling a buffer) run off the loop as well.

TensorStore has no call for the size of an object. The size is parsed from the error message for a range beyond the end
or, where a driver words that otherwise, found by bisection. So ``stat`` and each listed object cost at least one
request, and the time of last change is unknown.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorstore as ts

from tieredckpt._redact import redacted, redacted_text, secrets_of
from tieredckpt.blobs.base import BlobInfo, Buffer, Survives, Traits, check_key, check_prefix, is_key
from tieredckpt.blobs.object import aws_profile
from tieredckpt.concurrency import in_thread, together, whole
from tieredckpt.errors import (
    Closed,
    Conflict,
    Corrupt,
    Invalid,
    NoSpace,
    NotFound,
    ShortRead,
    TieredCkptError,
    TierUnavailable,
)

__all__ = ["KvStoreBlobs"]

T = TypeVar("T")

_OBJECT_SIZE = 64 << 20
_FAR = 1 << 62
_SIZES_AT_A_TIME = 32
_SIZE = re.compile(r"value of size (\d+)")
_FULL = re.compile(r"No space left on device|Disk quota exceeded|os_error_code='(?:28|122)'")
_NO_FOLDER = "Cannot list non-directory"
"""Error text of the file driver for a prefix that is an object; the store treats it as an empty folder."""

_REMOTE = frozenset({"gcs", "gcs_grpc", "http", "s3", "tsgrpc_kvstore"})
"""Drivers that send requests to a server and repeat them: the server may still carry out one that was given up."""

_CONDITION_FAILED = b""
"""The generation that TensorStore returns for a write whose condition did not hold."""


class KvStoreBlobs:
    """Blobs as the keys of a TensorStore kvstore; made by `open`."""

    def __init__(self, store: ts.KvStore, traits: Traits, secrets: tuple[str, ...] = ()) -> None:
        self._store = store
        self._traits = traits
        self._secrets = secrets
        self._location = _location(store)
        self._closed = False

    @classmethod
    async def open(
        cls,
        spec: str | Mapping[str, Any],
        *,
        survives: Survives | None = None,
        object_size: int = _OBJECT_SIZE,
        context: ts.Context | None = None,
    ) -> KvStoreBlobs:
        """The store that ``spec`` (a URL, or a JSON object with its ``driver``) describes.

        A path in it is a folder, with or without its final ``/``. The traits follow from the driver; ``survives``
        overrides what the medium outlives. Raises `Invalid` for a spec that TensorStore does not take, with its
        message, `TierUnavailable`.
        """
        secrets, shown = secrets_of(spec), redacted(spec)
        try:
            parsed = ts.KvStore.Spec(spec if isinstance(spec, str) else dict(spec))
            described = parsed.to_json()
            if (quiet := _quiet(described)) is not described:
                parsed = ts.KvStore.Spec(quiet)
        except (ValueError, TypeError) as error:
            told = _without_secrets(error, secrets)
            raise Invalid(f"TensorStore does not take {shown!r} as a kvstore: {told}") from told
        try:
            store = await ts.KvStore.open(parsed, context=context)
        except Exception as error:
            told = _without_secrets(error, secrets)
            raise _foreign(told, str(shown), "opened") from told
        if described.get("driver") == "file" and not store.path:
            raise Invalid(f"{shown!r} names no folder; give it a `path`")
        if store.path and not store.path.endswith("/"):
            store = store + "/"
        return cls(store, _traits(described, survives, object_size), secrets)

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def location(self) -> str:
        return self._location

    async def get(self, key: str, *, limit: int) -> bytes:
        self._check(key)
        # First ask for the byte after the limit: a whole read returns an object of any size.
        with contextlib.suppress(ShortRead):
            await self._read(key, slice(limit, limit + 1))
            raise Corrupt(f"{self._at(key)} is larger than the {limit} bytes that are acceptable")
        return await self._read(key, None)

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        self._check(key)
        if offset < 0 or into.readonly:
            raise Invalid(f"{key} cannot be read from offset {offset} on, or into read-only memory")
        data = await self._read(key, slice(offset, offset + len(into)))
        if len(data) != len(into):
            raise ShortRead(f"{self._at(key)} ended after {len(data)} of {len(into)} bytes from {offset} on")
        await in_thread(_copy, data, into)

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        self._check(key)
        if create_only and not self._traits.create_only:
            raise Invalid(f"{self._at(key)} was to be written by an exclusive put, which its driver may not have")
        store, condition = self._store, None
        with self._errors(key, "written"):
            if create_only:
                found = await store.read(key, byte_range=slice(0, 0))
                if found.state != "missing":
                    raise Conflict(f"{self._at(key)} exists already")
                condition = found.stamp.generation
            written = await _to_its_end(lambda: store.write(key, _joined(parts), if_equal=condition))
        if condition is not None and written.generation == _CONDITION_FAILED:
            raise Conflict(f"{self._at(key)} was created by another writer meanwhile")

    async def stat(self, key: str) -> BlobInfo:
        self._check(key)
        return BlobInfo(key, await self._size(key), 0.0)

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        self._check_open()
        check_prefix(prefix)
        # '0' follows '/', so this is every key that starts with the prefix.
        keys = ts.KvStore.KeyRange(prefix, prefix[:-1] + "0") if prefix else ts.KvStore.KeyRange()
        with self._errors(prefix, "listed"):
            try:
                found = await self._store.list(keys)
            except ValueError as error:
                if _NO_FOLDER not in str(error):
                    raise
                return
        names = [name for name in (raw.decode("latin-1") for raw in found) if is_key(name)]
        for first in range(0, len(names), _SIZES_AT_A_TIME):
            self._check_open()
            for info in await self._infos(names[first : first + _SIZES_AT_A_TIME]):
                yield info

    async def delete(self, key: str) -> None:
        self._check(key)
        with self._errors(key, "deleted"):
            await _to_its_end(lambda: self._store.write(key, None))

    async def close(self) -> None:
        """Refuse further verbs; those under way end as they would have."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the store at {self._location} was closed")

    def _check(self, key: str) -> None:
        self._check_open()
        check_key(key)

    def _at(self, key: str) -> str:
        return f"{self._location}{key}"

    async def _read(self, key: str, span: slice[int, int, None] | None) -> bytes:
        with self._errors(key, "read"):
            result = await self._store.read(key, byte_range=span)
        match result.state:
            case "value":
                return bytes(result.value)
            case "missing":
                raise NotFound(f"{self._at(key)} does not exist")
            case state:
                raise TierUnavailable(f"{self._at(key)} was not read: TensorStore's answer was {state!r}")

    async def _infos(self, keys: Sequence[str]) -> Sequence[BlobInfo]:
        async def info(key: str) -> None:
            with contextlib.suppress(NotFound):  # deleted meanwhile
                infos.append(BlobInfo(key, await self._size(key), 0.0))

        infos: list[BlobInfo] = []
        await together(map(info, keys))
        return infos

    async def _size(self, key: str) -> int:
        try:
            await self._read(key, slice(_FAR, _FAR + 1))
        except ShortRead as refused:
            if found := _SIZE.search(str(refused.__cause__)):
                return int(found[1])
        if not await self._holds(key, 1):
            return 0
        low, high = 1, 2
        while await self._holds(key, high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if await self._holds(key, middle) else (low, middle)
        return low

    async def _holds(self, key: str, nbytes: int) -> bool:
        """Whether an object has at least so many bytes."""
        try:
            return len(await self._read(key, slice(nbytes - 1, nbytes))) == 1
        except ShortRead:
            return False

    @contextlib.contextmanager
    def _errors(self, key: str, doing: str) -> Iterator[None]:
        try:
            yield
        except TieredCkptError:
            raise
        except Exception as error:
            told = _without_secrets(error, self._secrets)
            raise _foreign(told, self._at(key), doing) from told


def _quiet(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec; if an S3 spec says nothing of credentials, it gets the place where they are.

    TensorStore would find them there anyway; but the SDK of AWS searches every place in turn, and at each opening
    prints to stderr where it finds none.
    """
    said = {*spec, *spec.get("context", {})}
    if spec.get("driver") != "s3" or "aws_credentials" in said or (found := aws_profile.for_tensorstore()) is None:
        return spec
    return spec | {"aws_credentials": found}


async def _to_its_end(start: Callable[[], ts.Future[T]]) -> T:
    """Call ``start`` on a thread and await its future; a cancellation waits for the end.

    Otherwise a write could take effect long after its caller was cancelled, and undo a later delete.
    """

    async def work() -> T:
        return await (await in_thread(start))

    return await whole(work())


def _without_secrets(error: Exception, secrets: tuple[str, ...]) -> Exception:
    """An error of TensorStore without secrets in its text: URLs and specs come back in it."""
    text = redacted_text(str(error), secrets)
    return error if text == str(error) else ValueError(text)


def _foreign(error: Exception, where: str, doing: str) -> TieredCkptError:
    """Map an error of TensorStore, by its message, to an error of this library.

    "Not found" is not mapped: a missing object is a state of a read, never an error message.
    """
    what = f"{where} was not {doing}: {error}"
    if _FULL.search(str(error)):
        return NoSpace(f"{what}; evict steps, or give the tier more room")
    if doing == "read" and str(error).startswith("OUT_OF_RANGE"):
        return ShortRead(what)
    return TierUnavailable(what)


def _traits(spec: Mapping[str, Any], survives: Survives | None, object_size: int) -> Traits:
    """Traits of a driver; an unknown driver is assumed to have the verbs alone."""
    outlives, durable, atomic, create_only = Survives.NOTHING, False, False, False
    match spec.get("driver"):
        case "memory":
            atomic = create_only = True
        case "file":
            # Writing in place, as on a file system without rename, gives up what the lock and rename give.
            atomic = create_only = _member(spec, "file_io_locking", "mode") != "non_atomic"
            outlives, durable = Survives.NODE, spec.get("file_io_sync", True) is not False
        case "chfs":
            outlives = Survives.PROCESS  # no rename, no exclusive put between processes, never synced
        case "gcs" | "s3":
            # Not every server of the protocol honours conditions, and this one is not tried.
            outlives, durable, atomic = Survives.SITE, True, True
    remote = not _REMOTE.isdisjoint(_drivers(spec))
    return Traits(
        survives=outlives if survives is None else survives,
        durable=durable,
        atomic_put=atomic,
        create_only=create_only,
        ranged_get=True,
        direct_io=False,
        object_size=object_size,
        remote=remote,
        parallel_puts=4 if remote else 2,
    )


def _drivers(spec: object) -> Iterator[str]:
    """The drivers of a spec and of the specs nested in it."""
    if isinstance(spec, Mapping):
        if isinstance(driver := spec.get("driver"), str):
            yield driver
        spec = list(spec.values())
    if isinstance(spec, list):
        for each in spec:
            yield from _drivers(each)


def _member(spec: Mapping[str, Any], name: str, member: str) -> object:
    inner = spec.get(name)
    return inner.get(member) if isinstance(inner, Mapping) else None


def _location(store: ts.KvStore) -> str:
    try:
        return str(redacted(store.url))
    except Exception:
        # Some drivers have no URL form.
        return str(redacted(store.spec().to_json()))


def _joined(parts: Sequence[Buffer]) -> bytes:
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    return b"".join(parts)


def _copy(data: bytes, into: memoryview) -> None:
    if data:
        np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8))
