"""An object store that fails as networks and servers do: what is raised, what is slowed down, what is let go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from support.frameworks import require
from support.object_stores import BUCKET, Place
from support.proxy import (
    Handler,
    Proxy,
    deny,
    ignore_ranges,
    internal_error,
    late,
    lose_reply,
    slow_down,
)
from support.scenes import config, ram, tree

require("obstore")

from obstore import exceptions

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobInfo, BlobStore, ListAtOnce, Survives, Unanswered
from tieredckpt.blobs.object.client import Client
from tieredckpt.blobs.object.kind import S3
from tieredckpt.blobs.object.refusals import meaning, without_secrets
from tieredckpt.blobs.object.store import ObjectStore
from tieredckpt.blobs.object.throttle import SlowDown
from tieredckpt.blobs.tier_checkup import check_tier
from tieredckpt.blobs.wrap import Deadline, Retrying
from tieredckpt.config.object_tiers import S3Tier
from tieredckpt.errors import Conflict, Invalid, NoSpace, NotFound, TierUnavailable
from tieredckpt.testing.backdoor import aligned, pattern

MIB = 1 << 20


async def opened(place: Place, between: Proxy, *, read_only: bool = False, **settings: Any) -> BlobStore:
    return await S3.open(S3Tier(name="s3", **place.tier(between.url, **settings)), read_only=read_only)


async def test_each_verb_is_one_request_and_a_pack_one_put(store: BlobStore, between: Proxy) -> None:
    parts = [aligned(pattern(MIB, seed)) for seed in range(40)]
    for verb, call in {
        "PUT": lambda: store.put("packs/ab/pack", parts),
        "GET": lambda: store.get("packs/ab/pack", limit=64 * MIB),
        "HEAD": lambda: store.stat("packs/ab/pack"),
        "DELETE": lambda: store.delete("packs/ab/pack"),
    }.items():
        between.restart_count()
        await call()
        assert between.count == {verb: 1}
    between.restart_count()
    assert [info async for info in store.list("packs/")] == []
    assert between.count == {"LIST": 2}


async def test_a_listing_tells_the_times_of_the_server(store: BlobStore) -> None:
    await store.put("a/b", [b"x"])
    (info,) = [info async for info in store.list("a/")]
    assert abs(info.modified - time.time()) < 3600
    assert (await store.stat("a/b")).modified == pytest.approx(info.modified, abs=1)


async def test_slow_down_is_waited_for_and_is_no_failure(store: BlobStore, between: Proxy) -> None:
    between.fail("*", slow_down, times=3)
    began = time.monotonic()
    await asyncio.gather(*(store.put(f"a/{number}", [b"x"]) for number in range(4)))
    assert time.monotonic() - began > 0.1  # the first pause
    assert between.count["PUT"] == 4 + 3
    between.fail("GET", slow_down, times=2)
    assert await store.get("a/0", limit=1) == b"x"


async def test_a_service_of_credentials_that_throttles_is_waited_for(store: BlobStore, between: Proxy) -> None:
    """All processes of a job ask it when they start."""
    between.fail("PUT", lambda request: request.refuse(400, "Throttling"), times=3)
    await store.put("a", [b"x"])
    assert between.count["PUT"] == 4


async def test_slow_down_that_does_not_end_is_ended_by_the_deadline(store: BlobStore, between: Proxy) -> None:
    between.fail("*", slow_down, times=None)
    with pytest.raises(TierUnavailable, match="had not ended"):
        await Deadline(store, "s3", base=0.5).stat("a")


async def test_other_errors_of_the_server_are_told_and_repeated_outside_alone(store: BlobStore, between: Proxy) -> None:
    between.fail("PUT", internal_error, times=2)
    with pytest.raises(TierUnavailable, match="500"):
        await store.put("a", [b"x"])
    assert between.count == {"PUT": 1}
    await Retrying(store, wait_jitter=0.01).put("a", [b"x"])
    assert between.count == {"PUT": 3}


async def test_a_missing_key_a_missing_bucket_and_a_refusal_are_told_apart(
    store: BlobStore, s3_place: Place, between: Proxy
) -> None:
    with pytest.raises(NotFound):
        await store.get("none", limit=1)
    between.fail("*", deny, times=4)
    for call in (store.get("a", limit=1), store.put("a", [b"x"]), store.stat("a"), store.delete("a")):
        with pytest.raises(TierUnavailable, match="credentials do not allow") as raised:
            await call
        assert "test-secret" not in str(raised.value)
    assert between.count["PUT"] == 1
    elsewhere = S3Tier(name="s3", **s3_place.tier(between.url, url="s3://no-such-bucket/run", retries=3))
    between.restart_count()
    with pytest.raises(TierUnavailable, match=r"NoSuchBucket.* make the bucket"):
        await S3.open(elsewhere)
    assert between.count == {"GET": 1}  # asking again would not help
    reader = await S3.open(elsewhere, read_only=True)
    with pytest.raises(TierUnavailable, match="make the bucket"):
        await reader.get("tieredckpt.json", limit=10)
    with pytest.raises(TierUnavailable, match="make the bucket"):
        assert [info async for info in reader.list("steps/")]
    await reader.close()


@pytest.mark.parametrize(
    "page",
    [
        "default backend - 404",
        "404 page not found\n",
        "<html>\r\n<head><title>404 Not Found</title></head>\r\n</html>\r\n",
    ],
)
async def test_a_proxy_without_its_server_does_not_make_objects_missing_or_deleted(
    store: BlobStore, between: Proxy, page: str
) -> None:
    """A deletion that was only believed left a commit behind whose packs were deleted next."""
    await store.put("a", [b"x"])

    def no_server(request: Handler) -> None:
        request.answer_with(404, page)

    for verb in (
        lambda: store.get("a", limit=1),
        lambda: store.get_into("a", 0, memoryview(bytearray(1))),
        lambda: store.stat("a"),
        lambda: store.delete("a"),
    ):
        between.fail("*", no_server, times=2)
        with pytest.raises(TierUnavailable, match="no object store has answered"):
            await verb()
        between.heal()
    assert (await store.stat("a")).size == 1


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ("http://127.0.0.1:9", "tcp connect error: Connection refused"),
        ("http://no-such-host.invalid", "dns error: "),
    ],
)
async def test_a_server_that_is_not_there_is_unavailable_and_the_cause_is_told(
    s3_place: Place, server: str, why: str
) -> None:
    reader = await S3.open(S3Tier(name="s3", **s3_place.tier(server)), read_only=True)
    with pytest.raises(TierUnavailable, match=f"s3://{BUCKET}.*{why}"):
        await reader.stat("a")
    await reader.close()


async def test_a_server_that_shows_another_certificate_is_told(s3_server: str, s3_place: Place) -> None:
    """Here one that shows none: it does not speak TLS."""
    place = s3_place.tier(s3_server.replace("http:", "https:"))
    reader = await S3.open(S3Tier(name="s3", **place), read_only=True)
    with pytest.raises(TierUnavailable, match="InvalidMessage InvalidContentType"):
        await reader.stat("a")
    await reader.close()


async def test_keys_of_the_tier_are_used_without_the_token_of_the_environment(
    s3_place: Place, between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to other keys, and to another service perhaps."""
    tokens: list[str | None] = []

    def look(request: Handler) -> None:
        tokens.append(request.headers.get("x-amz-security-token"))
        request.answer(request.forward())

    between.fail("*", look, times=None)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-other-keys")
    for more, sent in (({}, None), ({"session_token": "its-own"}, "its-own")):
        store = await S3.open(S3Tier(name="s3", **s3_place.tier(between.url, **more)))
        await store.put("a", [b"x"])
        await store.close()
        assert set(tokens) == {sent}
        tokens.clear()


