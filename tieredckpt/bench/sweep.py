"""Measure how costs grow: with the leaves of a tree, the bytes of its arrays, and the steps of a store."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tieredckpt._picture import picture
from tieredckpt.bench import catalog, small, turn
from tieredckpt.bench.catalog import CatalogSpec
from tieredckpt.bench.isolate import run_isolated
from tieredckpt.bench.peers import OURS
from tieredckpt.bench.small import SmallSpec
from tieredckpt.bench.turn import Spec, Turn
from tieredckpt.config import StoreConfig
from tieredckpt.units import format_size

__all__ = ["BYTES", "LEAVES", "STEPS", "Curves", "Point", "draw", "sweep"]

LEAVES = (10, 100, 1_000, 10_000, 100_000)
BYTES = (1 << 20, 16 << 20, 256 << 20, 1 << 30, 4 << 30)
STEPS = (1, 10, 100, 1_000, 10_000)

_CHUNKS = 100
"""Chunks of each step of a history."""
_PATIENCE = 600.0
"""Seconds that a measurement may take, besides the time for its bytes and steps."""
_SLOWEST = 20e6
"""Bytes a second; slower, a measurement counts as hanging."""


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds of one size, by operation."""

    size: int
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Curves:
    """The points of a sweep, by what grows."""

    leaves: list[Point]
    """Processor seconds for leaves of 64 bytes."""
    nbytes: list[Point]
    """Seconds for a transformer's state, beside a copy of it, and a write and a read of as many bytes."""
    steps: list[Point]
    """Seconds for a directory with so many steps of 100 chunks."""


def sweep(
    folder: Path,
    *,
    leaves: Sequence[int] = LEAVES,
    nbytes: Sequence[int] = BYTES,
    steps: Sequence[int] = STEPS,
    repeats: int = 3,
    tell: Callable[[str], object] = lambda _: None,
) -> Curves:
    """Measure each size in a process of its own, in new folders below ``folder``, which go with it.

    Raises:
        Failed: a measurement ended with an error, or took too long.
    """

    def points(sizes: Sequence[int], what: str, measure: Callable[[Path, int, int], dict[str, float]]) -> list[Point]:
        found = []
        for size in sizes:
            tell(f"{size:,} {what}")
            found.append(Point(size, measure(folder, size, repeats)))
        return found

    return Curves(
        points(leaves, "leaves", _of_leaves), points(nbytes, "bytes", _of_bytes), points(steps, "steps", _of_steps)
    )


def _of_leaves(folder: Path, count: int, repeats: int) -> dict[str, float]:
    spec = partial(SmallSpec, peer=OURS, repeats=repeats, leaves=count, alone=True)
    took = run_isolated(dict[str, float], small.__name__, folder, spec, timeout=_PATIENCE)
    return {"first save": took["first_save"], "later save": took["save"], "restore from RAM": took["restore"]}


def _of_bytes(folder: Path, nbytes: int, repeats: int) -> dict[str, float]:
    spec = partial(
        Spec,
        peer=OURS,
        workload="transformer",
        nbytes=nbytes,
        repeats=repeats,
        threads=StoreConfig.model_construct().copy_threads,
        parts=("memory", "cold", "warm"),
    )
    timeout = _PATIENCE + nbytes * (repeats + 5) / _SLOWEST
    samples = run_isolated(Turn, turn.__name__, folder, spec, timeout=timeout).samples
    names = {
        "save": "stall",
        "durable": "durable",
        "restore from RAM": "restore_ram",
        "restore, cold": "restore_cold_existing",
        "memcpy": "memcpy",
        "direct write": "write",
        "direct read": "read",
    }
    return {name: statistics.median(samples[sample]) for name, sample in names.items()}


def _of_steps(folder: Path, count: int, repeats: int) -> dict[str, float]:
    spec = partial(CatalogSpec, steps=count, chunks=_CHUNKS, repeats=repeats)
    took = run_isolated(dict[str, float], catalog.__name__, folder, spec, timeout=_PATIENCE + count / 20)
    return {
        "first opening": took["open_large_first_s"],
        "later opening": took["open_large_s"],
        "save until durable": took["save_empty_s"] + took["save_large_extra_s"],
    }


def draw(path: Path, curves: Curves) -> None:
    """Draw ``curves`` side by side into an SVG or PNG file, both axes logarithmic. Raises `Invalid` if it cannot."""
    with picture(path, width=12, height=4, columns=3) as (left, middle, right):
        _draw(left, curves.leaves, "leaves of 64 bytes", "seconds of the processor", lambda size: f"{size:,}")
        _draw(middle, curves.nbytes, "bytes of the state", "seconds", format_size, dashed=("memcpy", "direct"))
        _draw(right, curves.steps, "steps that the store holds", "seconds", lambda size: f"{size:,}")


def _draw(
    axes: Any,
    points: Sequence[Point],
    grows: str,
    costs: str,
    shown: Callable[[int], str],
    *,
    dashed: tuple[str, ...] = ("nothing",),
) -> None:
    sizes = [point.size for point in points]
    for name in points[0].seconds:
        limit = name.startswith(dashed)
        style = {"linestyle": "--", "color": "gray", "alpha": 0.7} if limit else {"marker": "o"}
        axes.plot(sizes, [point.seconds[name] for point in points], label=name, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes)
    axes.set_xticklabels([shown(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(grows)
    axes.set_ylabel(costs)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
