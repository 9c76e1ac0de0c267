"""What a run of `bench gpu` may take: how large its state is, and how often each way to save is measured."""

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
"""Seconds at most before any round is measured: memory is taken and registered behind the first saves."""
_SAVES = 2
"""Of a round: one by itself, one beside a training step."""
_STEPS = 5
"""Of a round: one with a save, one without, one before each of them, and one that changes what was restored."""
_COPIES = 3
"""Of a round that wait for nothing: of the save by itself, of what of the other save is left, of the restore."""
HIDES = 1.5
"""How long forward and backward pass of a step last, over a copy of the state: no shorter step can hide it."""
_LARGEST = 20_000_000_000
_SAMPLE = 256 << 20
"""Bytes that `write_rate` writes."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a run may take."""

    seconds: float
    """In all, about: each way to save gets an equal share, but at least one round of two saves."""
    repeats: int
    """Rounds that are measured of each way at most."""
    write_rate: float
    """Bytes a second that the folder takes."""
    copy_rate: float
    """Bytes a second that the device gives."""
    peers: int

    @property
    def share(self) -> float:
        """Seconds of one way."""
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
        """Bytes of a state that fits into the memory that is free, and of which a share has time for two rounds.

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
