"""A process without free file descriptors gets errors of this library, and its store works again once it has some."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.limits import descriptors_left
from support.scenes import SOON, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.agent.agent import Agent
from tieredckpt.blobs.ram import find
from tieredckpt.config import StoreConfig
from tieredckpt.events import Events

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

ONLY_IN_RAM = """
import json, logging, os, resource, sys, time
import numpy as np
from tieredckpt import CheckpointStore
from tieredckpt.errors import TieredCkptError

told = []
logging.getLogger("tieredckpt").addFilter(lambda record: told.append(record.getMessage()) or True)

def attempt(work):
    try:
        work()
    except TieredCkptError:
        pass

def wait_until(done):
    deadline = time.monotonic() + float(sys.argv[2])
    while not done():
        assert time.monotonic() < deadline, told
        time.sleep(0.01)

with CheckpointStore.open(json.loads(sys.argv[1])).sync() as store:
    for step in 1, 2:
        store.save(step, {"w": np.arange(60_000.0) + step})
    store.promote(1, "disk")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    attempt(lambda: store.evict(1, "ram"))
    attempt(lambda: store.save(3, {"w": np.arange(2_000_000.0)}))  # for which the slab grows
    wait_until(lambda: sum("tier 'ram' failed" in each for each in told) > 1)  # once as it was opened again
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: 2 in store.all_steps())
    assert np.array_equal(store.restore(2).tree["w"], np.arange(60_000.0) + 2)
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


def test_what_is_only_in_ram_stays_there_while_no_file_can_be_opened(shared_memory: Path, tmp_path: Path) -> None:
    """The note that names the slab could not be read, so RAM was taken for that of an earlier boot, and emptied."""
    tiers = {"ram": ram(shared_memory, capacity="auto"), "disk": folder(tmp_path / "disk", promote="never", retries=1)}
    told = json.dumps(config(tiers).model_dump(mode="json"))
    command = [sys.executable, "-c", ONLY_IN_RAM, told, str(SOON)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_an_agent_that_stays_goes_on_looking_after_a_moment_when_no_file_can_be_opened(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(name: str) -> StoreConfig:
        return config({"ram": ram(shared_memory, on_close="keep"), "disk": folder(tmp_path / name)})

    async with CheckpointStore.open(settings("of another store")) as store:
        await store.save(1, tree(1))
    reads, looks = find.marker_at, 0

    def short_of_descriptors(path: Path) -> Any:
        nonlocal looks
        looks += 1
        with descriptors_left(0):
            return reads(path)

    monkeypatch.setattr(find, "marker_at", short_of_descriptors)
    agent = asyncio.create_task(Agent(settings("of the agent"), Events(), "stays").run())
    try:
        async with asyncio.timeout(SOON):
            while looks < 3:
                assert not agent.done()
                await asyncio.sleep(0.01)
    finally:
        agent.cancel()
        await asyncio.wait([agent])
    assert agent.cancelled()