async def test_a_full_server_has_no_space(store: BlobStore, between: Proxy) -> None:
    between.fail("PUT", lambda request: request.refuse(403, "QuotaExceeded"))
    with pytest.raises(NoSpace, match="quota"):
        await store.put("a", [b"x"])


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
async def test_two_creations_at_the_same_moment_are_tried_again(store: BlobStore, between: Proxy, code: str) -> None:
    between.fail("PUT", lambda request: request.refuse(409, code))
    with pytest.raises(TierUnavailable):
        await store.put("a", [b"x"], create_only=True)
    await store.put("a", [b"x"], create_only=True)
    with pytest.raises(Conflict):
        await store.put("a", [b"x"], create_only=True)


async def test_a_put_whose_reply_is_lost_may_be_repeated(store: BlobStore, between: Proxy, s3_place: Place) -> None:
    between.fail("PUT", lose_reply, times=2)
    retrying = Retrying(store, wait_jitter=0.01)
    await retrying.put("a", [b"x"])
    await retrying.put("b", [b"y"], create_only=True)  # the second try finds what the first has made
    assert s3_place.bucket.read("a") == b"x"
    assert s3_place.bucket.read("b") == b"y"


async def test_a_put_that_hangs_lets_go_of_its_memory_when_it_is_cancelled(store: BlobStore, between: Proxy) -> None:
    hang = between.hang("PUT", times=None)
    memory = bytearray(24 * MIB)
    putting = asyncio.ensure_future(store.put("a", [memory, memory]))
    await asyncio.to_thread(hang.reached.wait, 0.2)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    memory.pop()  # a BufferError while anybody uses it
    hang.release()
    between.heal()
    with pytest.raises(NotFound):
        await store.stat("a")


