"""Whose RAM and whose folder it is, on the command line: what is there is listed, freed, adopted or forked."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import run, told
from support.scenes import ram_in

from tieredckpt import CheckpointStore, StoreConfig
from tieredckpt.blobs.ram.find import find_ram
from tieredckpt.blobs.ram.folder import SHARED_MEMORY_VARIABLE
from tieredckpt.config import to_toml
from tieredckpt.engine.opening.change_identity import fork
from tieredckpt.engine.tier import marker_file
from tieredckpt.errors import Conflict


@pytest.fixture(autouse=True)
def root(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where RAM of this test is."""
    monkeypatch.setenv(SHARED_MEMORY_VARIABLE, str(shared_memory / "user"))
    return shared_memory / "user"


def settings(disk: Path, **ram: Any) -> StoreConfig:
    tiers = {
        "ram": {"kind": "ram", "capacity": "1 MiB", **ram},
        "disk": {"kind": "posix", "path": disk, "fsync": False, "promote": "never"},
    }
    return StoreConfig(tiers=tiers, chunk_size=8192)


def killed(disk: Path, *steps: int, **ram: Any) -> str:
    """A run that ends with an error, its steps in RAM and the first of them on disk; the store's UUID."""
    store = CheckpointStore.open(settings(disk, **ram)).sync()
    store.__enter__()
    for step in steps:
        store.save(step, {"w": np.full(100, step)})
    store.promote(steps[0], "disk")
    marker = store._life.engine.state.identity.marker
    store._life.close_blocking(clean=False)
    assert marker is not None
    return marker.store


def newest(disk: Path) -> int | None:
    with CheckpointStore.open(settings(disk), read_only=True).sync() as store:
        restored = store.restore()
    return None if restored is None else restored.step


def test_all_ram_is_listed_with_whose_it_is(tmp_path: Path, root: Path) -> None:
    one, two = killed(tmp_path / "one", 1), killed(tmp_path / "two", 1, 2, 3)
    shutil.rmtree(tmp_path / "one")
    found = {each["store"]: each for each in told("ls", "--ram")}
    assert found.keys() == {one, two}
    assert found[one]["places"] == {str(tmp_path / "one"): "gone"}
    assert found[two]["places"] == {str(tmp_path / "two"): "there"}
    assert [step["step"] for step in found[two]["steps"]] == [1, 2, 3]
    assert found[two]["memory"] >= 8192
    assert not found[two]["used_by"]
    with CheckpointStore.open(settings(tmp_path / "two")).sync():
        used = {each["store"]: each["used_by"] for each in told("ls", "--ram")}
        assert used[two].startswith("process ")
    shown = run("ls", "--ram").output
    assert one in shown
    assert f"{tmp_path / 'one'} (gone)" in shown
    assert one in run("doctor", tmp_path / "two").output


def test_the_ram_of_a_store_that_is_named_is_listed_alone(tmp_path: Path, shared_memory: Path) -> None:
    one, two = killed(tmp_path / "one", 1), killed(tmp_path / "two", 1, path=shared_memory / "elsewhere")
    settings_file = tmp_path / "two.toml"
    settings_file.write_text(to_toml(settings(tmp_path / "two", path=shared_memory / "elsewhere")))
    assert [each["store"] for each in told("ls", tmp_path / "one", "--ram")] == [one]
    assert [each["store"] for each in told("ls", settings_file, "--ram")] == [two]
    assert told("ls", tmp_path / "three", "--ram") == []
    assert "no RAM of this store" in run("ls", tmp_path / "three", "--ram").output


def test_no_store_and_no_option_is_wrong_usage() -> None:
    assert run("ls").exit_code == 2
    assert run("forget").exit_code == 2


def test_an_empty_name_is_not_the_folder_that_we_are_in(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path / "disk", 1)
    monkeypatch.chdir(tmp_path / "disk")
    assert run("forget", "").exit_code == 2
    assert find_ram(root)


def test_what_no_ram_notes_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert f"no RAM on this machine notes {tmp_path / 'file'};" in run("adopt", tmp_path / "file").output


def test_what_has_lost_its_folder_is_forgotten_and_nothing_else(tmp_path: Path, root: Path) -> None:
    one, two = killed(tmp_path / "one", 1), killed(tmp_path / "two", 1)
    shutil.rmtree(tmp_path / "one")
    assert [each["store"] for each in told("forget", "--gone")] == [one]
    assert [each.store for each in find_ram(root)] == [two]
    assert newest(tmp_path / "two") == 1
    assert told("forget", tmp_path / "two")[0]["steps"] == 1
    assert not root.exists()


