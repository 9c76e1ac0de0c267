"""Every change to the media under a store, in order, and what a crash after any of them may leave.

A *medium* is what a tier writes to: files, with names in folders. A change is seen at once; it is *settled*,
so that no crash undoes it, by a sync of its file (a write) or of its folder (a name). Until then a crash may
lose it, keep it and lose an earlier one, or keep a part of it. See fsync(2); and Pillai et al., "All File
Systems Are Not Created Equal" (OSDI 2014), for what file systems have been seen to do.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    "crashes",
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
    data: dict[int, bytes] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Folders that were never made as far as the medium knows, with all that is below them."""

    def copy(self) -> _Image:
        return _Image(self.names.copy(), self.data.copy(), self.missing.copy())

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
                self.data[file] = self.data[file].ljust(size, b"\0")[:size]
            case Put(path=path, file=file, data=data):
                self.names[path] = file
                self.data[file] = data

    def write(self, change: Written, cut: int) -> None:
        """Write the first ``cut`` bytes of a change, or as many zeros where it is negative."""
        held = self.data.setdefault(change.file, b"")
        if data := change.data[:cut] if cut >= 0 else bytes(-cut):
            end = change.offset + len(data)
            self.data[change.file] = held[: change.offset].ljust(change.offset, b"\0") + data + held[end:]

    def lose(self, change: Entry) -> None:
        if isinstance(change, FolderMade):
            self.missing.add(change.path)

    def files(self) -> dict[str, bytes]:
        return {
            path: self.data.get(file, b"")
            for path, file in self.names.items()
            if not any(path.startswith(f"{folder}/") for folder in self.missing)
        }


def files_after(entries: Sequence[Entry], tier: str) -> dict[str, bytes]:
    """The files of a tier after some entries."""
    image = _Image()
    for entry in entries:
        if entry.tier == tier:
            image.apply(entry)
    return image.files()


def crashes(entries: Sequence[Entry], media: Mapping[str, Medium], failure: Failure) -> Iterator[Crash]:
    """Every crash before, between and after these entries that is told apart here, in their order.

    The last write is torn at several lengths. Of the changes that are not settled where the failure takes them,
    all are lost, each one alone is lost, each one alone is kept, and each write is torn or leaves zeros.
    """
    tiers = {
        tier: _Tier(at_risk=failure == "node" or medium is Medium.SERVERS)
        for tier, medium in media.items()
        if not (failure == "node" and medium is Medium.SHARED_MEMORY)
    }
    for at in range(len(entries) + 1):
        if at and (changed := tiers.get(entries[at - 1].tier)) is not None:
            changed.add(at - 1, entries[at - 1])
        kept = {name: tier.files for name, tier in tiers.items()}
        yield Crash(at, failure, "nothing lost", kept)
        for name, tier in tiers.items():
            for what, files in tier.left(at - 1):
                yield Crash(at, failure, f"{name}: {what}", kept | {name: files})


class _Tier:
    """The medium of one tier, entry by entry, and as it would be without some of what is not settled.

    It is kept as it was before each change that a crash may still lose or tear, so that only what came after that
    is applied anew.
    """

    def __init__(self, *, at_risk: bool) -> None:
        self._at_risk = at_risk
        self._image = _Image()
        self.files: dict[str, bytes] = {}
        self._entries: dict[int, Entry] = {}
        """Those of this tier from the first that may be lost, by number."""
        self._before: dict[int, _Image] = {}
        """The medium before each that may be lost."""
        self._left: list[tuple[str, dict[str, bytes]]] | None = None
        """What may become of what is not settled, until the medium changes."""
        self._pending: list[int] = []
        self._writes: dict[int, list[int]] = {}
        self._names: dict[str, list[int]] = {}
        """Numbers of the changes that are not settled, by file and by folder."""

    def add(self, number: int, entry: Entry) -> None:
        """Apply an entry of this tier."""
        if self._at_risk:
            self._note(number, entry)
            self._pending = sorted(n for numbers in (*self._writes.values(), *self._names.values()) for n in numbers)
        self._entries[number], self._before[number] = entry, self._image
        self._image = self._image.copy()
        self._image.apply(entry)
        self.files, self._left = self._image.files(), None
        keep = {*self._pending, number}
        self._before = {n: image for n, image in self._before.items() if n in keep}
        self._entries = {n: each for n, each in self._entries.items() if n >= min(keep)}

    def _note(self, number: int, entry: Entry) -> None:
        """What is not settled from this entry on."""
        match entry:
            case Written(file=file):
                self._writes.setdefault(file, []).append(number)
            case Synced(file=file):
                self._writes.pop(file, None)
            case Made(path=path) | Moved(path=path) | Removed(path=path) | FolderMade(path=path):
                self._names.setdefault(path.rpartition("/")[0], []).append(number)
            case FolderRemoved(path=path):
                self._names.setdefault(path.rpartition("/")[0], []).append(number)
                self._names.pop(path, None)  # what was changed in it goes with it
            case FolderSynced(path=path):
                self._names.pop(path, None)

    def left(self, last: int) -> Iterator[tuple[str, dict[str, bytes]]]:
        """What may become of what is not settled, and of the entry ``last``, if it is of this tier, with the files."""
        if self._left is None:
            self._left = [(what, self._without(lost, torn)) for what, lost, torn in self._outcomes()]
        yield from self._left
        if last in self._entries and last not in self._pending:
            yield from ((what, self._without((), torn)) for what, torn in self._torn(last))

    def _outcomes(self) -> Iterator[tuple[str, AbstractSet[int], Mapping[int, int]]]:
        pending, everything = self._pending, frozenset(self._pending)
        if pending:
            yield "all unsettled changes lost", everything, _NOTHING
        if len(pending) > 1:
            for number in pending[-_PENDING_MAX:]:
                what = f"{type(self._entries[number]).__name__} of entry {number}"
                yield f"{what} lost alone", {number}, _NOTHING
                yield f"{what} kept alone", everything - {number}, _NOTHING
        for number in pending:
            for what, torn in self._torn(number):
                yield what, frozenset(), torn

    def _torn(self, number: int) -> Iterator[tuple[str, Mapping[int, int]]]:
        """What a crash makes of one write."""
        entry = self._entries[number]
        if isinstance(entry, Written):
            for cut in _cuts(len(entry.data)):
                yield f"entry {number} torn after {cut} bytes", {number: cut}
            if number in self._pending:
                yield f"entry {number} is zeros", {number: -len(entry.data)}

    def _without(self, lost: Collection[int], torn: Mapping[int, int]) -> dict[str, bytes]:
        """The files as a crash leaves them.

        Args:
            lost: which entries, by number, never reached the medium.
            torn: how many bytes of a write did; a negative number counts zeros that came in their place.
        """
        first = min((*lost, *torn))
        image = self._before[first].copy()
        for number, entry in self._entries.items():
            if number < first:
                continue
            if number in lost:
                image.lose(entry)
            elif number in torn and isinstance(entry, Written):
                image.write(entry, torn[number])
            else:
                image.apply(entry)
        return image.files()


def _cuts(nbytes: int) -> list[int]:
    half = nbytes // 2
    return sorted({0, 1, half, half // 4096 * 4096, nbytes - 1} & set(range(nbytes)))
