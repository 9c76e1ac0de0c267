"""The settings of tiers in object stores, and that their secrets stay where they are."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tieredckpt.config import dump_with_secrets, load, to_toml
from tieredckpt.config.kinds import kind_of
from tieredckpt.errors import Invalid

CANARY = "c4n4ry-c4n4ry"


def tiers(**tier: Any) -> dict[str, Any]:
    return {"tiers": {"far": {"kind": "s3", "url": "s3://bucket/run"} | tier}}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"url": "gs://bucket/run"}, "such as 's3://bucket/runs/7'"),
        ({"url": "s3://"}, "should be a bucket"),
        ({"url": "s3://user:secret@bucket/x"}, "without a user"),
        ({"url": "s3://bucket/a?x=secret"}, "without a user, query"),
        ({"url": "s3://bucket/../x"}, "should be a bucket"),
        ({"url": "s3://bucket//x"}, "should be a bucket"),
        ({"url": 3}, "should be a bucket"),
        ({"endpoint": "objects.example.org"}, "should be a URL"),
        ({"endpoint": "https://user:secret@host"}, "should have no user"),
        ({"endpoint": "ftp://host"}, "should be a URL"),
        ({"object_size": "1 MiB"}, "object_size"),
        ({"concurrency": 0}, "concurrency"),
        ({"secret_access_key": ""}, "leave it out"),
        ({"secret_access_key": 7}, "as text"),
        ({"secret_access_key": "REDACTED"}, "put the secret there"),
        ({"acces_key_id": "a"}, "did you mean `access_key_id`"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(Invalid, match=told) as raised:
        load(tiers(**wrong))
    assert "secret@" not in str(raised.value)
    assert "=secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "url", "secrets"),
    [
        ("s3", "s3://bucket/run", ["access_key_id", "secret_access_key", "session_token"]),
        ("gcs", "gs://bucket/run", ["service_account_key"]),
        ("azure", "az://container/run", ["account_key", "sas_token"]),
    ],
)
def test_secrets_are_in_no_dump_and_no_text(kind: str, url: str, secrets: list[str]) -> None:
    config = load(tiers(kind=kind, url=url, **dict.fromkeys(secrets, CANARY)))
    recorded = json.dumps(config.recorded_policies)
    (tier,) = config.tiers
    assert tier.location is not None
    shown = [repr(config), str(config), to_toml(config), config.model_dump_json(), recorded, str(config.model_dump())]
    assert all(CANARY not in text for text in [*shown, tier.location, str(kind_of(tier).location(tier)), repr(tier)])
    assert load(dump_with_secrets(config)) == config  # as an agent gets them
    with pytest.raises(Invalid, match="REDACTED"):
        load(config.model_dump(mode="json"))


def test_a_configuration_without_secrets_survives_a_trip() -> None:
    config = load(tiers(endpoint="http://127.0.0.1:9000/", region="eu-west-1", profile="me", unsigned_payload=True))
    assert load(config.model_dump(mode="json")) == config
    (tier,) = config.tiers
    assert tier.location == "s3://bucket/run at http://127.0.0.1:9000"


def test_two_tiers_are_not_in_one_place_and_endpoints_are_places() -> None:
    one = {"kind": "s3", "url": "s3://bucket/run"}
    with pytest.raises(Invalid, match="give each its own place"):
        load({"tiers": {"a": one, "b": one | {"url": "s3://bucket/run/"}}})
    load({"tiers": {"a": one, "b": one | {"endpoint": "http://127.0.0.1:9000"}}})


def test_the_endpoint_of_the_environment_is_part_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    (tier,) = load(tiers()).tiers
    kind = kind_of(tier)
    assert tier.location == "s3://bucket/run"
    for variable in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):  # a later one comes first
        monkeypatch.setenv(variable, f"https://{variable.lower().replace('_', '-')}.example.org/")
        where = f"https://{variable.lower().replace('_', '-')}.example.org"
        assert kind.location(tier) == tier.location == f"s3://bucket/run at {where}"
        assert kind.tensorstore_spec is not None
        assert kind.tensorstore_spec(tier, "")["endpoint"] == where
    (named,) = load(tiers(endpoint="http://127.0.0.1:9000")).tiers
    assert named.location == "s3://bucket/run at http://127.0.0.1:9000"
    azure = {"kind": "azure", "url": "az://container/run"}
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    (tier,) = load({"tiers": {"az": azure}}).tiers
    assert tier.location == "az://container/run at mine"
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "https://blobs.example.org")
    assert tier.location == "az://container/run at https://blobs.example.org"


@pytest.mark.parametrize("near", [{}, {"near": {"kind": "chfs"}}], ids=["alone", "with CHFS"])
def test_nodes_with_gateways_of_their_own_name_the_store_alike(
    monkeypatch: pytest.MonkeyPatch, near: dict[str, Any]
) -> None:
    config = load({"tiers": tiers()["tiers"] | near})
    names = set()
    for node in ("one", "two"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{node}:9000")
        names.add((config.identity, tuple(str(kind_of(tier).location(tier)) for tier in config.located[1:])))
    assert len(names) == 1
    assert load(tiers(endpoint="http://other:9000")).identity != load(tiers()).identity


async def test_without_obstore_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for module in ("client", "probe", "store"):
        monkeypatch.delitem(sys.modules, f"tieredckpt.blobs.object.{module}", raising=False)
    (tier,) = load(tiers()).tiers
    with pytest.raises(Invalid, match=r"pip install 'tieredckpt\[s3\]'"):
        await kind_of(tier).open(tier)


def test_tensorstore_is_told_where_it_is() -> None:
    (tier,) = load(tiers(endpoint="http://127.0.0.1:9000", region="eu-west-1")).tiers
    spec = kind_of(tier).tensorstore_spec
    assert spec is not None
    assert spec(tier, "") == {
        "driver": "s3",
        "bucket": "bucket",
        "path": "run/",
        "endpoint": "http://127.0.0.1:9000",
        "aws_region": "eu-west-1",
    }
