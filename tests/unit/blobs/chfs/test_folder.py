"""The folder of a store in CHFS whose tier names none: its own, or that of a version before if it lies there."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scenes import assert_restored, assert_same, config, folder, ram, steps_on, tree

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig, load, to_toml
from tieredckpt.config.checks import probable_mistakes
from tieredckpt.config.tiers import CHFS_FOLDER
from tieredckpt.errors import Conflict


def stores(chfs: Any, shared_memory: Path, disk: Path, **pmem: Any) -> StoreConfig:
    """RAM of each in a folder of its own, so that nothing but the tiers tells whose it is."""
    tier = {"kind": "chfs", "server": f"directory:{chfs.directory}", "chunk_size": "16 KiB", "retries": 0} | pmem
    return config(
        {
            "ram": ram(shared_memory, path=shared_memory / "of-test" / disk.name),
            "pmem": tier,
            "disk": folder(disk, survives="site"),
        }
    )


def folders(chfs: Any) -> set[str]:
    return {path.name for server in (chfs.directory / "servers").iterdir() for path in server.iterdir()}


async def save(settings: StoreConfig, step: int) -> None:
    async with CheckpointStore.open(settings) as store:
        await (await store.save(step, tree(step))).reached("pmem")
        await store.flush()


async def steps_on_pmem(settings: StoreConfig) -> list[int]:
    async with CheckpointStore.open(settings, read_only=True) as store:
        return await steps_on(store, "pmem")


async def test_two_trainings_with_disks_of_their_own_share_no_step(
    chfs: Any, shared_memory: Path, tmp_path: Path
) -> None:
    one, other = (stores(chfs, shared_memory, tmp_path / name) for name in ("one", "other"))
    await save(one, 1)
    await save(other, 2)
    assert await steps_on_pmem(one) == [1]
    assert await steps_on_pmem(other) == [2]
    assert len(folders(chfs)) == 2
    assert all(name.startswith("tieredckpt-") for name in folders(chfs))


async def test_a_store_of_a_version_before_is_found_where_that_put_it(
    chfs: Any, shared_memory: Path, tmp_path: Path
) -> None:
    before = stores(chfs, shared_memory, tmp_path / "one", path=CHFS_FOLDER)
    now = stores(chfs, shared_memory, tmp_path / "one")
    await save(before, 1)
    assert await steps_on_pmem(now) == [1]
    await save(now, 2)
    assert await steps_on_pmem(before) == [1, 2]
    assert folders(chfs) == {"tieredckpt"}
    async with CheckpointStore.open(now) as store:
        spec = await store.spec(2, "params/w0")
        assert spec["kvstore"]["base"]["path"] == f"{CHFS_FOLDER}/"
        assert_restored(await store.restore(2), tree(2))


async def test_a_new_store_leaves_that_of_another_training_alone(
    chfs: Any, shared_memory: Path, tmp_path: Path
) -> None:
    await save(stores(chfs, shared_memory, tmp_path / "one", path=CHFS_FOLDER), 1)
    other = stores(chfs, shared_memory, tmp_path / "other")
    await save(other, 2)
    assert await steps_on_pmem(other) == [2]
    with pytest.raises(Conflict):
        await save(stores(chfs, shared_memory, tmp_path / "other", path=CHFS_FOLDER), 3)


async def test_a_store_of_a_version_before_is_found_while_its_disk_is_silent(
    chfs: Any, shared_memory: Path, tmp_path: Path
) -> None:
    await save(stores(chfs, shared_memory, tmp_path / "one", path=CHFS_FOLDER), 1)
    (tmp_path / "one").rename(tmp_path / "away")
    (tmp_path / "one").write_text("no folder: what cannot be read")
    async with CheckpointStore.open(stores(chfs, shared_memory, tmp_path / "one")) as store:
        assert "pmem" in await store.where(1)


def named(chfs: Any, shared_memory: Path, name: str, **pmem: Any) -> StoreConfig:
    """A store of RAM and CHFS alone, which leaves its RAM to the next process."""
    tier = {"kind": "chfs", "server": f"directory:{chfs.directory}", "chunk_size": "16 KiB", "retries": 0} | pmem
    return config({"ram": ram(shared_memory, on_close="keep"), "pmem": tier}, name=name)


async def test_a_named_store_leaves_that_of_another_name_of_a_version_before_alone(
    chfs: Any, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await save(named(chfs, shared_memory, "bert", path=CHFS_FOLDER), 1)
    await save(named(chfs, shared_memory, "llama"), 2)
    assert "nothing tells that it is this one" in caplog.text
    assert await steps_on_pmem(named(chfs, shared_memory, "llama")) == [2]
    assert await steps_on_pmem(named(chfs, shared_memory, "bert", path=CHFS_FOLDER)) == [1]
    assert folders(chfs) == {"tieredckpt", "tieredckpt-llama"}


async def test_a_named_store_of_a_version_before_is_found_by_its_ram(chfs: Any, shared_memory: Path) -> None:
    before = named(chfs, shared_memory, "llama", path=CHFS_FOLDER)
    await save(before, 1)
    assert await steps_on_pmem(named(chfs, shared_memory, "llama")) == [1]
    assert folders(chfs) == {"tieredckpt"}


TRAIN = """
import os, signal, sys
from support.scenes import tree
from tieredckpt import CheckpointStore
from tieredckpt.config import load

