"""Under the name of an export there is all of it or nothing, whatever its threads do that were left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.limits import limit

from tieredckpt import Closed, Conflict, Invalid, NoSpace, NotFound, TierUnavailable
from tieredckpt.blobs.posix.stream import Blocks
from tieredckpt.blobs.posix.transfer import Stopped
from tieredckpt.config import ExportConfig
from tieredckpt.engine.exporting import exporter, folder
from tieredckpt.engine.exporting.folder import Folder
from tieredckpt.engine.exporting.places import RECORD, Record, encode

FILES = ("one", "two", "three")
SOON = 60.0


def record(serial: int = 1) -> Record:
    return Record(export="hf", format="npy", store="0" * 32, step=1, serial=serial, saved_at=0.0, nbytes=3, metrics={})


async def export(place: Folder, serial: int, before: Record | None = None) -> None:
    async with place.writing(record(serial), before, ()) as writing:
        assert writing.path is not None
        writing.path.mkdir()
        for name in FILES:
            (writing.path / name).write_text(str(serial))
        await writing.commit(record(serial))


def check(path: Path, serial: int) -> None:
    assert sorted(os.listdir(path / "step-1")) == sorted([*FILES, RECORD])
    assert {(path / "step-1" / name).read_text() for name in FILES} == {str(serial)}


class Held:
    """A function that waits before its first call."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not self.begun.is_set():
            self.begun.set()
            assert self.go_on.wait(SOON)
        return self._function(*arguments, **named)


@pytest.mark.parametrize("streamed", [False, True])
async def test_all_of_an_export_is_on_the_device_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def flushed(fd: int) -> None:
        fsync(fd)
        calls.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def renamed(path: Path, to: Path) -> None:
        rename(path, to)
        calls.append(f"renamed to {to.name}")

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    place = Folder(tmp_path, lambda: "of-test")
    async with place.writing(record(), None, Blocks()) as writing:
        for name in FILES:
            if streamed:
                with writing.files.open(name) as file:
                    file.write(b"1")
            else:
                assert writing.path is not None
                writing.path.mkdir(exist_ok=True)
                (writing.path / name).write_text("1")
        await writing.commit(record())
    check(tmp_path, 1)
    named = calls.index("renamed to step-1")
    assert {*calls[:named]} == {*FILES, RECORD, "step-1"}
    assert calls[named + 1 :] == [tmp_path.name]
    await place.delete(record())
    assert calls[-2:] == ["renamed to gone", tmp_path.name]


async def test_what_a_format_leaves_to_be_flushed_has_time_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = folder.flush_tree

    def slowly(*arguments: Any, **named: Any) -> None:
        time.sleep(1.0)
        monkeypatch.setattr(folder, "_ANSWERS_WITHIN", SOON)  # what comes behind has its usual time
        flush(*arguments, **named)

    monkeypatch.setattr(folder, "flush_tree", slowly)
    monkeypatch.setattr(folder, "_ANSWERS_WITHIN", 0.1)
    limit(monkeypatch, export_flush_rate=record().nbytes / SOON)
    await export(Folder(tmp_path, lambda: "of-test"), 1)
    check(tmp_path, 1)


async def test_a_copy_of_an_export_under_the_name_of_another_step_is_no_export(tmp_path: Path) -> None:
    place = Folder(tmp_path, lambda: "of-test")
    await export(place, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-2")
    assert [*await place.exported()] == [1]


async def test_an_export_of_another_store_is_neither_replaced_nor_deleted(tmp_path: Path) -> None:
    """Somebody has put it in the place of one of this store, since that looked."""
    place, other = Folder(tmp_path, lambda: "of-test"), msgspec.structs.replace(record(), store="1" * 32)
    await export(place, 1)
    (tmp_path / "step-1" / RECORD).write_bytes(encode(other))
    await place.delete(record())
    with pytest.raises(Conflict, match="no export of this store"):
        await export(place, 2, before=record())
    assert await place.exported() == {1: other}
    check(tmp_path, 1)


async def test_what_appears_under_the_name_of_an_export_at_its_rename_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "mine").write_text("mine")
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    with pytest.raises(Conflict, match="no export of this store"):
        await export(Folder(tmp_path, lambda: "of-test"), 1)
    assert os.listdir(tmp_path / "step-1") == ["mine"]


async def test_an_export_that_somebody_moves_away_at_its_deletion_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_is_of", lambda *_: True)  # as it was a moment ago
    await Folder(tmp_path, lambda: "of-test").delete(record())
    assert os.listdir(tmp_path) == []


async def test_what_is_no_export_does_not_keep_the_exports_from_being_found(tmp_path: Path) -> None:
    place = Folder(tmp_path, lambda: "of-test")
    await export(place, 1)
    (tmp_path / "step-2").write_text("a file")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / RECORD).write_text("{}")
    assert [*await place.exported()] == [1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Stopped(), Closed),
        (MemoryError(), NoSpace),
        (OSError(errno.ENOSPC, "full"), NoSpace),
        (OSError(errno.EDQUOT, "quota"), NoSpace),
        (OSError(errno.EEXIST, "there"), Conflict),
        (OSError(errno.EIO, "broken"), TierUnavailable),
        (ValueError("no"), Invalid),
        (NotFound("gone"), NotFound),
    ],
    ids=repr,
)
def test_errors_of_a_format_become_those_of_the_library(error: Exception, kind: type[Exception]) -> None:
    assert type(folder.mapped(error, "/out")) is kind


