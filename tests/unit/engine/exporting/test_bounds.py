"""What an export costs, and what a process leaves that is killed in the middle of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tieredckpt import CheckpointStore
from tieredckpt.interchange.safetensors import SAFETENSORS

MEASURING = """
import json, sys, threading
import numpy as np
from tieredckpt import CheckpointStore
from tieredckpt.events import ExportFailed, StepExported

def anonymous():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10

with CheckpointStore.open(json.loads(sys.argv[1])).sync() as store:
    ended, watched = threading.Event(), threading.Event()
    told = []
    def hear(event):
        if isinstance(event, (StepExported, ExportFailed)):
            told.append(event)
            ended.set()
    store.subscribe(hear)
    rows = int(sys.argv[2]) << 10
    large = np.ones(rows << 10, np.uint8).view(sys.argv[3]).reshape(rows, -1)
    tree = {"large": large, "small": {str(at): np.ones(100) for at in range(1000)}}
    del large
    store.save(1, tree)
    del tree
    before, peak = anonymous(), 0
    while not ended.wait(0.01):
        peak = max(peak, anonymous())
    assert isinstance(told[0], StepExported), told
    print(max(0, peak - before))
"""

KILLED = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
from tieredckpt import CheckpointStore
from tieredckpt.engine.exporting import folder, held_step

point = sys.argv[2]
calls = 0

def dying(function):
    def call(*arguments, **named):
        global calls
        calls += 1
        if calls == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call

if point == "rename":
    Path.rename = dying(Path.rename)
elif point == "flush":
    folder.sync_folder = dying(folder.sync_folder)
    folder.os.fsync = dying(os.fsync)
else:
    held_step.fill = dying(held_step.fill)
with CheckpointStore.open(json.loads(sys.argv[1])).sync() as store:
    for step in (1, 2):
        store.save(step, {f"w{at}": np.full(100_000, step + at) for at in range(4)})
        store.flush()
"""

HANGING = """
import json, sys, threading
import numpy as np
from dataclasses import replace
from tieredckpt import CheckpointStore
from tieredckpt.blobs.posix import stream
from tieredckpt.engine import limits

limits.in_force = replace(limits.in_force, export_gives_up=0.1)
begun = threading.Event()

def hang(*arguments):
    begun.set()
    threading.Event().wait()

stream.write_batch = hang
store = CheckpointStore.open_sync(json.loads(sys.argv[1]))
store.save(1, {"w": np.ones(1000)})
assert begun.wait(60)
store.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
print("closed")
"""


def config(tmp_path: Path, shared_memory: Path, *, chunk_size: str = "1 MiB", **export: Any) -> dict[str, Any]:
    return {
        "store": {"chunk_size": chunk_size},
        "tiers": {
            "ram": {"kind": "ram", "path": str(shared_memory / "ram"), "on_close": "keep"},
            "disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False, "retain": "all"},
        },
        "exports": {"hf": {"format": "safetensors", "to": str(tmp_path / "out")} | export},
    }


@pytest.mark.parametrize(
    ("cast", "dtype", "chunk_size"),
    [(None, "float32", "1 MiB"), ("bf16", "float32", "1 MiB"), ("bf16", "float64", "16 MiB")],
)
def test_an_export_takes_less_than_256_mib_whatever_the_size_of_a_step(
    tmp_path: Path, shared_memory: Path, cast: str | None, dtype: str, chunk_size: str
) -> None:
    """Of a step of 384 MiB in one array: the private memory of the process, apart from the store's own slab."""
    settings = config(tmp_path, shared_memory, chunk_size=chunk_size, **({} if cast is None else {"cast": cast}))
    command = [sys.executable, "-c", MEASURING, json.dumps(settings), "384", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256 << 20, done.stdout
    itemsize = np.dtype(dtype).itemsize if cast is None else 2
    written = (tmp_path / "out" / "step-1" / "model.safetensors").stat().st_size
    assert written > (384 << 20) // np.dtype(dtype).itemsize * itemsize


@pytest.mark.parametrize(
    ("point", "at"), [("fill", 2), ("flush", 1), ("flush", 3), ("flush", 8), ("rename", 1), ("rename", 2)]
)
def test_killed_in_the_middle_of_an_export_it_leaves_whole_ones_and_the_restart_makes_the_rest(
    tmp_path: Path, shared_memory: Path, point: str, at: int
) -> None:
    settings = config(tmp_path, shared_memory)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(settings), point, str(at)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert SAFETENSORS.read is not None

    def check() -> list[str]:
        found = sorted(name for name in os.listdir(tmp_path / "out") if not name.startswith("."))
        for name in found:
            assert SAFETENSORS.read is not None
            tensors = SAFETENSORS.read(tmp_path / "out" / name)
            for place in range(4):
                np.testing.assert_array_equal(tensors[f"w{place}"], int(name[-1]) + place)
        return found

    assert set(check()) < {"step-1", "step-2"} or point != "fill"
    with CheckpointStore.open(settings).sync() as store:
        store.flush()
        steps = store.all_steps()
    assert check() == [f"step-{step}" for step in steps]
    assert sorted(os.listdir(tmp_path / "out")) == check()


def test_a_process_ends_though_an_export_hangs_in_its_device(tmp_path: Path, shared_memory: Path) -> None:
    command = [sys.executable, "-c", HANGING, json.dumps(config(tmp_path, shared_memory))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "closed\n"
