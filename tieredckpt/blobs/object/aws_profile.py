"""Find AWS credentials, and load those of a profile of ``~/.aws`` by boto3, as obstore does not find them.

A profile may have keys, a role to assume, single sign-on, or a program that gives credentials. Sources are asked in the
order of the AWS CLI: https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-authentication.html.
"""

from __future__ import annotations

import configparser
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from tieredckpt._redact import redacted_text
from tieredckpt.errors import Invalid

__all__ = ["for_tensorstore", "provider", "region", "to_be_read"]

_TTL = timedelta(minutes=10)
"""How long credentials from boto3 are used: boto3 gives none that end sooner, and obstore asks no earlier."""

_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_GIVES = frozenset(
    {
        "aws_access_key_id",
        "credential_process",
        "credential_source",
        "login_session",
        "role_arn",
        "source_profile",
        "sso_account_id",
        "sso_session",
        "sso_start_url",
        "web_identity_token_file",
    }
)
"""Settings of a profile by which it gives credentials; others, such as the region, give none."""


def to_be_read() -> str | None:
    """The profile to use, by the environment or the files of AWS; None if the environment has credentials."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or _unsigned():
        return None
    if (name := os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")) is not None:
        return name
    if os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None  # which comes before the default profile, and obstore reads
    return "default" if any(map(_gives, _FILES)) else None


def region() -> str | None:
    """The region of the profile that is in force, by the configuration of AWS; None where that says none."""
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    sections = (name,) if name == "default" else (f"profile {name}", name)
    with suppress(configparser.Error, UnicodeDecodeError):
        found = _read(os.environ.get("AWS_CONFIG_FILE") or _FILES["AWS_CONFIG_FILE"])
        return next((found.get(each, "region") for each in sections if found.has_option(each, "region")), None)
    return None


def provider(tier: str, profile: str, told_by: str) -> Any:
    """A provider that gives obstore the credentials of a profile, and renews them. Blocking. Raises `Invalid`.

    ``told_by`` says who named the profile, for messages.
    """
    try:
        from boto3.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise Invalid(
            f"tier {tier!r}: {told_by} names the profile {profile!r}, which is read by boto3, and that is not there: "
            f"pip install boto3, or give credentials in the environment (AWS_ACCESS_KEY_ID)"
        ) from error
    try:
        return Boto3CredentialProvider(Session(profile_name=profile), ttl=_TTL)
    except Exception as error:  # botocore's own kinds, of which there are many; they may repeat what a program printed
        told = ValueError(redacted_text(str(error)))
        raise Invalid(f"tier {tier!r}: the profile {profile!r} gives no credentials: {told}") from told


def _unsigned() -> bool:
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1")


def _gives(variable: str) -> bool:
    """Whether the default profile gives credentials, by one of the two files."""
    return not _GIVES.isdisjoint(_settings(os.environ.get(variable) or _FILES[variable], "default"))


def for_tensorstore() -> dict[str, str] | None:
    """The place of the credentials as TensorStore's ``aws_credentials``; None where it has no form for that place."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return {"type": "environment"}
    if _unsigned():
        return {"type": "anonymous"}
    paths = {of: str(Path(os.environ.get(of) or usual).expanduser()) for of, usual in _FILES.items()}
    if (profile := to_be_read()) is not None:
        keys, config = paths.values()
        if "aws_access_key_id" not in _settings(keys, profile):
            return None
        # Its SDK raises for a missing file.
        config = config if os.path.isfile(config) else keys
        return {"type": "profile", "profile": profile, "credentials_file": keys, "config_file": config}
    if os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None
    in_container = {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"} & {*os.environ}
    # Not "imds", although an instance may give some: with that, a public bucket could not be read without any.
    return {"type": "ecs"} if in_container else None


def _settings(path: str, profile: str) -> frozenset[str]:
    """The settings of a profile in a file; all settings for a malformed file, so that boto3 reports the error."""
    try:
        found = _read(path)
    except (configparser.Error, UnicodeDecodeError):
        return _GIVES
    return frozenset(found.options(profile)) if found.has_section(profile) else frozenset()


def _read(path: str) -> configparser.RawConfigParser:
    """A file of AWS, empty where it cannot be read. Raises `configparser.Error`, `UnicodeDecodeError`."""
    parser = configparser.RawConfigParser(strict=False)
    with suppress(OSError, RuntimeError):
        parser.read(Path(path).expanduser(), encoding="utf-8")
    return parser
