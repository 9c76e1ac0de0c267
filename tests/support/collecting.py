"""What tests of collection share: states with chunks in common, a place where time passes, and what is needed there."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.scenes import CHUNK, assert_restored, config, files_below, ram
from tieredckpt import CheckpointStore
from tieredckpt.engine.keeping import collector
from tieredckpt.engine.tier import steps
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.format import layout, ocdbt
from tieredckpt.format.manifest import decode_step

GRACE = 3600.0
ARRAYS = 10


def state(**seeds: int) -> dict[str, Any]:
    """Ten arrays of a chunk each, and one in the index; those that are named differ by their seeds."""
    arrays = {f"w{i}": seeds.get(f"w{i}", i) for i in range(ARRAYS)}
    found = {key: np.random.default_rng(seed).integers(0, 255, CHUNK, dtype=np.uint8) for key, seed in arrays.items()}
    return found | {"small": np.arange(7.0), "seeds": sorted(arrays.values())}


def changed(seed: int, *, keeps: int = 0) -> dict[str, Any]:
    """A state of which the first ``keeps`` arrays are as ever."""
    return state(**{f"w{i}": 100 * seed + i for i in range(keeps, ARRAYS)})


def referenced(root: Path) -> set[str]:
    """Every file that a committed step of a tier needs, read from the files themselves."""
    needed = {layout.MARKER}
    for manifest in root.glob("steps/*/manifest.ocdbt"):
        data = manifest.read_bytes()
        btree = ocdbt.read_root(data).path
        index = decode_step(data, (root / btree).read_bytes(), btree)
        needed |= {manifest.relative_to(root).as_posix(), btree}
        needed |= {extent.path for extent in unique_extents(index.arrays).values()}
    return needed


class Place:
    """The folders of a test, and the passing of time over what lies there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.disk = root / "of-test" / "disk"
        self.far = root / "of-test" / "far"
        self.late = 0.0
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + self.late)
        passed = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + self.late)
        for module in (collector, steps):
            monkeypatch.setattr(module, "time", passed)

    def let_the_grace_pass(self) -> None:
        """Two hours pass, for the collector and for every file but leases, which are renewed."""
        self.late += 2 * GRACE
        for path in (path for path in files_below(self.root) if path.parent.name != "leases"):
            with suppress(FileNotFoundError):
                then = path.stat().st_mtime - 2 * GRACE
                os.utime(path, (then, then))


def opened(place: Place, disk: dict[str, Any], **more: Any) -> CheckpointStore:
    return CheckpointStore.open(config({"ram": ram(place.root), "disk": disk, **more}, grace=GRACE))


async def assert_restores(store: CheckpointStore, step: int, tree: Any) -> None:
    assert_restored(await store.restore(step, resume=False), tree)


async def two_steps(store: CheckpointStore) -> dict[int, Any]:
    trees = {1: state(), 2: changed(2, keeps=1)}
    for step, tree in trees.items():
        await (await store.save(step, tree)).reached("disk")
    await store.flush()
    return trees


async def two_steps_apart(store: CheckpointStore) -> dict[int, Any]:
    trees = {1: state(), 2: changed(2)}
    for step, tree in trees.items():
        await (await store.save(step, tree)).reached("disk")
    await store.flush()
    return trees


async def a_sparse_pack(store: CheckpointStore) -> dict[int, Any]:
    trees = await two_steps(store)
    await store.evict(1, "disk")
    return {2: trees[2]}
