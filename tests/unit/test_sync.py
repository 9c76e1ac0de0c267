"""The blocking face: what the async one promises, without an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.insight import flip_chunk
from support.scenes import CHUNK, assert_same

from tieredckpt import CheckpointStore, Closed, Corrupt, Invalid, SyncStore
from tieredckpt.config import StoreConfig


@pytest.fixture
def tree() -> dict[str, Any]:
    return {"w": np.arange(2 * CHUNK, dtype=np.uint8), "epoch": 3}


IN_OTHER_FORM = {"open", "open_sync", "sync"}
"""What a store without an event loop is made by."""


def public(face: type) -> dict[str, Any]:
    members = {name: member for name, member in vars(face).items() if not name.startswith("_")}
    return {name: member for name, member in members.items() if name not in IN_OTHER_FORM}


def both_faces() -> Iterator[tuple[Any, ...]]:
    for name, member in public(CheckpointStore).items():
        blocking = vars(SyncStore)[name]
        yield name, *(each.fget if isinstance(each, property) else each for each in (member, blocking))


def test_the_blocking_face_has_the_same_methods() -> None:
    assert list(public(SyncStore)) == list(public(CheckpointStore))


@pytest.mark.parametrize(
    ("name", "awaited", "blocking"), list(both_faces()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_blocking_face_has_the_same_arguments_results_and_docstrings(
    name: str, awaited: Any, blocking: Any
) -> None:
    one, other = inspect.signature(awaited), inspect.signature(blocking)
    assert list(one.parameters.values()) == list(other.parameters.values())  # names, kinds, defaults, annotations
    result = {"Checkpoint": "SyncCheckpoint", "Restored | None": "SyncRestored | None"}
    assert result.get(one.return_annotation, one.return_annotation) == other.return_annotation
    assert awaited.__doc__
    assert awaited.__doc__ == blocking.__doc__
    assert not inspect.iscoroutinefunction(blocking)


def test_both_ways_to_open_take_the_same_arguments() -> None:
    one, other = (inspect.signature(each) for each in (CheckpointStore.open, CheckpointStore.open_sync))
    assert one.parameters == other.parameters


def test_a_store_is_opened_and_closed_without_a_with_block(tiers: StoreConfig, tree: dict[str, Any]) -> None:
    store = CheckpointStore.open_sync(tiers)
    store.save(1, tree)
    store.close()
    with pytest.raises(Closed):
        store.steps()
    with pytest.raises(Invalid, match="opened before"):
        store.__enter__()
    with CheckpointStore.open_sync(tiers) as store:
        assert store.latest_step() == 1
        with pytest.raises(Invalid, match="opened before"):
            store.__enter__()
    with pytest.raises(Closed):
        store.steps()


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
    with pytest.raises(
        Closed, match=r"not open yet: .* a blocking one opens with `with`, or as CheckpointStore\.open_sync"
    ):
        store.steps()