with CheckpointStore.open(load(sys.argv[1])).sync() as store:
    for step in (1, 2):
        store.save(step, tree(step)).reached("pmem")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("comes_back", ["with its data", "empty"])
async def test_a_named_store_of_a_trainer_that_was_killed_is_found_in_ram(
    chfs: Any, shared_memory: Path, tmp_path: Path, comes_back: str
) -> None:
    settings = named(chfs, shared_memory, "llama")
    command = [sys.executable, "-c", TRAIN, str(to_toml_file(tmp_path, settings))]
    cwd = Path(__file__).parents[3]
    killed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, cwd=cwd)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    if comes_back == "empty":
        chfs.switch("empty = 0 1 2")
    async with CheckpointStore.open(settings) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 2
        assert set(restored.sources) == {"ram"}
        assert_same(restored.tree, tree(2))
        await (await store.save(3, tree(3))).reached("pmem")
        await store.flush()
        assert "pmem" in await store.where(2), "what CHFS lost was promoted again"
    assert 3 in await steps_on_pmem(settings)


def test_the_folder_is_told_from_the_name_or_from_the_tiers_that_outlive_chfs(tmp_path: Path) -> None:
    chfs, disk = {"kind": "chfs"}, folder(tmp_path / "disk")

    def path(tiers: dict[str, Any], **settings: Any) -> str | None:
        located = {tier.name: tier for tier in load({"tiers": tiers, "store": settings}).located}
        return getattr(located["pmem"], "path", None)

    named = path({"pmem": chfs, "disk": disk}, name="llama")
    assert named == "/tieredckpt-llama"
    told = path({"pmem": chfs, "disk": disk})
    assert told == path({"pmem": chfs | {"server": "ofi+tcp://10.0.0.1:7"}, "disk": disk}), "servers change with jobs"
    assert told != path({"pmem": chfs, "disk": folder(tmp_path / "other")})
    assert path({"pmem": chfs | {"path": "/mine"}, "disk": disk}) == "/mine"
    alone = load({"tiers": {"ram": {"kind": "ram"}, "pmem": chfs}})
    assert path({"ram": {"kind": "ram"}, "pmem": chfs}) == CHFS_FOLDER
    assert any("give the tier a `path`" in text for _, text in probable_mistakes(alone))
    assert not probable_mistakes(load({"tiers": {"ram": {"kind": "ram"}, "pmem": chfs}, "store": {"name": "llama"}}))
    again = load(to_toml_file(tmp_path, alone))
    assert again == alone


def to_toml_file(tmp_path: Path, settings: StoreConfig) -> Path:
    (tmp_path / "again.toml").write_text(to_toml(settings))
    return tmp_path / "again.toml"
