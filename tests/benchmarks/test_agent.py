"""What promotion by an agent gives, next to promotion in the trainer's own process."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import numpy as np
import pytest
from support.agents import end_agent
from support.scenes import folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.events import StepPromoted

MIB = 1 << 20
_STATE = 512 * MIB
_STEPS = 5
_TURNS = 2


async def promoted(settings: StoreConfig, nbytes: int) -> list[float]:
    """Bytes a second at which states of arrays of ``nbytes`` reached the disk, one after the other."""
    rates: list[float] = []
    async with CheckpointStore.open(settings) as store:
        store.subscribe(
            lambda event: rates.append(event.written / event.seconds) if isinstance(event, StepPromoted) else None
        )
        rng = np.random.default_rng(0)
        for step in range(_STEPS):
            tree = {f"w{i}": rng.integers(0, 256, nbytes, dtype=np.uint8) for i in range(_STATE // nbytes)}
            await (await store.save(step, tree)).reached("disk")
            await store.collect()
    return rates


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nbytes", [16 * MIB, 64 << 10], ids=["16 MiB", "64 KiB"])
def test_an_agent_promotes_about_as_fast_as_the_trainer_itself(
    shared_memory: Path, tmp_path: Path, nbytes: int
) -> None:
    found: dict[str, list[float]] = {"trainer": [], "agent": []}
    for _ in range(_TURNS):
        for mode in found:
            tiers = {
                "ram": ram(shared_memory, capacity="1200 MiB"),
                "disk": folder(tmp_path / mode, direct=None, fsync=True, retain={"kind": "last_n", "n": 1}),
            }
            found[mode] += asyncio.run(promoted(StoreConfig(tiers=tiers, promote_in=mode), nbytes))
            end_agent(Path(tiers["ram"]["path"]))
    means = {mode: statistics.mean(rates) / MIB for mode, rates in found.items()}
    print(f"\narrays of {nbytes} bytes:", ", ".join(f"{mode} {mean:.0f} MiB/s" for mode, mean in means.items()))  # noqa: T201
    assert means["agent"] > 0.4 * means["trainer"]
