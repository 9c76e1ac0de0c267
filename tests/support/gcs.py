"""The XML API of Google Cloud Storage, as obstore asks it, over a server of S3's protocol.

The two differ in how a put says that nothing may be there (``x-goog-if-generation-match: 0``), and in the signature.
https://cloud.google.com/storage/docs/xml-api/reference-headers
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from support.object_stores import CREDENTIALS
from support.proxy import Handler, Proxy, proxy

__all__ = ["gcs", "key_without_signature"]

_ABSENT = "x-goog-if-generation-match"
_SIGNED = (
    f"AWS4-HMAC-SHA256 Credential={CREDENTIALS['access_key_id']}/20260101/{CREDENTIALS['region']}/s3/aws4_request, "
    f"SignedHeaders=host, Signature=00"
)
"""Names the owner of a bucket; the server behind checks no signature."""


@contextmanager
def gcs(server: str) -> Iterator[Proxy]:
    """Stand in front of a server of S3's protocol that checks no signature, as one of Google Cloud Storage."""
    with proxy(server) as between:
        between.fail("*", _translate, times=None)
        yield between


def key_without_signature(url: str) -> str:
    """The key of a service account for requests to this server that nobody signs."""
    nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    return json.dumps({"gcs_base_url": url, "disable_oauth": True, **nobody})


def _translate(request: Handler) -> None:
    for name, value in request.headers.items():
        if name.lower().startswith("x-goog-") and (name.lower(), value) != (_ABSENT, "0"):
            request.refuse(501, f"NotTranslated {name}: {value}")
            return
    if request.headers.get(_ABSENT) is not None:
        request.headers["If-None-Match"] = "*"
    del request.headers["Authorization"]
    request.headers["Authorization"] = _SIGNED
    request.answer(request.forward(without=(_ABSENT,)), headers={"x-goog-generation": "1"})
