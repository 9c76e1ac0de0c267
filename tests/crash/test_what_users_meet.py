"""What users of other libraries met (each has a public report), and what must not happen to users of this one."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from reliability.tiers import FaultyTiers
from support import trainer as trainer_module
from support.insight import bytes_of_listed_steps, extents, flip, flip_chunk, slab_of, tier_of
from support.overdue import only_held_calls_are_late
from support.scenes import CHUNK, SOON, Heard, assert_restored, assert_same, config, crash, folder, ram, tree
from support.trainer import state

from tieredckpt import CheckpointStore
from tieredckpt.blobs.posix import transfer
from tieredckpt.config import StoreConfig
from tieredckpt.engine.restoring import reader
from tieredckpt.engine.saving.snapshot import Snapshot
from tieredckpt.errors import Corrupt, Invalid, NotFound, TierUnavailable
from tieredckpt.events import SaveFailed, TierFailed, TierRecovered


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def two_tiers(shared_memory: Path, disk: Path) -> StoreConfig:
    return config({"ram": ram(shared_memory), "disk": folder(disk)})


# -- a tensor that changes right after the save ------------------------------------------------------------


def _numpy() -> Any:
    return np.arange(8 * CHUNK, dtype=np.float32)


def _numpy_strided() -> Any:
    return np.arange(8 * CHUNK, dtype=np.float32).reshape(-1, 64).T


def _torch() -> Any:
    return pytest.importorskip("torch").arange(8 * CHUNK, dtype=pytest.importorskip("torch").float32)


@pytest.mark.parametrize("make", [_numpy, _numpy_strided, _torch])
async def test_what_changes_right_after_the_save_is_saved_as_it_was(
    two_tiers: StoreConfig, faults: FaultyTiers, make: Callable[[], Any]
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        written = faults["disk"].hold("put", key="packs/*")
        weights = make()
        checkpoint = await store.save(1, {"w": weights})
        weights *= -1  # what the optimizer does while the checkpoint is on its way
        await written.reached()
        weights += 7
        written.release()
        await checkpoint.reached("disk")
        for tier in ("ram", "disk"):
            if tier == "disk":
                await store.evict(1, "ram")
            restored = await store.restore(like={"w": make()})
            assert restored is not None
            assert restored.sources.keys() == {tier}
            assert_same(np.asarray(restored.tree["w"]).copy(), np.asarray(make()).copy())


# -- `latest` that moves before the data is durable --------------------------------------------------------


@pytest.mark.parametrize("key", ["packs/*", "steps/*/btree", "steps/*/manifest.ocdbt"])
@pytest.mark.parametrize("fails", [False, True], ids=["slow", "failing"])
async def test_the_newest_durable_step_stays_until_a_newer_one_is_durable(
    shared_memory: Path, disk: Path, faults: FaultyTiers, key: str, fails: bool
) -> None:
    newest_only = config({"ram": ram(shared_memory), "disk": folder(disk, retain={"kind": "last_n", "n": 1})})
    async with CheckpointStore.open(newest_only) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        held = faults["disk"].hold("put", key=key)
        if fails:
            faults["disk"].fail("put", TierUnavailable("the cable was pulled"), key=key)
        checkpoint = await store.save(2, tree(2))
        await held.reached()
        await _assert_newest_on(disk, 1)
        held.release()
        if fails:
            await heard.first(TierFailed)
            await heard.first(TierRecovered)
        await checkpoint.reached("disk")
        await store.flush()
        await _assert_newest_on(disk, 2)
        assert await store.where(2) == ("ram", "disk")
    calls = [(call.verb, call.key) for call in faults["disk"].calls]
    put_new = calls.index(("put", "steps/0000000002-000002/manifest.ocdbt"))
    gone_old = calls.index(("delete", "steps/0000000001-000001/manifest.ocdbt"))
    assert put_new < gone_old
    assert not any(verb == "delete" and key.startswith("packs/") for verb, key in calls[:gone_old])


async def _assert_newest_on(disk: Path, step: int) -> None:
    """What a node without the RAM would restore now."""
    async with CheckpointStore.open(config({"found": folder(disk)}), read_only=True) as elsewhere:
        restored = await elsewhere.restore()
        assert restored is not None
        assert restored.step == step
        assert_same(restored.tree, tree(step))


# -- a background save that fails in silence ---------------------------------------------------------------


async def test_a_background_save_that_failed_is_reported_and_the_next_one_works(
    two_tiers: StoreConfig, faults: FaultyTiers, caplog: pytest.LogCaptureFixture
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        held = faults["disk"].hold("put", key="packs/*")
        faults["disk"].fail("put", TierUnavailable("the quota server is down"), key="packs/*")
        lost = await store.save(1, tree(1))
        waiting = asyncio.create_task(lost.reached("disk"))
        await asyncio.sleep(0)  # it waits before the tier fails, and is told of that
        await held.reached()
        held.release()
        with pytest.raises(TierUnavailable, match=r"step 1 .*'disk'.*the quota server is down"):
            await waiting
        failed = await heard.first(TierFailed)
        assert (failed.tier, str(failed.error)) == ("disk", "the quota server is down")
        assert "tier 'disk' failed" in caplog.text
        following = await store.save(2, tree(2))
        await heard.first(TierRecovered)
        await following.reached("disk")
        await store.flush()
        for step in (1, 2):
            assert await store.where(step) == ("ram", "disk")


async def test_a_save_by_reference_that_failed_is_reported_and_the_next_one_works(
    two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    jnp = pytest.importorskip("jax.numpy")
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        with monkeypatch.context() as patch:
            patch.setattr(Snapshot, "of", _raises(MemoryError("no host memory")))
            checkpoint = await store.save(1, {"w": jnp.arange(CHUNK)}, capture="reference")
            failed = await heard.first(SaveFailed)
            assert (failed.step, type(failed.error)) == (1, MemoryError)
            with pytest.raises(MemoryError, match="no host memory"):
                await checkpoint.reached("disk")
        await (await store.save(1, {"w": jnp.arange(CHUNK)}, capture="reference")).reached("disk")
        assert slab_of(store).used == await bytes_of_listed_steps(store)


def _raises(error: BaseException) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return staticmethod(fail)


# -- waiting without end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dead", "silent"])
async def test_waiting_for_a_tier_that_does_not_answer_ends_with_its_error(
    shared_memory: Path, disk: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    only_held_calls_are_late(monkeypatch)
    settings = config({"ram": ram(shared_memory), "disk": folder(disk)})
    async with asyncio.timeout(SOON), CheckpointStore.open(settings) as store:
        if how == "dead":
            faults.kill("disk", TierUnavailable("the server is gone"))
        else:
            faults.refuse("disk")  # or what is opened in its place would answer
            never = faults["disk"].hold("*", times=None)
        checkpoint = await store.save(1, tree(1))
        with pytest.raises(TierUnavailable, match=r"step 1 \(serial 1\) is not on tier 'disk'"):
            await checkpoint.reached("disk")
        with pytest.raises(TierUnavailable, match="tier 'disk' lacks step 1"):
            await store.flush()
        for step in (2, 3):
            assert not (await store.save(step, tree(step))).skipped
        assert_restored(await store.restore(), tree(3))
    if how == "silent":
        never.release()


# -- a donated array ---------------------------------------------------------------------------------------


async def test_an_array_donated_under_its_capture_is_named_and_later_saves_work(
    two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = pytest.importorskip("jax")
    step_of_training = jax.jit(lambda weights: weights + 1, donate_argnums=0)
    donated = threading.Event()
    of = Snapshot.of

    def wait_and_look(*arguments: Any) -> Snapshot:
        assert donated.wait(SOON)
        return of(*arguments)

    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        weights, bias = jax.numpy.arange(4.0 * CHUNK), jax.numpy.ones(CHUNK)
        with monkeypatch.context() as patch:
            patch.setattr(Snapshot, "of", staticmethod(wait_and_look))
            checkpoint = await store.save(1, {"b": bias, "layer": {"w": weights}}, capture="reference")
            after = step_of_training(weights)
            assert weights.is_deleted()
            donated.set()
            for _ in range(2):
                with pytest.raises(Invalid, match=r"'layer/w'.* was donated or deleted while its capture was pending"):
                    await checkpoint.reached("ram")
        failed = await heard.first(SaveFailed)
        assert failed.step == 1
        assert "'layer/w'" in str(failed.error)
        assert await store.steps() == ()
        assert slab_of(store).used == 0
        following = await store.save(2, {"b": bias, "layer": {"w": after}}, capture="reference")
        await following.reached("ram")
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree["layer"]["w"], np.asarray(after))


# -- memory that grows -------------------------------------------------------------------------------------


async def test_memory_and_descriptors_do_not_grow_with_saves(shared_memory: Path, disk: Path) -> None:
    few = {"kind": "last_n", "n": 2}
    process = psutil.Process()
    tiers = {"ram": ram(shared_memory, capacity="4 MiB"), "disk": folder(disk, retain=few)}
    async with CheckpointStore.open(config(tiers)) as store:

        async def train(steps: range) -> tuple[int, ...]:
            for step in steps:
                await (await store.save(step, tree(step, arrays=4, nbytes=16 * CHUNK))).reached("disk")
            await store.flush()
            sizes = (process.memory_info().rss, slab_of(store).used, len(process.open_files()), process.num_fds())
            return *sizes, process.num_threads()

        rss, used, files, descriptors, threads = await train(range(20))
        rss_after, used_after, files_after, descriptors_after, threads_after = await train(range(20, 80))
        assert used_after == used == await bytes_of_listed_steps(store)
        assert rss_after - rss < 16 << 20  # 60 saves are 60 MiB
        assert files_after <= files + 2
        assert descriptors_after <= descriptors + 2
        assert threads_after - threads < 20  # pools start theirs when they are needed; 60 saves that leak are 60
        state = store._life.engine.state
        assert state.scratch.slab.used == 0
        assert len(state.records()) <= 5  # what the slab has room for
        for tier in state.tiers:
            for remembered in (
                tier.steps.readers,
                tier.packs.orphans,
                tier.steps.tombstones,
                tier.steps.indeterminate,
                tier.steps.stuck,
                tier.steps.indexes.packs,
            ):
                assert len(remembered) <= 5


# -- memory that another process reads, or that a dead one left --------------------------------------------


@pytest.fixture
def shared(shared_memory: Path, disk: Path) -> dict[str, Any]:
    nearest = ram(shared_memory, capacity="1 MiB", on_close="keep")
    return {
        "store": {"chunk_size": trainer_module.CHUNK},
        "tiers": {"ram": nearest, "disk": folder(disk, retain="all")},
    }


@contextmanager
def training(settings: dict[str, Any], first: int, last: int, *point: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        trainer_module.__file__,
        json.dumps(settings, default=str),
        str(first),
        str(last),
        *point,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


async def test_who_reads_memory_while_the_trainer_saves_sees_whole_steps(shared: dict[str, Any]) -> None:
    seen: set[int] = set()
    from_ram = 0
    shared["tiers"]["disk"]["retain"] = {"kind": "last_n", "n": 5}  # or the reader lists ever more
    with training(shared, 1, 1_000_000) as child:  # as many as are needed, however slow the reader is
        assert child.stdout is not None
        child.stdout.readline()
        while len(seen) < 6 or not from_ram:
            assert child.poll() is None
            async with CheckpointStore.open(shared, read_only=True) as beside:
                try:
                    copied = await beside.restore()
                    viewed = await beside.restore(copy=False)
                except NotFound:  # it was in RAM alone when the reader came, and went to the disk since
                    continue
                assert copied is not None
                assert viewed is not None
                await viewed.verified()
                for restored in (copied, viewed):
                    assert_same(restored.tree, state(restored.step))
                from_ram += "ram" in copied.sources
            seen.add(copied.step)


async def test_who_is_killed_while_it_reads_leaves_no_lock_behind(shared: dict[str, Any]) -> None:
    look = (
        "import json, sys; from tieredckpt import CheckpointStore\n"
        "with CheckpointStore.open(json.loads(sys.argv[1]), read_only=True).sync() as store:\n"
        "    tree = store.restore(1, copy=False).tree\n"
        "    print('looking', flush=True); sys.stdin.read()\n"
    )
    async with CheckpointStore.open(shared) as store:
        await store.save(1, state(1))
        await store.flush()
        command = [sys.executable, "-c", look, json.dumps(shared, default=str)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "looking\n"
            for step in range(2, 12):
                await store.save(step, state(step))
                await store.flush()
            assert "ram" not in await store.where(1)
            assert slab_of(store).used > await bytes_of_listed_steps(store)
            child.kill()
        await store.collect()
        assert slab_of(store).used == await bytes_of_listed_steps(store)


async def test_the_copy_in_memory_is_found_though_the_disk_never_got_it(shared: dict[str, Any], disk: Path) -> None:
    with training(shared, 1, 1, "before a pack") as child:
        assert child.wait(SOON) == -signal.SIGKILL
    assert not list(disk.glob("steps/*"))
    assert not list(disk.glob("packs/**/*.pack"))
    async with CheckpointStore.open(shared) as store:
        restored = await store.restore()
        assert restored is not None
        assert (restored.step, {*restored.sources}) == (1, {"ram"})
        assert_same(restored.tree, state(1))
        await store.flush()
        assert await store.where(1) == ("ram", "disk")


# -- training that goes on ---------------------------------------------------------------------------------


class Training:
    """Noisy gradient descent with momentum: every bit of the result depends on every bit of the state."""

    def __init__(self) -> None:
        self.generator = np.random.Generator(np.random.MT19937(7))
        self.weights = self.generator.standard_normal(3 * CHUNK).astype(np.float32)
        self.momentum = np.zeros_like(self.weights)
        self.losses: list[float] = []

    def step(self) -> None:
        gradient = self.weights + self.generator.standard_normal(self.weights.size).astype(np.float32)
        self.momentum *= np.float32(0.9)
        self.momentum += gradient
        self.weights -= np.float32(0.01) * self.momentum
        self.losses.append(float(np.square(self.weights).sum()))

    def tree(self) -> dict[str, Any]:
        random = self.generator.bit_generator.state["state"]
        return {"weights": self.weights, "momentum": self.momentum, "key": random["key"], "at": random["pos"]}

    def load(self, tree: dict[str, Any]) -> None:
        self.weights[...], self.momentum[...] = tree["weights"], tree["momentum"]
        self.generator.bit_generator.state = {
            "bit_generator": "MT19937",
            "state": {"key": tree["key"], "pos": tree["at"]},
        }


@pytest.mark.parametrize("lost", ["the process", "the node"])
async def test_after_a_recovery_the_training_goes_on_bit_for_bit(two_tiers: StoreConfig, disk: Path, lost: str) -> None:
    undisturbed = Training()
    for _ in range(12):
        undisturbed.step()

    training, losses = Training(), {}
    async with CheckpointStore.open(two_tiers) as store:
        for step in range(1, 8):
            training.step()
            losses[step] = training.losses[-1]
            checkpoint = await store.save(step, training.tree())
        await checkpoint.reached("disk")
        training.step()  # lost
        await crash(store)
    again = Training()
    tiers = two_tiers if lost == "the process" else config({"disk": folder(disk)})
    async with CheckpointStore.open(tiers) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 7
        assert restored.sources.keys() == ({"ram"} if lost == "the process" else {"disk"})
        again.load(restored.tree)
        for step in range(8, 13):
            again.step()
            losses[step] = again.losses[-1]
            await store.save(step, again.tree())
    assert list(losses.values()) == undisturbed.losses
    assert_same(again.tree(), undisturbed.tree())


# -- a restore that failed once ----------------------------------------------------------------------------


@pytest.mark.parametrize("into", [False, True], ids=["new arrays", "into"])
async def test_a_restore_of_what_was_damaged_everywhere_succeeds_when_it_is_repaired(
    two_tiers: StoreConfig, into: bool
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, tree(1))).reached("disk")
        (path, where), *_ = await extents(store, "disk", 1, "params/w2")
        await flip_chunk(store, "ram", 1, "params/w2")
        flip(path, where.offset)
        target = tree(0) if into else None
        for _ in range(2):
            with pytest.raises(Corrupt, match=re.escape("array 'params/w2' of step 1 (serial 1) is lost")):
                await store.restore(into=target)
        flip(path, where.offset)
        restored = await store.restore(into=target)
        assert_restored(restored, tree(1))
        assert restored.sources.keys() == {"ram", "disk"}
        await store.flush()
        assert [found.problem for found in await store.verify()] == ["", ""]


@pytest.mark.parametrize("nearest", ["ram", "disk"])
async def test_a_restore_that_ran_out_of_memory_once_can_be_repeated(
    two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch, nearest: str
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, tree(1))).reached("disk")
        if nearest == "disk":
            await store.evict(1, "ram")
        target = tree(0)
        reading = (reader, "deliver") if nearest == "ram" else (transfer, "_arena")
        for owner, name in (reading, (reader, "pieces_of")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, _raises(MemoryError("out of memory")).__func__)
                with pytest.raises(MemoryError):
                    await store.restore(into=target)
            assert not tier_of(store, nearest).steps.readers
            assert_restored(await store.restore(into=target), tree(1))
        assert store._life.engine.state.scratch.slab.used == 0
        await (await store.save(2, tree(2))).reached("disk")
