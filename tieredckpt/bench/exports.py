"""What an export behind the training takes: the whole state, as safetensors, beside a direct write of as many bytes.

``python -m tieredckpt.bench.exports`` reads an `ExportSpec` from stdin as JSON, and writes its figures to a file.
"""

from __future__ import annotations

import queue
import statistics
from pathlib import Path

from tieredckpt.bench.isolate import IsolatedSpec, measure_what_is_asked
from tieredckpt.bench.limits import Limits
from tieredckpt.bench.workloads import change, workload_named
from tieredckpt.config import ExportConfig, PosixTier, RamTier, StoreConfig
from tieredckpt.events import Event, ExportFailed, SaveSkipped, StepExported
from tieredckpt.policy.base import Promotion, Retention, parse
from tieredckpt.store import CheckpointStore

__all__ = ["ExportSpec", "measure_exports"]


# What a turn waits for: a step that RAM has no room for is never exported.
_ENDS = SaveSkipped | StepExported | ExportFailed


class ExportSpec(IsolatedSpec, frozen=True, kw_only=True):
    """Of which state."""

    workload: str
    nbytes: int
    threads: int


def measure_exports(spec: ExportSpec) -> dict[str, float]:
    """Seconds of an export and of a direct write of as many bytes, in turns, and the former over the latter."""
    state = workload_named(spec.workload).build(spec.nbytes)
    ended: queue.Queue[Event] = queue.Queue()
    exports: list[float] = []
    writes: list[float] = []
    limits = Limits(state, Path(spec.folder), spec.threads)
    try:
        with CheckpointStore.open(_config(spec)).sync() as store:
            store.subscribe(lambda event: ended.put(event) if isinstance(event, _ENDS) else None)
            for step in range(spec.repeats + 1):
                change(state, list(state))
                store.save(step, state)
                event = ended.get()
                if not isinstance(event, StepExported):
                    raise RuntimeError(f"step {step} was not exported: {event}")
                written = limits.write() * event.nbytes / limits.nbytes
                if step:  # the first one waits for memory that is new
                    exports.append(event.seconds)
                    writes.append(written)
    finally:
        limits.close()
    export, write = statistics.median(exports), statistics.median(writes)
    return {"export_s": export, "export_over_direct_write": export / write}


def _config(spec: ExportSpec) -> StoreConfig:
    slab = spec.nbytes * 9 // 4 + (64 << 20)  # the step that is exported, and the next one
    ram = RamTier(name="ram", path=Path(spec.shared, "exports"), capacity=slab, on_close="release")
    disk = PosixTier(name="disk", path=Path(spec.folder, "exports"), promote=parse(Promotion, "never"))
    keep = parse(Retention, {"kind": "last_n", "n": 1})
    export = ExportConfig(name="bench", format="safetensors", to=str(Path(spec.folder, "exported")), keep=keep)
    return StoreConfig(tiers=(ram, disk), exports=(export,))


if __name__ == "__main__":
    measure_what_is_asked(ExportSpec, measure_exports)
