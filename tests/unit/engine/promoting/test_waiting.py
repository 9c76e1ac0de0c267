"""Who waits for tiers that are due nothing is told so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore

STATE = {"w": np.arange(8)}
NEVER_GIVEN = {"kind": "best", "metric": "misspelt", "mode": "min"}


@pytest.mark.parametrize(
    ("promote", "told"),
    [(NEVER_GIVEN, True), ({"kind": "every_n_steps", "n": 100}, True), ({"kind": "every_n_steps", "n": 2}, False)],
    ids=["a metric that is never given", "not yet", "every other step"],
)
async def test_a_flush_that_leaves_all_steps_in_ram_warns_once(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, promote: dict[str, Any], told: bool
) -> None:
    tiers = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", promote=promote)})
    async with CheckpointStore.open(tiers) as store:
        await store.flush()
        for step in (1, 2):
            await store.save(step, STATE, metrics={"loss": 1.0})
        for _ in range(2):
            await store.flush()
    warned = [record.getMessage() for record in caplog.records if "no step is below RAM" in record.getMessage()]
    assert len(warned) == told
    assert all("step 2" in message and "tier 'disk'" in message for message in warned)
