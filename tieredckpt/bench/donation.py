"""What each capture costs a JAX training that donates its state.

``python -m tieredckpt.bench.donation --size "512 MiB"`` prints a table. A step of the training adds to every array, in
place. For each capture the table tells, as medians: when `save` returns; how much longer the save and the two steps
behind it take than two steps alone, which is what the training loses; and when the copy in RAM is whole. ``wait``
captures by reference and waits for RAM, as donation needs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tieredckpt.bench.isolate import places
from tieredckpt.checkpoint import SyncCheckpoint
from tieredckpt.config import RamTier, StoreConfig
from tieredckpt.policy.base import Retention, parse
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncStore
from tieredckpt.units import format_duration, parse_size

__all__ = ["CAPTURES", "main", "measure_donation"]

CAPTURES = ("copy", "wait", "device", "pinned_host")

_ARRAYS = 32


def measure_donation(nbytes: int, repeats: int) -> dict[str, tuple[float, ...]]:
    """By capture: seconds until `save` returned, that the training lost, and until the step was in RAM; medians.

    Args:
        nbytes: of the state, float32 in 32 arrays on JAX's default device.
        repeats: saves of each capture, after one that is not counted.
    """
    import jax
    import jax.numpy as jnp

    step: Any = jax.jit(lambda state: [array + 1 for array in state], donate_argnums=0)
    state = [jnp.full(nbytes // 4 // _ARRAYS, number, jnp.float32) for number in range(_ARRAYS)]
    slab = nbytes * 9 // 4 + (64 << 20)
    keep = parse(Retention, {"kind": "last_n", "n": 1})
    found: dict[str, tuple[float, ...]] = {}
    with places(Path(tempfile.gettempdir())) as where:
        ram = RamTier(name="ram", path=where.shared / "ram", capacity=slab, retain=keep, on_close="release")
        with CheckpointStore.open(StoreConfig(name="donation", tiers=(ram,))).sync() as store:
            for capture in CAPTURES:
                rows = []
                for _ in range(repeats + 1):
                    state = jax.block_until_ready(step(state))
                    begin = time.perf_counter()
                    state = jax.block_until_ready(step(step(state)))
                    alone = time.perf_counter() - begin
                    begin = time.perf_counter()
                    saved = _saved(store, state, capture)
                    returned = time.perf_counter() - begin
                    state = jax.block_until_ready(step(step(state)))
                    lost = time.perf_counter() - begin - alone
                    saved.reached("ram")
                    rows.append((returned, lost, time.perf_counter() - begin))
                found[capture] = tuple(map(statistics.median, zip(*rows[1:], strict=True)))
    return found


def _saved(store: SyncStore, state: Any, capture: Any) -> SyncCheckpoint:
    saved = store.save((store.latest_step() or 0) + 1, state, capture="reference" if capture == "wait" else capture)
    if capture == "wait":
        saved.reached("ram")
    return saved


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default="512 MiB")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    write = sys.stdout.write
    write(f"{'capture':<12} {'save returns':>13} {'training loses':>15} {'in RAM after':>13}\n")
    for capture, row in measure_donation(given.size, given.repeats).items():
        returned, lost, in_ram = (format_duration(max(0.0, value)) for value in row)
        write(f"{capture:<12} {returned:>13} {lost:>15} {in_ram:>13}\n")


if __name__ == "__main__":
    main()
