"""Nothing blocks an event loop: not the trainer's, and not the engine's, which promotes while the trainer computes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blockbuster
import numpy as np
import pytest
from blockbuster import blockbuster as detector
from reliability.tiers import FaultyTiers
from support.scenes import SOON, Heard, assert_restored, config, folder, ram, steps_on, tree

from tieredckpt import CheckpointStore, _life, checkpoint, store
from tieredckpt.engine import loop
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.promoting import pack_writer
from tieredckpt.engine.restoring import reader
from tieredckpt.engine.saving import cells
from tieredckpt.engine.tier import chunk_reader, commit_file, step_index
from tieredckpt.events import StepPromoted, TierFailed

SYSTEM_CALLS = (
    "fdatasync",
    "fsync",
    "makedirs",
    "open",
    "posix_fallocate",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
)
"""Of `os`, beside those that blockbuster knows."""

HEAVY = (
    (commit_file, "encode_step"),
    (pack_writer, "seal"),
    (reader, "deliver"),
    (cells, "copy_and_digest"),
    (chunk_reader, "digest_array"),
    (step_index, "decode_step"),
)
"""Work that grows with the tree."""


OURS = (loop, store, checkpoint, _life)
"""One of them is on the stack of whatever the library does on a loop: the engine's own, and the public faces. Imported
here, for the first opening of a process imports what a store needs."""


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where the library blocked a running event loop, even if its error was swallowed."""
    found: list[str] = []

    class Seen(blockbuster.BlockingError):
        def __init__(self, function: str) -> None:
            super().__init__(function)
            where = [line for line in traceback.format_stack() if "/tieredckpt/" in line]
            found.append(f"{function} on the loop of {threading.current_thread().name}:\n{''.join(where[-3:])}")

    monkeypatch.setattr(detector, "BlockingError", Seen)
    with blockbuster.blockbuster_ctx(OURS) as guard:
        more = [blockbuster.BlockBusterFunction(None, f"os.{name}", scanned_modules=OURS) for name in SYSTEM_CALLS]
        more += [blockbuster.BlockBusterFunction(owner, name, scanned_modules=OURS) for owner, name in HEAVY]
        for stream in ("io.TextIOWrapper.write", "io.BufferedWriter.write"):
            guard.functions[stream].can_block_in("logging/__init__.py", "emit")  # as its user set it up
        # Names in shared memory, which is no device: looked up and removed as fast as anything else is.
        guard.functions["os.stat"].can_block_in("tieredckpt/blobs/ram/store.py", "share")
        for function in more:
            # A name is opened in shared memory, which is no device.
            function.can_block_in("tieredckpt/blobs/ram/store.py", "share").activate()
        try:
            assert all(function.activated for function in (guard.functions["time.sleep"], *more))
            yield found
        finally:
            for function in more:
                function.deactivate()


