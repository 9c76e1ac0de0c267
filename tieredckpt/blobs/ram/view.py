"""Map extents of a file one behind the other, read-only, so that scattered chunks read as whole arrays.

Address space is reserved once, and every extent is mapped to its place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.mapping import Addresses
from tieredckpt.errors import TierUnavailable

__all__ = ["Placed", "window"]


@dataclass(frozen=True, slots=True)
class Placed:
    """``length`` bytes of the file from ``offset`` on, shown at ``position``; all three are whole pages."""

    position: int
    offset: int
    length: int


def window(fd: int, size: int, placed: Sequence[Placed], release: Callable[[], None]) -> npt.NDArray[np.uint8]:
    """A read-only array of ``size`` bytes that shows the extents of ``fd`` where they were placed.

    ``release`` is called, once, when no array refers to the window any more. Raises `TierUnavailable`.
    """
    try:
        addresses = Addresses(max(size, ALIGNMENT), release)
        for extent in placed:
            addresses.place(extent.position, fd, extent.offset, extent.length)
    except OSError as error:
        raise TierUnavailable(f"cannot map {size} bytes of the slab: {error.strerror}") from error
    return addresses.array()
