"""What trainers hand over besides arrays and scalars comes back through a real store, in every way to ask for it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from support.objects import TREES, TREES_OF_CLASSES, Colour, bits_of
from support.scenes import config, crash, folder, ram

from tieredckpt import AS_SAVED, CheckpointStore
from tieredckpt.config import StoreConfig


@pytest.fixture
def two_tiers(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    return config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}, chunk_size=4096)


def test_any_tree_of_objects_comes_back(two_tiers: StoreConfig) -> None:
    step = 0
    with CheckpointStore.open(two_tiers).sync() as store:

        @settings(max_examples=40, deadline=None)
        @given(tree=TREES, classes=TREES_OF_CLASSES)
        def hold(tree: Any, classes: Any) -> None:
            nonlocal step
            step += 2
            store.save(step - 1, tree)
            found = store.restore(as_="saved")
            assert found is not None
            assert bits_of(found.tree) == bits_of(tree)
            store.save(step, classes)
            found = store.restore(like=classes)
            assert found is not None
            assert bits_of(found.tree) == bits_of(classes)

        hold()


def test_objects_come_back_in_another_process_and_are_described(two_tiers: StoreConfig) -> None:
    tree = {"colour": Colour.RED, "seen": {"a", (1, None)}, "last": deque([np.ones(9)], 5), "n": Counter({None: 2})}

    async def save_and_end() -> None:
        store = await CheckpointStore.open(two_tiers)
        await (await store.save(1, tree)).reached("disk")
        await crash(store)

    asyncio.run(save_and_end())
    with CheckpointStore.open(two_tiers, read_only=True).sync() as store:
        found = store.restore(like=tree)
        assert found is not None
        assert bits_of(found.tree) == bits_of(tree)
        details = store.describe(1)
        assert dict(details.scalars) == {"colour": 'enum(["RED",1])', "seen": 'set(["a",[1,null]])', "n/=null": 2}
        assert [array.key for array in details.arrays] == ["last/0"]


@pytest.mark.parametrize("how", ["like", "into"])
def test_a_part_that_is_left_open_comes_back_as_it_was_saved(two_tiers: StoreConfig, how: str) -> None:
    weights = np.arange(5000.0)
    rest = {"seen": deque([np.arange(9000), np.float32(1)]), "rng": {1: b"x", "1": None}, "colour": Colour.RED}
    with CheckpointStore.open(two_tiers).sync() as store:
        store.save(1, {"weights": weights, "rest": rest})
        empty = np.zeros(5000)
        found = store.restore(**{how: {"weights": empty, "rest": AS_SAVED}})
        assert found is not None
        assert bits_of(found.tree) == bits_of({"weights": weights, "rest": rest | {"colour": 1}})
        assert (found.tree["weights"] is empty or np.shares_memory(found.tree["weights"], empty)) == (how == "into")
        whole = store.restore(**{how: AS_SAVED})
        assert whole is not None
        assert bits_of(whole.tree) == bits_of(found.tree)
        views = store.restore(like={"weights": empty, "rest": AS_SAVED}, copy=False)
        assert views is not None
        assert bits_of(views.tree) == bits_of(found.tree)
