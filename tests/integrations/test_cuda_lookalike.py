"""torch's own code for GPUs over a look-alike of the CUDA runtime: what needs a device is tried where there is none."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
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


def failing(folder: Path) -> None:
    """What a process does whose device fails beside its saves."""
    import torch
    from support.cuda_lookalike import kernels  # noqa: F401

    from tieredckpt import CheckpointStore, DeviceUnavailable

    state = {f"w{i}": torch.full((1 << 18,), float(i), device="cuda") for i in range(9)}
    tiers: Any = {"ram": {"kind": "ram", "path": str(folder / "ram"), "capacity": "64 MiB"}}
    tiers["disk"] = {"kind": "posix", "path": str(folder / "disk"), "fsync": False}
    with CheckpointStore.open_sync({"tiers": tiers}) as store:
        store.save(1, state)
        store.save(2, state, capture="lazy")
        store.save(3, state, capture="lazy").captured()
        ctypes.CDLL("libcuda.so.1").cuda_lookalike_fail(700)
        for act in (
            lambda: store.save(4, state),
            lambda: store.save(5, state, capture="lazy").captured(),
            lambda: store.restore(into=state),
        ):
            with pytest.raises(DeviceUnavailable, match=r"cuda:0.*illegal memory access"):
                act()
        restored = store.restore(as_="numpy")
        assert restored is not None
        assert restored.step == 3
        for i in range(9):
            assert (restored.tree[f"w{i}"] == i).all()
        store.flush()
        assert [each.step for each in store.steps() if "disk" in each.tiers] == [1, 2, 3]


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


def test_a_device_that_fails_ends_neither_the_process_nor_what_was_saved(tmp_path: Path, shared_memory: Path) -> None:
    imports = "from integrations.test_cuda_lookalike import Path, failing"
    run(tmp_path, "-c", f"{imports}; failing(Path({str(shared_memory)!r}))", speed=SPEED)
