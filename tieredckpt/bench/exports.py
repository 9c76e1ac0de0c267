"""The time of exports in the background: the whole state, as safetensors, beside a direct write of as many bytes.

``python -m tieredckpt.bench.exports`` reads an `ExportSpec` from stdin as JSON, and writes its figures to a file.
"""

from __future__ import annotations

import queue
import statistics
import time
from functools import partial
from pathlib import Path

from tieredckpt.bench.isolate import IsolatedSpec, measure_what_is_asked
from tieredckpt.bench.limits import Limits, seconds
from tieredckpt.bench.workloads import State, change, workload_named
from tieredckpt.config import ExportConfig, PosixTier, RamTier, StoreConfig
from tieredckpt.events import Event, ExportFailed, SaveSkipped, StepExported
from tieredckpt.policy.base import Promotion, Retention, parse
from tieredckpt.store import CheckpointStore

__all__ = ["ExportSpec", "measure_exports"]


# What a turn waits for: a step that RAM has no room for is never exported.
_ENDS = SaveSkipped | StepExported | ExportFailed
_GLANCE = 0.001
"""Seconds between two checks whether an export has begun."""


class ExportSpec(IsolatedSpec, frozen=True, kw_only=True):
    """The state to export."""

    workload: str
    nbytes: int
    threads: int


def measure_exports(spec: ExportSpec) -> dict[str, float]:
    """Exports, exact and with floats cast to bfloat16, beside direct writes; and the time that they add to a stall."""
    state = workload_named(spec.workload).build(spec.nbytes)
    limits = Limits(state, Path(spec.folder), spec.threads)
    try:
        export, write = _beside_writes(spec, state, limits, None)
        cast, cast_write = _beside_writes(spec, state, limits, "bf16")
    finally:
        limits.close()
    stalls = _stalls(spec, state, limits.into)
    return {
        "export_s": export,
        "export_over_direct_write": export / write,
        "export_cast_s": cast,
        "export_cast_over_direct_write": cast / cast_write,
        **({} if stalls is None else {"export_stall_ratio": stalls[1] / stalls[0]}),
    }


def _beside_writes(spec: ExportSpec, state: State, limits: Limits, cast: str | None) -> tuple[float, float]:
    """Seconds of an export, and of a direct write of as many bytes, in turns."""
    ended: queue.Queue[Event] = queue.Queue()
    exports: list[float] = []
    writes: list[float] = []
    with CheckpointStore.open(_config(spec, f"exports-{cast}", cast)).sync() as store:
        store.subscribe(lambda event: ended.put(event) if isinstance(event, _ENDS) else None)
        for step in range(spec.repeats + 1):
            change(state, list(state))
            store.save(step, state)
            event = _exported(step, ended)
            written = limits.write(event.nbytes)
            if step:  # the first export waits for new memory
                exports.append(event.seconds)
                writes.append(written)
    return statistics.median(exports), statistics.median(writes)


def _stalls(spec: ExportSpec, state: State, other: State) -> tuple[float, float] | None:
    """Seconds until `save` returns, in turns without an export and while the step before is exported.

    Both immediately follow another save. None if no export lasted as long as the save beside it.
    """
    ended: queue.Queue[Event] = queue.Queue()
    alone: list[float] = []
    beside: list[float] = []
    with CheckpointStore.open(_config(spec, "stalls", every=4)).sync() as store:
        store.subscribe(lambda event: ended.put(event) if isinstance(event, _ENDS) else None)
        for step in range(0, 4 * spec.repeats + 4, 2):
            change(state, list(state))
            change(other, list(other))
            store.save(step, state)
            exports = step % 4 == 0
            while exports and ended.empty() and store.export_infos()[0].exporting is None:
                time.sleep(_GLANCE)
            took = seconds(partial(store.save, step + 1, other))
            if not exports:
                alone.append(took)
                continue
            exported_beside = ended.empty()
            _exported(step, ended)
            if step and exported_beside:  # else a part of the save had the machine for itself
                beside.append(took)
    return (statistics.median(alone[1:]), statistics.median(beside)) if beside else None


def _exported(step: int, ended: queue.Queue[Event]) -> StepExported:
    event = ended.get()
    if not isinstance(event, StepExported):
        raise RuntimeError(f"step {step} was not exported: {event}")
    return event


def _config(spec: ExportSpec, name: str, cast: str | None = None, every: int = 1) -> StoreConfig:
    """The configuration of a new store: one at the same place would continue the exports of the one before.

    Step numbers that are multiples of ``every`` are exported.
    """
    slab = spec.nbytes * 9 // 4 + (64 << 20)  # the step that is exported, and the next one
    ram = RamTier(name="ram", path=Path(spec.shared, name), capacity=slab, on_close="release")
    disk = PosixTier(name="disk", path=Path(spec.folder, name), promote=parse(Promotion, "never"))
    keep = parse(Retention, {"kind": "last_n", "n": 1})
    to = str(Path(spec.folder, f"{name}-out"))
    when = parse(Promotion, {"kind": "every_n_steps", "n": every})
    export = ExportConfig(name="bench", format="safetensors", to=to, when=when, keep=keep, cast=cast)
    return StoreConfig(tiers=(ram, disk), exports=(export,))


if __name__ == "__main__":
    measure_what_is_asked(ExportSpec, measure_exports)
