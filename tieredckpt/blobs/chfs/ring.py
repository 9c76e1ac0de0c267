"""Records how many servers a store was written with, in the store itself.

CHFS places chunks by the number of its servers: with one more or one less, most objects look missing. The record is
32 empty folders ``~ring/<servers>-<n>``. They spread over all servers, so any server that is left tells how many there
were. The name lies outside the alphabet of keys.

Objects written to one number of servers are never looked for on another. A store that continues with another number
does so in a folder of its own, ``~<servers>``, and its record is ``~ring/<servers>~<n>``.

A record that replaces another is written in four steps, and the first object is put after the last of them:

1. make ``~ring/<servers>+<n>``: the record of this number has begun
2. make its entries
3. remove the entries of other numbers
4. remove the begun entries

While begun entries exist, the entries of their number are ignored if there are entries of another number. So a writer
that was killed in any step leaves the store where it was, or where it goes, and the next writer starts with step 1.
See docs/decisions/0033-where-a-store-lies-in-chfs.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from tieredckpt.blobs.base import Unanswered
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.concurrency import together
from tieredckpt.errors import NotFound
from tieredckpt.format import layout

__all__ = ["Ring", "check", "write"]

_log = logging.getLogger("tieredckpt")

_FOLDER = "~ring"
_NAMES = 32
_NAME = re.compile(r"([1-9][0-9]{0,5})([-~+])([0-9]{1,2})")
_STEPS_NAMED = 20
_NAMED = 16
"""Most addresses that a message names."""

Entry = tuple[int, str, int]
"""Servers, a mark, and which of the 32 folders it is. The mark is ``~`` if the objects lie in a folder of their own,
else ``-``; or ``+``: the record of this number has begun."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Placement of a store on the current servers."""

    folder: str
    recorded: bool
    """Whether the record is complete; otherwise it is written before the first object."""
    new: bool = False
    """Whether nothing was written with this number of servers yet, so more servers may be about to join."""
    without: str = ""
    """Description, for people, of objects written with other numbers of servers."""


async def check(link: Link, root: str, where: str, expected: int | None, *, writes: bool = True) -> Ring:
    """Compare the ring with the record.

    Args:
        link: to the worker.
        root: of the store.
        where: the same, for messages.
        expected: how many servers there must be, whatever the record says; None to trust the record.
        writes: whether the store may continue with more servers than are recorded.

    Raises:
        Unanswered: there are fewer servers, or more, and objects would look missing.
    """
    servers = link.servers
    if expected not in (None, servers):
        raise Unanswered(
            f"{where}: CHFS has {_count(servers)}, and {expected} are expected, as `servers` of the tier says; start "
            f"the others beside {_names(link)}"
        )
    # The entries that the servers own are the last record. If they own none, the servers were others then, and still
    # hold the entries of that time.
    found = await _record(link, root)
    if not _made(found):
        found = await _record(link, root, replicas=True)
    made, begun = _made(found), _begun(found)
    if not made:
        return Ring(root, recorded=False, new=True)
    told = made - begun or made
    grown = servers > max(told)
    # Earlier versions made no begun entries, so a crash kept the old entries in the record.
    outgrew = servers not in begun and _entries(servers, "~") <= found
    if told != {servers} and not expected and not (grown and writes) and not outgrew:
        # The record names several numbers if a server was away while the store continued without it.
        raise Unanswered(
            f"{where}: CHFS has {_count(servers)}, and {_numbers(told)} are expected, with which the store was "
            f"written; start the others beside {_names(link)}, or set `servers = {servers}` to go on in a folder of "
            f"its own, without {await _left_behind(link, root, servers, found)}"
        )
    apart = servers not in made or any(entry[:2] == (servers, "~") for entry in found)
    folder, own = (f"{root}/~{servers}", _entries(servers, "~")) if apart else (root, _entries(servers, "-"))
    if told == {servers} and not own <= found and not begun and not expected:
        _log.warning("%s: a server has come back without its data; what it held has to be promoted again", where)
    if servers in told:
        return Ring(folder, recorded=found == own)
    without = f"{await _left_behind(link, root, servers, found)} of {_numbers(told)}"
    return Ring(folder, recorded=False, new=True, without=without)


async def write(link: Link, root: str, ring: Ring) -> None:
    """Record the ring as it is now, in place of any other record."""
    own = _entries(link.servers, "-" if ring.folder == root else "~")
    if ring.without:
        _log.warning(
            "chfs:%s: with %s the store goes on in a folder of its own, without %s; what RAM still has is promoted "
            "again, and CHFS with as many servers as before has the rest",
            *(root, _count(link.servers), ring.without),
        )
        if not own <= await _record(link, root):  # else another writer was here since
            await _make(link, root, _entries(link.servers, "+"))
    await _make(link, root, own)
    await link.ask(frames.CheckRing())  # a server that joined meanwhile places the entries elsewhere
    found = await _record(link, root)
    begun = _begun(found)
    # Begun entries are removed last, and the entries that are ignored because of them first.
    for entry in sorted(found - own, key=lambda entry: (entry[1] == "+", entry[0] not in begun)):
        with suppress(NotFound):  # another writer removed it
            await link.ask(frames.RemoveFolder(_path(root, entry)))


async def _make(link: Link, root: str, entries: Collection[Entry]) -> None:
    await together(link.ask(frames.MakeFolder(_path(root, entry))) for entry in entries)


def _entries(servers: int, mark: str) -> set[Entry]:
    return {(servers, mark, n) for n in range(_NAMES)}


def _path(root: str, entry: Entry) -> str:
    servers, mark, n = entry
    return f"{root}/{_FOLDER}/{servers}{mark}{n}"


def _made(found: Collection[Entry]) -> set[int]:
    return {servers for servers, mark, _ in found if mark != "+"}


def _begun(found: Collection[Entry]) -> set[int]:
    return {servers for servers, mark, _ in found if mark == "+"}


async def _record(link: Link, root: str, *, replicas: bool = False) -> set[Entry]:
    names = [name for name, _ in await link.ask(frames.ListFolder(f"{root}/{_FOLDER}", replicas))]
    return {(int(match[1]), match[2], int(match[3])) for match in map(_NAME.fullmatch, names) if match}


async def _left_behind(link: Link, root: str, servers: int, found: Collection[Entry]) -> str:
    """The names of the steps written with other numbers of servers, as far as the servers have their folders."""
    others = [(number, mark) for number, mark, _ in found if number != servers and mark != "+"]
    folders = {f"{root}/~{number}" if mark == "~" else root for number, mark in others}
    steps: set[int] = set()
    for folder in folders:
        names = [name for name, _ in await link.ask(frames.ListFolder(f"{folder}/steps", True))]
        parsed = (layout.parse_step_folder(f"{layout.STEPS}{name}/") for name in names)
        steps |= {step[0] for step in parsed if step is not None}
    if not steps:
        return "what was written to them"
    named = ", ".join(map(str, sorted(steps)[-_STEPS_NAMED:]))
    return f"step{'s' if len(steps) > 1 else ''} {'..., ' if len(steps) > _STEPS_NAMED else ''}{named}"


def _numbers(of: Collection[int]) -> str:
    return " or ".join(map(str, sorted(of)))


def _count(servers: int) -> str:
    return f"{servers} server{'s' if servers != 1 else ''}"


def _names(link: Link) -> str:
    shown = link.addresses[:_NAMED]
    return ", ".join(shown) + (" and more" if len(link.addresses) > len(shown) else "") or "those that run"
