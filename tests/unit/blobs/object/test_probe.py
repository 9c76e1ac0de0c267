"""What an endpoint honours is found out once, by the first writer, and kept beside the marker."""

from __future__ import annotations

import json

import pytest
from support.object_stores import Place
from support.proxy import Handler, Proxy, deny, ignore_conditions, ignore_ranges, internal_error, proxy

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.object.kind import S3
from tieredckpt.config.object_tiers import S3Tier
from tieredckpt.errors import Invalid, TierUnavailable

VERDICT = "tieredckpt-endpoint.json"


async def opened(place: Place, between: Proxy, *, read_only: bool = False, retries: int = 0) -> BlobStore:
    store = await S3.open(S3Tier(name="s3", **place.tier(between.url, retries=retries)), read_only=read_only)
    await store.close()
    return store


async def test_the_first_writer_probes_and_the_next_believes_it(s3_place: Place, between: Proxy) -> None:
    store = await opened(s3_place, between)
    assert store.traits.create_only
    assert between.count == {"GET": 2, "PUT": 3}
    kept = s3_place.bucket.read(VERDICT)
    assert kept is not None
    assert json.loads(kept) == {"version": 1, "endpoint": between.url, "create_only": True}
    between.restart_count()
    assert (await opened(s3_place, between)).traits.create_only
    assert between.count == {"GET": 1}


@pytest.mark.usefixtures("no_signature")
async def test_a_server_that_ignores_conditions_loses_the_trait(s3_place: Place, between: Proxy) -> None:
    between.fail("PUT", ignore_conditions, times=None)
    assert not (await opened(s3_place, between)).traits.create_only
    between.heal()
    assert not (await opened(s3_place, between)).traits.create_only  # by the verdict, until the endpoint is another


@pytest.mark.parametrize("status", [400, 501])
async def test_a_server_that_refuses_conditions_loses_the_trait(s3_place: Place, between: Proxy, status: int) -> None:
    def refuse(request: Handler) -> None:
        if request.headers.get("If-None-Match"):
            request.refuse(status, "NotImplemented")
        else:
            request.answer(request.forward())

    between.fail("PUT", refuse, times=None)
    assert not (await opened(s3_place, between)).traits.create_only
    assert between.count == {"GET": 2, "PUT": 3}  # a refusal is not repeated


async def test_conditions_that_the_environment_switches_off_are_a_trait_less(
    s3_place: Place, between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    assert not (await opened(s3_place, between)).traits.create_only


@pytest.mark.usefixtures("no_signature")
async def test_a_server_that_ignores_ranges_is_unfit(s3_place: Place, between: Proxy) -> None:
    between.fail("GET", ignore_ranges, times=None)
    with pytest.raises(Invalid, match="cannot be a tier"):
        await opened(s3_place, between)
    with pytest.raises(Invalid, match="cannot be a tier"):  # it has left no verdict
        await opened(s3_place, between)


@pytest.mark.usefixtures("no_signature")
async def test_what_was_copied_to_another_endpoint_is_probed_there(
    s3_server: str, s3_place: Place, between: Proxy
) -> None:
    await opened(s3_place, between)
    with proxy(s3_server) as other:
        other.fail("PUT", ignore_conditions, times=None)
        assert not (await opened(s3_place, other)).traits.create_only


@pytest.mark.parametrize("damaged", [b"", b"{}", b"\xff", b"[" * 4000, b"x" * 5000], ids=repr)
async def test_a_damaged_verdict_is_found_anew(s3_place: Place, between: Proxy, damaged: bytes) -> None:
    await s3_place.bucket.put(VERDICT, damaged)
    assert (await opened(s3_place, between)).traits.create_only


async def test_a_verdict_of_another_version_is_found_anew(s3_place: Place, between: Proxy) -> None:
    """What its words mean there is not known here."""
    told = {"version": 2, "endpoint": between.url, "create_only": False}
    await s3_place.bucket.put(VERDICT, json.dumps(told).encode())
    assert (await opened(s3_place, between)).traits.create_only


async def test_readers_write_nothing_and_need_no_verdict(s3_place: Place, between: Proxy) -> None:
    between.fail("PUT", deny, times=None)
    await opened(s3_place, between, read_only=True)
    assert between.count == {}
    with pytest.raises(TierUnavailable, match="credentials do not allow"):
        await opened(s3_place, between)


async def test_an_opening_is_tried_again_as_often_as_other_operations(s3_place: Place, between: Proxy) -> None:
    between.fail("*", internal_error, times=2)
    assert (await opened(s3_place, between, retries=2)).traits.create_only
