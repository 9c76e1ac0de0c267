"""Who may use what a folder tier makes: its user alone, or a group, whatever the umask is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.file_systems import FILE_SYSTEMS, kind_on, system_of

from tieredckpt import PosixTier, RamTier
from tieredckpt.blobs.posix.kind import POSIX
from tieredckpt.errors import Invalid, TierUnavailable

GROUP = 54321
KINDS = [kind_on(name, system_of(found)) for name, found in FILE_SYSTEMS.items()]


def modes(root: Path) -> dict[str, int]:
    paths = [root, *root.rglob("*")]
    return {path.relative_to(root).as_posix(): path.stat().st_mode & 0o7777 for path in paths}


@pytest.fixture(params=[0o022, 0o077], ids=["022", "077"])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("kind", KINDS, ids=FILE_SYSTEMS)
@pytest.mark.parametrize(("access", "folder", "file"), [("private", 0o700, 0o600), ("group", 0o2770, 0o660)])
async def test_permissions_are_what_is_configured(
    tmp_path: Path, kind: type, access: str, folder: int, file: int
) -> None:
    root = tmp_path / "root"
    store = await kind.open(kind.config(name="disk", path=root, access=access))
    await store.put("packs/ab/small", [b"x"])
    await store.put("packs/ab/large", [bytes(2 << 20)])
    await store.close()
    expected = {".": folder, "packs": folder, "packs/ab": folder, "packs/ab/small": file, "packs/ab/large": file}
    assert modes(root) == expected


async def test_a_folder_that_its_group_may_not_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    tier = PosixTier(name="disk", path=tmp_path, access="group")
    with pytest.raises(Invalid, match="chmod 2770"):
        await POSIX.open(tier)
    await (await POSIX.open(tier, read_only=True)).close()  # who only reads may


async def test_a_private_store_whose_root_alone_was_given_to_the_group_is_refused(tmp_path: Path) -> None:
    private = await POSIX.open(PosixTier(name="disk", path=tmp_path))
    await private.put("packs/ab/1", [b"x"])
    await private.close()
    tmp_path.chmod(0o2770)
    with pytest.raises(Invalid, match=r"packs may not .*chmod -R g"):
        await POSIX.open(PosixTier(name="disk", path=tmp_path, access="group"))


async def test_a_root_that_vanishes_while_it_is_opened_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o2770)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("tieredckpt.blobs.posix.store.probe", lambda *_, **__: monkeypatch.setattr(Path, "stat", fail))
    with pytest.raises(TierUnavailable, match="cannot be used"):
        await POSIX.open(PosixTier(name="disk", path=tmp_path, access="group"))


@pytest.mark.parametrize("kind", KINDS, ids=FILE_SYSTEMS)
async def test_a_folder_whose_making_broke_off_gets_its_permissions(tmp_path: Path, kind: type) -> None:
    """Its maker died between two calls, or the client repeated the first and said that the folder exists."""
    tmp_path.chmod(0o2770)
    store = await kind.open(kind.config(name="disk", path=tmp_path, access="group"))
    (tmp_path / "packs").mkdir(mode=0o700)
    await store.put("packs/ab/1", [b"x"])
    await store.close()
    assert modes(tmp_path)["packs"] == 0o2770


async def test_a_file_whose_permissions_cannot_be_set_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o2770)
    store = await POSIX.open(PosixTier(name="disk", path=tmp_path, access="group"))

    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", fail)
    with pytest.raises(TierUnavailable):
        await store.put("key", [b"x"])
    await store.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_private() -> None:
    with pytest.raises(Invalid, match="access"):
        RamTier(name="ram", access="group")  # type: ignore[call-arg]  # which it has not


@pytest.fixture
def folder_of_group() -> Iterator[Path]:
    """A folder that users other than the one who runs the tests can reach."""
    if os.geteuid():
        pytest.skip("only root can be two users")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2770)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("access", "evaluator"), [("group", "has [2, 3]"), ("private", "TierUnavailable")], ids=["group", "private"]
)
@pytest.mark.parametrize("inner", ["", "made/by/the/store"], ids=["there", "made"])
def test_another_user_of_the_group_reads_writes_and_deletes(
    folder_of_group: Path, access: str, evaluator: str, inner: str
) -> None:
    program = Path(__file__).with_name("users_program.py")
    run = [sys.executable, str(program), str(folder_of_group / inner), access, str(GROUP)]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300)
    assert [json.loads(line) for line in done.stdout.splitlines()] == ["saved", evaluator], done.stderr
