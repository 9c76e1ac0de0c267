"""An export is made once: of several ranks by rank 0, beside an agent by the agent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agents import eventually
from support.cohort import cohort, common, whole
from support.exports import exported
from support.scenes import Heard, config, folder, ram, tree

from tieredckpt import CheckpointStore, TierUnavailable
from tieredckpt.events import ExportFailed, StepExported

DYING = """
import json, os, signal, sys
from support.scenes import tree
from tieredckpt import CheckpointStore
store = CheckpointStore.open(json.loads(sys.argv[1])).sync().__enter__()
for step in (1, 2, 3):
    store.save(step, tree(step))
os.kill(os.getpid(), signal.SIGKILL)
"""


def save_and_die(settings: dict[str, Any]) -> None:
    """A trainer that is killed as soon as the last save has returned."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", DYING, json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


async def test_of_several_ranks_rank_0_exports_the_whole_step_once(shared_memory: Path, tmp_path: Path) -> None:
    """The parts of all ranks, read from the tier that all see, as one file."""
    exports = {"hf": {"format": "safetensors", "to": tmp_path / "out"}}
    async with cohort(3, shared_memory, tmp_path / "disk", exports=exports) as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "disk")
            await ranks.flush()
        made = [[event.step for event in heard.of(StepExported)] for heard in ranks.heard]
        assert made == [[1, 2], [], []]
        assert not any(heard.of(ExportFailed) for heard in ranks.heard)
        infos = await ranks.all(lambda store, rank: store.export_infos())
        assert [[info.steps for info in each] for each in infos] == [[(1, 2)], [], []]
    for step in (1, 2):
        found = exported(tmp_path / "out" / f"step-{step}")
        np.testing.assert_array_equal(found["w"], whole(step))
        np.testing.assert_array_equal(found["common"], common(step))
        assert {f"own.rank{rank}" for rank in range(3)} <= found.keys()


async def test_beside_an_agent_the_agent_exports(ram_folder: Path, shared_memory: Path, tmp_path: Path) -> None:
    """The trainer hears of it, and waits for it in `flush`."""
    tiers = {"ram": ram(shared_memory, on_close="keep"), "disk": folder(tmp_path / "disk")}
    exports = {"hf": {"format": "safetensors", "to": tmp_path / "out"}, "gone": _cannot(tmp_path)}
    settings = config(tiers, promote_in="agent", exports=exports)
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        await store.save(1, tree(1))
        with pytest.raises(TierUnavailable, match="export 'gone'"):
            await store.flush()
        assert store._life.engine.exporter is None
        event = await heard.first(StepExported)
        failed = await heard.first(ExportFailed)
        assert (event.step, event.export, failed.export) == (1, "hf", "gone")
        assert "in the way" in str(failed.error)
    found = exported(tmp_path / "out" / "step-1")
    np.testing.assert_array_equal(found["params.w0"], tree(1)["params"]["w0"])


def _cannot(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "in the way").write_text("")
    return {"format": "npz", "to": tmp_path / "in the way"}


async def test_an_agent_makes_the_exports_of_a_trainer_that_died(
    ram_folder: Path, shared_memory: Path, tmp_path: Path
) -> None:
    tiers = {"ram": ram(shared_memory, on_close="keep"), "disk": folder(tmp_path / "disk")}
    exports = {"hf": {"format": "safetensors", "to": tmp_path / "out"}}
    settings = config(tiers, promote_in="agent", exports=exports).model_dump(mode="json")
    await asyncio.to_thread(save_and_die, settings)
    await asyncio.to_thread(eventually, (tmp_path / "out" / "step-3").exists, "the agent exports")
    np.testing.assert_array_equal(exported(tmp_path / "out" / "step-3")["params.w0"], tree(3)["params"]["w0"])
