"""One turn: one peer saves and restores one state in a process of its own, each time next to its limits.

With several ranks, each has such a process and its share of the state; all do everything at the same time.

``python -m tieredckpt.bench.turn`` reads a `Spec` from stdin as JSON, and writes a `Turn` to the file that it names.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from tieredckpt.bench.compute import ComputeLoop
from tieredckpt.bench.files import Listing, forget, largest_first
from tieredckpt.bench.isolate import IsolatedSpec, Meeting, measure_what_is_asked
from tieredckpt.bench.limits import Limits, seconds
from tieredckpt.bench.peers import peer_named
from tieredckpt.bench.peers.base import Peer, Session, Setting
from tieredckpt.bench.peers.ours import Stored
from tieredckpt.bench.resident import peak_since, resident
from tieredckpt.bench.workloads import State, Workload, change, fingerprints, of_rank, workload_named

__all__ = ["Part", "Spec", "Turn", "measure", "of_all_ranks"]

_WARM_UP = 64 << 10

_ADDED = ("slab", "peak_save", "peak_restore", "tenth_changed")
"""Facts that differ between ranks; all ranks see the same for the others."""

Part = Literal["limits", "tenth", "compute", "memory", "export", "cold", "warm"]
"""Measurements besides saves."""


class Spec(IsolatedSpec, frozen=True, kw_only=True):
    """Settings of a turn."""

    peer: str
    workload: str
    nbytes: int
    """Bytes of the state; with several ranks, of each rank's share."""
    threads: int
    parts: tuple[Part, ...]
    rank: int = 0
    seat: tuple[int, ...] = ()
    """Descriptors of the sockets to all other ranks; see `tieredckpt.bench.isolate`."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a turn."""

    nbytes: int
    """Of the state."""
    arrays: int
    samples: dict[str, list[float]]
    """Seconds by measurement; of ``interference``, seconds for each GB."""
    facts: dict[str, float]
    """Bytes and counts that are equal in every repetition."""
    snapshot: bool
    """Whether the saved values were restored, although the state changed right after ``save``."""


