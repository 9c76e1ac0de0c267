"""What lies in RAM outlives the trainer, is read beside it, and is never torn, mixed up or leaked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import trainer as trainer_module
from support.insight import bytes_of_listed_steps, slab_of, tier_of
from support.scenes import Heard, assert_restored, assert_same, crash, files_below, folder, ram, ram_in
from support.trainer import CHUNK, POINTS, state

from tieredckpt import CheckpointStore
from tieredckpt.errors import Conflict
from tieredckpt.events import StepRestored, TierFailed

TRAINER = Path(trainer_module.__file__)


@pytest.fixture
def tiers(shared_memory: Path, tmp_path: Path) -> dict[str, Any]:
    """RAM for three states of the trainer, and a directory."""
    nearest = ram(shared_memory, capacity="512 KiB", on_close="keep")
    return {"ram": nearest, "disk": folder(tmp_path / "disk", retain="all")}


@pytest.fixture
def ram_folder(tiers: dict[str, Any]) -> Path:
    return Path(tiers["ram"]["path"])


def settings(tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"store": {"chunk_size": CHUNK} | more, "tiers": tiers}


@asynccontextmanager
async def opened(tiers: dict[str, Any], *, read_only: bool = False) -> AsyncIterator[CheckpointStore]:
    async with CheckpointStore.open(settings(tiers), read_only=read_only) as store:
        yield store


class Process:
    """A child that says what it does, line by line."""

    def __init__(self, *command: object) -> None:
        self._child = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def until(self, line: str) -> None:
        """Read up to that line."""
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        for said in self._child.stdout:
            self.lines.append(said.rstrip())
            if self.lines[-1] == line:
                return
        pytest.fail(f"the child ended before it said {line!r}:\n{self._child.stderr.read()}")

    def tell(self, line: str) -> None:
        """Send it a line."""
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(60)

    def died(self) -> list[str]:
        """What it said before it killed itself."""
        said, error = self._child.communicate(timeout=60)
        assert self._child.returncode == -signal.SIGKILL, error
        return said.split("\n")[:-1]


@contextmanager
def process(*command: object) -> Iterator[Process]:
    child = Process(*command)
    try:
        yield child
    finally:
        child.kill()
        for pipe in (child._child.stdin, child._child.stdout, child._child.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def trainer(tiers: dict[str, Any], first: int, last: int, *point: str) -> Iterator[Process]:
    with process(TRAINER, json.dumps(settings(tiers), default=str), first, last, *point) as child:
        yield child


def train_and_die(tiers: dict[str, Any], last: int, *point: str) -> None:
    """Save steps from 1 on, and die: as ``point`` says, or when the last is saved and promoted."""
    with trainer(tiers, 1, last, *point) as child:
        if point:
            child.died()
        else:
            child.until(f"saved {last}")


async def assert_restores(store: CheckpointStore, step: int, *sources: str) -> None:
    restored = await store.restore(step, resume=False)
    assert_restored(restored, state(step))
    assert set(restored.sources) == set(sources)


async def assert_sound(store: CheckpointStore) -> None:
    for info in await store.steps():
        assert not any(found.problem for found in await store.verify(info.step))


# -- kill -9 ----------------------------------------------------------------------------------------------


async def test_after_kill_9_a_new_process_restores_from_ram_bit_for_bit(tiers: dict[str, Any]) -> None:
    train_and_die(tiers, 3)
    async with opened(tiers) as store:
        heard = Heard(store)
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 3
        assert_same(restored.tree, state(3))
        assert set(restored.sources) == {"ram"}
        assert set(heard.of(StepRestored)[0].sources) == {"ram"}
        assert slab_of(store).used == await bytes_of_listed_steps(store)
        await store.save(4, state(4))
        await store.flush()
        await assert_restores(store, 4, "ram")


async def test_what_was_not_promoted_yet_when_the_process_died_is_promoted_by_the_next(
    tiers: dict[str, Any],
) -> None:
    train_and_die(tiers, 2, "before a pack")
    async with opened(tiers) as store:
        await store.flush()
        assert await store.where(2) == ("ram", "disk")
        await assert_sound(store)


@pytest.mark.parametrize("point", POINTS)
async def test_killed_in_the_middle_of_a_save_it_leaves_whole_steps_and_no_trace_of_the_torn_one(
    tiers: dict[str, Any], ram_folder: Path, point: str
) -> None:
    # The slab is for three states, so that the fifth save evicts.
    train_and_die(tiers, 5, point)
    committed = {4} | ({5} if point in ("after the manifest", "before a pack", "after a pack") else set())
    async with opened(tiers) as store:
        assert {info.step for info in await store.steps()} == {1, 2, 3} | committed
        for step in committed:
            await assert_restores(store, step, "ram")
        for step in (1, 2, 3):
            assert_restored(await store.restore(step, resume=False), state(step))
        assert slab_of(store).used == await bytes_of_listed_steps(store)
        in_ram = [f"{info.step:010d}-{info.serial:06d}" for info in await store.steps() if "ram" in info.tiers]
        expected = {f"{name}/{file}" for name in in_ram for file in ("btree", "manifest.ocdbt")}
        assert files_of_steps(ram_in(ram_folder)) == expected
        for step in range(6, 12):
            assert not (await store.save(step, state(step))).skipped
        await store.flush()
        await assert_restores(store, 11, "ram")
        assert slab_of(store).used == await bytes_of_listed_steps(store)
        await assert_sound(store)


def files_of_steps(root: Path) -> set[str]:
    return {path.relative_to(root / "steps").as_posix() for path in files_below(root / "steps")}


async def test_a_trainer_may_die_again_and_again(tiers: dict[str, Any]) -> None:
    for last in range(2, 12, 3):
        with trainer(tiers, last - 1, last + 1, "some chunks") as child:
            assert child.died()[-1] == f"saved {last}"
        async with opened(tiers) as store:
            restored = await store.restore()
            assert restored is not None
            assert restored.step == last
            assert_same(restored.tree, state(last))
            assert slab_of(store).used == await bytes_of_listed_steps(store)


async def test_without_its_ram_folder_a_process_restores_from_the_directory(
    tiers: dict[str, Any], ram_folder: Path
) -> None:
    train_and_die(tiers, 3)
    shutil.rmtree(ram_folder)
    async with opened(tiers) as store:
        await assert_restores(store, 3, "disk")
        await store.save(4, state(4))
        await assert_restores(store, 4, "ram")


async def test_what_is_of_another_boot_is_wiped(tiers: dict[str, Any], ram_folder: Path) -> None:
    train_and_die(tiers, 3)
    note = json.loads((ram_in(ram_folder) / "slab.json").read_text())
    (ram_in(ram_folder) / "slab.json").write_text(json.dumps(note | {"boot_id": "before the power went"}))
    async with opened(tiers) as store:
        assert tier_of(store, "ram").steps.held == {}
        assert slab_of(store).used == 0
        await assert_restores(store, 3, "disk")


async def test_what_lay_in_a_memfd_ends_with_the_process(tiers: dict[str, Any], small_tmpfs: Path) -> None:
    tiers["ram"] |= {"path": small_tmpfs / "ram", "capacity": "128 MiB"}
    train_and_die(tiers, 3)
    async with opened(tiers) as store:
        assert tier_of(store, "ram").steps.held == {}
        await assert_restores(store, 3, "disk")
        await store.save(4, state(4))
        await assert_restores(store, 4, "ram")


# -- whose it is ------------------------------------------------------------------------------------------


async def test_what_another_store_left_in_ram_stays_its_own(tiers: dict[str, Any], tmp_path: Path) -> None:
    train_and_die(tiers, 3)
    mine = {"ram": tiers["ram"], "disk": folder(tmp_path / "my own")}
    async with opened(mine) as store:
        assert await store.steps() == ()
        await store.save(1, state(7))
    async with opened(tiers) as store:
        await assert_restores(store, 3, "ram")
    async with opened(mine) as store:
        assert_restored(await store.restore(), state(7))


def test_a_forked_worker_neither_keeps_the_folder_nor_frees_it(tiers: dict[str, Any]) -> None:
    script = """
