"""What saves and restores of device memory cost: stall, overlap with training, and restore, beside the peers.

What works on a device is behind `Training` and `DevicePeer`, so that this module needs none; `peers.gpu` has those of
torch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from tieredckpt.bench.limits import Limits
from tieredckpt.bench.report import Aim
from tieredckpt.config import load
from tieredckpt.errors import DeviceUnavailable
from tieredckpt.store import CheckpointStore
from tieredckpt.units import format_duration

__all__ = ["AIMS", "Bounds", "DevicePeer", "GpuReport", "GpuRow", "Training", "measure", "no_device", "write_rate"]

AIMS = (
    Aim("gpu_stall_over_copy", "stall of a save, over a copy of the state from the device", 1.1),
    Aim("gpu_lazy_step_over_step", "lazy: a training step with a save beside it, over one without", 1.01),
    Aim("gpu_lazy_waited_s", "lazy: what the trainer waits in that step", 0.050, "s"),
    Aim("gpu_restore_over_copy", "restore from RAM into the state, over a copy to the device", 1.1),
)

_WARM_UP = 30.0
"""Seconds at most before any round is measured: memory is taken and registered behind the first saves."""
_WAYS = ("copy", "lazy")
_SAVES = 2
"""Of a round: one by itself, one beside a training step."""
_LARGEST = 8 << 30
_SAMPLE = 256 << 20
"""Bytes that `write_rate` writes."""


class Training(Protocol):
    """A training whose state lies on a device. `forward` and `change` only enqueue."""

    device: str
    """For people."""
    nbytes: int
    """Of the state."""

    def state(self) -> dict[str, Any]:
        """The arrays themselves, not copies."""

    def forward(self) -> None:
        """All of a step that does not change the state."""

    def change(self) -> None:
        """The step of the optimizer."""

    def synchronize(self) -> None:
        """Return when all that was enqueued is done."""

    def copies(self) -> tuple[float, float]:
        """Seconds of a copy of ``nbytes`` from the device to page-locked memory, and of one back."""


class DevicePeer(Protocol):
    """Another way to save the state."""

    name: str

    def save(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write a new file or folder. Return when it says so."""

    def captured(self) -> None:
        """Return when the state may be changed."""

    def durable(self) -> None:
        """Return when the save is complete."""

    def close(self) -> None:
        """End what runs in the background."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """Medians of one way to save, in seconds; None for what it does not do."""

    name: str
    stall_s: float
    """The trainer waits for `save` and until it may change the state, one after the other."""
    durable_s: float
    """From the call until the save is complete."""
    step_s: float
    """A training step with a save beside it."""
    waited_s: float
    """What the trainer waits in that step."""
    restore_s: float | None = None
    """From memory, into the state."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a run may take."""

    seconds: float
    """In all, about: each way to save gets an equal share, but at least one round of two saves."""
    repeats: int
    """Rounds that are measured of each way at most."""
    write_rate: float
    """Bytes a second that the folder takes."""
    peers: int

    @property
    def share(self) -> float:
        """Seconds of one way."""
        return self.seconds / (len(_WAYS) + self.peers)

    @property
    def warm_up(self) -> float:
        """Seconds of it before a round is measured."""
        return min(_WARM_UP, self.share / 3)

    def estimate(self, nbytes: int) -> float:
        """Seconds that one way takes with a state of ``nbytes``, as far as writing it takes most of them."""
        return min(self.share, self.warm_up + self.repeats * _SAVES * nbytes / self.write_rate)

    def largest(self, device: int, host: int, disk: int) -> int:
        """Bytes of a state that fits into the memory that is free, and of which a share has time for two rounds.

        The training has gradients beside its state; the host has two snapshots, and a peer a copy and what it
        serializes; the disk has three steps.
        """
        in_time = self.share / (2 * _SAVES) * self.write_rate
        return min(_LARGEST, device // 2, host // 5, disk // 4, int(in_time))


def write_rate(folder: Path) -> float:
    """Bytes a second of a direct sequential write."""
    limits = Limits({"sample": np.ones(_SAMPLE, np.uint8)}, folder, threads=1)
    try:
        return _SAMPLE / limits.write()
    finally:
        limits.close()


@dataclass(frozen=True, slots=True)
class GpuReport:
    """Figures of one run on one device."""

    device: str
    nbytes: int
    step_s: float
    """A training step without a save."""
    copy_out_s: float
    copy_in_s: float
    rows: Sequence[GpuRow]
    failed: Mapping[str, str]
    """Why a peer has no row."""

    @property
    def ratios(self) -> dict[str, float]:
        """The figures of `AIMS`, by their keys."""
        ours = {row.name: row for row in self.rows}
        lazy, copy = ours["tieredckpt, lazy"], ours["tieredckpt, copy"]
        assert copy.restore_s is not None, "it was measured"
        return {
            "gpu_stall_over_copy": copy.stall_s / self.copy_out_s,
            "gpu_lazy_step_over_step": lazy.step_s / self.step_s,
            "gpu_lazy_waited_s": lazy.waited_s,
            "gpu_restore_over_copy": copy.restore_s / self.copy_in_s,
        }


def measure(
    training: Training,
    folder: Path,
    peers: Sequence[type[DevicePeer]],
    bounds: Bounds,
    progress: Callable[[str], None],
) -> GpuReport:
    """Measure this library's ways to save, then each peer; ``folder`` is where they write."""
    estimate = format_duration(bounds.estimate(training.nbytes))
    progress("copies and training steps")
    out_s, in_s = training.copies()
    step_s = median(_timed(training, lambda: None, lambda: None)[0] for _ in range(bounds.repeats))
    rows = []
    failed: dict[str, str] = {}
    for way in _WAYS:
        progress(f"tieredckpt, {way}, about {estimate}")
        with _room(folder / way) as room:
            rows.append(_ours(training, room, way, _Rounds(bounds)))
    for kind in peers:
        progress(f"{kind.name}, about {estimate}")
        try:
            with _room(folder / kind.name) as room, closing(kind()) as peer:
                rows.append(_peer(training, room, peer, _Rounds(bounds)))
        except Exception as error:  # a peer's, which costs the others nothing
            failed[kind.name] = f"{type(error).__name__}: {error}"
    return GpuReport(training.device, training.nbytes, step_s, out_s, in_s, rows, failed)


@contextmanager
def _room(folder: Path) -> Iterator[Path]:
    """A new folder, for the length of the block: the device holds the steps of one way at a time."""
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class _Rounds:
    """The rounds of one way, which begins now: the first ones, and those that count, as far as its time goes."""

    def __init__(self, bounds: Bounds) -> None:
        self._begin, self._bounds = time.monotonic(), bounds

    def first(self) -> Iterator[None]:
        return self._until(self._begin + self._bounds.warm_up)

    def measured(self) -> Iterator[None]:
        return islice(self._until(self._begin + self._bounds.share), self._bounds.repeats)

    @staticmethod
    def _until(end: float) -> Iterator[None]:
        """At least one, and no other that would end after ``end`` if it took as long as those before."""
        begin = time.monotonic()
        for done in count(1):
            yield
            now = time.monotonic()
            if now + (now - begin) / done > end:
                return


def _timed(training: Training, save: Callable[[], None], captured: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a step with a save beside it, and what of them the trainer waits for the save."""
    training.synchronize()
    begin = time.perf_counter()
    save()
    saved = time.perf_counter()
    training.forward()
    before = time.perf_counter()
    captured()
    after = time.perf_counter()
    training.change()
    training.synchronize()
    return time.perf_counter() - begin, saved - begin + after - before


def _stall(training: Training, save: Callable[[], None], captured: Callable[[], None]) -> float:
    training.synchronize()
    begin = time.perf_counter()
    save()
    captured()
    return time.perf_counter() - begin


def _ours(training: Training, folder: Path, way: Any, rounds: _Rounds) -> GpuRow:
    state = training.state()
    stalls, durables, steps, waits, restores = found = [list[float]() for _ in range(5)]
    tiers = {
        "ram": {"kind": "ram", "retain": {"kind": "last_n", "n": 1}},
        "disk": {"kind": "posix", "path": folder, "retain": {"kind": "last_n", "n": 2}},
    }
    with CheckpointStore.open(load({"tiers": tiers})).sync() as store:
        store.prepare(state)
        number = 0
        checkpoint: Any = None

        def save() -> None:
            nonlocal number, checkpoint
            number += 1
            checkpoint = store.save(number, state, capture=way)

        def captured() -> None:
            checkpoint.captured()

        for _ in rounds.first():
            _timed(training, save, captured)
            store.flush()
        for _ in rounds.measured():
            begin = time.perf_counter()
            stalls.append(_stall(training, save, captured))
            checkpoint.reached("disk")
            durables.append(time.perf_counter() - begin)
            step, waited = _timed(training, save, captured)
            steps.append(step)
            waits.append(waited)
            store.flush()
            training.synchronize()
            begin = time.perf_counter()
            store.restore(into=state, resume=False)
            restores.append(time.perf_counter() - begin)
            _timed(training, lambda: None, lambda: None)  # or the next save would find every chunk on the disk
    return GpuRow(f"tieredckpt, {way}", *map(median, found))


def _peer(training: Training, folder: Path, peer: DevicePeer, rounds: _Rounds) -> GpuRow:
    state = training.state()
    number = 0

    def save() -> None:
        nonlocal number
        number += 1
        peer.save(folder / str(number), state)

    def forget_before() -> None:
        before = folder / str(number - 1)
        if before.is_dir():
            shutil.rmtree(before)
        else:
            before.unlink(missing_ok=True)

    def figures() -> tuple[float, float, float, float]:
        begin = time.perf_counter()
        stall = _stall(training, save, peer.captured)
        peer.durable()
        took = time.perf_counter() - begin
        forget_before()
        step, waited = _timed(training, save, peer.captured)
        peer.durable()
        forget_before()
        return stall, took, step, waited

    for _ in rounds.first():
        figures()
    found = [figures() for _ in rounds.measured()]
    return GpuRow(peer.name, *map(median, zip(*found, strict=True)))


def no_device(why: str) -> DeviceUnavailable:
    """What is raised where there is nothing to measure."""
    return DeviceUnavailable(f"there is no CUDA device to measure: {why}. `tieredckpt doctor` tells more")
