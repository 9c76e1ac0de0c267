"""Fixed costs: opening, closing, a save of one array; and the cost of each leaf of a tree.

``python -m tieredckpt.bench.small`` reads a `SmallSpec` from stdin as JSON, and writes its figures to a file.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tieredckpt.bench.isolate import IsolatedSpec, measure_what_is_asked
from tieredckpt.bench.limits import seconds
from tieredckpt.bench.peers import peer_named
from tieredckpt.bench.peers.base import Peer, Setting
from tieredckpt.bench.peers.ours import Stored
from tieredckpt.bench.workloads import State, change

__all__ = ["SmallSpec", "measure_small"]

_ONE = 64 << 10
"""Bytes of the one array."""
_SLAB = 64 << 20
_FEWER = 100
"""The factor by which the smaller of the two compared trees has fewer leaves."""


class SmallSpec(IsolatedSpec, frozen=True, kw_only=True):
    """The peer to measure."""

    peer: str
    leaves: int
    """Leaves of the larger tree, only of this library; 0 for none."""
    alone: bool = False
    """Whether to measure only the tree of so many leaves."""


def measure_small(spec: SmallSpec) -> dict[str, float]:
    """Seconds to open, to save one array, until it is durable, and to close; microseconds of the processor a leaf.

    For a tree alone, seconds of the processor.
    """
    peer = peer_named(spec.peer)
    if spec.alone:
        return _leaves(spec, peer, spec.leaves)
    one = {"array": np.zeros(_ONE, dtype=np.uint8)}
    samples: dict[str, list[float]] = {}
    for turn in range(spec.repeats + 1):
        found = _session(peer, _setting(spec, f"one-{turn}", _ONE), one)
        if turn:  # the first turn loads the libraries
            for name, took in found.items():
                samples.setdefault(name, []).append(took)
    figures = {name: statistics.median(took) for name, took in samples.items()}
    return figures | (_each_leaf(spec, peer) if spec.leaves else {})


def _setting(spec: SmallSpec, name: str, nbytes: int) -> Setting:
    folder = Path(spec.folder, name)
    folder.mkdir()
    return Setting(folder, Path(spec.shared), nbytes)


def _session(peer: Peer, setting: Setting, state: State) -> dict[str, float]:
    gc.collect()  # else the garbage of the session before would be collected meanwhile
    begin = time.perf_counter()
    session = peer.open(setting)
    opened = time.perf_counter()
    session.take(state)
    took = seconds(lambda: session.save(0))
    waited = seconds(session.wait)
    closed = seconds(session.close)
    return {"open_s": opened - begin, "save_s": took, "durable_s": took + waited, "close_s": closed}


def _each_leaf(spec: SmallSpec, peer: Peer) -> dict[str, float]:
    few, many = (_leaves(spec, peer, count) for count in (spec.leaves // _FEWER, spec.leaves))
    more = spec.leaves - spec.leaves // _FEWER
    return {f"leaves_{name}_us": (many[name] - few[name]) / more * 1e6 for name in many}


def _leaves(spec: SmallSpec, peer: Peer, count: int) -> dict[str, float]:
    """Processor seconds of trees of so many leaves of 64 bytes: the first save, later saves, restores."""
    state: State = {f"leaf{number}": np.full(16, number, np.float32) for number in range(count)}
    session = peer.open(_setting(spec, f"leaves-{count}", _SLAB))
    assert isinstance(session, Stored)
    try:
        session.take({"array": np.zeros(_ONE, dtype=np.uint8)})
        session.save(0)
        session.wait()
        session.take(state)
        took: list[float] = []
        for step in range(spec.repeats + 2):
            change(state, list(state))
            gc.collect()
            took.append(_processor_seconds(partial(session.save, step + 1)))
            session.wait()
        restores = [_processor_seconds(lambda: session.restore(state)) for _ in range(spec.repeats + 1)]
    finally:
        session.close()
    return {
        "first_save": took[0],
        "save": statistics.median(took[2:]),
        "restore": statistics.median(restores[1:]),
    }


def _processor_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    measure_what_is_asked(SmallSpec, measure_small)
