"""Processes of jax.distributed are killed in the middle of a training, and it goes on bit for bit, in any number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed.jax_train_program import DIES_AFTER, HANGS_AT, LAST
from distributed.launch import SOON, Job, launch

pytestmark = pytest.mark.timeout(4 * SOON)

PROGRAM = Path(__file__).with_name("jax_train_program.py")


@contextmanager
def training(
    folder: Path, shared: Path, *, processes: int, capture: str = "device", dies: bool = False
) -> Iterator[Job]:
    """A job of so many processes, which have four devices together."""
    devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes}", "JAX_PLATFORMS": "cpu"}
    arguments = {"ram": str(shared / "ram"), "disk": str(shared / "disk"), "capture": capture, "dies": dies}
    engine = "jax" if processes > 1 else "none"
    with launch(engine, PROGRAM, ranks=processes, folder=folder, arguments=arguments, environment=devices) as job:
        yield job


def bits(job: Job, processes: int) -> dict[str, dict[str, str]]:
    """By step the digests of all boxes, of all processes."""
    told = [job.told(rank)["bits"] for rank in range(processes)]
    return {step: {name: each for one in told for name, each in one[step].items()} for step in told[0]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the state is after each step, where nobody is killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with training(folder / "job", folder, processes=2) as job:
        job.succeed()
        return bits(job, 2)


def test_two_processes_killed_in_the_middle_go_on_bit_for_bit_and_so_do_others(
    undisturbed: dict[str, Any], tmp_path: Path, shared_memory: Path
) -> None:
    with training(tmp_path / "dying", shared_memory, processes=2, capture="pinned_host", dies=True) as job:
        for rank in range(2):
            job.wait_for("training", rank=rank)
        for rank in range(2):
            job.kill(rank)
        for rank in range(2):
            job.wait_until_ended(rank)

    with training(tmp_path / "again", shared_memory, processes=2) as job:
        job.succeed()
        began = job.told(0)["began"]
        assert 0 < began <= HANGS_AT
        assert began >= DIES_AFTER - 1  # of the last save, the copy into RAM may have been under way
        found = bits(job, 2)
        assert found == {step: each for step, each in undisturbed.items() if int(step) >= began}
        assert job.told(1)["where"] == ["ram", "disk"]
    assert undisturbed[str(LAST)] != undisturbed[str(LAST - 1)]
    for processes in (1, 4):
        with training(tmp_path / str(processes), shared_memory, processes=processes) as job:
            job.succeed()
            assert bits(job, processes) == {str(LAST): undisturbed[str(LAST)]}
            assert all(job.told(rank)["half"] for rank in range(processes))
