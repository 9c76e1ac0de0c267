"""Every change to the media under a store, in order, and what a crash after any of them may leave.

A *medium* is what a tier writes to: files, with names in folders. A change is seen at once; it is *settled*,
so that no crash undoes it, by a sync of its file (a write) or of its folder (a name). Until then a crash may
lose it, keep it and lose an earlier one, or keep a part of it. See fsync(2); and Pillai et al., "All File
Systems Are Not Created Equal" (OSDI 2014), for what file systems have been seen to do.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

__all__ = [
    "Acknowledged",
    "Crash",
    "Damaged",
    "Entry",
    "Failure",
    "FolderMade",
    "FolderRemoved",
    "FolderSynced",
    "Journal",
    "Made",
    "Medium",
    "Moved",
    "Put",
    "Removed",
    "Synced",
    "Written",
    "crashes_after",
    "files_after",
]

Failure = Literal["process", "node"]
"""What dies: the process that writes, or its node with all its memory."""

_PENDING_MAX = 12
"""Of more unsettled changes than these, the last are lost or kept one by one, the others together."""


class Medium(enum.Enum):
    """What holds the files of a tier, hence what a crash does to them."""

    SHARED_MEMORY = "shared memory"
    """Keeps everything until the node dies, and then nothing."""
    FILES = "files"
    """Keeps everything until the node dies, and then what is settled."""
    SERVERS = "servers"
    """On other nodes: keeps what is settled; what is under way may arrive or not."""


@dataclass(frozen=True, slots=True)
class Made:
    """A new empty file, or one more name of a file."""

    tier: str
    path: str
    file: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A file has a new name in place of an old one, in one go."""

    tier: str
    old: str
    path: str
    file: int


@dataclass(frozen=True, slots=True)
class Removed:
    """A file has lost a name."""

    tier: str
    path: str
    file: int


@dataclass(frozen=True, slots=True)
class FolderMade:
    tier: str
    path: str


@dataclass(frozen=True, slots=True)
class FolderRemoved:
    tier: str
    path: str


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes of a file, which has ``size`` bytes from then on."""

    tier: str
    file: int
    offset: int
    data: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Synced:
    """Every write to a file so far is settled."""

    tier: str
    file: int


@dataclass(frozen=True, slots=True)
class FolderSynced:
    """Every change of a name in a folder so far is settled."""

    tier: str
    path: str


@dataclass(frozen=True, slots=True)
class Put:
    """A whole file with its name at once, settled, as an object store does it."""

    tier: str
    path: str
    file: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The store said that a tier holds a step; nothing that the tier survives may take it away."""

    tier: str
    serial: int


@dataclass(frozen=True, slots=True)
class Damaged:
    """What a tier holds of a step was damaged on purpose: until it is acknowledged again it may be lost."""

    tier: str
    serial: int


Change = Made | Moved | Removed | FolderMade | FolderRemoved | Written | Synced | FolderSynced | Put
Entry = Change | Acknowledged | Damaged


class Journal:
    """The entries so far; may be added to from any thread."""

    def __init__(self) -> None:
        self.guards_order = threading.RLock()
        """Held from a change to its entry, so that entries come in the order of the changes."""
        self._entries: list[Entry] = []
        self._files = 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        with self.guards_order:
            return tuple(self._entries)

    def add(self, entry: Entry) -> None:
        with self.guards_order:
            self._entries.append(entry)

    def new_file(self) -> int:
        """A number for a file that no entry has named yet."""
        with self.guards_order:
            self._files += 1
            return self._files


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash after ``entries[:at]``, and the files that it left on each tier, by name."""

    at: int
    failure: Failure
    what: str
    """What became of the changes that were not settled."""
    files: Mapping[str, Mapping[str, bytes]]


_NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True)
class _Image:
    """One medium, as changes are applied to it or lost."""

    names: dict[str, int] = field(default_factory=dict)
    data: dict[int, bytearray] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Folders that were never made as far as the medium knows, with all that is below them."""

    def apply(self, change: Entry) -> None:
        match change:
            case Made(path=path, file=file):
                self.names[path] = file
            case Moved(old=old, path=path, file=file):
                if self.names.get(old) == file:
                    del self.names[old]
                self.names[path] = file
            case Removed(path=path, file=file):
                if self.names.get(path) == file:
                    del self.names[path]
            case FolderMade(path=path) | FolderRemoved(path=path):
                self.missing.discard(path)
            case Written(file=file, size=size):
                self.write(change, len(change.data))
                held = self.data[file]
                held.extend(bytes(max(0, size - len(held))))
                del held[size:]
            case Put(path=path, file=file, data=data):
                self.names[path] = file
                self.data[file] = bytearray(data)

    def write(self, change: Written, cut: int) -> None:
        """Write the first ``cut`` bytes of a change, or as many zeros where it is negative."""
        held = self.data.setdefault(change.file, bytearray())
        data = change.data[:cut] if cut >= 0 else bytes(-cut)
        held.extend(bytes(max(0, change.offset - len(held)) if data else 0))
        held[change.offset : change.offset + len(data)] = data

    def lose(self, change: Entry) -> None:
        if isinstance(change, FolderMade):
            self.missing.add(change.path)

    def files(self) -> dict[str, bytes]:
        return {
            path: bytes(self.data.get(file, b""))
            for path, file in self.names.items()
            if not any(path.startswith(f"{folder}/") for folder in self.missing)
        }


