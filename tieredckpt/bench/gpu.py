"""The cost of saves and restores of device memory: stall, overlap with training, and restore, beside the peers.

`Training` and `DevicePeer` hide the device, so that this module needs none; `peers.gpu` implements them for torch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from tieredckpt.bench.gpu_bounds import HIDES, WAYS, Bounds, Rounds
from tieredckpt.bench.report import Aim
from tieredckpt.config import load
from tieredckpt.errors import DeviceUnavailable
from tieredckpt.store import CheckpointStore
from tieredckpt.units import format_duration

__all__ = ["AIMS", "DevicePeer", "GpuReport", "GpuRow", "Training", "measure", "no_device"]

AIMS = (
    Aim("gpu_stall_over_copy", "stall of a save, over a copy of the state from the device", 1.1),
    Aim("gpu_lazy_step_over_step", "lazy: a training step with a save beside it, over one without", 1.01),
    Aim("gpu_lazy_waited_s", "lazy: what the trainer waits in that step", 0.050, "s"),
    Aim("gpu_restore_over_copy", "restore from RAM into the state, over a copy to the device", 1.1),
)

_SLAB = 64 << 20
"""Least bytes of a slab."""
_TRIES = 3
"""Steps whose median gives the duration of a step."""


class Training(Protocol):
    """A training whose state lies on a device. `forward` and `change` only enqueue, as far as the device takes it."""

    device: str
    """For people."""
    nbytes: int
    """Of the state."""
    passes: int
    """Forward and backward passes of a step, whose gradients add up. `measure` sets it."""

    def state(self) -> dict[str, Any]:
        """The arrays themselves, not copies."""

    def forward(self) -> None:
        """Run the ``passes`` of a step, the part that does not change the state."""

    def change(self) -> None:
        """Run the step of the optimizer."""

    def synchronize(self) -> None:
        """Wait for all work that the training enqueued, whatever else the device still does."""

    def copies(self) -> tuple[float, float]:
        """Seconds of a copy of ``nbytes`` from the device to page-locked memory, and of one back."""


class DevicePeer(Protocol):
    """Another way to save the state."""

    name: str

    def save(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write a new file or folder, and return when the peer does."""

    def captured(self) -> None:
        """Wait until the state may be changed."""

    def durable(self) -> None:
        """Wait until the save is complete."""

    def close(self) -> None:
        """End the background work."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """Medians of one way to save, in seconds; None for what the way does not do."""

    name: str
    stall_s: float
    """The trainer waits for `save`, and then until it may change the state."""
    durable_s: float
    """From the call until the save is complete."""
    step_s: float
    """A training step with a save beside it."""
    waited_s: float
    """Time that the trainer waits in that step, beyond the forward and backward pass."""
    plain_s: float
    """A training step without a save, measured in turns with those."""
    restore_s: float | None = None
    """From memory, into the state."""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """Figures of one run on one device."""

    device: str
    nbytes: int
    passes: int
    """Forward and backward passes of a step."""
    forward_s: float
    """Seconds of these passes together, which can hide a copy."""
    copy_out_s: float
    copy_in_s: float
    rows: Sequence[GpuRow]
    failed: Mapping[str, str]
    """Why a way, or a peer, has no row."""

    @property
    def ratios(self) -> dict[str, float]:
        """The figures of `AIMS`, by their keys, of what did not fail."""
        ours = {row.name: row for row in self.rows}
        found = {}
        if (copy := ours.get("tieredckpt, copy")) is not None:
            assert copy.restore_s is not None, "it was measured"
            found["gpu_stall_over_copy"] = copy.stall_s / self.copy_out_s
            found["gpu_restore_over_copy"] = copy.restore_s / self.copy_in_s
        if (lazy := ours.get("tieredckpt, lazy")) is not None:
            found["gpu_lazy_step_over_step"] = lazy.step_s / lazy.plain_s
            found["gpu_lazy_waited_s"] = lazy.waited_s
        return found


def measure(
    training: Training,
    folder: Path,
    peers: Sequence[type[DevicePeer]],
    bounds: Bounds,
    progress: Callable[[str], None],
) -> GpuReport:
    """Measure this library's ways to save, then each peer; ``folder`` is where they write.

    A failure of one does not affect the others.
    """
    begin = time.monotonic()
    progress("copies and training steps")
    out_s, in_s = training.copies()
    forward_s = _lengthen(training, HIDES * out_s)
    bounds = replace(bounds, seconds=max(0.0, bounds.seconds - (time.monotonic() - begin)))
    estimate = format_duration(bounds.estimate(training.nbytes))

    def ours(way: str, room: Path) -> GpuRow:
        return _ours(training, room, way, Rounds(bounds))

    def theirs(kind: type[DevicePeer], room: Path) -> GpuRow:
        with closing(kind()) as peer:
            return _peer(training, room, peer, Rounds(bounds))

    parts = {f"tieredckpt, {way}": partial(ours, way) for way in WAYS}
    parts |= {kind.name: partial(theirs, kind) for kind in peers}
    rows = []
    failed: dict[str, str] = {}
    for name, row in parts.items():
        progress(f"{name}, about {estimate}")
        try:
            with _room(folder / name) as room:
                rows.append(row(room))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            progress(f"{name} failed: {failed[name]}")
        else:  # else a run that is cut off before its report has printed this
            progress(f"{name}: {_told(rows[-1])}")
    return GpuReport(training.device, training.nbytes, training.passes, forward_s, out_s, in_s, rows, failed)


def _told(row: GpuRow) -> str:
    stall, durable, step, waited, plain = map(
        format_duration, (row.stall_s, row.durable_s, row.step_s, row.waited_s, row.plain_s)
    )
    return f"stall {stall}, durable {durable}, step with a save {step}, of it waited {waited}, without {plain}"


def _lengthen(training: Training, least: float) -> float:
    """Give a step enough passes to last ``least`` seconds; returns the seconds that they last."""
    training.passes = 1
    while True:
        took = median(_forward(training) for _ in range(_TRIES))
        if took >= least:
            return took
        training.passes = max(training.passes + 1, ceil(training.passes * least / took))


def _forward(training: Training) -> float:
    training.synchronize()
    begin = time.perf_counter()
    training.forward()
    training.synchronize()
    return time.perf_counter() - begin


@contextmanager
def _room(folder: Path) -> Iterator[Path]:
    """A new folder, for the length of the block: the device holds the steps of one way at a time."""
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _timed(training: Training, save: Callable[[], None], captured: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a step with a save beside it, and the part of them for which the trainer waits for the save.

    Before the optimizer's step the trainer waits for the gradients, as a trainer does that checks whether they are
    finite. So the device is idle while it waits for the save after that.
    """
    training.synchronize()
    begin = time.perf_counter()
    save()
    saved = time.perf_counter()
    training.forward()
    training.synchronize()
    before = time.perf_counter()
    captured()
    after = time.perf_counter()
    training.change()
    training.synchronize()
    return time.perf_counter() - begin, saved - begin + after - before


