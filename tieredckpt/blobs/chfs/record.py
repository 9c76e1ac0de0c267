"""Records how many servers a store was written with, in the store itself, and finds its folder by that.

CHFS places chunks by the number of its servers: with one more or one less, most objects look missing. The record is
32 empty folders ``~ring/<servers>-<n>``, its entries. They spread over all servers, so any server that is left tells
how many there were. The name lies outside the alphabet of keys.

Objects written to one number of servers are never looked for on another. A store that continues with another number
does so in a folder of its own, ``~<servers>``, and its entries are ``~ring/<servers>~<n>``.

A record that replaces another is written in four steps, and the first object is put after the last of them:

1. make the begun entries ``~ring/<servers>+<n>``: the record of this number has begun
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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from tieredckpt.blobs.base import Unanswered
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.concurrency import together
from tieredckpt.errors import NotFound
from tieredckpt.format import layout

__all__ = ["Placement", "is_whole", "place", "write"]

_log = logging.getLogger("tieredckpt")

_FOLDER = "~ring"
_ENTRIES = 32
_ENTRY = re.compile(r"([1-9][0-9]{0,5})([-~+])[0-9]{1,2}")
_IN_ROOT, _APART, _BEGUN = "-", "~", "+"
_MADE = _IN_ROOT + _APART
_STEPS_NAMED = 20
_ADDRESSES_NAMED = 16


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a store lies on the current servers."""

    folder: str
    record: Literal["complete", "incomplete", "none"]
    """What is recorded of this number of servers; the rest is written before the first object. With ``none``, nothing
    was written to this number yet, so more servers may be about to join."""
    without: str = ""
    """Description, for people, of objects written with other numbers of servers, if the store goes on without them."""


async def place(link: Link, root: str, where: str, expected: int | None, *, writes: bool = True) -> Placement:
    """Find the folder of a store by its record.

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
            f"the others beside {_addresses(link)}"
        )
    # The entries that the servers own are the last record. If they own none, the servers were others then, and still
    # hold the entries of that time.
    found = await _read(link, root)
    if not _written(found):
        found = await _read(link, root, replicas=True)
    written, begun = _written(found), _numbers(found, _BEGUN)
    if not written:
        return Placement(root, "none")
    grown = writes and servers > max(written)
    # Earlier versions made no begun entries, so a crash kept the old entries in the record.
    outgrew = servers not in begun and _entries(servers, _APART) <= found
    if not (written == {servers} or expected or grown or outgrew):
        raise Unanswered(
            f"{where}: CHFS has {_count(servers)}, and {_listed(written)} are expected, with which the store was "
            f"written; start the others beside {_addresses(link)}, or set `servers = {servers}` to go on in a folder "
            f"of its own, without {await _steps_elsewhere(link, root, found)}"
        )
    in_root = servers in _numbers(found, _IN_ROOT) - _numbers(found, _APART)
    folder = root if in_root else f"{root}/~{servers}"
    own = _entries(servers, _IN_ROOT if in_root else _APART)
    if servers not in written:
        return Placement(folder, "none", f"{await _steps_elsewhere(link, root, found)} of {_listed(written)}")
    if written == {servers} and not (own <= found or begun or expected):
        _log.warning("%s: a server has come back without its data; what it held has to be promoted again", where)
    return Placement(folder, "complete" if found == own else "incomplete")


async def write(link: Link, root: str, placement: Placement) -> None:
    """Record the current number of servers, in place of any other record."""
    own = _entries(link.servers, _IN_ROOT if placement.folder == root else _APART)
    if placement.without:
        _log.warning(
            "chfs:%s: with %s the store goes on in a folder of its own, without %s; what RAM still has is promoted "
            "again, and CHFS with as many servers as before has the rest",
            *(root, _count(link.servers), placement.without),
        )
        if not own <= await _read(link, root):  # else another writer was here since
            await _make(link, root, _entries(link.servers, _BEGUN))
    await _make(link, root, own)
    await link.ask(frames.CheckRing())  # a server that joined meanwhile places the entries elsewhere
    found = await _read(link, root)
    begun = _numbers(found, _BEGUN)
    # Begun entries are removed last, and the entries that are ignored because of them first.
    for entry in sorted(found - own, key=lambda entry: (_BEGUN in entry, begun.isdisjoint(_numbers([entry], _MADE)))):
        with suppress(NotFound):  # another writer removed it
            await link.ask(frames.RemoveFolder(f"{root}/{_FOLDER}/{entry}"))


async def is_whole(link: Link, root: str, placement: Placement) -> bool:
    """Whether the servers have all entries of a record that was complete: one that lost its data lacks those it had."""
    return _entries(link.servers, _IN_ROOT if placement.folder == root else _APART) <= await _read(link, root)


async def _make(link: Link, root: str, entries: Iterable[str]) -> None:
    await together(link.ask(frames.MakeFolder(f"{root}/{_FOLDER}/{entry}")) for entry in entries)


async def _read(link: Link, root: str, *, replicas: bool = False) -> set[str]:
    names = await link.ask(frames.ListFolder(f"{root}/{_FOLDER}", replicas))
    return {name for name, *_ in names if _ENTRY.fullmatch(name)}


def _entries(servers: int, mark: str) -> set[str]:
    return {f"{servers}{mark}{n}" for n in range(_ENTRIES)}


def _numbers(entries: Iterable[str], marks: str) -> set[int]:
    """The numbers of servers that entries with any of these marks tell."""
    return {int(match[1]) for match in map(_ENTRY.fullmatch, entries) if match and match[2] in marks}


def _written(entries: Iterable[str]) -> set[int]:
    """The numbers that the store was written with: several if a server was away while it continued without it."""
    made = _numbers(entries, _MADE)
    return made - _numbers(entries, _BEGUN) or made


async def _steps_elsewhere(link: Link, root: str, entries: Iterable[str]) -> str:
    """The names of the steps written with other numbers of servers, as far as the servers have their folders."""
    folders = {f"{root}/~{servers}" for servers in _numbers(entries, _APART) - {link.servers}}
    if _numbers(entries, _IN_ROOT) - {link.servers}:
        folders.add(root)
    steps: set[int] = set()
    for folder in folders:
        names = [name for name, *_ in await link.ask(frames.ListFolder(f"{folder}/steps", True))]
        parsed = (layout.parse_step_folder(f"{layout.STEPS}{name}/") for name in names)
        steps |= {step[0] for step in parsed if step is not None}
    if not steps:
        return "what was written to them"
    named = ", ".join(map(str, sorted(steps)[-_STEPS_NAMED:]))
    return f"step{'s' if len(steps) > 1 else ''} {'..., ' if len(steps) > _STEPS_NAMED else ''}{named}"


def _listed(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _count(servers: int) -> str:
    return f"{servers} server{'s' if servers != 1 else ''}"


def _addresses(link: Link) -> str:
    named = ", ".join(link.addresses[:_ADDRESSES_NAMED])
    return named + (" and more" if len(link.addresses) > _ADDRESSES_NAMED else "") or "those that run"
