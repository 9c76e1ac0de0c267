"""Ranks speak over real engines, beside a training that uses them, and outlive each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.launch import SOON, launch

pytestmark = pytest.mark.timeout(3 * SOON)

PROGRAM = Path(__file__).with_name("communicator_program.py")
DEADLINE = 4.0
LATE = 30.0
"""Seconds after which nobody would say that a deadline was kept, however busy the machine is."""

RANKS = {"torch": 3, "mpi": 4, "jax": 2, "none": 3}
KINDS = {"torch": "TorchCommunicator", "mpi": "MpiCommunicator", "jax": "JaxCommunicator", "none": "SharedStore"}


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The folder that all ranks share."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("engine", RANKS)
def test_ranks_speak_while_a_training_runs_collectives_and_leave_nothing_behind(
    engine: str, tmp_path: Path, disk: Path
) -> None:
    size = RANKS[engine]
    messages = 10 if engine == "none" else 40
    arguments = {"task": "speak", "disk": str(disk), "messages": messages, "sessions": 2}
    with launch(engine, PROGRAM, ranks=size, folder=tmp_path / "job", arguments=arguments) as job:
        job.succeed()
        told = [job.told(rank) for rank in range(size)]
    for each in told:
        assert each["kind"] == KINDS[engine]
        assert each["bulk"] == (engine in ("torch", "mpi"))
        assert each["steps"] > 0
        assert each["left"] == []
    assert [path for path in disk.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("engine", "how", "bulk"),
    [
        pytest.param("torch", "kill", True, marks=pytest.mark.slow),
        ("torch", "stop", True),
        ("mpi", "stop", False),  # mpiexec itself ends all ranks when one is killed
        # MPICH itself may now and then not come back from a call while a rank of its shared memory is stopped.
        pytest.param("mpi", "stop", True, marks=pytest.mark.slow),
        ("jax", "kill", False),
        pytest.param("jax", "stop", False, marks=pytest.mark.slow),
        ("none", "kill", False),
    ],
)
def test_the_others_are_told_within_the_deadline_when_a_rank_is_gone(
    engine: str, how: str, bulk: bool, tmp_path: Path, disk: Path
) -> None:
    size = max(3, RANKS[engine])
    last = size - 1
    arguments = {"task": "outlive", "disk": str(disk), "deadline": DEADLINE, "bulk": bulk}
    with launch(engine, PROGRAM, ranks=size, folder=tmp_path / "job", arguments=arguments, notice=60.0) as job:
        for rank in range(size):
            job.wait_for("open", rank=rank)
        (job.kill if how == "kill" else job.stop)(last)
        (disk / "gone").touch()
        for rank in range(last):
            job.wait_for("outlived", rank=rank)
            told = job.told(rank)
            assert told["missing"] == [last]
            assert told["seconds"] < DEADLINE + LATE
            assert rank or told["seconds"] > 0.9 * DEADLINE, "rank 0 waits, and tells the others"
            if bulk:
                assert len(told["bulk"]) == 2
                assert max(told["bulk"]) < DEADLINE + LATE
                assert (told["cancelled"] or 0.0) < LATE
            assert told["closing"] < DEADLINE + LATE
            assert told["still"] == [[other] for other in range(last) if other != rank]
        (disk / "over").touch()
        for rank in range(last):
            job.wait_until_ended(rank)  # whatever of it still waits for the dead


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_a_process_with_two_stores_ends_in_order_though_nobody_closes_them(
    engine: str, tmp_path: Path, disk: Path
) -> None:
    arguments = {"task": "leave", "disk": str(disk)}
    with launch(engine, PROGRAM, ranks=2, folder=tmp_path / "job", arguments=arguments) as job:
        job.succeed()
        assert [job.told(rank) for rank in range(2)] == ["left"] * 2


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_read_nothing_of_before(tmp_path: Path, disk: Path) -> None:
    arguments = {"task": "meet again", "disk": str(disk)}
    with launch("torch", PROGRAM, ranks=4, folder=tmp_path / "job", arguments=arguments, restarts=1) as job:
        job.succeed()
        for rank in range(4):
            assert job.told(rank) == {"words": ["second"] * 4, "stale": []}