def _plain(training: Training) -> float:
    """Seconds of a step without a save."""
    return _timed(training, lambda: None, lambda: None)[0]


def _in_turns(
    training: Training,
    number: int,
    save: Callable[[], None],
    captured: Callable[[], None],
    durable: Callable[[], None],
) -> tuple[float, float, float]:
    """As `_timed`, and the seconds of a step without a save, which comes first in every other round.

    A step that does not count precedes each: a device that was idle is slow at first.
    """
    step = waited = plain = 0.0
    for beside in (True, False) if number % 2 else (False, True):
        _plain(training)
        if beside:
            step, waited = _timed(training, save, captured)
            durable()
        else:
            plain = _plain(training)
    return step, waited, plain


def _stall(training: Training, save: Callable[[], None], captured: Callable[[], None]) -> float:
    training.synchronize()
    begin = time.perf_counter()
    save()
    captured()
    return time.perf_counter() - begin


def _ours(training: Training, folder: Path, way: Any, rounds: Rounds) -> GpuRow:
    state = training.state()
    found: list[tuple[float, ...]] = []
    tiers = {
        "ram": {"kind": "ram", "capacity": max(_SLAB, training.nbytes * 5 // 2), "retain": {"kind": "last_n", "n": 1}},
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
        for turn, _ in enumerate(rounds.measured()):
            begin = time.perf_counter()
            stall = _stall(training, save, captured)
            checkpoint.reached("disk")
            durable = time.perf_counter() - begin
            beside = _in_turns(training, turn, save, captured, store.flush)
            training.synchronize()
            begin = time.perf_counter()
            store.restore(into=state, resume=False)
            found.append((stall, durable, *beside, time.perf_counter() - begin))
            _plain(training)  # or the next save would find every chunk on the disk
    return GpuRow(f"tieredckpt, {way}", *map(median, zip(*found, strict=True)))


def _peer(training: Training, folder: Path, peer: DevicePeer, rounds: Rounds) -> GpuRow:
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

    def durable() -> None:
        peer.durable()
        forget_before()

    def figures(turn: int) -> tuple[float, ...]:
        begin = time.perf_counter()
        stall = _stall(training, save, peer.captured)
        peer.durable()
        took = time.perf_counter() - begin
        forget_before()
        return stall, took, *_in_turns(training, turn, save, peer.captured, durable)

    for turn, _ in enumerate(rounds.first()):
        figures(turn)
    found = [figures(turn) for turn, _ in enumerate(rounds.measured())]
    return GpuRow(peer.name, *map(median, zip(*found, strict=True)))


def no_device(why: str) -> DeviceUnavailable:
    """The error if there is nothing to measure."""
    return DeviceUnavailable(f"there is no CUDA device to measure: {why}. `tieredckpt doctor` tells more")
