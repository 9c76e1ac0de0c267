"""Loops as T5X and MaxText have them, killed in the middle, end to the last bit as those that were not."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed.launch import SOON, launch
from support.frameworks import need_modules
from support.runs import Ended, Run, runs_of
from support.scenes import new_shared_folder

from tieredckpt.blobs.ram.folder import SHARED_MEMORY_VARIABLE

need_modules("jax", "flax", "optax", "orbax")

pytestmark = pytest.mark.timeout(8 * SOON)

PROGRAM = Path(__file__).with_name("orbax_program.py")

LOOPS = ("maxtext", "t5x")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Ended]]:
    """How each loop ended that was killed, that went on after that, and that was left alone."""
    folder, memory = tmp_path_factory.mktemp("loops"), new_shared_folder()
    runs = {}
    for loop in LOOPS:
        killed, through = str(folder / loop / "killed"), str(folder / loop / "through")
        runs[loop, "killed"] = Run((loop, killed, "5"))
        runs[loop, "through"] = Run((loop, through, "0"))
        runs[loop, "gone on"] = Run((loop, killed, "0"))
    runs["maxtext", "compared"] = Run(("compare", str(folder / "maxtext" / "killed")))  # which saves the last step
    environment = {
        "PYTHONPATH": str(PROGRAM.parents[1]),
        "PYTHONWARNINGS": "ignore",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        SHARED_MEMORY_VARIABLE: str(memory / "user"),
    }
    try:
        found = runs_of(PROGRAM, *runs.values(), folder=folder, seconds=SOON, environment=environment)
        yield dict(zip(runs, found, strict=True))
    finally:
        shutil.rmtree(memory)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_training_that_was_killed_ends_as_one_that_was_not(loop: str, ended: dict[tuple[str, str], Ended]) -> None:
    assert ended[loop, "killed"].code == -signal.SIGKILL
    assert len(ended[loop, "through"].lines[-1]) == 64
    assert ended[loop, "gone on"] == ended[loop, "through"]


def test_other_meshes_restore_what_a_training_ended_with(ended: dict[tuple[str, str], Ended]) -> None:
    assert ended["maxtext", "compared"] == ended["maxtext", "through"]


def test_processes_save_and_restore_what_each_has(tmp_path: Path, shared_memory: Path) -> None:
    memory = {SHARED_MEMORY_VARIABLE: str(shared_memory / "user"), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    arguments = {"folder": str(tmp_path / "run")}
    with launch("jax", PROGRAM, ranks=2, folder=tmp_path, arguments=arguments, environment=memory) as job:
        job.succeed()
        assert [job.told(rank) for rank in range(2)] == [[True, True, 0, 10], [True, True, 0, 11]]


@pytest.mark.slow
def test_processes_that_were_killed_together_end_as_those_that_were_not(tmp_path: Path, shared_memory: Path) -> None:
    """By SIGKILL, right after a save, of jax.distributed with arrays over both."""

    def run(name: str, kill_at: int) -> list[tuple[int, str]]:
        memory = {SHARED_MEMORY_VARIABLE: str(shared_memory / name), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
        arguments = {"folder": str(tmp_path / name), "kill_at": kill_at}
        job_folder = tmp_path / f"{name}-{kill_at}"
        job_folder.mkdir()
        with launch("jax", PROGRAM, ranks=2, folder=job_folder, arguments=arguments, environment=memory) as job:
            if kill_at:
                job.wait()
                assert not any(job.has_told(rank) for rank in range(2))
                return []
            job.succeed()
            return [tuple(job.told(rank)) for rank in range(2)]

    run("killed", 6)
    gone_on, through = run("killed", 0), run("through", 0)
    assert [begun for begun, _ in through] == [0, 0]
    assert all(begun in (4, 6) for begun, _ in gone_on)  # the save of the last one may not have been committed
    assert [found for _, found in gone_on] == [found for _, found in through]
