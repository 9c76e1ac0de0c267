"""Try whether a blob store keeps its contract where it runs: a short trial of every verb, cleaned up afterwards.

The conformance suite (`tieredckpt.testing.blobs`) tests the code against the contract; this module tests a user's own
device, mount or servers. Like kopia's provider validation, it can be run against a store in use.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import ALIGNMENT, BlobStore, Buffer, GetDigested, Stretch
from tieredckpt.concurrency import note, on_own_thread
from tieredckpt.errors import Conflict, NotFound, ShortRead, TieredCkptError
from tieredckpt.format.digest import digest
from tieredckpt.units import format_rate, format_size

__all__ = ["CHECKUP", "Check", "Facts", "check_up", "random_memory", "warm_memory", "within"]

CHECKUP = "checkup/"
"""The folder of keys that a trial uses; the engine has none there."""

_HANGS = "had not ended after"

_LAST_TRY = 5.0
"""Most seconds for the deletion, after another part has not ended in time."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried: what, whether it held, and what was seen."""

    name: str
    ok: bool
    detail: str
    slower: bool = False
    """It held, but is slower than it could be."""


@runtime_checkable
class Facts(Protocol):
    """An ability of some stores."""

    def facts(self) -> Mapping[str, str]:
        """Facts about an open store that help to explain a failure, by name."""


class _Failed(Exception):
    """The store answered, and the answer breaks its contract."""


async def check_up(
    store: BlobStore, nbytes: int = 64 << 20, *, deadline: float = 30.0, min_bandwidth: float = 10_000_000
) -> AsyncIterator[Check]:
    """Try every verb of ``store`` with small objects and one of ``nbytes``; the first failure ends the trial.

    Yields each check as it ends. The objects of the trial are deleted in the end, also after a failure. A part that has
    not ended after ``deadline`` seconds and the time for its bytes is left behind, though it may hang for ever.
    """
    trial = _Trial(store, await on_own_thread("trial", random_memory, nbytes))
    try:
        for name, part in trial.parts():
            check = await within(name, part(), deadline + (nbytes / min_bandwidth if name.startswith("large") else 0))
            yield check
            if not check.ok:
                if check.detail.startswith(_HANGS):
                    deadline = min(deadline, _LAST_TRY)
                break
    finally:
        last = await within("delete", trial.tidy(), deadline)
    yield last


async def within(name: str, work: Coroutine[Any, Any, str], seconds: float) -> Check:
    """Run ``work`` as a check. If it has not ended in time, leave it behind, even if it ignores its cancellation."""
    running = asyncio.ensure_future(work)
    try:
        await asyncio.wait([running], timeout=seconds)
    finally:
        if not running.done():
            running.cancel()
            running.add_done_callback(note)
    if not running.done():
        return Check(name, False, f"{_HANGS} {seconds:.1f} s; is it reachable? If it is only slow, raise `deadline`")
    try:
        return Check(name, True, running.result())
    except _Failed as failed:
        return Check(name, False, str(failed))
    except TieredCkptError as error:
        return Check(name, False, f"{type(error).__name__}: {error}")
    except Exception as error:  # of a store that is not ours; it would end a restore that another tier could serve
        return Check(name, False, f"{type(error).__name__}, which is no error of tieredckpt.errors: {error}")