async def test_an_export_that_is_given_up_before_its_rename_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a thread that was left behind puts it in the way of the next try."""
    flushing = Held(folder.flush_tree)
    monkeypatch.setattr(folder, "flush_tree", flushing)
    place, given_up = Folder(tmp_path, lambda: "of-test"), asyncio.Event()
    run = place.run

    async def tells(what: str, *arguments: Any, **named: Any) -> Any:
        if what == "the end of an export":  # which comes after it was given up
            given_up.set()
        return await run(what, *arguments, **named)

    monkeypatch.setattr(place, "run", tells)
    exporting = asyncio.create_task(export(place, 1))
    assert await asyncio.to_thread(flushing.begun.wait, SOON)
    exporting.cancel()
    await asyncio.wait_for(given_up.wait(), SOON)
    flushing.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await exporting
    assert os.listdir(tmp_path) == []


async def test_an_export_that_is_given_up_at_its_rename_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it is not deleted while it is renamed."""
    deleting, renamed = threading.Event(), threading.Event()
    rename, rmtree = Held(Path.rename), shutil.rmtree

    def slowly(path: Any, *rest: Any) -> None:
        for file in sorted(Path(path).rglob(FILES[0])):
            file.unlink()
        deleting.set()
        assert renamed.wait(SOON)
        rmtree(path, *rest)

    def renaming(self: Path, target: Path) -> Any:
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renaming)
    monkeypatch.setattr(folder.shutil, "rmtree", slowly)
    exporting = asyncio.create_task(export(Folder(tmp_path, lambda: "x"), 1))
    assert await asyncio.to_thread(rename.begun.wait, SOON)
    exporting.cancel()
    await asyncio.to_thread(deleting.wait, 0.3)  # in which it would have begun to delete
    rename.go_on.set()
    while not (tmp_path / "step-1").exists():
        await asyncio.sleep(0.01)
    renamed.set()
    with pytest.raises(asyncio.CancelledError):
        await exporting
    check(tmp_path, 1)
    assert os.listdir(tmp_path) == ["step-1"]


async def test_an_export_whose_successor_cannot_be_renamed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Folder(tmp_path, lambda: "x")
    await export(place, 1)
    rename = Path.rename

    def refusing(self: Path, target: Path) -> Any:
        if (self / FILES[0]).read_text() == "2":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refusing)
        with pytest.raises(TierUnavailable, match="Input/output error"):
            await export(place, 2, record(1))
    check(tmp_path, 1)
    assert os.listdir(tmp_path) == ["step-1"]
    await export(place, 2, record(1))
    check(tmp_path, 2)


async def test_a_look_that_was_left_behind_deletes_nothing_of_what_began_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had waited for another thread, which hung in the device."""
    place, looked = Folder(tmp_path, lambda: "x"), list[Folder]()
    hanging = Held(os.path.lexists)
    monkeypatch.setattr(folder.os.path, "lexists", hanging)

    def look(self: Folder) -> dict[int, Record]:
        looked.append(self)
        return {}

    monkeypatch.setattr(Folder, "_exported", look)
    beginning = asyncio.create_task(export(place, 1, None))
    assert await asyncio.to_thread(hanging.begun.wait, SOON)
    looking = asyncio.create_task(place.exported())
    await asyncio.sleep(0)  # it has begun
    await asyncio.sleep(0)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    hanging.go_on.set()
    await export(place, 2)
    check(tmp_path, 2)
    for thread in threading.enumerate():
        if "a list of exports" in thread.name:
            thread.join(SOON)
    assert not looked


async def test_what_a_store_leaves_unfinished_bears_its_identity_also_if_that_was_unknown_at_first(
    tmp_path: Path,
) -> None:
    """Else nobody would clean it up, or another store in this folder that begins in the same way would delete it."""
    identity = SimpleNamespace(marker=None)
    settings = ExportConfig(name="hf", format="safetensors", to=str(tmp_path))
    place = exporter._place_of(cast(Any, SimpleNamespace(identity=identity)), settings)
    identity.marker = SimpleNamespace(store="1" * 32)
    async with place.writing(record(), None, ()):
        (unfinished,) = os.listdir(tmp_path)
    assert unfinished.startswith(".tieredckpt-11111111-hf-")
    for name in (unfinished, ".tieredckpt-22222222-hf-0", ".tieredckpt--hf-0"):
        (tmp_path / name).mkdir()
    assert await place.exported() == {}
    assert sorted(os.listdir(tmp_path)) == [".tieredckpt--hf-0", ".tieredckpt-22222222-hf-0"]
