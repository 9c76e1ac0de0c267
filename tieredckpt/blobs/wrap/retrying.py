"""Repeats verbs that failed because the store was unavailable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import stamina

from tieredckpt.blobs.base import BlobInfo, BlobStore, Buffer, Unanswered
from tieredckpt.blobs.wrap.deadline import Overdue
from tieredckpt.blobs.wrap.forward import Forward, Operation, size_of
from tieredckpt.blobs.wrap.mapped import mapped
from tieredckpt.errors import Closed, Conflict, Corrupt, NotFound, TieredCkptError, TierUnavailable

__all__ = ["Retrying"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")

_LAST_ATTEMPT = 120.0
"""Seconds after which no further attempt is begun."""
_LONGEST_WAIT = 10.0
"""Most seconds between two attempts, without the jitter."""


class Retrying(Forward):
    """Repeats a verb that raised `TierUnavailable`, with exponential waits and jitter; no other error.

    An error that is none of `tieredckpt.errors` becomes `TierUnavailable`.
    `Unanswered` is not repeated; of a deletion it becomes `TierUnavailable` if an attempt before it may have succeeded,
    or may yet. An `Overdue` verb is repeated only if it is a put: a reader asks another tier meanwhile, and a deletion
    may come late. From the first attempt that fails until one succeeds, the store is not `responsive`. A verb that is
    cancelled between attempts does not count, unless an attempt of it was `Overdue`. If the store is closed under a
    verb, the verb raises `TierUnavailable` too: a tier that fails is opened again beside its readers.

    Args:
        attempts: how often a verb is tried at most, the first time included.
        logged: types of unmapped errors whose traceback is in the log, and need not be there again.
        wait_initial, wait_jitter: seconds between attempts: the first wait, and the most that chance adds.
    """

    def __init__(
        self,
        inner: BlobStore,
        *,
        attempts: int = 4,
        wait_initial: float = 0.1,
        wait_jitter: float = 1.0,
        logged: set[type[Exception]] | None = None,
    ) -> None:
        super().__init__(inner)
        retry = partial(
            stamina.retry,
            attempts=attempts,
            timeout=_LAST_ATTEMPT,
            wait_initial=wait_initial,
            wait_max=_LONGEST_WAIT,
            wait_jitter=wait_jitter,
        )
        self._retry_put, self._retry = retry(on=_may_help_a_put), retry(on=_may_help)
        self._logged = set() if logged is None else logged
        self._failed = False
        """Whether no attempt has succeeded since a verb finally failed."""
        self._failing: set[object] = set()
        """Verbs that continue after a failed attempt, with no success since."""

    @property
    def responsive(self) -> bool:
        return not self._failed and not self._failing and super().responsive

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        verb, overdue, uncertain = object(), False, False

        async def attempt() -> T:
            nonlocal overdue, uncertain
            try:
                with mapped(f"{self.location}: {operation.verb} of {operation.key}", self._logged):
                    result = await call()
            except TierUnavailable as error:
                overdue = overdue or isinstance(error, Overdue)
                uncertain = uncertain or not isinstance(error, Unanswered)
                self._failing.add(verb)
                where = f"{self.location}: {operation.verb} of {operation.key}"
                _log.info("%s failed, and may be tried again: %s", where, error)
                raise
            except TieredCkptError:
                self._answered()
                raise
            self._answered()
            return result

        try:
            # No argument is passed through stamina, which would print it: a part may be gigabytes.
            return await (self._retry_put if operation.verb == "put" else self._retry)(attempt)()
        except TierUnavailable as error:
            self._failed = True
            if operation.verb == "delete" and uncertain and isinstance(error, Unanswered):
                raise TierUnavailable(str(error)) from error
            raise
        except Closed as error:  # readers ask another tier, and the library's user has closed nothing
            raise TierUnavailable(f"{error}, to be opened anew") from error
        except asyncio.CancelledError:
            self._failed = self._failed or (overdue and verb in self._failing)
            raise
        finally:
            self._failing.discard(verb)

    def _answered(self) -> None:
        self._failed = False
        self._failing.clear()

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        failed = False

        async def attempt() -> None:
            nonlocal failed
            try:
                await self._inner.put(key, parts, create_only=create_only)
            except TierUnavailable:
                failed = True
                raise
            except Conflict:
                # An attempt whose reply was lost may have created the object: then it holds these bytes.
                if not failed or not await self._holds(key, parts):
                    raise

        await self.around(Operation("put", key, 0), attempt)

    async def close(self) -> None:
        """Close the store; a failure is only logged, since what was put is put."""
        try:
            with mapped(f"{self.location}: close", self._logged):
                await super().close()
        except TierUnavailable as error:
            _log.warning("%s", error)

    async def _holds(self, key: str, parts: Sequence[Buffer]) -> bool:
        try:
            found = await self._inner.get(key, limit=size_of(parts))
        except (NotFound, Corrupt):
            return False
        return found == b"".join(parts)

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        # A listing that broke off cannot go on where it was, so it is completed before it is handed out.
        async def whole() -> Sequence[BlobInfo]:
            return [info async for info in self._inner.list(prefix)]

        for info in await self.around(Operation("list", prefix, 0), whole):
            yield info


def _may_help_a_put(error: Exception) -> bool:
    """Whether an immediate further attempt may succeed."""
    return isinstance(error, TierUnavailable) and not isinstance(error, Unanswered)


def _may_help(error: Exception) -> bool:
    return _may_help_a_put(error) and not isinstance(error, Overdue)


def _is_not_ours(record: logging.LogRecord) -> bool:
    return not str(getattr(record, "stamina.callable", "")).startswith(__name__)


# Python prints warnings where no log is configured, and stamina's text names neither store nor cause.
logging.getLogger("stamina").addFilter(_is_not_ours)

# Now: else stamina imports them at the first retry, when their files may be on what fails.
stamina.instrumentation.get_on_retry_hooks()
