"""Credentials of S3 that nobody gave to the tier: they are those that the AWS CLI would take."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from support.object_stores import Place
from support.proxy import Proxy

from tieredckpt.blobs.object import aws_profile
from tieredckpt.blobs.object.kind import S3
from tieredckpt.config.object_tiers import S3Tier
from tieredckpt.errors import Invalid

KEYS = "aws_access_key_id = an-id\naws_secret_access_key = a-key\n"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of AWS are looked for; the environment says nothing else."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws"


async def used(place: Place, between: Proxy, **settings: str) -> None:
    """Open a tier that names no keys, and put something."""
    without = place.tier(between.url, access_key_id=None, secret_access_key=None) | settings
    store = await S3.open(S3Tier(name="s3", **without))
    try:
        await store.put("a", [b"x"])
    finally:
        await store.close()


@pytest.mark.usefixtures("no_signature")
async def test_a_profile_gives_credentials_by_boto3_which_is_asked_once(
    s3_place: Place, between: Proxy, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "credentials").write_text(f"[mine]\n{KEYS}")
    profiles = []
    provider = aws_profile.provider

    def asked(*told: str) -> Any:
        profiles.append(told[1])
        return provider(*told)

    monkeypatch.setattr(aws_profile, "provider", asked)
    await used(s3_place, between, profile="mine")
    assert profiles == ["mine"]  # once: each would ask single sign-on, or the program, by itself
    with pytest.raises(Invalid, match="the profile 'yours' gives no credentials"):
        await used(s3_place, between, profile="yours")


async def test_what_a_program_that_gives_no_credentials_says_is_told_without_secrets(
    s3_place: Place, between: Proxy, files: Path
) -> None:
    program = "sh -c 'echo no ticket for https://me:hunter22@sso/?code=abcd >&2; exit 1'"
    (files / "config").write_text(f"[profile mine]\ncredential_process = {program}\n")
    with pytest.raises(Invalid, match=r"the profile 'mine' gives no credentials: .*no ticket for") as found:
        await used(s3_place, between, profile="mine")
    told = "".join(traceback.format_exception(found.value))
    assert "hunter22" not in told
    assert "abcd" not in told


@pytest.mark.usefixtures("no_signature")
async def test_the_default_profile_and_the_one_that_the_environment_names_need_no_setting(
    s3_place: Place, between: Proxy, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "config").write_text(f"[default]\nregion = eu-north-1\n[profile mine]\n{KEYS}")
    (files / "credentials").write_text(f"[default]\n{KEYS}")
    await used(s3_place, between)
    (files / "credentials").unlink()
    monkeypatch.setenv("AWS_PROFILE", "mine")
    await used(s3_place, between)
    monkeypatch.setenv("AWS_PROFILE", "yours")
    with pytest.raises(Invalid, match="the profile 'yours' gives no credentials"):
        await used(s3_place, between)


@pytest.mark.usefixtures("no_signature")
@pytest.mark.parametrize(
    ("config", "profile", "region"),
    [
        ("[default]\nregion = eu-north-1\n[profile mine]\nregion = ap-south-1\n", None, "eu-north-1"),
        ("[default]\nregion = eu-north-1\n[profile mine]\nregion = ap-south-1\n", "mine", "ap-south-1"),
        ("[default]\noutput = json\n", None, None),
        ("region = of no profile", None, None),
        (None, None, None),
    ],
)
def test_the_region_is_that_of_the_profile_where_nothing_else_says_one(
    files: Path, monkeypatch: pytest.MonkeyPatch, config: str | None, profile: str | None, region: str | None
) -> None:
    """Keys may come from the environment, or a role, and the region from the file, as for the AWS CLI."""
    if config is not None:
        (files / "config").write_text(config)
    if profile is not None:
        monkeypatch.setenv("AWS_PROFILE", profile)
    assert aws_profile.region() == region


async def test_without_boto3_a_profile_is_an_error_that_says_what_to_install(
    s3_place: Place, between: Proxy, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "credentials").write_text(f"[default]\n{KEYS}")
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    with pytest.raises(Invalid, match="pip install boto3"):
        await used(s3_place, between)


@pytest.mark.parametrize(
    ("config", "environment", "profile"),
    [
        ("", {}, None),
        ("[default]\nregion = eu-north-1\ns3 =\n  max_queue_size = 9\n", {}, None),
        ("[other]\nrole_arn = a\n", {}, None),
        ("[default]\nsso_session = me\n", {}, "default"),
        ("[default]\ncredential_process = /bin/me\n", {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, None),
        ("[default]\ncredential_process = /bin/me\n", {"AWS_ACCESS_KEY_ID": "an-id"}, None),
        ("[default]\ncredential_process = /bin/me\n", {"AWS_SKIP_SIGNATURE": "true"}, None),
        ("", {"AWS_PROFILE": "me", "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, "me"),
        ("", {"AWS_PROFILE": "me", "AWS_ACCESS_KEY_ID": "an-id"}, None),
        ("this is no such file", {}, "default"),
    ],
)
def test_boto3_is_asked_only_where_a_profile_gives_credentials(
    files: Path, monkeypatch: pytest.MonkeyPatch, config: str, environment: dict[str, str], profile: str | None
) -> None:
    """So that nobody waits for its import who has credentials without it."""
    (files / "config").write_text(config)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert aws_profile.to_be_read() == profile


def test_tensorstore_is_told_where_credentials_are(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SDK would look everywhere, and print where there are none."""
    assert aws_profile.for_tensorstore() is None  # it ends without credentials, as a public bucket needs it
    with monkeypatch.context() as patched:
        patched.setenv("AWS_SKIP_SIGNATURE", "true")
        assert aws_profile.for_tensorstore() == {"type": "anonymous"}
    with monkeypatch.context() as patched:
        patched.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1/")
        assert aws_profile.for_tensorstore() == {"type": "ecs"}
        patched.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/token")
        assert aws_profile.for_tensorstore() is None
        patched.setenv("AWS_ACCESS_KEY_ID", "an-id")
        assert aws_profile.for_tensorstore() == {"type": "environment"}
    (files / "config").write_text("[default]\nsso_session = me\n")
    assert aws_profile.for_tensorstore() is None
    (files / "credentials").write_text(f"[default]\n{KEYS}")
    where = {"credentials_file": str(files / "credentials"), "config_file": str(files / "config")}
    assert aws_profile.for_tensorstore() == {"type": "profile", "profile": "default", **where}