async def test_reads_and_small_puts_that_hang_end_when_they_are_cancelled(store: BlobStore, between: Proxy) -> None:
    await store.put("a", [pattern(MIB)])
    into = bytearray(MIB)
    for verb, call in {
        "GET": lambda: store.get_into("a", 0, memoryview(into)),
        "HEAD": lambda: store.stat("a"),
        "PUT": lambda: store.put("b", [b"x"]),
        "DELETE": lambda: store.delete("b"),
    }.items():
        hang = between.hang(verb)
        running = asyncio.ensure_future(call())
        await asyncio.to_thread(hang.reached.wait, 10)
        began = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - began < 10
        hang.release()
    await store.get_into("a", 0, memoryview(into))
    assert into == pattern(MIB)


async def test_a_small_put_that_is_cancelled_has_ended_for_the_server_too(
    store: BlobStore, between: Proxy, s3_place: Place
) -> None:
    """Else it would bring back what is deleted next, as the manifest of a commit that was called off."""
    for seconds in (0.0, 0.01, 0.1):
        between.fail("PUT", late)
        putting = asyncio.ensure_future(store.put("steps/manifest", [b"x"]))
        await asyncio.sleep(seconds)
        putting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await putting
        await store.delete("steps/manifest")
        await asyncio.to_thread(between.settle)
        assert s3_place.bucket.read("steps/manifest") is None


async def test_a_deletion_that_is_cancelled_has_ended_for_the_server_too(
    store: BlobStore, between: Proxy, s3_place: Place
) -> None:
    """Else it would take away what is put next, as the manifest of a step that is promoted again."""
    for seconds in (0.0, 0.01, 0.1):
        await store.put("steps/manifest", [b"old"])
        between.fail("DELETE", late)
        deleting = asyncio.ensure_future(store.delete("steps/manifest"))
        await asyncio.sleep(seconds)
        deleting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await deleting
        await store.put("steps/manifest", [b"new"])
        await asyncio.to_thread(between.settle)
        assert s3_place.bucket.read("steps/manifest") == b"new"


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (409, "OperationAborted", TierUnavailable, "OperationAborted"),
        (412, "PreconditionFailed", TierUnavailable, "PreconditionFailed"),
        (400, "EntityTooLarge", Unanswered, "lower the tier's `object_size`"),
        (413, "", Unanswered, "lower the tier's `object_size`"),
        (507, "", NoSpace, "raise the quota"),
        (403, "QuotaExceeded", NoSpace, "raise the quota"),
        (403, "AccessDenied", TierUnavailable, "the credentials do not allow it"),
        (403, "InvalidObjectState", Unanswered, "archive class"),
        (403, "RequestTimeTooSkewed", Unanswered, "set this machine's clock"),
        (400, "ExpiredToken", Unanswered, "renew the session token"),
        (400, "AuthorizationHeaderMalformed", Unanswered, "set the tier's `region`"),
        (301, "PermanentRedirect", Unanswered, "set the tier's `region`"),
    ],
)
async def test_what_a_server_says_of_a_plain_put_is_told_apart(
    store: BlobStore, between: Proxy, status: int, code: str, kind: type[Exception], says: str
) -> None:
    between.fail("PUT", lambda request: request.refuse(status, code))
    with pytest.raises(kind, match=re.escape(says)) as raised:
        await store.put("a", [b"x"])
    assert not isinstance(raised.value, Conflict)
    assert (kind is NoSpace) == isinstance(raised.value, NoSpace)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Bulk delete request failed for key a: AuthorizationPermissionMismatch (code: 403)", "do not allow it"),
        ("Bulk delete request failed for key a: not permitted by a policy (code: 409)", "an immutability policy"),
        ("Server returned non-2xx status code: 412 Precondition Failed: LeaseIdMissing", "a lease on it"),
    ],
)
def test_a_deletion_that_the_server_refuses_is_not_taken_for_one_that_may_come_late(text: str, says: str) -> None:
    """Azure answers a request for many deletions, of which obstore tells the status of each in words of its own."""
    refusal = meaning(exceptions.GenericError(text), "a was not deleted", "deleted", exclusive=False)
    assert isinstance(refusal, Unanswered)
    assert says in str(refusal)


