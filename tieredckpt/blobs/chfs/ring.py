"""How many servers a store was written with, remembered in the store itself.

CHFS places chunks by the number of its servers: with one more or one less, most objects look missing. The
record is 32 empty folders ``~ring/<servers>-<n>``, which spread over all servers, so that whichever are left tell
how many there were. The name lies outside the alphabet of keys.
"""

from __future__ import annotations

import logging
import re

from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.concurrency import together
from tieredckpt.errors import NotFound, TierUnavailable

__all__ = ["check", "write"]

_log = logging.getLogger("tieredckpt")

_FOLDER = "~ring"
_NAMES = 32
_NAME = re.compile(r"([1-9][0-9]{0,5})-([0-9]{1,2})")


async def check(link: Link, root: str, where: str, expected: int | None) -> bool:
    """Compare the ring with the record; False when the record has to be written.

    Args:
        expected: how many servers there must be, whatever the record says; None to believe the record.

    Raises:
        TierUnavailable: there are fewer servers, or more, and objects would look missing.
    """
    found = await _record(link, root)
    wanted = {expected} if expected else {servers for servers, _ in found} or {link.servers}
    if wanted != {link.servers}:
        # Several, where a server was away while the store went on without it.
        told = " or ".join(map(str, sorted(wanted)))
        raise TierUnavailable(
            f"{where}: CHFS has {link.servers} servers, and {told} are expected; start it with as many as the store "
            f"was written with, or set `servers = {link.servers}` if what was on others may be lost"
        )
    complete = found == {(link.servers, n) for n in range(_NAMES)}
    if found and not complete and not expected:
        _log.warning("%s: a server has come back without its data; what it held has to be promoted again", where)
    return complete


async def write(link: Link, root: str) -> None:
    """Record the ring as it is now, in place of any other record."""
    for servers, n in await _record(link, root):
        if servers != link.servers:
            try:
                await link.ask(frames.RemoveFolder(f"{root}/{_FOLDER}/{servers}-{n}"))
            except NotFound:
                continue  # another writer removed it
    await together(link.ask(frames.MakeFolder(f"{root}/{_FOLDER}/{link.servers}-{n}")) for n in range(_NAMES))


async def _record(link: Link, root: str) -> set[tuple[int, int]]:
    names = [name for name, _ in await link.ask(frames.ListFolder(f"{root}/{_FOLDER}"))]
    return {(int(match[1]), int(match[2])) for match in map(_NAME.fullmatch, names) if match}