def test_a_folder_that_was_never_reached_is_not_gone(tmp_path: Path, root: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = CheckpointStore.open(settings(tmp_path / "file" / "disk")).sync()
    store.__enter__()
    store.save(1, {"w": np.ones(3)})
    store._life.close_blocking(clean=False)
    assert told("forget", "--gone") == []
    (found,) = told("ls", "--ram")
    assert found["places"] == {str(tmp_path / "file" / "disk"): "never seen"}


def test_forgetting_what_a_version_before_left_leaves_the_stores_beside_it(tmp_path: Path, root: Path) -> None:
    one = killed(tmp_path / "one", 1)
    for path in list((root / one).iterdir()):
        path.rename(root / path.name)
    (root / one).rmdir()
    (root / "owner.json").unlink()
    two = killed(tmp_path / "two", 2)
    told("forget", one)
    assert [each.store for each in find_ram(root)] == [two]
    assert newest(tmp_path / "two") == 2


def test_an_agent_brings_back_nothing_that_a_person_removed(tmp_path: Path) -> None:
    disk, settings_file = tmp_path / "disk", tmp_path / "ckpt.toml"
    killed(disk, 1, 2)
    shutil.rmtree(disk)
    settings_file.write_text(to_toml(settings(disk).model_copy(update={"promote_in": "agent"})))
    result = run("agent", settings_file, "--once")
    assert "nothing is left to promote" in result.output
    assert "promoting from" not in result.output
    assert not disk.exists()


def test_an_agent_that_cannot_promote_does_not_say_that_it_does(tmp_path: Path) -> None:
    settings_file = tmp_path / "ckpt.toml"
    settings_file.write_text(f"[tiers.disk]\nkind = 'posix'\npath = '{tmp_path / 'disk'}'\n")
    result = run("agent", settings_file)
    assert result.exit_code == 1
    assert result.output.startswith("Invalid: an agent promotes from RAM")


def test_a_fork_that_was_cut_off_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    killed(disk, 2, 3)

    async def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(marker_file, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(fork(settings(disk)))
    forked = told("fork", disk)
    assert newest(disk) == 3
    assert killed(disk, 5) == forked["store"]


def test_a_fork_of_a_folder_that_is_not_there_makes_none(tmp_path: Path) -> None:
    refused = run("fork", tmp_path / "mistyped")
    assert (refused.exit_code, refused.stderr.split(":")[0]) == (1, "NotFound")
    assert not (tmp_path / "mistyped").exists()


def test_tiers_of_several_stores_or_of_none_are_not_forked(tmp_path: Path) -> None:
    disks = [tmp_path / name for name in ("one", "other")]
    one, other = (killed(disk, 1) for disk in disks)
    both = tmp_path / "both.toml"
    both.write_text("".join(f"[tiers.{disk.name}]\nkind = 'posix'\npath = '{disk}'\n" for disk in disks))
    refused = run("fork", both)
    assert refused.exit_code == 1
    assert f"is of store {one} and tier 'other' of {other}; fork each folder on its own" in refused.output
    shutil.rmtree(disks[0])  # RAM still has the store
    assert f"there is no store at {disks[0]}, so there is nothing to fork" in run("fork", disks[0]).output


def test_ram_that_is_in_use_is_not_forgotten(tmp_path: Path, root: Path) -> None:
    uuid = killed(tmp_path / "one", 1)
    with CheckpointStore.open(settings(tmp_path / "one")).sync() as store:
        refused = run("forget", uuid)
        assert refused.exit_code == 1
        assert "in use by process" in refused.output
        restored = store.restore()
        assert restored is not None
    assert run("forget", "--gone").exit_code == 0


def test_a_removed_folder_is_adopted_by_what_ram_holds(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    uuid = killed(disk, 1)
    shutil.rmtree(disk)
    with CheckpointStore.open(settings(disk)).sync() as store:  # starts afresh, and saves nothing
        assert store.restore() is None
    assert told("adopt", disk, "--ram", uuid) == {"store": uuid, "folder": str(disk), "steps": 1}
    assert newest(disk) == 1


def test_what_holds_steps_of_another_store_is_not_adopted(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    uuid = killed(disk, 1)
    shutil.rmtree(disk)
    killed(disk, 2)
    for chosen in (["--ram", uuid], []):  # the RAM of its own store is no choice
        refused = run("adopt", disk, *chosen)
        assert refused.exit_code == 1
        assert "holds steps of store" in refused.output
    shutil.rmtree(disk)
    refused = run("adopt", disk)
    assert refused.exit_code == 1
    assert "RAM of several stores notes this place; choose one with --ram" in refused.output
    assert run("adopt", tmp_path / "new", "--ram", uuid).exit_code == 0
    assert newest(tmp_path / "new") == 1


def test_a_copy_that_was_forked_goes_on_beside_the_other(tmp_path: Path) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    uuid = killed(disk, 2, 3)
    shutil.copytree(disk, copy)
    with pytest.raises(Conflict, match="is a copy of the store at"):
        CheckpointStore.open(settings(copy)).sync().__enter__()
    forked = told("fork", copy)
    assert forked["forked_from"] == uuid
    killed(copy, 4)
    assert newest(copy) == 4
    assert newest(disk) == 3
    with CheckpointStore.open(settings(copy)).sync() as store:
        assert [step.step for step in store.steps()] == [2, 4]


def test_ram_goes_with_the_folder_that_is_forked(tmp_path: Path, root: Path) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    uuid = killed(disk, 2, 3)
    shutil.copytree(disk, copy)
    forked = told("fork", disk)
    assert newest(disk) == 3
    assert newest(copy) == 2
    assert killed(copy, 8) == uuid
    assert killed(disk, 5) == forked["store"]
    assert (newest(disk), newest(copy)) == (5, 8)
    assert sorted(path.name for path in root.iterdir() if not path.is_symlink()) == sorted([uuid, forked["store"]])


def test_what_a_trainer_writes_to_is_not_forked(tmp_path: Path) -> None:
    with CheckpointStore.open(settings(tmp_path / "disk")).sync() as store:
        store.save(1, {"w": np.ones(3)})
        refused = run("fork", tmp_path / "disk")
        assert refused.exit_code == 1
        assert "is being written to by process" in refused.output
        store.flush()


def test_ram_at_a_path_of_its_own_is_named_by_that(tmp_path: Path, shared_memory: Path) -> None:
    path = shared_memory / "own"
    uuid = killed(tmp_path / "disk", 1, path=path)
    assert told("ls", "--ram") == []
    assert ram_in(path).name == uuid
    assert told("forget", uuid, "--root", path)[0]["store"] == uuid
    assert not path.exists()
