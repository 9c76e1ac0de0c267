"""Time from RAM until a step is durable on a device, with each codec, by the promotion that stores use."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.codecs import CODECS
from tieredckpt.format.rounding import Bound
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncStore

__all__ = ["RUNS", "DurableRow", "Sample", "measure_durable"]

RUNS = 2
"""Runs of each codec; the faster one counts."""


@dataclass(slots=True)
class DurableRow:
    """The promotion of one step to a new tier with a codec."""

    codec: str
    nbytes: int
    """Bytes of the step's arrays."""
    written: int
    """Bytes of packs."""
    seconds: float
    """Until the step is committed and durable."""


class Sample:
    """The beginnings of arrays, the same share of each, for ``nbytes`` of ``total`` in all."""

    def __init__(self, nbytes: int, total: int) -> None:
        self._share = min(1.0, nbytes / max(total, 1))
        self.arrays: dict[str, npt.NDArray[Any]] = {}

    def add(self, key: str, array: npt.NDArray[Any]) -> None:
        """Copy the beginning of an array."""
        rows = max(1, round(self._share * len(array))) if array.ndim else 0
        self.arrays[key] = np.array(array[:rows] if array.ndim else array)


def measure_durable(
    arrays: Mapping[str, npt.NDArray[Any]],
    folder: Path,
    *,
    bound: Bound | None = None,
    bandwidth: int | None = None,
    threads: int = 1,
    done: Callable[[], object] = lambda: None,
) -> list[DurableRow]:
    """Promote arrays from RAM to new tiers in a new folder of ``folder``, which is removed afterwards.

    Args:
        arrays: by key; RAM must have room for them.
        folder: on the device.
        bound: that of a lossy rule for all keys.
        bandwidth: bytes a second that the device is slowed down to.
        threads: that compress.
        done: called after each promotion, of which there are two for each codec.

    Raises `NoSpace`, `TierUnavailable`.
    """
    rows = []
    with _scratch(folder, bound, bandwidth, threads) as store:
        store.save(1, dict(arrays))
        store.flush()  # to the first tier, so that each of the others may go
        nbytes = sum(array.nbytes for array in arrays.values())
        for codec in CODECS:
            row = DurableRow(codec, nbytes, 0, math.inf)
            for run in range(RUNS):
                begin = time.monotonic()
                row.written = store.promote(1, f"{codec}{run}")
                row.seconds = min(row.seconds, time.monotonic() - begin)
                store.evict(1, f"{codec}{run}")
                store.collect()  # else the device would delete during the measurement
                done()
            rows.append(row)
    return rows


@contextmanager
def _scratch(folder: Path, bound: Bound | None, bandwidth: int | None, threads: int) -> Iterator[SyncStore]:
    rules: dict[str, Any] = {}
    if bound is not None:
        rules["lossy"] = [{"keys": ["**"], "max_abs_error" if bound.absolute else "max_error": bound.most}]
    if bandwidth is not None:
        rules["rate_limit"] = bandwidth
    with tempfile.TemporaryDirectory(prefix="tieredckpt-bench-", dir=folder) as place:

        def tier(name: str, **settings: Any) -> dict[str, Any]:
            return {"kind": "posix", "path": Path(place, name)} | settings

        tiers: dict[str, Any] = {"ram": {"kind": "ram", "on_close": "release"}, "exact": tier("exact")}
        for codec in CODECS:
            for run in range(RUNS):
                name = f"{codec}{run}"
                tiers[name] = tier(name, promote="never", codec=codec, codec_threads=threads, **rules)
        store = {"name": f"bench-{Path(place).name}", "when_full": "wait"}
        with CheckpointStore.open({"store": store, "tiers": tiers}, ranks=None).sync() as opened:
            yield opened
