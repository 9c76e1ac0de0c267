"""Requests to an object store by obstore."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple

import obstore
from obstore import exceptions, store
from pydantic import SecretStr

from tieredckpt._redact import secrets_of
from tieredckpt.blobs.base import BlobInfo, Buffer, Unanswered
from tieredckpt.blobs.object import aws_profile
from tieredckpt.blobs.object.refusals import meaning, without_secrets
from tieredckpt.concurrency import until_done
from tieredckpt.config.object_tiers import AzureTier, GcsTier, ObjectTier, S3Tier
from tieredckpt.errors import Invalid, NotFound, TieredCkptError
from tieredckpt.units import format_size

__all__ = ["LISTED_AT_ONCE", "Client", "Range"]

_UNLIMITED = timedelta(days=365)

LISTED_AT_ONCE = 1000
"""Objects in a page of a listing; the last page has fewer."""

_LEAST_PART, _PARTS = 16 << 20, 10_000
"""Bytes of a part of an object that is streamed, and how many parts S3 takes of one: those of a larger object are
larger. All but the last are of one size, as R2 wants them."""

_PARTS_AT_ONCE = 4
"""Parts sent at a time, and in memory meanwhile; of larger parts fewer, so that they take no more memory."""

_ABORTS_WITHIN = 5.0
"""Seconds for a cancelled upload to be aborted."""

_UNCOUNTED = 1000
"""Attempts, where their time is limited."""


class Range(NamedTuple):
    """Bytes of an object that are arriving."""

    start: int
    end: int
    pieces: AsyncGenerator[Any]
    """Contiguous buffers."""


class Client:
    """The objects below the prefix of a tier. Every method is one request, and is not repeated here."""

    keeps_versions = False
    """Whether the service told a version of the object that was last put or read: what is deleted stays as one."""
    _used_by: int | None = None
    """The process whose obstore has begun to work; its threads are not in a process that was forked since."""

    def __init__(self, tier: ObjectTier) -> None:
        """Blocking where a profile is read. Raises `Invalid` for settings that obstore does not take."""
        self._name, self.location = tier.name, tier.location
        self._always_tells_versions = isinstance(tier, GcsTier)
        self._secrets = _secrets(tier)
        try:
            opened = _MAKERS[type(tier)](tier, tier.service or "")
            self._store = opened(**_options(tier, _REPEATS_NOTHING))
            self._streams = cache(lambda part: opened(**_options(tier, _repeats_parts(tier, part))))
            """Makes what sends objects in parts of so many bytes."""
        except Invalid:
            raise
        except (exceptions.BaseError, ValueError, TypeError) as error:
            told = without_secrets(error, self._secrets)
            raise Invalid(f"tier {tier.name!r} at {tier.location}: {told}") from told

    async def put(self, key: str, views: Sequence[memoryview], *, create_only: bool = False) -> None:
        """One PUT of the caller's memory, without a copy; obstore may use the memory for a moment after this ends."""
        mode = "create" if create_only else "overwrite"
        with self._errors(key, "written", exclusive=create_only):
            put = await obstore.put_async(self._store, key, views, mode=mode, use_multipart=False)
        self._note(put["version"])

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], *, nbytes: int | None = None) -> None:
        """Upload in several requests. The object appears at once after the last; if this raises, no part of it does.

        The pieces come only once, so each request is repeated by itself. ``nbytes`` is the most bytes that come, if
        known. Raises `Invalid` if more come than fit in 10,000 parts of the size chosen for ``nbytes``.
        """
        part = max(_LEAST_PART, -(-(nbytes or 0) // (_PARTS << 20)) << 20)  # whole MiB
        sent = 0
        given_up: Exception | None = None
        cancelled = False

        async def given() -> AsyncIterator[Buffer]:
            nonlocal given_up, sent
            try:
                async for piece in pieces:
                    if cancelled:  # obstore aborts the upload only if no next piece comes; else it leaves the parts
                        raise Unanswered(f"{key} was given up")
                    sent += memoryview(piece).nbytes
                    if sent > part * _PARTS:
                        told = "unknown length" if nbytes is None else f"{format_size(nbytes)} at most"
                        raise Invalid(
                            f"tier {self._name!r}: {key} at {self.location} was announced with {told}, for which it "
                            f"may have {format_size(part * _PARTS)}, and has more; write several files"
                        )
                    yield piece
            except Exception as error:
                given_up = error
                raise

        async def put() -> None:
            try:
                with self._errors(key, "written"):
                    await obstore.put_async(
                        await asyncio.to_thread(self._streams, part),
                        key,
                        given(),
                        mode="overwrite",
                        use_multipart=True,
                        chunk_size=part,
                        max_concurrency=max(1, _PARTS_AT_ONCE * _LEAST_PART // part),
                    )
            except TieredCkptError as error:
                if given_up is not None:
                    raise given_up from error
                raise

        def give_up() -> None:
            nonlocal cancelled
            cancelled = True
            asyncio.get_running_loop().call_later(_ABORTS_WITHIN, running.cancel)

        running = asyncio.ensure_future(put())
        await until_done(running, give_up)

    async def get(self, key: str, start: int | None = None, end: int | None = None, *, piece: int) -> tuple[Range, int]:
        """Read an object, which may be large, or a range of it: the arriving bytes, and the size of the object.

        They arrive in buffers of at least ``piece`` bytes.

        A range that begins beyond the end is a `ShortRead`; one that ends there arrives in part.
        """
        options = None if start is None else {"range": (start, end)}
        with self._errors(key, "read"):
            result = await obstore.get_async(self._store, key, options=options)
            found, size = result.range, result.meta["size"]
        self._note(result.meta["version"])
        start, end = found
        return Range(start, end, self._pieces(key, result, piece)), size

    async def get_range(self, key: str, start: int, end: int) -> obstore.Bytes:
        """Read a range of an object into one buffer, without a turn of the loop between head and bytes.

        The buffer is shorter where the object ends, and has any length if the server lies.
        """
        with self._errors(key, "read"):
            return await obstore.get_range_async(self._store, key, start=start, end=end)

    async def stat(self, key: str) -> BlobInfo:
        with self._errors(key, "looked at"):
            return _info(await obstore.head_async(self._store, key))

    async def list(self, prefix: str, *, after: str = "") -> AsyncGenerator[list[BlobInfo]]:
        """List the objects below a folder with keys greater than ``after``, in pages; a large folder by many requests.

        ``after`` is for servers that list keys in order.
        """
        folder = prefix.rstrip("/") or None
        with self._errors(prefix, "listed"):
            async for found in obstore.list(self._store, folder, offset=after or None, chunk_size=LISTED_AT_ONCE):
                yield [_info(each) for each in found]

    async def delete(self, key: str) -> None:
        try:
            with self._errors(key, "deleted"):
                await obstore.delete_async(self._store, key)
        except NotFound:
            pass  # Azure and Google Cloud Storage raise this

    def _note(self, version: str | None) -> None:
        self.keeps_versions = version not in (None, "null") and not self._always_tells_versions

    async def _pieces(self, key: str, result: Any, nbytes: int) -> AsyncGenerator[Any]:
        with self._errors(key, "read"):
            async for piece in result.stream(min_chunk_size=nbytes):
                yield piece

    @contextlib.contextmanager
    def _errors(self, key: str, doing: str, *, exclusive: bool = False) -> Iterator[None]:
        self._check_process()
        try:
            yield
        except TieredCkptError:
            raise
        except Exception as error:
            told = without_secrets(error, self._secrets)
            what = f"tier {self._name!r}: {key or 'the tier'} at {self.location} was not {doing}: {told}"
            raise meaning(error, what, doing, exclusive=exclusive) from told

    def _check_process(self) -> None:
        if Client._used_by is None:
            Client._used_by = os.getpid()
        elif Client._used_by != os.getpid():
            raise Unanswered(
                f"tier {self._name!r} at {self.location}: this process was forked from one that used an object store, "
                f"whose threads it does not have; start processes by 'spawn', or fork before a store is opened"
            )


class _Repeats(NamedTuple):
    """How obstore itself handles requests that fail."""

    timeout: timedelta
    """Of one request."""
    retry: dict[str, Any]


_REPEATS_NOTHING = _Repeats(_UNLIMITED, {"max_retries": 0})
"""The wrappers around the store decide what to repeat, and how long it may take."""


def _repeats_parts(tier: ObjectTier, part: int) -> _Repeats:
    """As the wrappers of a store do with a put: repeat failed and throttled requests, for a limited time."""
    seconds = tier.deadline + _PARTS_AT_ONCE * part / tier.min_bandwidth
    return _Repeats(
        timedelta(seconds=seconds),
        {
            "max_retries": _UNCOUNTED,
            "retry_timeout": timedelta(seconds=(tier.retries + 1) * seconds),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
        },
    )


def _options(tier: ObjectTier, repeats: _Repeats) -> dict[str, Any]:
    return {
        "prefix": tier.prefix or None,
        "client_options": {
            "timeout": repeats.timeout,
            "connect_timeout": timedelta(seconds=tier.deadline),
            "allow_http": (tier.service or "").startswith("http://"),
        },
        "retry_config": repeats.retry,
    }


def _s3(tier: S3Tier, endpoint: str) -> Callable[..., Any]:
    unsigned = not endpoint.startswith("http://") if tier.unsigned_payload is None else tier.unsigned_payload
    settings = {
        "endpoint": endpoint or None,
        "region": tier.region,
    }
    credentials: dict[str, Any] = {}
    keys = _given(
        {
            "access_key_id": _told(tier.access_key_id),
            "secret_access_key": _told(tier.secret_access_key),
            "token": _told(tier.session_token),
        }
    )
    if keys:
        # Not as settings, which obstore would complete by a session token of the environment: it is of other keys.
        credentials["credential_provider"] = lambda: {**keys, "expires_at": None}
    profile = tier.profile
    if profile is None and tier.access_key_id is None:
        profile = aws_profile.to_be_read()
    if profile is not None:
        told_by = "the environment or a file of AWS" if tier.profile is None else "`profile`"
        credentials["credential_provider"] = aws_profile.provider(tier.name, profile, told_by)
        # The profile's own, which the provider brings, comes last.
        settings["region"] = tier.region or os.environ.get("AWS_REGION")
    elif tier.region is None and not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        settings["region"] = aws_profile.region()
    # One DELETE for one object: not every server takes the request for many.
    fixed = {"unsigned_payload": unsigned, "disable_bulk_delete": True}
    return partial(store.S3Store, tier.bucket, **fixed, **_given(settings), **credentials)


def _gcs(tier: GcsTier, endpoint: str) -> Callable[..., Any]:
    settings = {
        "base_url": endpoint or None,
        "service_account": None if tier.credentials is None else str(tier.credentials),
        "service_account_key": _told(tier.service_account_key),
    }
    return partial(store.GCSStore, tier.bucket, **_given(settings))


def _azure(tier: AzureTier, endpoint: str) -> Callable[..., Any]:
    settings = {
        "endpoint": endpoint or None,
        "account_name": tier.account,
        "account_key": _told(tier.account_key),
        "sas_key": _told(tier.sas_token),
        # Otherwise a key or an identity of the environment would win.
        "credential_type": "sas_token" if tier.sas_token else "access_key" if tier.account_key else None,
    }
    return partial(store.AzureStore, tier.bucket, **_given(settings))


_MAKERS: Mapping[type[ObjectTier], Callable[..., Callable[..., Any]]] = {
    S3Tier: _s3,
    GcsTier: _gcs,
    AzureTier: _azure,
}
"""Makers of the store of each kind, with its credentials, which are looked for once."""


def _secrets(tier: ObjectTier) -> tuple[str, ...]:
    return secrets_of({"secret": [value.get_secret_value() for _, value in tier if isinstance(value, SecretStr)]})


def _told(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _given(settings: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if value is not None}


def _info(found: Mapping[str, Any]) -> BlobInfo:
    return BlobInfo(found["path"], found["size"], found["last_modified"].timestamp())
