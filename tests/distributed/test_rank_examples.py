"""The examples of many ranks run as their guide says, and go on with another number of ranks."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from distributed.launch import SOON, free_port, mpiexec, need

pytestmark = pytest.mark.timeout(3 * SOON)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(folder: Path, *commands: Sequence[str]) -> list[str]:
    """What the commands print, started together in ``folder``; all of them must succeed."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for command in commands
    ]
    try:
        told = [each.communicate(timeout=SOON) for each in running]
    finally:
        for each in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(each.pid).children(recursive=True):
                    child.kill()
            each.kill()
            each.wait()
    for each, (out, err) in zip(running, told, strict=True):
        assert each.returncode == 0, out + err
    return [line for out, _ in told for line in out.splitlines()]


def test_torchrun(tmp_path: Path) -> None:
    """By the last line: with PyTorch 2.10 Gloo prints before who is connected."""
    need("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    example = str(EXAMPLES / "ranks_torchrun.py")
    assert run(tmp_path, [*torchrun, "3", example])[-1:] == ["3 ranks trained steps 1 to 10, saved on ram, disk"]
    assert run(tmp_path, [*torchrun, "2", example])[-1:] == ["2 ranks trained steps 11 to 20, saved on ram, disk"]


def test_dcp_of_two_processes_goes_on_from_one(tmp_path: Path) -> None:
    need("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = str(EXAMPLES / "dcp_loop.py")
    assert run(tmp_path, [sys.executable, example])[-1:] == ["trained to step 10"]
    assert run(tmp_path, [*torchrun, example])[-2:] == ["trained to step 20"] * 2


def test_mpiexec(tmp_path: Path) -> None:
    need("mpi")
    example = [sys.executable, str(EXAMPLES / "ranks_mpi.py")]
    four = run(tmp_path, [str(mpiexec()), "-n", "4", *example])
    assert four == ["4 ranks went from step 0 to 5, and the field sums up to 79840000"]
    two = run(tmp_path, [str(mpiexec()), "-n", "2", *example])
    assert two == ["2 ranks went from step 5 to 10, and the field sums up to 159680000"]


def test_jax(tmp_path: Path) -> None:
    need("jax")
    for first in (1, 6):
        address = f"localhost:{free_port()}"
        example = [sys.executable, str(EXAMPLES / "ranks_jax.py"), address, "2"]
        (line,) = run(tmp_path, [*example, "0"], [*example, "1"])
        assert line == f"2 processes trained steps {first} to {first + 4}, and a weight is {first + 4}"


def test_the_guide_starts_every_example_as_it_is_tested() -> None:
    guide = (ROOT / "docs" / "guides" / "ranks.md").read_text("utf-8")
    assert set(re.findall(r"examples/(ranks_\w+\.py)", guide)) == {path.name for path in EXAMPLES.glob("ranks_*.py")}
    text = Path(__file__).read_text("utf-8")
    assert {path.name for path in EXAMPLES.glob("ranks_*.py") if f'"{path.name}"' not in text} == set()
