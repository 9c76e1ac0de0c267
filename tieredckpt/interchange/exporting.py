"""Writes a step in another library's format: beside its place, verified, and then renamed, all or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tieredckpt.blobs.posix.files import is_full, sync_folder
from tieredckpt.engine.exporting.folder import FolderFiles, flush_tree
from tieredckpt.engine.inventory import Scalar, StepInfo
from tieredckpt.errors import Conflict, Corrupt, Invalid, NoSpace, NotFound
from tieredckpt.interchange.base import Digests, Format
from tieredckpt.interchange.formats import find, find_url
from tieredckpt.interchange.linked_packs import NO_LINK
from tieredckpt.interchange.stored_step import StepCopy, StoredStep, from_copies
from tieredckpt.interchange.to_objects import write_to_objects
from tieredckpt.sync import SyncStore

__all__ = ["Exported", "export_copy", "export_step"]


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export."""

    info: StepInfo
    path: Path | str
    """The file or folder, or the URL."""
    part: str | None
    """The exported part; None for the whole step."""
    names: tuple[str, ...]
    """Names of the arrays, and of other values where the format has them, in the file or folder."""
    sources: Mapping[str, int]
    """Bytes that came from each tier."""
    scalars: Mapping[str, Scalar]
    """The step's leaves that are not arrays, by key."""
    left_out: tuple[str, ...]
    """The keys of those leaves, if the format cannot hold them."""
    lossy: bool
    """Whether it is a lossy copy of the step, whose values are not all as they were saved."""


def export_step(
    store: SyncStore,
    target: str,
    step: int | None = None,
    *,
    part: str | None = None,
    keys: Sequence[str] | None = None,
    lossy: bool = False,
    progress: Callable[[int], None] = lambda nbytes: None,
    **options: Any,
) -> Exported:
    """Write a step of ``store`` to ``SCHEME:PATH``, where nothing exists yet, or only an empty folder.

    It is written beside that place, flushed to the device, read back, compared, and then renamed. Formats that are
    streamed go to ``SCHEME:URL`` too, where the last file commits the others; they are read back after that.

    Args:
        store: open; read-only will do.
        target: such as ``safetensors:out/model``; `tieredckpt.config.formats.formats` tells the schemes.
        step: its number; None for the newest.
        part: the path of a container of the step that is exported, such as ``model``. Without it and ``keys``,
            safetensors takes ``model`` or ``state_dict`` if the step has one of them; other formats take all.
        keys: only the leaves under these keys or patterns, under their whole names.
        lossy: if the exact step cannot be read, write all of it from a lossy copy; see `Exported.lossy`.
        progress: called with the bytes of each array that was read.
        options: of the format. safetensors: ``cast`` (``"bf16"`` or ``"fp16"``), ``shard_size`` in bytes, and
            ``rename``, a dict from patterns of keys to names (``{"params/**": "model.**"}``).

    Raises:
        Conflict: the target exists.
        Invalid: the format cannot hold a leaf of the step, or has no such option; or the place cannot be written.
        NoSpace: the device, or a quota on it, is full.
        Corrupt: the written bytes did not come back, or the step is damaged.
        NotFound, TierUnavailable: as `SyncStore.describe`.
    """
    given = partial(export_copy, target=target, part=part, keys=keys, progress=progress, **options)
    return from_copies(store, step, given, lossy=lossy)


def export_copy(
    copy: StepCopy,
    /,  # an option of a format has that name
    target: str,
    *,
    part: str | None = None,
    keys: Sequence[str] | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
    **options: Any,
) -> Exported:
    """As `export_step`, for this copy of a step."""
    remote = find_url(target)
    scheme, format_, to = remote or find(target, "write")
    for option in options.keys() - format_.options:
        raise Invalid(f"{scheme} has no option {option}")
    if part is not None and keys is not None:
        raise Invalid("part and keys: give one of them")
    if isinstance(to, str):
        chosen = _chosen(copy, part, keys, format_.parts, progress)
        assert format_.stream is not None
        written = write_to_objects(copy.store, to, partial(format_.stream, chosen, **options))
        return _exported(chosen, format_, to, written)
    with _new(to) as unfinished:
        chosen = _chosen(copy, part, keys, format_.parts, progress)
        if format_.stream is not None:
            single = bool(format_.suffix) and (to.suffix.lower() == format_.suffix or format_.one_file)
            written = format_.stream(chosen, FolderFiles(unfinished, single=single), **options)
        else:
            assert format_.write is not None
            written = format_.write(chosen, unfinished, **options)
        flush_tree(unfinished, forget=True)
        _compare(format_, unfinished, written, to)
    return _exported(chosen, format_, to, written)


def _exported(chosen: StoredStep, format_: Format, to: Path | str, written: Digests) -> Exported:
    left_out = () if format_.values else tuple(chosen.scalars)
    sources, lossy = dict(chosen.sources), chosen.copy.lossy is not None
    return Exported(chosen.info, to, chosen.part, tuple(written), sources, chosen.scalars, left_out, lossy)


def _chosen(
    copy: StepCopy,
    part: str | None,
    keys: Sequence[str] | None,
    parts: Sequence[str],
    progress: Callable[[int], None],
) -> StoredStep:
    if part is None and keys is None:
        for usual in parts:
            try:
                return StoredStep(copy, part=usual, progress=progress)
            except NotFound:
                continue
    return StoredStep(copy, part=part, keys=keys, progress=progress)


@contextmanager
def _new(to: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``to`` on success."""
    try:
        if os.path.lexists(to) and not (to.is_dir() and not to.is_symlink() and not any(to.iterdir())):
            raise _exists(to)
        with _beside(to) as beside:
            unfinished = beside / to.name
            yield unfinished
            try:
                if unfinished.is_dir():
                    unfinished.rename(to)
                else:
                    _link_or_rename(unfinished, to)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise _exists(to) from error
                raise
            sync_folder(to.parent)
    except OSError as error:
        raise (NoSpace if is_full(error) else Invalid)(f"{to} cannot be written: {error.strerror or error}") from error


@contextmanager
def _beside(to: Path) -> Iterator[Path]:
    """A new folder beside ``to``, which is removed at the end, as are folders above that were made and stayed empty."""
    missing = [folder for folder in to.parents if not os.path.lexists(folder)]
    try:
        try:
            beside = _made_in(to.parent)
        except FileNotFoundError:  # another export that has made the folder, too, has failed, and removed it
            beside = _made_in(to.parent)
        try:
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _made_in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".tieredckpt-", dir=folder))


def _link_or_rename(unfinished: Path, to: Path) -> None:
    try:
        os.link(unfinished, to)  # unlike a rename, it refuses to replace a file that came meanwhile
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        if os.path.lexists(to):
            raise _exists(to) from error
        unfinished.rename(to)


def _exists(to: Path) -> Conflict:
    return Conflict(f"{to} exists already; choose another name, nothing is replaced")


def _compare(format_: Format, path: Path, written: Digests, to: Path) -> None:
    assert format_.read_back is not None
    found = dict(format_.read_back(path))
    wrong = sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name))
    if wrong:
        raise Corrupt(
            f"{to}: {', '.join(map(repr, wrong[:5]))} did not come back as written, nothing was exported; look at the "
            f"device, and try again"
        )
