"""A RAM tier's folder is ours alone: what it makes is closed to others, and what others made is not touched."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
from support.ram_folders import MIB, opened, run

from tieredckpt.blobs.ram.folder import SHARED_MEMORY_VARIABLE, shared_memory_root
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.errors import Conflict, TierUnavailable

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")


async def test_what_it_makes_is_closed_to_others(folder: Path) -> None:
    async with opened(folder) as store:
        await store.put("steps/1/btree", [b"index"])
        for path in (folder, *folder.rglob("*")):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


async def test_one_store_at_a_time_writes_and_the_other_is_told_who(folder: Path) -> None:
    async with opened(folder):
        with pytest.raises(Conflict, match=f"in use by process {os.getpid()} on "):
            RamStore.open(folder, MIB)
    async with opened(folder):
        pass


async def test_the_lock_of_a_killed_process_is_free(folder: Path) -> None:
    script = """
        import os, signal, sys, pathlib
        from tieredckpt.blobs.ram.store import RamStore
        RamStore.open(pathlib.Path(sys.argv[1]), 1 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(script, folder).returncode == -signal.SIGKILL
    async with opened(folder):
        pass


async def test_a_symbolic_link_is_not_followed(shared_memory: Path) -> None:
    (shared_memory / "elsewhere").mkdir()
    (shared_memory / "link").symlink_to("elsewhere")
    (shared_memory / "nowhere").symlink_to("missing")
    for name in ("link", "nowhere"):
        with pytest.raises(Conflict, match=f"{name} is not a folder of user {os.getuid()}; remove it"):
            RamStore.open(shared_memory / name, MIB)
    assert not list((shared_memory / "elsewhere").iterdir())


async def test_a_file_in_the_folders_place_is_refused(shared_memory: Path) -> None:
    (shared_memory / "file").write_text("")
    with pytest.raises(Conflict, match="file is not a folder of user"):
        RamStore.open(shared_memory / "file", MIB)


@as_root
async def test_somebody_elses_folder_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(Conflict, match="is not a folder of user 0"):
        RamStore.open(folder, MIB)
    assert not list(folder.iterdir())


@as_root
async def test_a_root_of_all_tiers_that_is_somebody_elses_is_refused(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shared_memory / "tieredckpt-0"
    root.mkdir()
    os.chown(root, 12345, 12345)
    monkeypatch.setenv(SHARED_MEMORY_VARIABLE, str(root))
    with pytest.raises(Conflict, match="tieredckpt-0 is not a folder of user 0"):
        RamStore.open(root / "name", MIB)


@as_root
async def test_nobody_but_root_reads_somebody_elses_folder(folder: Path) -> None:
    script = """
        import os, sys, pathlib
        from tieredckpt.blobs.ram.store import RamStore
        from tieredckpt.errors import Conflict
        os.setuid(12345)
        try:
            RamStore.attach(pathlib.Path(sys.argv[1]))
        except Conflict as error:
            print(error)
    """
    async with opened(folder):
        RamStore.attach(folder).slab.close()
        folder.parent.chmod(0o755)
        folder.chmod(0o777)
        for path in folder.rglob("*"):
            path.chmod(0o777)
        done = run(script, folder)
    assert "is not a folder of user 12345" in done.stdout, done.stderr


async def test_a_folder_that_was_open_to_others_is_closed(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    async with opened(folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_the_folder_above_is_left_as_it_is(shared_memory: Path) -> None:
    shared_memory.chmod(0o755)
    async with opened(shared_memory / "ram") as store:
        store.remove()
    assert stat.S_IMODE(shared_memory.stat().st_mode) == 0o755
    (shared_memory / "made").mkdir()
    async with opened(shared_memory / "made" / "ram") as store:
        store.remove()
    assert [path.name for path in shared_memory.iterdir()] == ["made"]


async def test_a_folder_that_cannot_be_made_is_an_unavailable_tier(shared_memory: Path) -> None:
    (shared_memory / "file").write_text("")
    with pytest.raises(TierUnavailable, match="file/ram cannot be opened: File exists; choose another path"):
        RamStore.open(shared_memory / "file" / "ram", MIB)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
def test_a_folder_is_not_made_again_for_ever_where_none_can_be() -> None:
    with pytest.raises(TierUnavailable, match="cannot be opened: No such file or directory; choose another path"):
        RamStore.open(Path("/proc/tieredckpt/ram"), MIB)


def test_the_environment_names_the_folder_of_ram_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_MEMORY_VARIABLE, str(tmp_path))
    assert shared_memory_root() == tmp_path
    monkeypatch.delenv(SHARED_MEMORY_VARIABLE)
    assert shared_memory_root().name == f"tieredckpt-{os.getuid()}"
