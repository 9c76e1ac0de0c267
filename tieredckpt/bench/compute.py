"""A loop that computes as a training does, and the time that background work takes from it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

__all__ = ["ComputeLoop"]

_SIDE = 256
_CALIBRATION = 0.4


class ComputeLoop:
    """Iterations of a matrix product and a little Python, about a millisecond each, on one core.

    The process must run with one BLAS thread: with more, the loop's own threads would compete for the cores.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self._a = rng.random((_SIDE, _SIDE), dtype=np.float32)
        self._b = rng.random((_SIDE, _SIDE), dtype=np.float32)
        self._out = np.empty_like(self._a)

    def _iterate(self) -> None:
        np.matmul(self._a, self._b, out=self._out)
        sum(i * i for i in range(1000))  # this holds the interpreter, as a training's own Python does

    def undisturbed(self) -> float:
        """Seconds of an iteration when nothing else runs: the median over `_CALIBRATION` seconds."""
        took: list[float] = []
        begin = now = time.perf_counter()
        while now - begin < _CALIBRATION:
            self._iterate()
            after = time.perf_counter()
            took.append(after - now)
            now = after
        return statistics.median(took)

    def lost(self, work: Callable[[], object]) -> float:
        """Seconds that the loop loses while ``work``, in another thread, waits for background work."""
        iteration = self.undisturbed()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="tieredckpt bench wait")
        begin = time.perf_counter()
        thread.start()
        count = 0
        while thread.is_alive():
            self._iterate()
            count += 1
        took = time.perf_counter() - begin
        thread.join()
        if errors:
            raise errors[0]
        return took - count * iteration
