"""What a save, a promotion and a restore cost, as ratios to what the machine can do, measured in the same run.

::

    python tests/benchmarks/measure.py --size 1GiB [--folder DIR] [--repeats 7] [--json]

The repetitions are interleaved: in each round the limit (memcpy, direct write, direct read) is measured next to
the operation, and the medians of the rounds are compared. ``DIR`` should lie on the device that matters.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt import CheckpointStore, StepInfo, SyncStore
from tieredckpt.blobs.ram import shared_memory_root
from tieredckpt.config import load
from tieredckpt.units import format_size, parse_size

Tree = dict[str, npt.NDArray[Any]]

_ARRAYS = 64
_BLOCK = 16 << 20
_TINY = 10_000


def state_of(nbytes: int) -> Tree:
    """A state of random float32 matrices, ``nbytes`` in all (rounded to whole rows)."""
    rng = np.random.default_rng(1)
    rows = max(1, nbytes // _ARRAYS // 4096)
    return {f"layer{i}": rng.random((rows, 1024), dtype=np.float32) for i in range(_ARRAYS)}


def change(state: Tree, keys: list[str] | None = None) -> None:
    """Give arrays new values, as a training step does."""
    for key in keys if keys is not None else state:
        state[key] += np.float32(1)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Limits:
    """What the machine can do with the same bytes."""

    def __init__(self, state: Tree, folder: Path, threads: int) -> None:
        self._state = state
        self.into = {key: np.zeros_like(array) for key, array in state.items()}
        self._pool = ThreadPoolExecutor(threads)
        self._file = folder / "limit"
        self._blocks = -(-sum(array.nbytes for array in state.values()) // _BLOCK)
        self._memory = mmap.mmap(-1, _BLOCK)
        np.frombuffer(self._memory, dtype=np.uint8)[:] = 1

    def memcpy(self) -> float:
        """Seconds to copy the state into warm memory, with the store's number of threads."""

        def copy(key: str) -> None:
            np.copyto(self.into[key], self._state[key])

        return seconds(lambda: list(self._pool.map(copy, self._state)))

    def write(self) -> float:
        """Seconds of a sequential write of as many bytes, fsync included; direct where the file system can."""
        fd = self._open(os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._file)

        def work() -> None:
            for block in range(self._blocks):
                os.pwrite(fd, self._memory, block * _BLOCK)
            os.fsync(fd)

        try:
            return seconds(work)
        finally:
            os.close(fd)

    def read(self, packs: list[Path]) -> float:
        """Seconds of a sequential read of as many bytes from the newest packs, direct where the file system can."""

        def work() -> None:
            left = self._blocks * _BLOCK
            for pack in sorted(packs, key=lambda path: -path.stat().st_mtime):
                fd = self._open(os.O_RDONLY, pack)
                try:
                    for start in range(0, min(left, pack.stat().st_size), _BLOCK):
                        left -= os.preadv(fd, [self._memory], start)
                finally:
                    os.close(fd)

        return seconds(work)

    @staticmethod
    def _open(flags: int, path: Path) -> int:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            return os.open(path, flags, 0o600)


def peak_reset() -> None:
    """Begin a new high-water mark of this process's resident memory; see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> int:
    """Bytes of ``VmRSS`` or ``VmHWM``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return 0


def packs_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("packs/*/*.pack"))


