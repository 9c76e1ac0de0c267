"""What many tests of whole stores share: configurations, trees, and what a store was heard to say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from tieredckpt import CheckpointStore, Restored, SyncRestored
from tieredckpt.blobs.ram.folder import SHARED_MEMORY_VARIABLE, is_store_folder
from tieredckpt.config import StoreConfig
from tieredckpt.events import Event, StepEvicted, StepPromoted, StepSaved

E = TypeVar("E", bound=Event)

CHUNK = 16 << 10
SOON = 60.0
"""Seconds after which what should have happened by itself counts as never happening."""


shared_folders: dict[Path, str] = {}
"""The test that made each `new_shared_folder`."""


def new_shared_folder() -> Path:
    """A new folder in the shared memory of this test run; its maker removes it."""
    folder = Path(tempfile.mkdtemp(dir=Path(os.environ[SHARED_MEMORY_VARIABLE]).parent))
    shared_folders[folder] = os.environ.get("PYTEST_CURRENT_TEST", "")
    return folder


def ram_in(root: Path) -> Path:
    """The RAM folder of the one store whose RAM is in a root; the root itself where there is none."""
    found = [path for path in root.glob("*") if is_store_folder(path.name)] if not is_store_folder(root.name) else []
    assert len(found) < 2, f"there is RAM of several stores: {found}"
    return found[0] if found else root


def ram(shared_memory: Path, **settings: Any) -> dict[str, Any]:
    """A RAM tier in a folder of the test."""
    return {"kind": "ram", "path": shared_memory / "of-test" / "ram", "capacity": "16 MiB"} | settings


def folder(path: Path, **settings: Any) -> dict[str, Any]:
    """A directory as a tier that fails at once when it fails."""
    return {"kind": "posix", "path": path, "retries": 0, "fsync": False, "direct": False} | settings


def config(tiers: Any, **settings: Any) -> StoreConfig:
    """A store over ``tiers`` with chunks small enough for small arrays to have several."""
    return StoreConfig(tiers=tiers, **({"chunk_size": CHUNK} | settings))


def tree(seed: int = 0, arrays: int = 4, nbytes: int = 3 * CHUNK) -> dict[str, Any]:
    """Random arrays of about ``nbytes`` each under ``params``, and a few leaves of other kinds."""
    rng = np.random.default_rng(seed)
    rows = nbytes // 256
    return {
        "params": {f"w{i}": rng.standard_normal((rows, 64)).astype(np.float32) for i in range(arrays)},
        "half": rng.standard_normal(40).astype(ml_dtypes.bfloat16),
        "count": np.array(seed, dtype=np.int64),
        "epoch": seed,
        "name": f"run {seed}",
    }


def assert_same(found: Any, expected: Any) -> None:
    """Both trees have the same keys and the same values, bit for bit."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


def assert_restored(found: Restored | SyncRestored | None, expected: Any) -> None:
    """There was a step to restore, and this tree in it, bit for bit."""
    assert found is not None
    assert_same(found.tree, expected)


async def save_steps(store: CheckpointStore, *steps: int, to: str | None = None) -> None:
    """Save the `tree` of each step, and wait until that tier has it; until all have what is due, if none is named."""
    for step in steps:
        checkpoint = await store.save(step, tree(step))
        await (store.flush() if to is None else checkpoint.reached(to))


async def steps_on(store: CheckpointStore, tier: str) -> list[int]:
    """The steps that a tier holds, oldest save first."""
    return [info.step for info in await store.steps() if tier in info.tiers]


class Heard:
    """The events of a store, in their order, and waiting for one."""

    def __init__(self, store: CheckpointStore) -> None:
        self.events: list[Event] = []
        self._loop = asyncio.get_running_loop()
        self._next = asyncio.Event()
        store.subscribe(self._hear)

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    def of(self, kind: type[E]) -> list[E]:
        """Those of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def first(self, kind: type[E], where: Callable[[E], bool] = lambda _: True) -> E:
        """The first event of the kind that there is, or the next to come; fails after `SOON` seconds."""
        async with asyncio.timeout(SOON):
            while True:
                coming = self._next
                for event in self.of(kind):
                    if where(event):
                        return event
                await coming.wait()


class Keeper:
    """Watches a store of RAM and tiers that survive the same: no step may leave one before a newer one is as safe."""

    def __init__(self, store: CheckpointStore, tiers: Sequence[str]) -> None:
        self._tiers = tiers
        self.held: dict[str, set[int]] = {}
        self.broken: list[str] = []
        store.subscribe(self._hear)

    def _hear(self, event: object) -> None:
        match event:
            case StepSaved(serial=serial, tier=tier) if tier is not None:
                self.held.setdefault(tier, set()).add(serial)
            case StepPromoted(serial=serial, tier=tier):
                self.held.setdefault(tier, set()).add(serial)
            case StepEvicted(serial=serial, tier=tier):
                self.held[tier].discard(serial)
                as_safe = [self.held.get(name, set()) for name in self._tiers[tier != "ram" :]]
                if not any(max(serials, default=0) >= serial for serials in as_safe):
                    self.broken.append(f"serial {serial} left {tier} before a newer one was as safe: {self.held}")


async def polled(happens: Callable[[], bool], *, within: float = SOON) -> None:
    """Return when something has happened that nobody tells; fails after so many seconds."""
    async with asyncio.timeout(within):
        while not happens():
            await asyncio.sleep(0.01)


async def crash(store: CheckpointStore) -> None:
    """End a store as the death of its process would: nothing more is saved, promoted or tidied up.

    Its locks are given up, since this process lives on.
    """
    await store.__aexit__(RuntimeError, RuntimeError("the process died"), None)


def leases(path: Path) -> list[str]:
    """The leases in the folder of a tier; beside one that is being renewed lies a temporary file."""
    return [name for name in os.listdir(path / "leases") if not name.endswith("~")]


async def taken_over(disk: Path, **settings: Any) -> None:
    """Another writer takes the one of a disk for dead, saves step 2 there, keeps only that, collects, and goes."""
    (mine,) = (disk / "leases").iterdir()
    mine.unlink()
    keeps_one = config({"disk": folder(disk, retain={"kind": "last_n", "n": 1})}, **settings)
    async with CheckpointStore.open(keeps_one) as other:
        await (await other.save(2, tree(2))).reached("disk")
        await other.flush()
        await other.collect()
        assert [info.step for info in await other.steps()] == [2]


def files_below(path: Path) -> list[Path]:
    """Every file below a folder. A store may delete files and folders meanwhile, which ``Path.rglob`` does not bear."""
    return [Path(folder, name) for folder, _, names in os.walk(path) for name in names]


def files_under(path: Path) -> dict[str, int]:
    """Relative name and size of every file below a folder, leases apart; a store may be deleting some meanwhile."""
    sizes = {}
    for file in files_below(path):
        with contextlib.suppress(FileNotFoundError):
            if "leases" not in file.parts:
                sizes[file.relative_to(path).as_posix()] = file.stat().st_size
    return sizes


def pack_bytes(path: Path) -> int:
    """Bytes of all packs of a tier."""
    return sum(size for name, size in files_under(path).items() if name.startswith("packs/"))
