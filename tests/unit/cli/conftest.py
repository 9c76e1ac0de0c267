"""A small store over RAM and two folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tieredckpt import CheckpointStore, SyncStore
from tieredckpt.config import load, to_toml


def tree(seed: int) -> dict[str, Any]:
    """Arrays of several chunks and of less than one, and scalars."""
    random = np.random.default_rng(seed)
    return {
        "params": {"w": random.standard_normal((100, 64)).astype(np.float32), "b": np.full(5, seed)},
        "epoch": seed,
        "note": "first\nsecond",
    }


@pytest.fixture
def config(tmp_path: Path, shared_memory: Path) -> Path:
    """The configuration of a store that was not opened yet; RAM stays when it is closed."""
    path = tmp_path / "ckpt.toml"
    (shared_memory / "of-test").mkdir()
    folder = {"fsync": False, "retain": "all"}
    tiers = {
        "ram": {
            "kind": "ram",
            "path": str(shared_memory / "of-test" / "ram"),
            "capacity": "4 MiB",
            "on_close": "keep",
        },
        "disk": {"kind": "posix", "path": str(tmp_path / "disk"), **folder},
        "archive": {"kind": "posix", "path": str(tmp_path / "archive"), "promote": "never", **folder},
    }
    path.write_text(to_toml(load({"store": {"chunk_size": "8 KiB"}, "tiers": tiers})))
    return path


@pytest.fixture
def trained(config: Path) -> Path:
    """A store with the steps 1, 2 and 3 in RAM and on disk, and no writer."""
    with CheckpointStore.open(config).sync() as store:
        for step in (1, 2, 3):
            store.save(step, tree(step), metrics={"loss": 1 / step})
        store.flush()
    return config


@pytest.fixture
def training(config: Path) -> Iterator[SyncStore]:
    """A trainer's store, open, with step 1 in RAM and on disk."""
    with CheckpointStore.open(config).sync() as store:
        store.save(1, tree(1), metrics={"loss": float("nan")})
        store.flush()
        yield store