@pytest.fixture(params=["posix", "kvstore"])
def slow(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A durable tier of each kind, with all that makes it slow."""
    if request.param == "posix":
        return folder(tmp_path / "slow", fsync=True, direct=None)
    return {"kind": "kvstore", "spec": {"driver": "file", "path": f"{tmp_path / 'slow'}/"}, "retries": 0}


async def live(store: CheckpointStore) -> None:
    """All that a trainer and those who look after it do with a store."""
    for step in (1, 2, 3):
        assert store.due(step)
        checkpoint = await store.save(step, tree(step), metrics={"loss": 1.0})
        await checkpoint.reached("slow")
    await store.flush()
    for options in ({}, {"like": tree()}, {"into": tree()}, {"copy": False}, {"step": 1, "resume": False}):
        restored = await store.restore(**options)
        assert_restored(restored, tree(restored.step))
        await restored.verified()
    assert [found.problem for found in await store.verify()] == ["", ""]
    assert [found.problem for found in await store.verify(2, "slow", repair=True)] == [""]
    await store.evict(3, "ram")
    await store.evict(1, "slow")
    assert await steps_on(store, "slow") == [2, 3]
    assert await store.where() == ("slow",)
    await store.describe()
    await store.spec(3, "params/w0")
    await store.tier_infos()
    await store.collect()


@pytest.mark.parametrize("promote_in", ["trainer", "agent"])
async def test_no_call_blocks_the_trainers_loop_or_the_engines(
    shared_memory: Path, slow: dict[str, Any], blocked: list[str], promote_in: str
) -> None:
    settings = config({"ram": ram(shared_memory), "slow": slow}, grace="2 s", lease_ttl="0.1 s", promote_in=promote_in)
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        await live(store)
    async with CheckpointStore.open(settings) as store, CheckpointStore.open(settings, read_only=True) as beside:
        for one in (store, beside):
            assert_restored(await one.restore(), tree(3))
    assert not blocked, "\n".join(blocked)
    assert not heard.of(TierFailed)


async def test_memory_that_outlives_the_store_is_taken_up_without_blocking(
    shared_memory: Path, slow: dict[str, Any], blocked: list[str]
) -> None:
    settings = config({"ram": ram(shared_memory, on_close="keep"), "slow": slow})
    for step in (1, 2):
        async with CheckpointStore.open(settings) as store:
            await store.save(step, tree(step))
    async with CheckpointStore.open(settings) as store:
        assert await store.where(2) == ("ram", "slow")
    assert not blocked, "\n".join(blocked)


async def test_a_state_that_streams_through_a_small_slab_blocks_nobody(
    shared_memory: Path, slow: dict[str, Any], blocked: list[str]
) -> None:
    async with CheckpointStore.open(config({"ram": ram(shared_memory, capacity="96 KiB"), "slow": slow})) as store:
        for step in (1, 2):
            await store.save(step, tree(step))
        assert await store.where(2) == ("slow",)
    assert not blocked, "\n".join(blocked)


async def test_a_tier_that_fails_and_comes_back_blocks_nobody(
    shared_memory: Path, slow: dict[str, Any], faults: FaultyTiers, blocked: list[str]
) -> None:
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "slow": slow})) as store:
        heard = Heard(store)
        faults["slow"].kill()
        await store.save(1, tree(1))
        await heard.first(TierFailed)
        faults["slow"].revive()
        await heard.first(StepPromoted)
    assert not blocked, "\n".join(blocked)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("time.sleep", lambda: time.sleep(0)),
        ("os.pread", lambda: os.pread(0, 0, 0)),
        ("copy_and_digest", lambda: cells.copy_and_digest(np.zeros(8, np.uint8), np.zeros(8, np.uint8))),
    ],
)
async def test_what_blocks_the_engines_loop_is_seen(blocked: list[str], name: str, block: Callable[[], object]) -> None:
    """Or the tests above would hold for anything."""

    async def work() -> None:
        block()

    engine = EngineLoop("engine under test")
    try:
        with pytest.raises(blockbuster.BlockingError):
            await engine.call(work())
    finally:
        await asyncio.to_thread(engine.stop)
    assert [name in found and "engine under test" in found for found in blocked] == [True]


async def test_what_blocks_the_trainers_loop_is_seen(
    tmp_path: Path, blocked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk")})) as opened:
        monkeypatch.setattr(_life, "checked_step", lambda step: time.sleep(0) or step)
        with pytest.raises(blockbuster.BlockingError):
            await opened.save(1, tree())
    assert [f"time.sleep on the loop of {threading.current_thread().name}" in found for found in blocked] == [True]


async def test_steps_are_promoted_while_the_trainer_computes_and_never_yields(
    shared_memory: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(disk)})) as store:
        for step in range(1, 6):
            await store.save(step, tree(step))
            _compute_until_there_is(disk, f"steps/{step:010d}-*/manifest.ocdbt")
        await store.flush()  # the file of a commit is seen before its writer has heard that it is there
        assert [found.problem for found in await store.verify(5)] == ["", ""]


def test_steps_are_promoted_while_a_trainer_without_a_loop_computes(shared_memory: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(disk)})).sync() as store:
        for step in range(1, 6):
            store.save(step, tree(step))
            _compute_until_there_is(disk, f"steps/{step:010d}-*/manifest.ocdbt")


def _compute_until_there_is(root: Path, pattern: str) -> None:
    weights = np.eye(64)
    deadline = time.monotonic() + SOON
    while not list(root.glob(pattern)):
        assert time.monotonic() < deadline, f"{pattern} did not come while the trainer computed"
        for _ in range(100):
            weights = weights @ weights.T
