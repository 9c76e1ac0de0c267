"""A trainer that gets SIGTERM: its newest step is durable before it ends, or the exit says what was kept."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scenes import SOON, assert_same, config, folder, ram, tree

from tieredckpt import CheckpointStore, StoreConfig, SyncStore
from tieredckpt.engine import engine
from tieredckpt.engine.admin import Admin
from tieredckpt.engine.mode import alone
from tieredckpt.engine.promoting import copy_step
from tieredckpt.errors import Invalid, NotFound
from tieredckpt.preempt import EXIT_STATUS, preemption

TESTS = Path(__file__).parents[1]


@pytest.fixture
def settings(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    """No step goes to the disk by itself."""
    return config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", promote="never")})


@pytest.fixture(autouse=True)
def _the_handler_is_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before
    assert not [thread for thread in threading.enumerate() if "preemption" in thread.name]


def warned(settings: StoreConfig, seconds: float) -> subprocess.CompletedProcess[str]:
    """A trainer that was sent SIGTERM after its third save, when it has ended."""
    configuration = json.dumps(settings.model_dump(mode="json"))
    command = [sys.executable, "-m", "support.preempted_trainer", configuration, str(seconds)]
    here = os.environ | {"PYTHONPATH": str(TESTS)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=here) as trainer:
        watchdog = threading.Timer(3 * SOON, trainer.kill)
        watchdog.start()
        try:
            assert trainer.stdout is not None
            said = [trainer.stdout.readline() for _ in range(3)]
            trainer.send_signal(signal.SIGTERM)
            out, err = trainer.communicate()
        finally:
            watchdog.cancel()
    return subprocess.CompletedProcess(command, trainer.returncode, "".join(said) + out, err)


async def assert_restores(settings: StoreConfig, step: int, tier: str) -> None:
    async with CheckpointStore.open(settings) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == step
        assert_same(restored.tree, tree(step))
        assert tier in await store.where(step)


async def test_a_trainer_that_is_warned_ends_with_its_newest_step_durable(
    settings: StoreConfig, tmp_path: Path
) -> None:
    done = warned(settings, 60)
    assert (done.returncode, done.stdout) == (EXIT_STATUS, "saved 1\nsaved 2\nsaved 3\nsaved 4\n"), done.stderr
    alone = config({"disk": folder(tmp_path / "disk")})
    await assert_restores(alone, 4, "disk")


async def test_the_policies_of_a_preemptible_machine_need_no_more_than_the_warning(
    shared_memory: Path, tmp_path: Path
) -> None:
    promote = {"kind": "any_of", "policies": [{"kind": "every", "interval": "10 min"}, {"kind": "on_signal"}]}
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", promote=promote, survives="site")}
    done = warned(config(tiers, when_full="replace"), 60)
    assert done.returncode == EXIT_STATUS, done.stderr
    await assert_restores(config({"disk": tiers["disk"] | {"promote": "always"}}), 4, "disk")


async def test_when_time_runs_out_the_exit_says_what_was_kept(shared_memory: Path, tmp_path: Path) -> None:
    slow = folder(tmp_path / "disk", promote="never", rate_limit="1 KB/s", min_bandwidth="100 B/s")
    settings = config({"ram": ram(shared_memory), "disk": slow})
    done = warned(settings, 1)
    assert done.returncode == 1
    assert "preempted, and time ran out after " in done.stderr
    assert "step 4 (serial 4) is on 'ram' alone; tier 'disk' has no step" in done.stderr
    await assert_restores(settings, 4, "ram")


def test_a_training_that_is_not_warned_goes_its_way(settings: StoreConfig) -> None:
    with CheckpointStore.open(settings).sync() as store:
        with preemption(store) as notice:
            store.save(1, tree(1))
            assert not notice.raised
        assert store.where(1) == ("ram",)
        with pytest.raises(ZeroDivisionError), preemption(store):
            raise ZeroDivisionError


def test_the_newest_step_is_promoted_behind_a_training_that_does_not_look(settings: StoreConfig) -> None:
    with CheckpointStore.open(settings).sync() as store:
        for step in (1, 2):
            saved = store.save(step, tree(step))

        def train() -> None:
            with preemption(store, seconds=60):
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)  # some send it again and again
                saved._loop.call_blocking(_held(store._store, 2, "disk"))

        with pytest.raises(SystemExit) as ended:
            train()
        assert ended.value.code == EXIT_STATUS
        assert store.where(1) == ("ram",)


def test_an_older_step_that_is_on_its_way_gives_way(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packs, writing = copy_step.write_packs, threading.Event()

    async def stall_at_first(*arguments: Any) -> None:
        if not writing.is_set():
            writing.set()
            await asyncio.Event().wait()
        await write_packs(*arguments)

    monkeypatch.setattr(copy_step, "write_packs", stall_at_first)
    with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})).sync() as store:
        store.save(1, tree(1))
        assert writing.wait(SOON)
        store.save(2, tree(2))
        with pytest.raises(SystemExit) as ended, preemption(store, seconds=SOON):
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == EXIT_STATUS
        assert "disk" in store.where(2)
        store.flush()
        assert "disk" in store.where(1)


async def _held(store: CheckpointStore, step: int, tier: str) -> None:
    state = store._life.engine.state
    async with asyncio.timeout(SOON):
        await state.changed.until(lambda: any(held.step == step for held in state.tier(tier).steps.held))


def test_an_error_in_a_training_that_was_warned_is_still_that_error(settings: StoreConfig) -> None:
    with CheckpointStore.open(settings).sync() as store:
        store.save(1, tree(1))

        def train() -> None:
            with preemption(store, seconds=60):
                signal.raise_signal(signal.SIGTERM)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        assert store.where(1) == ("ram", "disk")


def test_a_tier_that_fails_is_tried_again_until_the_time_is_out(
    settings: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_step, calls = alone.copy_step, 0

    async def fails_once(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise NotFound("the tier is away for a moment")
        return await copy_step(*arguments)

    monkeypatch.setattr(alone, "copy_step", fails_once)
    with CheckpointStore.open(settings).sync() as store:
        store.save(1, tree(1))
        with pytest.raises(SystemExit) as ended, preemption(store, seconds=60):
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == EXIT_STATUS
        assert store.where(1) == ("ram", "disk")


async def test_where_no_signal_arrives_it_is_refused(settings: StoreConfig) -> None:
    async with CheckpointStore.open(settings) as store:
        with pytest.raises(Invalid, match="SIGTERM reaches the main thread alone"):
            await asyncio.to_thread(preemption(store).__enter__)


def test_a_second_block_of_one_preemption_is_refused_and_takes_no_signal(settings: StoreConfig) -> None:
    with CheckpointStore.open(settings).sync() as store:
        notice = preemption(store)
        with notice:
            pass
        with pytest.raises(Invalid, match="entered before"):
            notice.__enter__()


def test_it_takes_the_safest_tier_or_the_one_that_is_named(shared_memory: Path, tmp_path: Path) -> None:
    tiers = {
        "ram": ram(shared_memory),
        "near": folder(tmp_path / "near", promote="never"),
        "nfs": folder(tmp_path / "nfs", promote="never", survives="site"),
        "far": folder(tmp_path / "far", promote="never", survives="site"),
    }
    with CheckpointStore.open(config(tiers)).sync() as store:
        store.save(1, tree(1))
        for tier, where in [(None, ("ram", "nfs")), ("near", ("ram", "near", "nfs"))]:
            with pytest.raises(SystemExit), preemption(store, tier=tier):
                signal.raise_signal(signal.SIGTERM)
            assert store.where(1) == where
        with pytest.raises(NotFound, match="did you mean 'near'"):
            preemption(store, tier="neat")
        with pytest.raises(Invalid, match="positive"):
            preemption(store, seconds=0)


def test_a_step_that_is_still_being_captured_is_the_newest(
    settings: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = engine.Engine.save

    async def takes_its_time(self: engine.Engine, step: int, *arguments: Any, **options: Any) -> Any:
        if step == 2:
            await asyncio.sleep(0.3)
        return await save(self, step, *arguments, **options)

    monkeypatch.setattr(engine.Engine, "save", takes_its_time)

    def train(store: SyncStore) -> None:
        with preemption(store, seconds=60):
            signal.raise_signal(signal.SIGTERM)
            store.save(2, {"epoch": 2, "name": "nothing in it can change"}, capture="reference")

    with CheckpointStore.open(settings).sync() as store:
        store.save(1, tree(1)).reached("ram")
        with pytest.raises(SystemExit) as ended:
            train(store)
        assert ended.value.code == EXIT_STATUS
        assert "disk" in store.where(2)


@pytest.mark.parametrize("changed", [False, True])
def test_a_warning_does_not_confirm_a_lazy_save_for_the_trainer(settings: StoreConfig, changed: bool) -> None:
    """The trainer may be changing the arrays at that moment; it confirms the save itself, at the latest at its end."""
    state = tree(2)

    def train(store: SyncStore) -> None:
        with preemption(store, seconds=60):
            store.save(2, state, capture="lazy")
            signal.raise_signal(signal.SIGTERM)
            store._life.loop.call_blocking(_held(store._store, 1, "disk"))
            assert store.latest_step() == 1
            if changed:
                state["params"]["w0"] += 1

    with CheckpointStore.open(settings).sync() as store:
        store.save(1, tree(1))
        with pytest.raises(SystemExit) as ended:
            train(store)
        assert ended.value.code == EXIT_STATUS
        assert store.all_steps() == ((1,) if changed else (1, 2))
        assert "disk" in store.where(1 if changed else 2)


def test_what_a_tiers_code_raises_is_tried_again(settings: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    promote, failures = Admin.promote, iter([OSError("no library of ours"), TimeoutError("neither")])

    async def fails_at_first(self: Admin, step: int, tier: str) -> object:
        for failure in failures:
            raise failure
        return await promote(self, step, tier)

    monkeypatch.setattr(Admin, "promote", fails_at_first)
    with CheckpointStore.open(settings).sync() as store:
        store.save(1, tree(1))
        with pytest.raises(SystemExit) as ended, preemption(store, seconds=60):
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == EXIT_STATUS
        assert "disk" in store.where(1)
        with pytest.raises(Invalid):
            preemption(store, name="")


def test_a_training_that_closes_its_store_before_the_warning_ends_as_one_that_was_in_time(
    settings: StoreConfig,
) -> None:
    def train() -> None:
        with CheckpointStore.open(settings).sync() as store, preemption(store):
            store.save(1, tree(1))
            store.promote(1, "disk")
            store.close()
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == EXIT_STATUS
