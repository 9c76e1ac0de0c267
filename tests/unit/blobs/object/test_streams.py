"""Objects that are streamed in parts: what fails on the way is repeated, and what ends for good leaves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from support.frameworks import require
from support.object_stores import REAL, Place
from support.proxy import Fault, Proxy, deny, internal_error, late, lose_reply, slow_down

require("obstore")

from tieredckpt.blobs.base import PutStream
from tieredckpt.blobs.object import client
from tieredckpt.blobs.object.kind import S3
from tieredckpt.blobs.object.store import ObjectStore
from tieredckpt.config.object_tiers import S3Tier
from tieredckpt.errors import Invalid, TierUnavailable
from tieredckpt.testing.backdoor import pattern

MIB = 1 << 20
PART = "partNumber="


@pytest.fixture
async def store(s3_place: Place, between: Proxy) -> AsyncIterator[ObjectStore]:
    store = await S3.open(S3Tier(name="s3", **s3_place.tier(between.url, deadline=2, retries=1)))
    assert isinstance(store, ObjectStore)
    between.restart_count()
    yield store
    await store.close()


async def pieces(nbytes: int) -> AsyncIterator[bytearray]:
    for at in range(0, nbytes, 8 * MIB):
        yield bytearray(pattern(min(8 * MIB, nbytes - at), at))


def whole(nbytes: int) -> bytes:
    return b"".join(pattern(min(8 * MIB, nbytes - at), at) for at in range(0, nbytes, 8 * MIB))


@pytest.mark.parametrize("fault", [slow_down, internal_error, lose_reply])
async def test_parts_that_fail_or_are_to_wait_are_sent_again(
    store: ObjectStore, s3_place: Place, between: Proxy, fault: Fault
) -> None:
    assert isinstance(store, PutStream)
    between.fail("PUT", fault, key=PART, times=4)
    await store.put_stream("large", pieces(40 * MIB))
    assert s3_place.bucket.read("large") == whole(40 * MIB)
    assert between.count["PUT"] == 3 + 4


async def test_the_environment_says_how_objects_are_encrypted_whether_or_not_they_are_streamed(
    s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    if s3_place.server == REAL:
        pytest.skip("it has no such key")
    by_key = "aws:kms", "arn:aws:kms:eu-west-1:123456789012:key/1"
    for name, value in zip(("AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID"), by_key, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "sha256")
    store = await S3.open(S3Tier(name="s3", **s3_place.tier()))
    assert isinstance(store, ObjectStore)
    await store.put("small", [b"x"])
    await store.put_stream("large", pieces(40 * MIB))
    assert s3_place.bucket.encryption("small") == s3_place.bucket.encryption("large") == by_key
    assert s3_place.bucket.read("large") == whole(40 * MIB)
    await store.close()


async def test_parts_grow_with_an_object_of_known_length(
    store: ObjectStore, s3_place: Place, between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server takes 10,000 parts of one object, S3 all of 5 TiB. They are of one size, as R2 wants them."""
    monkeypatch.setattr(client, "_PARTS", 4)
    for nbytes, parts in ((40 * MIB, 3), (64 * MIB, 4), (90 * MIB, 4), (100 * MIB, 4)):
        between.restart_count()
        await store.put_stream("large", pieces(nbytes), nbytes=nbytes)
        assert s3_place.bucket.read("large") == whole(nbytes)
        assert between.count["PUT"] == parts


@pytest.mark.parametrize(
    ("announced", "says"), [(None, "unknown length.*64 MiB"), (100 * MIB, "100 MiB at most.*100 MiB")]
)
async def test_an_object_that_outgrows_its_parts_is_refused_with_its_key_and_leaves_nothing(
    store: ObjectStore, s3_place: Place, monkeypatch: pytest.MonkeyPatch, announced: int | None, says: str
) -> None:
    monkeypatch.setattr(client, "_PARTS", 4)
    with pytest.raises(Invalid, match=rf"tier 's3': large at s3://.*{says}.*several files"):
        await store.put_stream("large", pieces(108 * MIB), nbytes=announced)
    assert "large" not in s3_place.bucket.sizes()
    await nothing_left(s3_place)


@pytest.mark.parametrize(("fault", "times"), [(slow_down, None), (deny, 1)])
async def test_parts_that_fail_for_good_end_the_upload_and_leave_nothing(
    store: ObjectStore, s3_place: Place, between: Proxy, fault: Fault, times: int | None
) -> None:
    """Within the time that a put of a tier would be tried."""
    between.fail("PUT", fault, key=PART, times=times)
    began = time.monotonic()
    with pytest.raises(TierUnavailable):
        await store.put_stream("large", pieces(40 * MIB))
    assert time.monotonic() - began < 60
    assert not s3_place.bucket.sizes().keys() & {"large"}
    await nothing_left(s3_place)


async def test_a_part_that_hangs_is_given_up_and_sent_again(
    store: ObjectStore, s3_place: Place, between: Proxy
) -> None:
    hang = between.hang("PUT", key=PART)
    try:
        await store.put_stream("large", pieces(40 * MIB))
    finally:
        hang.release()
    assert s3_place.bucket.read("large") == whole(40 * MIB)


async def test_an_upload_that_is_cancelled_leaves_nothing(store: ObjectStore, s3_place: Place, between: Proxy) -> None:
    between.fail("PUT", late, key=PART, times=None)
    running = asyncio.ensure_future(store.put_stream("large", pieces(400 * MIB)))
    while not await asyncio.to_thread(s3_place.bucket.uploads):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await nothing_left(s3_place)
    assert "large" not in s3_place.bucket.sizes()


@pytest.mark.parametrize("kind", [ValueError, TierUnavailable])
async def test_an_error_of_who_gives_the_pieces_is_raised_as_it_is_and_leaves_nothing(
    store: ObjectStore, s3_place: Place, kind: type[Exception]
) -> None:
    error = kind("no more")

    async def broken() -> AsyncIterator[bytearray]:
        async for piece in pieces(40 * MIB):
            yield piece
        raise error

    with pytest.raises(kind) as raised:
        await store.put_stream("large", broken())
    assert raised.value is error
    await nothing_left(s3_place)
    assert "large" not in s3_place.bucket.sizes()


async def nothing_left(place: Place) -> None:
    """The server may hear of it later."""
    for _ in range(600):
        if not await asyncio.to_thread(place.bucket.uploads):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("parts are left on the server")