def measure(nbytes: int, folder: Path, repeats: int) -> dict[str, Any]:
    """All figures for a state of about ``nbytes``; ``folder`` is empty, and is not tidied."""
    state = state_of(nbytes)
    nbytes = sum(array.nbytes for array in state.values())
    config = load(
        {
            "store": {"name": f"bench-{os.getpid()}"},
            "tiers": {
                "ram": {"kind": "ram", "capacity": nbytes * 9 // 4 + (64 << 20), "retain": {"kind": "last_n", "n": 1}},
                "disk": {"kind": "posix", "path": str(folder / "store"), "retain": {"kind": "last_n", "n": 2}},
            },
        }
    )
    limits = Limits(state, folder, config.copy_threads)
    rounds: dict[str, list[float]] = {name: [] for name in _ROUNDS}
    with CheckpointStore.open(config).sync() as store:
        for step in range(2):  # the first saves fault the slab's pages in
            change(state)
            store.save(step, state).reached("disk")
        peak_reset()
        before = resident("VmRSS")
        for step in range(2, 2 + repeats):
            change(state)
            limits.memcpy()  # the first work after a wait for the device is slow, whatever it is
            rounds["memcpy"].append(limits.memcpy())
            begin = time.perf_counter()
            checkpoint = store.save(step, state)
            saved = time.perf_counter()
            checkpoint.reached("disk")
            rounds["save"].append(saved - begin)
            rounds["durable"].append(time.perf_counter() - saved)
            rounds["write"].append(limits.write())
        peak_save = resident("VmHWM") - before
        into = limits.into
        for _ in range(repeats):
            rounds["memcpy_back"].append(limits.memcpy())
            rounds["restore_ram"].append(seconds(lambda: store.restore(into=into)))
            rounds["views"].append(seconds(lambda: store.restore(copy=False)))
        _check(state, into)
        incremental = _tenth(store, state, folder / "store", 2 + repeats)
    disk_only = config.model_copy(update={"tiers": config.tiers[1:]})
    with CheckpointStore.open(disk_only).sync() as store:
        _, peak_restore = store.restore(into=into), 0
        peak_reset()
        before = resident("VmRSS")
        for _ in range(repeats):
            rounds["read"].append(limits.read(list((folder / "store").glob("packs/*/*.pack"))))
            rounds["restore_disk"].append(seconds(lambda: store.restore(into=into)))
        peak_restore = resident("VmHWM") - before
    _check(state, into)
    median = {name: statistics.median(values) for name, values in rounds.items()}
    return {
        "nbytes": nbytes,
        "seconds": median,
        "stall_over_memcpy": median["save"] / median["memcpy"],
        "promotion_speed_over_direct_write": median["write"] / median["durable"],
        "restore_ram_speed_over_memcpy": median["memcpy_back"] / median["restore_ram"],
        "restore_disk_speed_over_direct_read": median["read"] / median["restore_disk"],
        "restore_views_s": median["views"],
        "incremental_bytes_ratio": incremental,
        "peak_save_over_state": peak_save / nbytes,
        "peak_restore_bytes": peak_restore,
    }


_ROUNDS = ("memcpy", "save", "durable", "write", "memcpy_back", "restore_ram", "views", "read", "restore_disk")


def _check(state: Tree, restored: Tree) -> None:
    for key, array in state.items():
        if not np.array_equal(array, restored[key]):
            raise SystemExit(f"{key} was not restored as it was saved")


def _tenth(store: SyncStore, state: Tree, folder: Path, step: int) -> float:
    """Bytes of new packs after a tenth of the arrays changed, over those of the whole state."""
    store.flush()
    before = packs_size(folder)
    written: list[int] = []
    end = store.subscribe(lambda event: written.append(getattr(event, "written", 0)))
    change(state, sorted(state)[: _ARRAYS // 10])
    store.save(step, state).reached("disk")
    end()
    assert before > 0
    return max(written) / sum(array.nbytes for array in state.values())


def measure_tiny(folder: Path, repeats: int) -> dict[str, Any]:
    """Microseconds per leaf for many tiny arrays."""
    state: Tree = {f"leaf{i}": np.full(64, i, dtype=np.float32) for i in range(_TINY)}
    into = {key: np.zeros_like(array) for key, array in state.items()}
    saves, restores = [], []
    config = {"store": {"name": f"tiny-{os.getpid()}"}, "tiers": {"ram": {"kind": "ram"}}}
    with CheckpointStore.open(config).sync() as store:
        for step in range(repeats + 1):
            change(state)
            saves.append(seconds(lambda: store.save(step, state)))  # noqa: B023  # called at once
            restores.append(seconds(lambda: store.restore(into=into)))
        steps: tuple[StepInfo, ...] = store.steps()
    shutil.rmtree(shared_memory_root() / config["store"]["name"])  # RAM alone held it, so it was kept
    _check(state, into)
    assert steps
    return {
        "tiny_save_us": statistics.median(saves[1:]) / _TINY * 1e6,
        "tiny_restore_us": statistics.median(restores[1:]) / _TINY * 1e6,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="1GiB", type=parse_size, help="bytes of the state (1GiB)")
    parser.add_argument("--folder", default=None, help="where to write (a temporary folder)")
    parser.add_argument("--repeats", default=7, type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="tieredckpt-measure-", dir=options.folder))
    try:
        figures = measure(options.size, folder, options.repeats) | measure_tiny(folder, options.repeats)
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        print(f"state of {format_size(figures['nbytes'])}, medians of {options.repeats} rounds")
        for name, value in figures["seconds"].items():
            print(f"  {name:<14}{value:8.3f} s")
        for name, value in figures.items():
            if isinstance(value, float):
                print(f"{name:<38}{value:8.3f}")
        print(f"{'peak_restore':<38}{format_size(max(0, figures['peak_restore_bytes']))}")
    return figures


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
