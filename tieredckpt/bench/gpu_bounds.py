"""Bounds of a run of `bench gpu`: the size of its state, and how often each way to save is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np

from tieredckpt.bench.limits import Limits

__all__ = ["HIDES", "WAYS", "Bounds", "Rounds", "write_rate"]

WAYS = ("copy", "lazy")
_WARM_UP = 30.0
"""Most seconds before a round is measured: the first saves allocate and register memory in the background."""
_SAVES = 2
"""Saves of a round: one by itself, one beside a training step."""
_STEPS = 5
"""Steps of a round: one with a save, one without, one before each of them, and one that changes the restored values."""
_COPIES = 3
"""Copies of a round that nothing hides: of the save by itself, of the rest of the other save, of the restore."""
HIDES = 1.5
"""Duration of the forward and backward pass, over that of a copy of the state: no shorter step can hide it."""
_LARGEST = 20_000_000_000
_SAMPLE = 256 << 20
"""Bytes that `write_rate` writes."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a run."""

    seconds: float
    """In all, about: each way to save gets an equal share, but at least one round of two saves."""
    repeats: int
    """Most rounds that are measured of each way."""
    write_rate: float
    """Bytes a second that the folder takes."""
    copy_rate: float
    """Bytes a second that the device gives."""
    peers: int

    @property
    def share(self) -> float:
        """Seconds for one way."""
        return self.seconds / (len(WAYS) + self.peers)

    @property
    def warm_up(self) -> float:
        """Seconds of it before a round is measured."""
        return min(_WARM_UP, self.share / 3)

    def round(self, nbytes: int) -> float:
        """Seconds of a round with a state of ``nbytes``: it is written, copied, and trained beside."""
        return nbytes * (_SAVES / self.write_rate + (_COPIES + HIDES * _STEPS) / self.copy_rate)

    def estimate(self, nbytes: int) -> float:
        """Seconds that one way takes with a state of ``nbytes``."""
        return min(self.share, self.warm_up + self.repeats * self.round(nbytes))

    def largest(self, device: int, host: int, disk: int) -> int:
        """Bytes of the largest state that fits into the free memory, and with which a share has time for two rounds.

        The training has gradients beside its state; the host has two snapshots, and a peer a copy and what it
        serializes; the disk has three steps.
        """
        in_time = self.share / 2 / self.round(1)
        return min(_LARGEST, device // 2, host // 5, disk // 4, int(in_time))


def write_rate(folder: Path) -> float:
    """Bytes a second of a direct sequential write."""
    limits = Limits({"sample": np.ones(_SAMPLE, np.uint8)}, folder, threads=1)
    try:
        return _SAMPLE / limits.write()
    finally:
        limits.close()


class Rounds:
    """The rounds of one way, which begins now: the first ones, and those that count, as far as time permits."""

    def __init__(self, bounds: Bounds) -> None:
        self._begin, self._bounds = time.monotonic(), bounds

    def first(self) -> Iterator[None]:
        return self._until(self._begin + self._bounds.warm_up)

    def measured(self) -> Iterator[None]:
        return islice(self._until(self._begin + self._bounds.share), self._bounds.repeats)

    @staticmethod
    def _until(end: float) -> Iterator[None]:
        """At least one round, and no other that would end after ``end`` at the speed of those before."""
        begin = time.monotonic()
        for done in count(1):
            yield
            now = time.monotonic()
            if now + (now - begin) / done > end:
                return
