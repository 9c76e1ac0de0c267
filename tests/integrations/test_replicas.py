"""A bit that is flipped in one replica of a PyTorch training is named, by rank and key, at the next save."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.launch import SOON, launch
from support.frameworks import require

require("torch")

PROGRAM = Path(__file__).with_name("replicas_program.py")


@pytest.mark.timeout(2 * SOON)
def test_a_flipped_bit_of_a_replica_is_named_with_its_rank_and_key(tmp_path: Path, shared_memory: Path) -> None:
    folder = str(shared_memory)
    with launch("torch", PROGRAM, ranks=3, folder=tmp_path, arguments={"folder": folder}) as job:
        job.succeed()
        for rank in range(3):
            told = job.told(rank)
            assert told["heard"] == [
                [1, "model/weight", [1]],
                [2, "optimizer/state/weight/exp_avg", [1]],
                [3, "table", [1]],
            ]
            assert told["steps"] == [0, 2, 3]  # what all ranks store, and is not the same, makes no step
