"""Finds out what an endpoint honours, once, and keeps the verdict in an object beside the store's marker.

Servers that speak a provider's protocol differ: some answer a range with the whole object, some ignore the condition of
a put and replace what was there, and some refuse a put that has one. Only a writer probes; a reader does not need the
verdict.
"""

from __future__ import annotations

import msgspec

from tieredckpt._decoders import from_json
from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.object.refusals import NoConditions, NoRanges
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, ShortRead

__all__ = ["VERDICT", "Verdict", "verdict_of"]

VERDICT = "tieredckpt-endpoint.json"
"""The key of the object that the probe writes, and that holds the verdict afterwards."""

_MAX = 4096


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on an endpoint."""

    version: int = 1
    endpoint: str
    """The endpoint that was probed; a copy of the store at another endpoint is probed again."""
    create_only: bool
    """Whether the endpoint refuses a conditional put where an object exists."""


async def verdict_of(store: BlobStore, endpoint: str) -> Verdict:
    """The stored verdict, or else a new one, which takes four more requests.

    Args:
        store: of the endpoint; it sends exclusive puts as if they were honoured.
        endpoint: its URL.

    Raises `Invalid` for an endpoint that no tier can use, `TierUnavailable`.
    """
    kept = await _kept(store)
    if kept is not None and (kept.version, kept.endpoint) == (1, endpoint):
        return kept
    trial = msgspec.json.encode({"probing": endpoint})  # no verdict, should this end half-way
    await store.put(VERDICT, [trial])
    try:
        await store.put(VERDICT, [b"{}"], create_only=True)
        verdict = Verdict(endpoint=endpoint, create_only=False)
    except NoConditions:
        verdict = Verdict(endpoint=endpoint, create_only=False)
    except Conflict:
        verdict = Verdict(endpoint=endpoint, create_only=True)
    into = bytearray(1)
    try:
        await store.get_into(VERDICT, 1, memoryview(into))
    except (NoRanges, ShortRead) as error:
        raise Invalid(
            f"{store.location} cannot be a tier: its server does not answer a request for a range of an object with "
            f"that range ({error})"
        ) from error
    await store.put(VERDICT, [msgspec.json.encode(verdict)])
    return verdict


async def _kept(store: BlobStore) -> Verdict | None:
    try:
        return from_json(await store.get(VERDICT, limit=_MAX), Verdict, VERDICT)
    except (NotFound, Corrupt):
        return None