import json, os, sys
from tieredckpt import CheckpointStore, Conflict
config = json.loads(sys.argv[1])
with CheckpointStore.open(config).sync() as store:
    store.save(1, {"n": 1})
    read, write = os.pipe()
    if os.fork() == 0:  # a worker that outlives the store, as a data loader's may
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        CheckpointStore.open(config).sync().__enter__()
    except Conflict:
        print("still locked")
with CheckpointStore.open(config).sync() as store:
    print("opened again", store.restore().step)
os.close(write)
os.wait()
"""
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        script,
        json.dumps(settings(tiers), default=str),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["still locked", "opened again 1"], done.stderr


async def test_a_worker_that_outlives_a_killed_trainer_is_in_nobodys_way(tiers: dict[str, Any]) -> None:
    script = """
import json, os, signal, sys
from tieredckpt import CheckpointStore
store = CheckpointStore.open(json.loads(sys.argv[1])).sync().__enter__()
store.save(1, {"n": 1})
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait4(0, os.WNOHANG)
signal.pause()
"""
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        script,
        json.dumps(settings(tiers), default=str),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "forked\n"
        trainer.kill()
        trainer.wait()
        async with opened(tiers) as store:
            restored = await store.restore()
            assert restored is not None
            assert restored.step == 1


async def test_who_only_looks_removes_nothing_of_another_store(tiers: dict[str, Any], tmp_path: Path) -> None:
    train_and_die(tiers, 3)
    async with opened({"disk": folder(tmp_path / "another")}) as store:
        await store.save(1, state(8))
        await store.flush()
    looking = CheckpointStore.open(settings(tiers | {"disk": folder(tmp_path / "another")}), read_only=True)
    heard: list[Any] = []
    looking.subscribe(heard.append)
    async with looking as store:
        assert [info.tiers for info in await store.steps()] == [("disk",)]
        assert not any(isinstance(event, TierFailed) for event in heard)
    async with opened(tiers) as store:
        await assert_restores(store, 3, "ram")


async def test_a_folder_that_leads_elsewhere_is_refused(tiers: dict[str, Any], ram_folder: Path) -> None:
    ram_folder.parent.mkdir()
    (ram_folder.parent / "elsewhere").mkdir()
    ram_folder.symlink_to("elsewhere")
    with pytest.raises(Conflict, match="is not a folder of user"):
        async with opened(tiers):
            pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
async def test_a_folder_of_another_user_is_refused(tiers: dict[str, Any], ram_folder: Path) -> None:
    ram_folder.mkdir(parents=True)
    os.chown(ram_folder, 12345, 12345)
    with pytest.raises(Conflict, match="is not a folder of user"):
        async with opened(tiers):
            pass


async def test_a_second_trainer_is_refused_and_the_first_goes_on(tiers: dict[str, Any]) -> None:
    with trainer(tiers, 1, 2) as child:
        child.until("saved 2")
        with pytest.raises(Conflict, match=rf"process {child._child.pid} on "):
            async with opened(tiers):
                pass
        async with opened(tiers, read_only=True) as store:
            await assert_restores(store, 2, "ram")


# -- beside the writer ------------------------------------------------------------------------------------

READER = """
    import json, sys
    import numpy as np
    from tieredckpt import CheckpointStore

    with CheckpointStore.open(json.loads(sys.argv[1]), read_only=True).sync() as store:
        tree = store.restore(1, copy=False).tree
        before = [array.copy() for array in tree["params"].values()]
        print("looking", flush=True)
        sys.stdin.readline()
        same = all(np.array_equal(*pair) for pair in zip(before, tree["params"].values()))
        print("the same" if same else "overwritten", flush=True)
        sys.stdin.readline()
