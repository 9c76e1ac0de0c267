"""The configuration of tiers in object stores: S3, Google Cloud Storage and Azure Blob Storage."""

from __future__ import annotations

import os
import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainSerializer, SecretStr, SerializationInfo

from tieredckpt._redact import is_redacted
from tieredckpt.config.tiers import WITH_SECRETS, AbsolutePath, Capacity, Flag, Threads, TierConfig
from tieredckpt.errors import Invalid
from tieredckpt.units import Size

__all__ = ["AzureTier", "GcsTier", "ObjectTier", "S3Tier", "check_endpoint"]

_COMPONENT = re.compile(r"[A-Za-z0-9._=-]+")


def _secret(value: object) -> SecretStr:
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, str) or not value:
        raise Invalid("should be the secret as text; leave it out to take it from the environment")
    if is_redacted(value):
        raise Invalid("has REDACTED in the place of a secret: put the secret there, or leave it out")
    return SecretStr(value.strip())  # without the line end that a shell or a mounted file adds


def _shown(secret: SecretStr | None, info: SerializationInfo) -> str | None:
    if secret is None:
        return None
    return secret.get_secret_value() if info.context is WITH_SECRETS else "REDACTED"


def check_endpoint(value: object) -> str:
    """Check the URL of a service: without user, query and fragment. Raises `Invalid`."""
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise Invalid("should be a URL such as 'https://objects.example.org', without a bucket")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise Invalid("should have no user, query or fragment; credentials have settings of their own")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")


def _url_of(scheme: str) -> BeforeValidator:
    """Takes ``scheme://bucket/prefix``, with or without a final slash."""

    def check(value: object) -> str:
        found, _, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
        parts = rest.rstrip("/").split("/")
        if found.lower() != scheme or not all(map(_COMPONENT.fullmatch, parts)) or {".", ".."} & {*parts}:
            raise Invalid(
                f"should be a bucket and a prefix of components of [A-Za-z0-9._=-], without a user, query or fragment, "
                f"such as '{scheme}://bucket/runs/7'"
            )
        return f"{scheme}://{'/'.join(parts)}"

    return BeforeValidator(check)


Secret = Annotated[SecretStr, BeforeValidator(_secret), PlainSerializer(_shown, when_used="json")]
Endpoint = Annotated[str, BeforeValidator(check_endpoint)]


class ObjectTier(TierConfig):
    """Settings that the kinds of object stores share."""

    url: str
    """The bucket (with Azure, the container) and the prefix of all keys."""
    endpoint: Endpoint | None = None
    """URL of the service; None for the provider's own, or for what the environment says."""
    capacity: Capacity | None = None
    """Bytes that the tier may use; None for no bound."""
    survives: Literal["node", "site"] = "site"
    object_size: Annotated[Size, Field(ge=5 << 20, le=1 << 30)] = 64 << 20
    """Bytes of a pack, about. Each is one PUT."""
    concurrency: Threads = 8
    """How many packs are written at a time; twice as many requests are under way at most."""
    endpoint_variables: ClassVar[tuple[str, ...]] = ()
    """Of the environment, first match first: what takes the place of ``endpoint`` where that is None."""

    @property
    def bucket(self) -> str:
        return self.url.partition("://")[2].partition("/")[0]

    @property
    def prefix(self) -> str:
        """Prefix of all keys, without slashes around it; empty for the whole bucket."""
        return self.url.partition("://")[2].partition("/")[2]

    @property
    def service(self) -> str | None:
        """URL of the service, by the tier or by the environment; None for the provider's own. Raises `Invalid`."""
        variable = next((name for name in self.endpoint_variables if os.environ.get(name)), None)
        if self.endpoint is not None or variable is None:
            return self.endpoint
        try:
            return check_endpoint(os.environ[variable])
        except Invalid as error:
            raise Invalid(f"tier {self.name!r}: the environment's {variable} {error}") from None

    @property
    def location(self) -> str:
        return self.url if (where := self.service) is None else f"{self.url} at {where}"

    @property
    def location_with_secrets(self) -> str:
        """Without what the environment says, which may differ between the nodes of a training."""
        return self.url if self.endpoint is None else f"{self.url} at {self.endpoint}"


class S3Tier(ObjectTier):
    """Amazon S3, or what speaks its protocol: Ceph, MinIO, R2 and others."""

    kind: Literal["s3"] = "s3"
    url: Annotated[str, _url_of("s3")]
    region: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")] | None = None
    """None for what the environment says, then ``us-east-1``."""
    profile: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Of ``~/.aws``, read by boto3, which must be installed; None for the credentials that the AWS CLI would take."""
    access_key_id: Secret | None = None
    secret_access_key: Secret | None = None
    session_token: Secret | None = None
    """Better in the environment (``AWS_ACCESS_KEY_ID`` and so on) than in a file; shown and stored nowhere."""
    unsigned_payload: Flag | None = None
    """Whether the digest of a body is left out of its signature, which costs no CPU then; None for over TLS alone."""
    endpoint_variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class GcsTier(ObjectTier):
    """Google Cloud Storage."""

    kind: Literal["gcs"] = "gcs"
    url: Annotated[str, _url_of("gs")]
    credentials: AbsolutePath | None = None
    """The JSON file of a service account; None for the environment (``GOOGLE_APPLICATION_CREDENTIALS``), then for the
    machine's own account."""
    service_account_key: Secret | None = None
    """The content of such a file."""


class AzureTier(ObjectTier):
    """Azure Blob Storage."""

    kind: Literal["azure"] = "azure"
    url: Annotated[str, _url_of("az")]
    account: Annotated[str, Field(pattern=r"^[a-z0-9]{3,24}$")] | None = None
    """The storage account; None for ``AZURE_STORAGE_ACCOUNT_NAME``."""
    account_key: Secret | None = None
    sas_token: Secret | None = None
    """Better in the environment (``AZURE_STORAGE_ACCOUNT_KEY``, ``AZURE_STORAGE_SAS_KEY``) than in a file."""
    endpoint_variables = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")

    @property
    def location(self) -> str:
        where = self.service or self.account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        return self.url if where is None else f"{self.url} at {where}"

    @property
    def location_with_secrets(self) -> str:
        where = self.endpoint or self.account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        return self.url if where is None else f"{self.url} at {where}"
