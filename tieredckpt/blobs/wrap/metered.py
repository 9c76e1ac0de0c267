"""Counts what passes through a store, and how fast."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.errors import Conflict, NotFound, TieredCkptError

__all__ = ["Metered", "Usage", "VerbUsage"]

T = TypeVar("T")

_VERBS = ("get", "get_into", "put", "stat", "list", "delete", "sweep")
_HALF_LIFE = 30.0


@dataclass(frozen=True, slots=True)
class VerbUsage:
    """Counters of one verb; listing counts one operation for each object."""

    operations: int = 0
    errors: int = 0
    """Calls that raised an error of this library, except `NotFound` and `Conflict`, which are answers."""
    nbytes: int = 0
    """Bytes moved by operations that succeeded."""
    seconds: float = 0.0
    """Time of all operations; longer than the time that passed where they ran side by side."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counters of a store since it was opened."""

    verbs: Mapping[str, VerbUsage]
    read_bandwidth: float | None
    """Bytes a second of `get_into` while at least one was under way, mostly over its last half minute of
    such time; None before the first."""
    write_bandwidth: float | None
    """The same of `put`."""


class Metered(Forward):
    """Counts operations, errors, bytes and seconds of each verb; `usage` returns them.

    ``clock`` gives seconds, monotonic.
    """

    def __init__(self, inner: BlobStore, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self._clock = clock
        self._verbs = dict.fromkeys(_VERBS, VerbUsage())
        self._reading, self._writing = _Flow(), _Flow()

    def usage(self) -> Usage:
        """The figures up to now; a value that does not change any more."""
        return Usage(MappingProxyType(dict(self._verbs)), self._reading.bandwidth(), self._writing.bandwidth())

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        flow = {"get_into": self._reading, "put": self._writing}.get(operation.verb)
        began = self._clock()
        if flow:
            flow.begin(began)
        moved = errors = 0
        try:
            result = await call()
            # The limit of a get says little about the bytes it moved.
            moved = len(result) if isinstance(result, bytes) else operation.nbytes
            return result
        except (NotFound, Conflict):
            raise
        except TieredCkptError:
            errors = 1
            raise
        finally:
            ended = self._clock()
            if flow:
                flow.end(ended, moved)
            sofar = self._verbs[operation.verb]
            self._verbs[operation.verb] = replace(
                sofar,
                operations=sofar.operations + 1,
                errors=sofar.errors + errors,
                nbytes=sofar.nbytes + moved,
                seconds=sofar.seconds + ended - began,
            )


class _Flow:
    """Bytes over busy seconds, both fading with busy time, so that an idle store forgets nothing."""

    __slots__ = ("_nbytes", "_seconds", "_since", "_under_way")

    def __init__(self) -> None:
        self._under_way = 0
        self._since = 0.0
        self._nbytes = self._seconds = 0.0

    def begin(self, now: float) -> None:
        self._pass(now)
        self._under_way += 1

    def end(self, now: float, nbytes: int) -> None:
        self._pass(now)
        self._under_way -= 1
        self._nbytes += nbytes

    def bandwidth(self) -> float | None:
        return self._nbytes / self._seconds if self._nbytes and self._seconds else None

    def _pass(self, now: float) -> None:
        if self._under_way:
            busy = now - self._since
            faded = 0.5 ** (busy / _HALF_LIFE)
            self._nbytes *= faded
            self._seconds = self._seconds * faded + busy
        self._since = now
