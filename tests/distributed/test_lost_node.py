"""A node that is lost and replaced comes back from the RAM of the other, over real engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from distributed.launch import SOON, launch

pytestmark = pytest.mark.timeout(3 * SOON)

PROGRAM = Path(__file__).with_name("lost_node_program.py")


@pytest.mark.parametrize(("engine", "ranks"), [("torch", 2), ("mpi", 4)])
def test_a_replaced_node_restores_from_its_peers_without_the_shared_tier(
    engine: str, ranks: int, tmp_path: Path, shared_memory: Path
) -> None:
    arguments = {"ram": str(shared_memory), "disk": str(tmp_path / "disk")}
    with launch(engine, PROGRAM, ranks=ranks, folder=tmp_path / "1", arguments=arguments | {"task": "save"}) as job:
        for rank in range(ranks):
            job.wait_for("replicated", rank=rank)
        for rank in range(ranks):
            job.kill(rank)
    shutil.rmtree(shared_memory / "b")
    with launch(engine, PROGRAM, ranks=ranks, folder=tmp_path / "2", arguments=arguments | {"task": "restore"}) as job:
        job.succeed()
        told = [job.told(rank) for rank in range(ranks)]
    for rank, each in enumerate(told):
        assert each["step"] == 3
        assert each["same"]
        assert sum(each["sources"].values()) == each["nbytes"]
        # The part of a new node's rank may have been given back to its RAM before it is restored.
        assert each["sources"].keys() <= ({"ram", "peers"} if rank >= ranks // 2 else {"ram"})
