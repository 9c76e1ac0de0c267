"""The kvstore store: what it takes for a store, what it expects of each driver, and how it maps errors."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from support.object_stores import BUCKET, CREDENTIALS, Place

from tieredckpt.blobs.base import Survives
from tieredckpt.blobs.kvstore import store as kvstore
from tieredckpt.blobs.kvstore.store import KvStoreBlobs
from tieredckpt.errors import Conflict, Invalid, NoSpace, NotFound, ShortRead, TierUnavailable
from tieredckpt.testing.backdoor import FolderBackDoor, listed


@pytest.fixture
async def store() -> AsyncIterator[KvStoreBlobs]:
    store = await KvStoreBlobs.open("memory://")
    yield store
    await store.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"driver": "nonesuch"}, "is not a registered KvStore driver"),
        ("nonesuch://bucket/", "unsupported URL scheme"),
        ({"driver": "file"}, "path"),
        ({}, "driver"),
        ({"driver": "memory", "colour": 1}, "colour"),
    ],
)
async def test_a_spec_that_tensorstore_does_not_take_is_invalid(spec: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message) as raised:
        await KvStoreBlobs.open(spec)
    assert str(spec) in str(raised.value)


async def test_what_is_expected_follows_from_the_driver(tmp_path: Path) -> None:
    async def traits(spec: Any, **options: Any) -> tuple[Survives, bool, bool, bool]:
        traits = (await KvStoreBlobs.open(spec, **options)).traits
        assert traits.ranged_get
        assert not traits.direct_io
        return traits.survives, traits.durable, traits.atomic_put, traits.create_only

    path = str(tmp_path)
    in_place = {"driver": "file", "path": path, "file_io_locking": {"mode": "non_atomic"}}
    assert await traits("memory://") == (Survives.NOTHING, False, True, True)
    assert await traits(f"file://{path}") == (Survives.NODE, True, True, True)
    assert await traits({"driver": "file", "path": path, "file_io_sync": False}) == (
        Survives.NODE,
        False,
        True,
        True,
    )
    assert await traits(in_place) == (Survives.NODE, True, False, False)
    # What its server does with a condition is not known.
    assert await traits({"driver": "gcs", "bucket": "bucket"}) == (Survives.SITE, True, True, False)
    assert await traits({"driver": "ocdbt", "base": "memory://"}) == (Survives.NOTHING, False, False, False)
    assert (await traits(f"file://{path}", survives=Survives.SITE))[0] is Survives.SITE


async def test_a_path_is_a_folder_with_or_without_its_last_slash(tmp_path: Path) -> None:
    for path in ("one", "two/"):
        store = await KvStoreBlobs.open({"driver": "file", "path": f"{tmp_path}/{path}"})
        await store.put("a/b", [b"x"])
        assert store.location.endswith("/")
        await store.close()
    assert await FolderBackDoor(tmp_path).list() == {"one/a/b", "two/a/b"}


async def test_names_that_are_no_keys_are_not_listed() -> None:
    context = ts.Context()
    raw = await ts.KvStore.open("memory://", context=context)
    for name in (b"a b", b"\xff", b"a//b", b"key", b"f/../g"):
        await raw.write(name, b"x")
    store = await KvStoreBlobs.open("memory://", context=context)
    assert await listed(store) == {"key": 1}


class Driver:
    """Answers like a kvstore: reads whose errors are worded otherwise, writes that fail."""

    def __init__(self, data: bytes = b"", error: Exception | None = None, state: str = "value") -> None:
        self.url, self.path = "played://", ""
        self.data, self.error, self.state = data, error, state
        self.reads = 0

    def read(self, key: str, *, byte_range: slice | None = None) -> asyncio.Future[Any]:
        self.reads += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.error is not None:
            answer.set_exception(self.error)
        elif self.state == "value" and byte_range and byte_range.stop > len(self.data):
            answer.set_exception(ValueError("OUT_OF_RANGE: HTTP 416"))
        else:
            value = self.data[byte_range] if byte_range else self.data
            answer.set_result(ts.KvStore.ReadResult(self.state, value if self.state == "value" else b""))
        return answer

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> ts.Future[Any]:
        promise, future = ts.Promise[Any].new()
        promise.set_exception(self.error)
        return future

    def list(self, keys: ts.KvStore.KeyRange) -> asyncio.Future[Any]:
        return self.read("list")


def played(driver: Driver) -> KvStoreBlobs:
    return KvStoreBlobs(driver, kvstore._traits({"driver": "gcs"}, None, 1))


@given(st.one_of(st.integers(0, 40), st.integers(0, 70_000)))
def test_a_size_is_found_where_no_message_tells_it(size: int) -> None:
    driver = Driver(bytes(size))
    assert asyncio.run(played(driver).stat("key")).size == size
    assert driver.reads <= 2 * size.bit_length() + 3


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("RESOURCE_EXHAUSTED: write: No space left on device [os_error_code='28']", NoSpace),
        ("UNKNOWN: Disk quota exceeded", NoSpace),
        ("RESOURCE_EXHAUSTED: HTTP 429, too many requests", TierUnavailable),
        ("NOT_FOUND: Failed to create directory", TierUnavailable),
        ("DEADLINE_EXCEEDED", TierUnavailable),
    ],
)
async def test_errors_keep_their_meaning_and_their_cause(message: str, error: type[Exception]) -> None:
    foreign = ValueError(message)
    store = played(Driver(error=foreign))
    for call in (store.put("key", [b"x"]), store.delete("key"), store.get("key", limit=1), listed(store)):
        with pytest.raises(error, match=r"key|listed") as raised:
            await call
        assert type(raised.value) is error
        assert raised.value.__cause__ is foreign


async def test_only_the_state_missing_is_missing() -> None:
    with pytest.raises(NotFound):
        await played(Driver(state="missing")).stat("key")
    for call in (
        played(Driver(state="unspecified")).get("key", limit=1),
        played(Driver(error=ValueError("NOT_FOUND: no such bucket"))).get("key", limit=1),
        played(Driver(error=KeyError("key"))).stat("key"),
    ):
        with pytest.raises(TierUnavailable):
            await call


async def test_an_answer_of_too_few_bytes_is_a_short_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = played(Driver(b"abcdef"))

    async def fewer(key: str, span: slice | None) -> bytes:
        return b"abc"

    monkeypatch.setattr(store, "_read", fewer)
    with pytest.raises(ShortRead, match="3 of 6"):
        await store.get_into("key", 0, memoryview(bytearray(6)))


async def test_a_write_that_lost_its_condition_is_a_conflict(store: KvStoreBlobs) -> None:
    # Another writer creates the object between the look and the write.
    raw, real = store._store, store._store.read
    other: Any = await KvStoreBlobs.open("memory://")

    class Late:
        url, path = raw.url, raw.path
        write = raw.write

        async def read(self, key: str, **options: Any) -> Any:
            found = await real(key, **options)
            await raw.write(key, b"winner")
            return found

    other._store = Late()
    with pytest.raises(Conflict):
        await other.put("key", [b"loser"], create_only=True)
    assert await store.get("key", limit=10) == b"winner"


@pytest.mark.parametrize(
    ("spec", "remote"),
    [
        ("memory://", False),
        ({"driver": "ocdbt", "base": "memory://"}, False),
        ({"driver": "s3", "bucket": "bucket", "aws_region": "x", "aws_credentials": {"type": "anonymous"}}, True),
        ({"driver": "gcs", "bucket": "bucket"}, True),
        ({"driver": "ocdbt", "base": {"driver": "http", "base_url": "http://127.0.0.1:9/"}}, True),
    ],
)
async def test_what_is_reached_by_requests_may_apply_a_put_late(spec: str | dict[str, Any], remote: bool) -> None:
    """By the trait, commits that are in doubt are looked for until `grace` is over, as TensorStore may try again."""
    store = await KvStoreBlobs.open(spec)
    assert store.traits.remote is remote
    await store.close()


QUIET = """
import asyncio, json, sys
from tieredckpt import CheckpointStore
spec = json.loads(sys.argv[1])
with CheckpointStore.open_sync({"tiers": {"far": {"kind": "kvstore", "spec": spec}}}) as store:
    store.save(1, {"x": 1})
"""


@pytest.mark.parametrize("told_by", ["the environment", "a file"])
def test_s3_by_tensorstore_hints_at_the_kind_for_it_and_the_sdk_says_nothing(
    s3_place: Place, tmp_path: Path, told_by: str
) -> None:
    spec = {"driver": "s3", "bucket": BUCKET, "path": s3_place.prefix, "endpoint": s3_place.server, "aws_region": "x"}
    keys = {f"AWS_{name.upper()}": CREDENTIALS[name] for name in ("access_key_id", "secret_access_key")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    if told_by == "a file":
        (tmp_path / ".aws").mkdir()
        text = "".join(f"{name.lower()} = {value}\n" for name, value in keys.items())
        (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{text}")
        keys = {}
    command = [sys.executable, "-c", QUIET, json.dumps(spec)]
    done = subprocess.run(
        command,
        env=environment | keys | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    (line,) = done.stderr.splitlines()
    assert "use kind = 's3'" in line
    assert "about 30 times" in line
    assert s3_place.bucket.sizes().keys() >= {"tieredckpt.json"}
