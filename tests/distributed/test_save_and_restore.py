"""Real engines: one rank dies in the middle of a save, all start again, and any number of ranks restores."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import save_program
from distributed.launch import SOON, launch

from tieredckpt import CheckpointStore

pytestmark = pytest.mark.timeout(4 * SOON)

PROGRAM = Path(__file__).with_name("save_program.py")


@pytest.mark.parametrize(
    ("engine", "ranks", "later"), [("torch", 3, (2,)), ("mpi", 3, (2,)), ("jax", 2, (1,)), ("none", 3, (1,))]
)
def test_a_death_in_the_middle_of_a_save_costs_that_save_and_nothing_else(
    engine: str, ranks: int, later: Sequence[int], tmp_path: Path, shared_memory: Path
) -> None:
    paths = {"ram": str(shared_memory / "ram"), "disk": str(tmp_path / "disk")}
    victim = ranks - 1

    def arguments(task: str, **more: Any) -> dict[str, Any]:
        return paths | {"task": task} | more

    dying = arguments("die", victim=victim, deadline=6.0)
    with launch(engine, PROGRAM, ranks=ranks, folder=tmp_path / "die", arguments=dying, notice=30) as job:
        job.wait_for("saving", rank=victim)
        for rank in range(victim):
            job.wait_for("saved", rank=rank)  # without waiting for the victim
        for rank in range(victim):
            job.wait_for("heard", rank=rank)
            assert job.told(rank)["ranks"] == [victim]
        job.kill(victim)

    with launch(engine, PROGRAM, ranks=ranks, folder=tmp_path / "go on", arguments=arguments("go_on")) as job:
        job.succeed()
        for rank in range(ranks):
            told = job.told(rank)
            assert (told["step"], told["same"], told["where"]) == (1, True, ["ram", "disk"])

    for size in later:
        again = "none" if size == 1 else engine
        with launch(again, PROGRAM, ranks=size, folder=tmp_path / str(size), arguments=arguments("restore")) as job:
            job.succeed()
            for rank in range(size):
                told = job.told(rank)
                assert (told["step"], told["same"]) == (3, True)
                assert sum(told["sources"].values()) > 0
        shutil.rmtree(shared_memory / "ram", ignore_errors=True)  # the next must do without

    with CheckpointStore.open(tmp_path / "disk", read_only=True).sync() as store:
        found = store.restore()
        assert found is not None
        np.testing.assert_array_equal(found.tree["w"], save_program.whole(3))
        np.testing.assert_array_equal(found.tree["common"]["bias"], save_program.common(3))
        assert sorted(found.tree["own"]) == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize("engine", ["torch", "mpi", "jax", "none"])
def test_a_job_that_is_suspended_for_longer_than_the_deadline_loses_no_save(
    engine: str, tmp_path: Path, shared_memory: Path
) -> None:
    paths = {"ram": str(shared_memory / "ram"), "disk": str(tmp_path / "disk")}
    arguments = paths | {"task": "suspend", "deadline": 4.0}
    with launch(engine, PROGRAM, ranks=2, folder=tmp_path / "suspend", arguments=arguments) as job:
        job.wait_for("waited for", rank=1)
        job.wait_for("saved", rank=0)
        for rank in range(2):
            job.stop(rank)
        time.sleep(5)
        for rank in range(2):
            job.go_on(rank)
        job.succeed()
        assert [job.told(rank) for rank in range(2)] == [["ram", "disk"]] * 2
