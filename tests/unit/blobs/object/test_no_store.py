"""A URL without a store: it is said so, and none is made there."""

from __future__ import annotations

import pytest
from support.command_line import run
from support.frameworks import require
from support.object_stores import BUCKET, CREDENTIALS, Place
from support.proxy import Proxy, internal_error, slow_down

require("obstore")

from tieredckpt.blobs.object.kind import S3
from tieredckpt.blobs.object.probe import VERDICT
from tieredckpt.config.object_tiers import S3Tier


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("command", [("ls",), ("collect",), ("evict", "1", "s3")])
def test_a_command_at_a_url_without_a_store_says_so_and_makes_none(
    command: tuple[str, ...], left: bool, s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where `doctor` has tried the endpoint before."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_place.server)
    if left:
        s3_place.bucket._client.put_object(Bucket=BUCKET, Key=f"{s3_place.prefix}/{VERDICT}", Body=b"{}")
    before = s3_place.bucket.sizes()
    verb, *more = command
    result = run(verb, s3_place.url, *more)
    assert result.exit_code == 1
    assert "there is no store" in result.stderr
    assert s3_place.bucket.sizes() == before


def test_requests_that_are_repeated_are_not_told_in_the_words_of_the_library_that_does_it(
    s3_place: Place, between: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``stamina.retry_scheduled`` names neither tier nor cause; Python prints it where nothing handles warnings."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
    between.fail("GET", internal_error, key="tieredckpt.json", times=1)
    s3_place.bucket._client.put_object(Bucket=BUCKET, Key=f"{s3_place.prefix}/tieredckpt.json", Body=b"{}")
    run("ls", s3_place.url)
    assert between.count["GET"] > 1
    assert not [record for record in caplog.records if record.name == "stamina"]


def test_whether_a_store_exists_is_found_out_in_time(s3_place: Place, between: Proxy) -> None:
    """A server that does not answer may have one; no thread goes on asking it."""
    tier = S3Tier(name="s3", **s3_place.tier(between.url, deadline=1))
    between.fail("LIST", slow_down, times=None)
    assert S3.exists(tier)
    between.heal()
    assert not S3.exists(tier)


def test_what_lies_below_a_prefix_is_a_store_only_if_it_looks_like_one(s3_place: Place) -> None:
    """The folder above many stores is none: looking there showed an empty one, and a collection made it."""
    put, tier = s3_place.bucket._client.put_object, S3Tier(name="s3", **s3_place.tier())
    put(Bucket=BUCKET, Key=f"{s3_place.prefix}/run-7/tieredckpt.json", Body=b"{}")
    assert not S3.exists(tier)
    put(Bucket=BUCKET, Key=f"{s3_place.prefix}/steps/0000000001-0000000001/manifest.ocdbt", Body=b"")
    assert S3.exists(tier)
    rounded = S3Tier(name="s3", **s3_place.tier(lossy=[{"keys": ["**"], "max_error": "0.4%"}]))
    assert not S3.exists(rounded)
    put(Bucket=BUCKET, Key=f"{s3_place.prefix}/derived/tieredckpt.json", Body=b"{}")
    assert S3.exists(rounded)
