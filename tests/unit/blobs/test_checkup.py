"""A checkup finds what is wrong with a store, says what, and leaves the store as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tieredckpt.blobs.base import BlobInfo
from tieredckpt.blobs.checkup import Check, check_up
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.errors import NoSpace, TierUnavailable
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


async def test_what_cannot_be_deleted_is_told(faulty: Faulty) -> None:
    faulty.fail("delete", TierUnavailable("read-only"))
    found = await checks(faulty)
    assert [(check.name, check.ok) for check in found][-1] == ("delete", False)
    assert "read-only" in found[-1].detail