@pytest.mark.parametrize(("doing", "kind"), [("written", TierUnavailable), ("read", NotFound), ("looked at", NotFound)])
def test_a_put_finds_nothing_missing(doing: str, kind: type[Exception]) -> None:
    """Else a promotion would take the step for one that has left."""
    refusal = meaning(FileNotFoundError("Object at location a not found"), f"a was not {doing}", doing, exclusive=False)
    assert type(refusal) is kind


async def test_a_proxy_whose_server_is_gone_is_not_asked_until_the_deadline(store: BlobStore, between: Proxy) -> None:
    between.fail("PUT", lambda request: request.refuse(503, "no healthy upstream"), times=None)
    with pytest.raises(TierUnavailable):
        await asyncio.wait_for(store.put("a", [b"x"]), 20)


def test_an_endpoint_of_the_environment_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://user:hunter2@objects.example.org")
    with pytest.raises(Invalid, match="AWS_ENDPOINT_URL should have no user") as raised:
        Client(S3Tier(name="s3", url="s3://bucket/run"))
    assert "hunter2" not in str(raised.value)


def test_a_secret_is_taken_without_the_end_of_its_line() -> None:
    tier = S3Tier(name="s3", url="s3://bucket/run", access_key_id="an-id\n", secret_access_key="a key\n")  # noqa: S106
    assert tier.access_key_id is not None
    assert tier.access_key_id.get_secret_value() == "an-id"


@pytest.mark.parametrize("where", ["body", "page"])
async def test_what_a_server_repeats_of_a_request_is_not_shown_and_the_cause_is(
    store: BlobStore, between: Proxy, where: str
) -> None:
    body = "<Error><Code>ExpiredToken</Code><Message>it has expired</Message><Token-0>the-token</Token-0></Error>"
    between.fail("GET", lambda request: request.answer_with(400, body if where == "body" else f"<html>{body}</html>"))
    with pytest.raises(TierUnavailable, match="400 Bad Request") as raised:
        await store.get("a", limit=1)
    cause = raised.value.__cause__
    assert type(cause).__module__.startswith("obstore")
    assert "400 Bad Request" in str(cause)
    shown = "".join(traceback.format_exception(raised.value))
    assert "the-token" not in shown
    assert "Debug source" not in shown


async def test_what_a_server_says_is_shown_without_the_escapes_of_xml(store: BlobStore, between: Proxy) -> None:
    body = "<?xml version='1.0'?><Error><Code>Odd</Code><Message>the &quot;key&quot; of a&amp;b</Message></Error>"
    between.fail("GET", lambda request: request.answer_with(400, body))
    with pytest.raises(TierUnavailable, match='the "key" of a&b'):
        await store.get("a", limit=1)
    escaped = without_secrets(ValueError(body.replace("a&amp;b", "hunt&amp;2")), ("hunt&2",))
    assert 'the "key" of REDACTED' in str(escaped)


@pytest.mark.usefixtures("no_signature")
async def test_a_server_that_answers_ranges_with_the_whole_is_told_by_readers_too(
    store: BlobStore, between: Proxy
) -> None:
    await store.put("a", [pattern(1000)])
    between.fail("GET", ignore_ranges, times=None)
    with pytest.raises(TierUnavailable, match="the whole object"):
        await store.get_into("a", 10, memoryview(bytearray(10)))


async def test_a_listing_of_several_pages_is_complete_also_where_the_server_wants_fewer_requests(
    store: BlobStore, between: Proxy
) -> None:
    names = {f"packs/{number:04}" for number in range(1003)}
    for some in [sorted(names)[at : at + 50] for at in range(0, len(names), 50)]:
        await asyncio.gather(*(store.put(name, [b""]) for name in some))
    between.restart_count()
    assert {info.key async for info in store.list("packs/")} == names
    assert between.count == {"LIST": 2}
    between.fail("LIST", slow_down, key="continuation-token")
    between.fail("LIST", slow_down, key="start-after")
    between.restart_count()
    found = [info.key async for info in store.list("packs/")]
    assert sorted(found) == sorted(names)  # none of them twice
    assert between.count == {"LIST": 4}  # the first page is not asked for again
    between.restart_count()
    assert isinstance(store, ListAtOnce)
    assert await store.list_at_once("packs/") is None
    assert between.count == {"LIST": 1}


