"""A checkup finds what is wrong with a store, says what, and leaves the store as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tieredckpt.blobs.base import BlobInfo, Buffer, Traits
from tieredckpt.blobs.checkup import Check, check_up
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.errors import NoSpace, ShortRead, TierUnavailable
from tieredckpt.testing.backdoor import listed
from tieredckpt.testing.faulty import Faulty

NBYTES = 3 << 20


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    return Faulty(PosixStore(tmp_path / "store", fsync=False))


async def checks(store: Faulty) -> list[Check]:
    return [check async for check in check_up(store, NBYTES)]


async def test_a_sound_store_passes_and_is_left_as_it_was(faulty: Faulty) -> None:
    await faulty.put("steps/mine", [b"mine"])
    found = await checks(faulty)
    assert [check for check in found if not check.ok] == []
    assert {operation.verb for operation in faulty.calls} == {"put", "get", "get_into", "stat", "list", "delete"}
    assert await listed(faulty) == {"steps/mine": 4}


@pytest.mark.parametrize(
    ("break_it", "name", "told"),
    [
        (lambda store: store.fail("put", TierUnavailable("no answer")), "small object", "no answer"),
        (lambda store: store.flip("get", 77, key="*/small"), "small object", "another content"),
        (lambda store: store.fail("put", NoSpace("full"), key="*/large"), "large write", "full"),
        (lambda store: store.flip("get_into", 10**6, key="*/large"), "large read", "other bytes"),
        (lambda store: store.flip("get_into", 5, key="*/large", nth=2), "large read", "digest"),
        (lambda store: store.flip("get_into", 5, key="*/large", nth=3), "range", "other bytes"),
        (lambda store: store.cut("get", 50, key="*/small", nth=3), "replacing", "second write"),
        (lambda store: store.fail("list", TierUnavailable("half a list"), nth=2), "list", "half a list"),
    ],
)
async def test_what_is_broken_is_named_and_nothing_is_left(
    faulty: Faulty, break_it: Callable[[Faulty], None], name: str, told: str
) -> None:
    break_it(faulty)
    *passed, failed, tidied = await checks(faulty)
    assert all(check.ok for check in passed)
    assert (failed.name, failed.ok) == (name, False)
    assert told in failed.detail
    assert tidied.ok
    assert await listed(faulty) == {}


async def test_an_error_that_the_store_has_not_mapped_is_a_finding(tmp_path: Path) -> None:
    class Unmapped(PosixStore):
        async def stat(self, key: str) -> BlobInfo:
            raise KeyError(key)

    *_, failed, tidied = await checks(Faulty(Unmapped(tmp_path / "store", fsync=False)))
    assert (failed.name, failed.ok, tidied.ok) == ("missing object", False, True)
    assert failed.detail.startswith("KeyError, which is no error of tieredckpt.errors: ")


class Knows(PosixStore):
    async def stat(self, key: str) -> BlobInfo:
        return BlobInfo(key, 1, 0.0)


class Fills(PosixStore):
    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        with suppress(ShortRead):
            await super().get_into(key, offset, into)


class Overwrites(PosixStore):
    @property
    def traits(self) -> Traits:
        return replace(super().traits, create_only=True)

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        await super().put(key, parts)


class Omits(PosixStore):
    omitted = False

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        async for info in super().list(prefix):
            if self.omitted or not info.key.endswith("large"):
                yield info
        self.omitted = True


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        (Knows, "missing object", "an object that was never written is there"),
        (Fills, "range", "a range beyond the end was filled"),
        (Overwrites, "exclusive name", "an object was created over one that was there"),
        (Omits, "list", "{'small': 1000} is listed"),
    ],
)
async def test_what_a_store_says_wrongly_is_a_finding(
    tmp_path: Path, kind: type[PosixStore], name: str, told: str
) -> None:
    *passed, failed, tidied = await checks(Faulty(kind(tmp_path / "store", fsync=False)))
    assert all(check.ok for check in passed)
    assert (failed.name, failed.ok, tidied.ok) == (name, False, True)
    assert told in failed.detail


async def test_what_is_listed_after_its_deletion_is_told(tmp_path: Path) -> None:
    class Keeps(PosixStore):
        async def delete(self, key: str) -> None:
            pass

    *passed, failed = await checks(Faulty(Keeps(tmp_path / "store", fsync=False)))
    assert all(check.ok for check in passed)
    assert (failed.name, failed.ok) == ("delete", False)
    assert failed.detail.startswith("2 objects are still listed after they were deleted: ")


async def test_what_cannot_be_deleted_is_told(faulty: Faulty) -> None:
    faulty.fail("delete", TierUnavailable("read-only"))
    found = await checks(faulty)
    assert [(check.name, check.ok) for check in found][-1] == ("delete", False)
    assert "read-only" in found[-1].detail
