"""Map errors of obstore: whether to repeat, to wait, or to fix something first, and what."""

from __future__ import annotations

import html
import re

from obstore import exceptions

from tieredckpt._redact import redacted_text
from tieredckpt.blobs.base import Unanswered
from tieredckpt.blobs.object.throttle import SlowDown
from tieredckpt.errors import Conflict, NoSpace, NotFound, ShortRead, TieredCkptError, TierUnavailable

__all__ = ["Denied", "NoConditions", "NoRanges", "OddName", "meaning", "without_secrets"]

_DETAILS = "\n\nDebug source:"
_BODY = re.compile(r"<(?:\?xml|!doctype|html|Error).*", re.IGNORECASE | re.DOTALL)
_SAID = re.compile(r"<(?:Code|Message|Details)>(.*?)</")
_STATUS = re.compile(r"(?:status |\()code: (\d{3})")
"""Also of one deletion among those that a request to Azure has."""
_FULL = re.compile(r"<Code>(?:QuotaExceeded|XMinioStorageFull|InsufficientCapacity\w*)<")
_TOO_LARGE = re.compile(r"<Code>(?:EntityTooLarge|RequestBodyTooLarge)<")
_NO_BUCKET = re.compile(r"<Code>(?:NoSuchBucket|ContainerNotFound)<|bucket does not exist", re.IGNORECASE)
_SLOW = re.compile(
    r"<Code>(?:SlowDown|ServerBusy|TooManyRequests|RequestLimitExceeded|RequestThrottled\w*|Throttling(?:Exception)?)<"
)
"""Also answers of the service that gives credentials, which all processes of a job ask when they start."""
_NO_CONDITIONS = re.compile(r"<Code>NotImplemented<|conditional put is disabled")
_ELSEWHERE = re.compile(r"<Code>(?:PermanentRedirect|AuthorizationHeaderMalformed)<|redirect without LOCATION")
_ENDINGS = {
    "InvalidObjectState": "restore it from its archive class first, and let no lifecycle rule move it there",
    "RequestTimeTooSkewed": "set this machine's clock",
    "ExpiredToken": "renew the session token",
    "InvalidToken": "renew the session token, or leave it out where the key needs none",
}
"""By the code of a refusal: how to fix what a repetition does not."""
_ENDED = re.compile(f"<Code>({'|'.join(_ENDINGS)})<")
_METADATA = re.compile(r"//(?:169\.254\.|metadata\.google\.internal|\[fd00:ec2::254\])")
"""Address at which a cloud gives credentials to its machines; it is asked last."""
_NO_RANGES = "non-partial response"
_ODD_NAME = "object with invalid path"
_NO_STORE = re.compile(r"status code: 404 Not Found:\s*(?!.*<Code>)\S", re.DOTALL)
"""An answer with a page: of a proxy without a server behind it, or of another service."""
_BEYOND = re.compile(r"Wanted range starting at|CONTENT_RANGE header: \S*bytes 0--1/0")
"""Error texts of obstore for a server that answers a range at the end with nothing, as Azurite does."""


class Denied(Unanswered):
    """The server refuses these credentials, or there are none: asking again does not help."""


class NoConditions(Unanswered):
    """The server refuses every put that has a condition."""


class NoRanges(Unanswered):
    """The server answered a request for a range with the whole object."""


class OddName(Unanswered):
    """Somebody has put an object into the folder whose name obstore refuses; it lists none of the others then."""


def meaning(error: Exception, what: str, doing: str, *, exclusive: bool) -> TieredCkptError:
    """Map an error of obstore to an error of this library.

    Kinds and status of the error are trusted; its text only where nothing else tells the cause.

    Args:
        error: as obstore raised it.
        what: what failed, for people.
        doing: a participle for the message: ``"written"``, ``"looked at"`` for a HEAD, and so on.
        exclusive: whether the put had the condition that no object exists.
    """
    full = str(error)
    status = int(found[1]) if (found := _STATUS.search(full)) else None
    if exclusive and (status == 501 or _NO_CONDITIONS.search(full)):
        return NoConditions(what)
    if (ended := _ENDED.search(full)) is not None:
        return Unanswered(f"{what}; {_ENDINGS[ended[1]]}")
    if _ODD_NAME in full:
        return OddName(f"{what}; that object is none of the store's: delete it, or move it out of the tier's folders")
    if _ELSEWHERE.search(full):
        return Unanswered(f"{what}; the bucket is in another region: set the tier's `region`")
    if _METADATA.search(full):
        what += (
            "; no credentials were found in the tier, the environment, a profile or a web identity, and this "
            "machine gives none"
        )
    if _NO_BUCKET.search(full):
        return Unanswered(f"{what}; make the bucket, or correct the tier's `url`")
    if _TOO_LARGE.search(full) or status == 413:
        return Unanswered(f"{what}; lower the tier's `object_size`, or raise the server's limit")
    if _FULL.search(full) or status == 507:
        return NoSpace(f"{what}; evict steps, or raise the quota")
    # 503 alone may come from a proxy whose server is gone; but the response to a HEAD has no code.
    if status == 429 or _SLOW.search(full) or (status == 503 and doing == "looked at"):
        return SlowDown(what)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or status in (401, 403):
        held = ", or a retention policy does not" if status == 403 and doing in ("written", "deleted") else ""
        return Denied(f"{what}; the credentials do not allow it{held}")
    if doing == "deleted" and status in (409, 412):
        return Unanswered(f"{what}; look for an immutability policy, a legal hold or a lease on it")
    if _NO_STORE.search(full.partition(_DETAILS)[0]):
        return TierUnavailable(f"{what}; no object store has answered: check the address, and the server behind it")
    if isinstance(error, FileNotFoundError):
        return NotFound(what) if doing != "written" else TierUnavailable(what)
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        # Another 409 than Azure's: a writer is at the same key now, and who wins is not known yet.
        is_there = status != 409 or "BlobAlreadyExists" in full
        return Conflict(what) if exclusive and is_there else TierUnavailable(what)
    if status == 416 or _BEYOND.search(full):
        return ShortRead(what)
    if _NO_RANGES in full:
        return NoRanges(f"{what}; the server answers a range with the whole object, which no tier can use")
    return TierUnavailable(what)


def without_secrets(error: Exception, secrets: tuple[str, ...]) -> Exception:
    """The same error, without secrets in its text."""
    told, _, debug = str(error).partition(_DETAILS)
    # Only the code, message and details of a body: its other elements may repeat the request.
    text = _BODY.sub(lambda body: html.unescape(" ".join(_SAID.findall(body[0]))), f"{told}{_why_not_sent(debug)}")
    text = " ".join(redacted_text(text, secrets).split())  # a secret may have been escaped
    kind = type(error) if isinstance(error, exceptions.BaseError | FileNotFoundError) else ValueError
    return kind(text)


def _why_not_sent(debug: str) -> str:
    """What obstore tells of a failed connection in its details alone: ``: dns error: Name or service not known``."""
    sent = debug.partition("reqwest::Error")[2]
    said = re.findall(r'"((?:[^"\\]|\\.)*)"', sent) or re.findall(r"(?<=error: )[A-Z]\w+\(\s*\w+", sent)[-1:]
    return "".join(": " + " ".join(re.split(r"[(\s]+", each)) for each in said)