"""


async def test_what_another_process_reads_is_not_overwritten_until_it_has_gone(tiers: dict[str, Any]) -> None:
    async with opened(tiers) as store:
        await store.save(1, state(1))
        await store.flush()
        taken = slab_of(store).used
        with process("-c", textwrap.dedent(READER), json.dumps(settings(tiers), default=str)) as reader:
            reader.until("looking")
            for step in range(2, 9):
                assert not (await store.save(step, state(step))).skipped
                await store.flush()
            assert "ram" not in await store.where(1)
            in_use = slab_of(store).used - await bytes_of_listed_steps(store)
            assert 0 < in_use <= taken
            reader.tell("look again")
            reader.until("the same")
            await store.collect()
            assert slab_of(store).used - await bytes_of_listed_steps(store) == in_use
        await store.collect()  # the reader was killed, and its lock went with it
        assert slab_of(store).used == await bytes_of_listed_steps(store)


async def test_what_another_process_reads_is_not_reused_by_the_writers_that_follow(
    tiers: dict[str, Any], ram_folder: Path
) -> None:
    train_and_die(tiers, 1)
    with process("-c", textwrap.dedent(READER), json.dumps(settings(tiers), default=str)) as reader:
        reader.until("looking")
        async with opened(tiers) as store:
            await store.flush()
            await store.evict(1, "ram")
        for first in (2, 12):  # two writers, each of which fills the slab more than once
            async with opened(tiers) as store:
                assert slab_of(store).used > await bytes_of_listed_steps(store)
                for step in range(first, first + 10):
                    assert not (await store.save(step, state(step))).skipped
        reader.tell("look again")
        reader.until("the same")
    async with opened(tiers) as store:
        assert slab_of(store).used == await bytes_of_listed_steps(store)
        assert not list((ram_in(ram_folder) / "retired").iterdir())


async def test_a_reader_sees_what_came_after_it_and_what_is_still_there(tiers: dict[str, Any]) -> None:
    async with opened(tiers) as store:
        for step in (1, 2):
            await store.save(step, state(step))
        await store.flush()
        async with opened(tiers, read_only=True) as reader:
            for step in range(3, 9):
                await store.save(step, state(step))
                await store.flush()
            assert [info.step for info in await reader.steps()] == list(range(1, 9))
            for step in (1, 2):
                await assert_restores(reader, step, "disk")


async def test_a_reader_does_not_change_what_it_reads(tiers: dict[str, Any], ram_folder: Path) -> None:
    train_and_die(tiers, 3)
    before = {path: path.stat().st_mtime_ns for path in ram_folder.rglob("*") if path.is_file()}
    async with opened(tiers, read_only=True) as store:
        await assert_restores(store, 3, "ram")
        await store.verify(3)
    assert {path: path.stat().st_mtime_ns for path in ram_folder.rglob("*") if path.is_file()} == before


# -- closing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_close", "stays"), [("keep", True), ("release", False), ("auto", False)])
async def test_what_happens_to_the_memory_at_the_end_is_as_configured(
    tiers: dict[str, Any], ram_folder: Path, on_close: str, stays: bool
) -> None:
    tiers["ram"]["on_close"] = on_close
    async with opened(tiers) as store:
        await store.save(1, state(1))
    assert ram_folder.exists() == stays
    async with opened(tiers) as store:
        await assert_restores(store, 1, "ram" if stays else "disk")


async def test_a_training_that_ends_by_an_error_leaves_its_memory_to_the_next(
    tiers: dict[str, Any], ram_folder: Path
) -> None:
    tiers["ram"]["on_close"] = "auto"
    store = await CheckpointStore.open(settings(tiers))
    await store.save(1, state(1))
    await crash(store)
    async with opened(tiers) as store:
        await assert_restores(store, 1, "ram")
