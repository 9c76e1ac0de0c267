"""A process without free file descriptors gets errors of this library, and its store works again once it has some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.scenes import SOON, config, folder, ram

from tieredckpt.config import StoreConfig

SHORT = """
import json, os, resource, sys, time
import numpy as np
from tieredckpt import CheckpointStore
from tieredckpt.errors import TieredCkptError

settings, framework, saved_before, free = json.loads(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
w = np.arange(60_000.0)
tree = {"w": w, "mask": w > 7, "epoch": 3}
if framework == "torch":
    import torch
    tree["w"] = torch.from_numpy(w)
if framework == "jax":
    import jax
    tree["w"] = jax.numpy.asarray(w, dtype="float32")

def attempt(work):
    try:
        return work()
    except TieredCkptError as error:
        print(type(error).__name__)

with CheckpointStore.open(settings).sync() as store:
    if saved_before == "saved before":
        store.save(1, tree)
        store.flush()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 9, limits[1]))
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for _ in range(free):
        os.close(taken.pop())
    loaded = set(sys.modules)
    attempt(lambda: store.save(2, tree, metrics={"loss": 1.0}))
    attempt(lambda: store.save(3, {"epoch": 1}, capture="reference").reached("ram"))
    for options in ({}, {"like": tree}, {"copy": False}, {"keys": ["mask"]}):
        attempt(lambda: store.restore(1, **options))
        attempt(lambda: store.restore(**options))
    ours = [name for name in set(sys.modules) - loaded if name.startswith("tieredckpt")]
    assert not ours, ours
    for fd in taken:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    deadline = time.monotonic() + float(sys.argv[5])
    while attempt(lambda: store.save(9, tree)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while "disk" not in store.where(9):
        attempt(store.flush)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    restored = store.restore(9).tree
    assert np.array_equal(restored["w"], np.asarray(tree["w"]))
    assert np.array_equal(restored["mask"], tree["mask"])
    if saved_before == "saved before":
        assert store.restore(1) is not None
"""


@pytest.mark.parametrize(
    ("framework", "saved_before", "free"),
    [
        ("numpy", "saved before", 0),
        ("numpy", "nothing before", 1),
        ("torch", "nothing before", 0),
        ("torch", "saved before", 1),
        ("jax", "nothing before", 0),
        ("jax", "saved before", 3),
    ],
)
def test_without_descriptors_a_store_raises_its_own_errors_and_recovers(
    shared_memory: Path, tmp_path: Path, framework: str, saved_before: str, free: int
) -> None:
    pytest.importorskip(framework)
    settings: StoreConfig = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")})
    told = json.dumps(settings.model_dump(mode="json"))
    done = subprocess.run(
        [sys.executable, "-c", SHORT, told, framework, saved_before, str(free), str(SOON)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
