"""The errors that tieredckpt raises, grouped by what a handler would do.

::

    TieredCkptError
    ├── NotFound          it is not there; look elsewhere, or start afresh
    ├── Corrupt           bytes are there and wrong; another tier may have them right
    │   └── ShortRead     an object ends before the range that was asked for
    ├── TierUnavailable   the tier does not answer; it is retried, training goes on
    ├── DeviceUnavailable a GPU does not give or take its bytes; this save or restore fails
    ├── RanksUnavailable  other ranks do not answer; this step is not committed, training goes on
    ├── NoSpace           the tier is full; evict, or give it more room
    ├── Conflict          somebody else holds it, or it exists already
    ├── Invalid           the caller's input cannot be used (also a ValueError)
    └── Closed            the store was closed

Foreign exceptions are mapped to these once, at the edge of a blob store, and stay reachable as
``__cause__``. Messages name the tier, step and key, say what happened, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "Closed",
    "Conflict",
    "Corrupt",
    "DeviceUnavailable",
    "Invalid",
    "NoSpace",
    "NotFound",
    "RanksUnavailable",
    "ShortRead",
    "TierUnavailable",
    "TieredCkptError",
]


class TieredCkptError(Exception):
    """Root of every error of this library."""


class NotFound(TieredCkptError):
    """An object, step, key or tier is not there."""


class Corrupt(TieredCkptError):
    """Stored bytes contradict their digest, checksum, length or grammar."""


class ShortRead(Corrupt):
    """An object holds fewer bytes than its reference promises."""


class TierUnavailable(TieredCkptError):
    """A tier failed, or did not answer within its deadline."""


class DeviceUnavailable(TieredCkptError):
    """A device, such as a GPU, failed to copy its memory."""


class RanksUnavailable(TieredCkptError):
    """Other ranks of the training died, or did not answer within the deadline."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        """Ranks that did not answer, as far as known."""


class NoSpace(TieredCkptError):
    """A tier, its quota or the RAM slab has no room for the write."""


class Conflict(TieredCkptError):
    """Another writer holds the store, or the object or step exists already."""


class Invalid(TieredCkptError, ValueError):
    """An argument, configuration value or tree cannot be used; nothing was changed."""


class Closed(TieredCkptError):
    """The store is closed, or is closing."""
