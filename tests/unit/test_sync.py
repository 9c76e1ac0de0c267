"""The blocking face: what the async one promises, without an event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.insight import flip_chunk
from support.scenes import CHUNK, assert_same, config, folder, ram

from tieredckpt import CheckpointStore, Closed, Corrupt
from tieredckpt.config import StoreConfig


@pytest.fixture
def tiers(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    return config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})


@pytest.fixture
def tree() -> dict[str, Any]:
    return {"w": np.arange(2 * CHUNK, dtype=np.uint8), "epoch": 3}


def test_a_training_without_an_event_loop_saves_and_restores(tiers: StoreConfig, tree: dict[str, Any]) -> None:
    with CheckpointStore.open(tiers).sync() as store:
        assert store.restore() is None
        checkpoint = store.save(1, tree, metrics={"loss": 0.5})
        checkpoint.reached("disk")
        assert checkpoint.saved is not None
        assert checkpoint.saved.nbytes == 2 * CHUNK
        assert store.config == tiers
    with CheckpointStore.open(tiers).sync() as store:
        restored = store.restore(like=tree)
    assert restored is not None
    assert (restored.step, restored.metrics) == (1, {"loss": 0.5})
    assert_same(restored.tree, tree)


def test_views_are_verified_when_asked(tiers: StoreConfig, tree: dict[str, Any]) -> None:
    with CheckpointStore.open(tiers).sync() as store:
        store.save(1, tree).reached("disk")
        whole = store.restore(copy=False)
        assert whole is not None
        whole.verified()
        asyncio.run(flip_chunk(store._store, "ram", 1, "w"))
        damaged = store.restore(copy=False)
        assert damaged is not None
        with pytest.raises(Corrupt, match="'w'"):
            damaged.verified()
        store.flush()
        del whole, damaged


def test_a_call_before_opening_says_so(tiers: StoreConfig) -> None:
    store = CheckpointStore.open(tiers).sync()
    with pytest.raises(Closed, match="not open yet"):
        store.steps()