class _Trial:
    def __init__(self, store: BlobStore, large: npt.NDArray[np.uint8]) -> None:
        self._store = store
        self._folder = f"{CHECKUP}{secrets.token_hex(8)}/"
        self._small = np.random.default_rng().bytes(1000)
        self._large = large

    def parts(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, str]]]]:
        return [
            ("small object", self._small_object),
            ("missing object", self._missing),
            ("exclusive name", self._exclusive),
            ("replacing", self._replacing),
            ("large write", self._write),
            ("large read", self._read),
            ("range", self._range),
            ("list", self._list),
        ]

    async def tidy(self) -> str:
        keys = [info.key async for info in self._store.list(self._folder)]
        for key in keys:
            await self._store.delete(key)
        if left := [info.key async for info in self._store.list(self._folder)]:
            raise _Failed(f"{len(left)} objects are still listed after they were deleted: {left[0]}")
        return f"{len(keys)} objects"

    async def _small_object(self) -> str:
        begin = time.perf_counter()
        await self._store.put(self._folder + "small", [self._small])
        written = time.perf_counter()
        if await self._store.get(self._folder + "small", limit=len(self._small)) != self._small:
            raise _Failed("another content came back than was written")
        return f"written in {_ms(written - begin)}, read in {_ms(time.perf_counter() - written)}"

    async def _missing(self) -> str:
        try:
            await self._store.stat(self._folder + "missing")
        except NotFound:
            return "told from one that is there"
        raise _Failed("an object that was never written is there")

    async def _exclusive(self) -> str:
        if not self._store.traits.create_only:
            return "not offered, and not needed"
        key, results = self._folder + "exclusive", []
        for content in (b"first", b"second"):
            try:
                await self._store.put(key, [content], create_only=True)
                results.append(content)
            except Conflict:
                pass
        if results != [b"first"] or await self._store.get(key, limit=100) != b"first":
            raise _Failed("an object was created over one that was there")
        return "one winner"

    async def _replacing(self) -> str:
        for content in (self._small[:100], self._small):
            await self._store.put(self._folder + "small", [content])
            if await self._store.get(self._folder + "small", limit=len(self._small)) != content:
                raise _Failed("after a second write, something else was read than that")
        return "atomic" if self._store.traits.atomic_put else "not atomic: readers may see part of an object"

    async def _write(self) -> str:
        begin = time.perf_counter()
        parts: list[Buffer] = [memoryview(self._large)]
        await self._store.put(self._folder + "large", parts)
        what = "durable" if self._store.traits.durable else "acknowledged, not durable"
        return f"{_rate(self._large.size, time.perf_counter() - begin)}, {what}"

    async def _read(self) -> str:
        into = await on_own_thread("trial", warm_memory, self._large.size)
        begin = time.perf_counter()
        await self._store.get_into(self._folder + "large", 0, memoryview(into))
        seconds = time.perf_counter() - begin
        if not await on_own_thread("trial", np.array_equal, into, self._large):
            raise _Failed("other bytes came back than were written")
        if self._store.traits.digested_reads and isinstance(self._store, GetDigested):  # as chunks are read
            into[:] = 0
            stretch = Stretch(0, into.size, memoryview(into))
            digests = await self._store.get_digested(self._folder + "large", [stretch])
            expected = [await on_own_thread("trial", digest, memoryview(self._large))]
            if digests != expected or not await on_own_thread("trial", np.array_equal, into, self._large):
                raise _Failed("other bytes came back than were written, or their digest is another one")
        return _rate(self._large.size, seconds)

    async def _range(self) -> str:
        size = self._large.size
        offset, length = size // 3, min(size // 3, 100_000)
        into = bytearray(length)
        await self._store.get_into(self._folder + "large", offset, memoryview(into))
        if into != self._large[offset : offset + length].tobytes():
            raise _Failed(f"other bytes came back than lie from {offset} on")
        try:
            await self._store.get_into(self._folder + "large", size - 1, memoryview(bytearray(2)))
        except ShortRead:
            return "bytes from the middle; none beyond the end"
        raise _Failed("a range beyond the end was filled")

    async def _list(self) -> str:
        found = {info.key.removeprefix(self._folder): info.size async for info in self._store.list(self._folder)}
        expected = {"small": len(self._small), "large": self._large.size}
        if self._store.traits.create_only:
            expected["exclusive"] = 5
        if found != expected:
            raise _Failed(f"{found} is listed, {expected} was written")
        return f"{len(found)} of {len(expected)} objects, with their sizes"


def warm_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that direct I/O takes and whose pages are there before a clock runs."""
    room = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    room[:] = 0
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]


def random_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """`warm_memory` with random bytes."""
    memory = warm_memory(nbytes)
    memory[:] = np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)
    return memory


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{format_size(nbytes)} at {format_rate(nbytes / max(seconds, 1e-9))}"