def files_after(
    entries: Sequence[Entry],
    tier: str,
    *,
    lost: AbstractSet[int] = frozenset(),
    torn: Mapping[int, int] = _NOTHING,
) -> dict[str, bytes]:
    """The files of a tier after some entries.

    Args:
        entries: all changes so far.
        tier: its name.
        lost: which of them, by number, never reached the medium.
        torn: how many bytes of a write did; a negative number counts zeros that came in their place.
    """
    image = _Image()
    for number, entry in enumerate(entries):
        if entry.tier != tier:
            continue
        if number in lost:
            image.lose(entry)
        elif number in torn and isinstance(entry, Written):
            image.write(entry, torn[number])
        else:
            image.apply(entry)
    return image.files()


def crashes_after(entries: Sequence[Entry], media: Mapping[str, Medium], failure: Failure) -> Iterator[Crash]:
    """Every crash after these entries that is told apart here.

    The last write is torn at several lengths. Of the changes that are not settled where the failure takes them,
    all are lost, each one alone is lost, each one alone is kept, and each write is torn or leaves zeros.
    """
    kept = {
        tier: files_after(entries, tier)
        for tier, medium in media.items()
        if not (failure == "node" and medium is Medium.SHARED_MEMORY)
    }
    yield Crash(len(entries), failure, "nothing lost", kept)
    for tier in kept:
        at_risk = failure == "node" or media[tier] is Medium.SERVERS
        pending = _pending(entries, tier) if at_risk else []
        for what, lost, torn in _outcomes(entries, tier, pending):
            files = files_after(entries, tier, lost=lost, torn=torn)
            yield Crash(len(entries), failure, f"{tier}: {what}", kept | {tier: files})


def _outcomes(
    entries: Sequence[Entry], tier: str, pending: Sequence[int]
) -> Iterator[tuple[str, frozenset[int], Mapping[int, int]]]:
    everything = frozenset(pending)
    if pending:
        yield "all unsettled changes lost", everything, _NOTHING
    if len(pending) > 1:
        for number in pending[-_PENDING_MAX:]:
            what = f"{type(entries[number]).__name__} of entry {number}"
            yield f"{what} lost alone", frozenset({number}), _NOTHING
            yield f"{what} kept alone", everything - {number}, _NOTHING
    last = len(entries) - 1
    ends = {last} if entries and entries[last].tier == tier else set()
    for number in sorted(ends | everything):
        entry = entries[number]
        if isinstance(entry, Written):
            for cut in _cuts(len(entry.data)):
                yield f"entry {number} torn after {cut} bytes", frozenset(), {number: cut}
            if number in everything:
                yield f"entry {number} is zeros", frozenset(), {number: -len(entry.data)}


def _cuts(nbytes: int) -> list[int]:
    half = nbytes // 2
    return sorted({0, 1, half, half // 4096 * 4096, nbytes - 1} & set(range(nbytes)))


def _pending(entries: Sequence[Entry], tier: str) -> list[int]:
    """The numbers of the changes that are not settled."""
    writes: dict[int, list[int]] = {}
    names: dict[str, list[int]] = {}
    for number, entry in enumerate(entries):
        if entry.tier != tier:
            continue
        match entry:
            case Written(file=file):
                writes.setdefault(file, []).append(number)
            case Synced(file=file):
                writes.pop(file, None)
            case Made(path=path) | Moved(path=path) | Removed(path=path) | FolderMade(path=path):
                names.setdefault(path.rpartition("/")[0], []).append(number)
            case FolderRemoved(path=path):
                names.setdefault(path.rpartition("/")[0], []).append(number)
                names.pop(path, None)  # what was changed in it goes with it
            case FolderSynced(path=path):
                names.pop(path, None)
    return sorted(number for numbers in (*writes.values(), *names.values()) for number in numbers)