async def test_an_answer_that_is_no_listing_is_not_taken_for_an_empty_one(store: BlobStore, between: Proxy) -> None:
    """Else a training would begin anew, or go on from an older step."""

    def failed(request: Handler) -> None:
        request.refuse(200, "InternalError")

    def login(request: Handler) -> None:
        request.answer_with(200, "<html><body>Who are you?</body></html>")

    for fault in (failed, login):
        await store.put("steps/1", [b"x"])
        between.fail("LIST", fault)
        assert [info.key async for info in store.list("steps/")] == ["steps/1"]
        between.fail("LIST", fault)
        assert isinstance(store, ListAtOnce)
        assert [info.key for info in await store.list_at_once("steps/") or ()] == ["steps/1"]


async def test_a_listing_of_several_pages_is_complete_also_where_one_is_answered_with_an_error(
    store: BlobStore, between: Proxy, s3_place: Place
) -> None:
    names = {f"packs/{number:04}" for number in range(1001)}
    for some in [sorted(names)[at : at + 50] for at in range(0, len(names), 50)]:
        await asyncio.gather(*(store.put(name, [b""]) for name in some))
    between.fail("LIST", lambda request: request.refuse(200, "InternalError"), key="continuation-token")
    assert {info.key async for info in store.list("packs/")} == names
    await store.delete("packs/1000")  # what is left fills a page
    assert len([info async for info in store.list("packs/")]) == 1000


async def test_a_listing_in_no_order_is_not_resumed_behind_what_it_did_not_tell() -> None:
    class Unordered(Client):
        def __init__(self) -> None:
            self.location = "s3://bucket"

        async def list(self, prefix: str, *, after: str = "") -> AsyncGenerator[list[BlobInfo]]:
            yield [BlobInfo(key, 1, 0.0) for key in "bca"]
            raise SlowDown("fewer requests")

    store = ObjectStore(Unordered(), create_only=False, survives=Survives.SITE, object_size=5 * MIB, concurrency=1)
    with pytest.raises(TierUnavailable, match="in no order"):
        [info async for info in store.list("")]
    await store.close()


async def test_a_checkup_tells_where_what_is_deleted_stays_as_a_version(s3_place: Place, between: Proxy) -> None:
    async def told() -> list[str]:
        checks = [check async for check in check_tier(S3Tier(name="s3", **s3_place.tier(between.url)), MIB)]
        assert all(check.ok for check in checks)
        return [check.detail for check in checks if check.name == "old versions"]

    def versioned(request: Handler) -> None:
        request.answer(request.forward(), headers={"x-amz-version-id": "15617812"})

    between.fail("*", versioned, times=None)
    for _ in ("a new tier", "one that is known"):
        (detail,) = await told()
        assert "paid for" in detail
    between.heal()
    assert not await told()


FORKING = """
import asyncio, json, os, signal, sys
from tieredckpt.blobs.object.kind import S3
from tieredckpt.config.object_tiers import S3Tier
from tieredckpt.errors import TierUnavailable

async def refused():
    try:
        store = await S3.open(S3Tier(name="s3", **json.loads(sys.argv[1])))
        await store.close()
    except TierUnavailable as error:
        return "forked" in str(error)
    return False

assert not asyncio.run(refused())
child = os.fork()
if child == 0:
    signal.alarm(40)
    os._exit(0 if asyncio.run(refused()) else 2)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""


def test_a_process_that_was_forked_is_told_so_and_does_not_hang(s3_place: Place) -> None:
    """In a process of its own: a fork of the one that runs the tests has the locks of their threads."""
    command = [sys.executable, "-c", FORKING, json.dumps(s3_place.tier())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


async def test_what_a_server_does_not_honour_is_not_asked_for(s3_place: Place, between: Proxy) -> None:
    store = await opened(s3_place, between, read_only=True)
    assert not store.traits.create_only
    with pytest.raises(Invalid, match="exclusive"):
        await store.put("a", [b"x"], create_only=True)
    await store.close()


async def test_requests_under_way_are_bounded_by_one_setting(
    s3_place: Place, between: Proxy, shared_memory: Path
) -> None:
    far = s3_place.tier(between.url, concurrency=2, object_size="5 MiB", retain="all")
    settings = config({"ram": ram(shared_memory), "s3": far})
    between.fail("*", late, times=None)
    async with CheckpointStore.open(settings) as opened:
        for step in range(8):
            await opened.save(step, tree(step))
        await opened.flush()
        await asyncio.gather(*(opened.verify(step, "s3") for step in range(8)))
    assert 2 < between.most_under_way <= 4
