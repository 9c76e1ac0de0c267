"""torch's own code for GPUs over a look-alike of the CUDA runtime: what needs a device is tried where there is none."""

from __future__ import annotations

import ctypes
import importlib
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import SOON
from support.cuda_lookalike import environment, missing

TESTS = Path(__file__).parent.parent
SPEED = 400_000_000
"""Slow enough for copies to be under way when what uses them goes on."""
MEMORY = 200_000_000

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def failing(folder: Path, seed: int) -> None:
    """What a process does whose first device fails at some moment; it is to end, and keep what it had saved."""
    import torch

    from tieredckpt import CheckpointStore, DeviceUnavailable

    importlib.import_module("support.cuda_lookalike.kernels")  # replaces torch's
    chance, fails = random.Random(seed), threading.Event()
    state = {f"w{i}": torch.full((1 << 16,), float(i), device=f"cuda:{i % 2}") for i in range(12)}
    state |= {f"small {i}": torch.full((50,), float(i), device="cuda") for i in range(30)}
    state["turned"] = torch.randn(300, 400, device="cuda").T
    tiers: Any = {"ram": {"kind": "ram", "path": str(folder / "ram"), "capacity": "64 MiB"}}
    tiers["disk"] = {"kind": "posix", "path": str(folder / "disk"), "fsync": False, "retain": "all"}
    captured: list[int] = []
    told: list[str] = []
    with CheckpointStore.open_sync({"tiers": tiers, "store": {"chunk_size": "100 KiB"}}) as store:

        def fail() -> None:
            ctypes.CDLL("libcuda.so.1").cuda_lookalike_fail(700)
            fails.set()

        timer = threading.Timer(chance.uniform(0.0, 0.5), fail)
        timer.start()
        for step in range(1, 1000):
            try:
                store.save(step, state, capture=chance.choice(["copy", "lazy"])).captured()
                captured.append(step)
                if chance.random() < 0.3:
                    store.restore(**{chance.choice(["like", "into"]): state})
            except DeviceUnavailable as error:
                told.append(str(error))
                if chance.random() < 0.3:
                    break
        assert fails.is_set()
        assert all("illegal memory access" in each for each in told)
        restored = store.restore(as_="numpy", resume=False)
        assert (restored.step if restored is not None else 0) == max(captured, default=0)
        if restored is not None:
            assert all((restored.tree[f"w{i}"] == i).all() for i in range(12))
        store.flush()
        assert [each.step for each in store.steps() if "disk" in each.tiers] == captured


def run(folder: Path, *command: str, **settings: int) -> str:
    """What a process that has the look-alike's devices printed; it must end well, and without faults."""
    variables = environment(folder, **settings) | {"PYTHONPATH": str(TESTS)}
    ended = subprocess.run(
        [sys.executable, *command], check=False, capture_output=True, text=True, timeout=SOON, env=variables
    )
    faults = folder / "faults"
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not faults.exists(), faults.read_text()
    return ended.stdout


@pytest.mark.timeout(2 * SOON)
@pytest.mark.parametrize("lockable", [1 << 40, pytest.param(0, marks=pytest.mark.slow)])
def test_what_needs_a_device_holds_over_the_look_alike(tmp_path: Path, lockable: int) -> None:
    """With memory that can be page-locked where it is, and without."""
    tests = [str(path) for path in TESTS.rglob("test_*.py") if re.search(r"EVERY_KIND|need_cuda\(", path.read_text())]
    options = ["-q", "-m", "cuda", "-p", "support.cuda_lookalike.kernels", "-p", "no:cacheprovider"]
    settings = {"devices": 2, "memory": MEMORY, "speed": SPEED, "lockable": lockable}
    told = run(tmp_path, "-m", "pytest", *options, *tests, **settings)
    assert " passed" in told
    assert "CUDA devices" not in told, "a test was skipped that the look-alike has the devices for"


@pytest.mark.timeout(2 * SOON)
@pytest.mark.parametrize("lockable", [1 << 40, 0])
def test_a_device_that_fails_ends_neither_the_process_nor_what_was_saved(
    lockable: int, tmp_path: Path, shared_memory: Path
) -> None:
    imports = "from integrations.test_cuda_lookalike import Path, failing"
    for seed in range(2):
        arguments = f"Path({str(shared_memory / str(seed))!r}), {seed}"
        run(tmp_path, "-c", f"{imports}; failing({arguments})", speed=SPEED, lockable=lockable)