class _Measurement:
    def __init__(self, spec: Spec, peer: Peer, workload: Workload) -> None:
        self._spec = spec
        self._peer = peer
        self._workload = workload
        self._folder = Path(spec.folder)
        self._meet = Meeting(spec.seat)
        self._state = workload.build(spec.nbytes, spec.rank)
        self._nbytes = sum(array.nbytes for array in self._state.values())
        self._limits = Limits(self._state, self._folder.parent, spec.threads, self._meet)
        self._samples: dict[str, list[float]] = {}
        self._facts: dict[str, float] = {}
        self._snapshot = True
        self._step = -1
        self._session: Session
        self._resident = 0
        """Bytes of this process when everything was loaded and nothing saved."""

    def run(self) -> Turn:
        parts = self._spec.parts
        self._warm_up()
        self._session = self._peer.open(self._setting(self._folder, self._nbytes))
        if isinstance(self._session, Stored):
            self._facts["slab"] = self._session.slab
        self._session.take(self._state)
        self._save_while_the_state_changes("first_stall")
        self._save_while_the_state_changes(None)
        self._steady_saves()
        if "tenth" in parts:
            self._changed_tenths()
        if "compute" in parts and self._peer.capture != "blocking":
            self._beside_a_computation()
        if "memory" in parts and isinstance(self._session, Stored):
            self._restores_from_memory(self._session)
        if "export" in parts and isinstance(self._session, Stored):
            self._exports(self._session)
        if "warm" in parts:
            self._restores(cold="cold" in parts)
        if "limits" in parts:
            self._other_limits()
        self._session.close()
        self._limits.close()
        return Turn(
            nbytes=self._nbytes,
            arrays=len(self._state),
            samples=self._samples,
            facts=self._facts,
            snapshot=self._snapshot,
        )

    def _note(self, name: str, value: float) -> None:
        self._samples.setdefault(name, []).append(value)

    def _setting(self, folder: Path, nbytes: int) -> Setting:
        spec = self._spec
        return Setting(folder, Path(spec.shared), nbytes, spec.rank, len(spec.seat) + 1, self._meet)

    def _seconds(self, work: Callable[[], object]) -> float:
        """Seconds of ``work``, which all ranks begin at the same time."""
        self._meet()
        return seconds(work)

    def _warm_up(self) -> None:
        """Save and restore a tiny state: loading libraries costs time and memory, and is no part of a save."""
        folder = self._folder.parent / "warm-up"
        folder.mkdir(exist_ok=True)
        session = self._peer.open(self._setting(folder, _WARM_UP))
        session.take({"array" + of_rank(self._spec.rank): np.zeros(_WARM_UP, dtype=np.uint8)})
        session.save(0)
        session.wait()
        self._meet()
        session.restart()
        session.restore(None)
        session.close()
        self._meet()
        shutil.rmtree(folder, ignore_errors=True)  # as all ranks do
        self._resident = resident()

    # -- saves --------------------------------------------------------------------------------------------

    def _save(self) -> tuple[float, float]:
        """Save once; returns the seconds until the state may change, and until all is durable."""
        self._step += 1
        resident()
        self._meet()
        begin = time.perf_counter()
        self._session.save(self._step)
        saved = time.perf_counter()
        self._session.wait()
        durable = time.perf_counter()
        self._meet()  # all ranks have written
        peak = peak_since(self._resident)
        if self._peer.capture == "reference":
            peak -= self._nbytes  # the arrays that the save refers to are a copy made by the bench
        self._facts["peak_save"] = max(0.0, peak, self._facts.get("peak_save", 0.0))
        return saved - begin, durable - begin

    def _tidy(self) -> None:
        if self._step > 0:
            self._session.forget(self._step - 1)

    def _save_while_the_state_changes(self, name: str | None) -> None:
        """Save, continue training at once, and compare the restored values with the saved ones."""
        if self._step >= 0:
            self._train()
        before = fingerprints(self._state)
        self._step += 1
        stall = self._seconds(lambda: self._session.save(self._step))
        self._workload.train(self._state, self._step)
        self._session.wait()
        self._meet()
        self._tidy()
        if name is not None:
            self._note(name, stall)
        self._snapshot &= fingerprints(self._session.restore(None)) == before

    def _train(self) -> None:
        self._workload.train(self._state, self._step)
        self._session.take(self._state)

    def _steady_saves(self) -> None:
        for _ in range(self._spec.repeats):
            self._train()
            self._limits.memcpy()  # the first work after a wait for the device is slow, whatever it is
            self._note("memcpy", self._limits.memcpy())
            before = Listing.of(self._folder)
            stall, durable = self._save()
            self._note("stall", stall)
            self._note("durable", durable)
            self._facts["files"], self._facts["written"] = Listing.of(self._folder).since(before)
            self._tidy()
            self._note("write", self._limits.write())

    def _changed_tenths(self) -> None:
        """Save after a tenth of the bytes changed; each time the same arrays, as with a frozen rest."""
        keys, nbytes = [], 0
        for key, array in self._state.items():
            if nbytes + array.nbytes <= self._nbytes / 10:
                keys.append(key)
                nbytes += array.nbytes
        self._facts["tenth_changed"] = nbytes
        self._facts["tenth_written"] = self._saves_after_changes(keys, "tenth")
        if isinstance(self._session, Stored):
            self._session.freeze(sorted(self._state.keys() - set(keys)))
            self._saves_after_changes(keys, "frozen")
            self._session.freeze(())

    def _saves_after_changes(self, keys: Sequence[str], name: str) -> int:
        """Save after each change of the arrays ``keys``; returns the bytes that the last save wrote."""
        written = 0
        for turn in range(self._spec.repeats + 1):
            change(self._state, keys)
            self._session.take(self._state)
            before = Listing.of(self._folder)
            stall, durable = self._save()
            _, written = Listing.of(self._folder).since(before)
            self._tidy()
            if turn == 0:
                continue  # from the second such save on, unchanged arrays are known to be unchanged
            self._note(f"{name}_stall", stall)
            self._note(f"{name}_durable", durable)
        return written

    def _beside_a_computation(self) -> None:
        loop = ComputeLoop()
        for _ in range(self._spec.repeats):
            self._train()
            self._step += 1
            self._meet()
            self._session.save(self._step)
            self._note("interference", max(0.0, loop.lost(self._session.wait)) / (self._nbytes / 1e9))
            self._tidy()

    # -- restores -----------------------------------------------------------------------------------------

    def _restores_from_memory(self, session: Stored) -> None:
        into = self._limits.into
        for _ in range(self._spec.repeats):
            self._note("memcpy_back", self._limits.memcpy())
            self._note("restore_ram", self._seconds(lambda: session.restore(into)))
            self._note("restore_views", self._seconds(session.views))
        self._snapshot &= _equal(self._state, into)

    def _exports(self, session: Stored) -> None:
        """Export on the file system of the store, where packs are linked."""
        to = self._folder / "export"
        for _ in range(self._spec.repeats):
            self._note("export_orbax", seconds(lambda: session.export(to)))
            shutil.rmtree(to)

    def _restores(self, *, cold: bool) -> None:
        self._session.restart()
        before = resident()
        for kind in self._peer.restores:
            into = self._limits.into if kind == "existing" else None
            for _ in range(self._spec.repeats):
                for heat in ("cold", "warm") if cold else ("warm",):
                    self._meet()
                    if heat == "cold":
                        forget(self._folder)
                        files = largest_first(self._folder)
                        self._note("read", self._limits.read(files, self._spec.rank * self._nbytes))
                        self._meet()
                        forget(self._folder)
                    self._meet()
                    begin = time.perf_counter()
                    restored = self._session.restore(into)
                    self._note(f"restore_{heat}_{kind}", time.perf_counter() - begin)
                    self._snapshot &= _equal(self._state, restored)
                    del restored
            if kind == self._peer.restores[0]:
                fresh = self._nbytes if kind == "new" else 0
                self._facts["peak_restore"] = max(0, peak_since(before) - fresh)

    def _other_limits(self) -> None:
        for _ in range(self._spec.repeats):
            self._note("memcpy_by_one", self._limits.memcpy_by_one())
            self._note("hash", self._limits.hash())
            self._note("fresh", self._limits.fresh())
            self._note("fresh_copy", self._limits.fresh_copy())


def _equal(state: State, restored: State) -> bool:
    return all(
        np.array_equal(array.reshape(-1).view(np.uint8), np.asarray(restored[key]).reshape(-1).view(np.uint8))
        for key, array in state.items()
    )


def measure(spec: Spec) -> Turn:
    """Run a turn, or that of one rank, in this process. Raises whatever the peer raises, with its session open."""
    return _Measurement(spec, peer_named(spec.peer), workload_named(spec.workload)).run()


def of_all_ranks(turns: Sequence[Turn]) -> Turn:
    """Merge the turns of all ranks: each sample is the slowest rank's, since all began at the same time."""
    first = turns[0]
    return Turn(
        nbytes=sum(turn.nbytes for turn in turns),
        arrays=sum(turn.arrays for turn in turns),
        samples={
            name: [max(each) for each in zip(*(turn.samples[name] for turn in turns), strict=True)]
            for name in first.samples
        },
        facts={name: (sum if name in _ADDED else max)([turn.facts[name] for turn in turns]) for name in first.facts},
        snapshot=all(turn.snapshot for turn in turns),
    )


if __name__ == "__main__":
    measure_what_is_asked(Spec, measure)
