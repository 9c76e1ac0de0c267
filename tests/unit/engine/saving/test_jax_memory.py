"""Saves of jax arrays that have no view on the host: they take little memory, and leave none behind.

Measured in a process of its own with four devices on the CPU, whose anonymous memory is that of devices and host.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.scenes import SOON

pytest.importorskip("jax")

MOST = 96 << 20
"""Bytes that a save may take beyond the state and the slab. NumPy has no view of 128 MiB of the state or more; two
threads hold a cell of 4 MiB each, and XLA frees late: up to 22 MiB were seen."""

PROGRAM = """
import gc, sys, threading, time
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tieredckpt import CheckpointStore
from tieredckpt.tree import jax_parts

ram, where, capture = sys.argv[1:]
if where == "elsewhere":  # as memory that is not the host's
    jax_parts._is_here = lambda array: False

def anonymous():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

mesh = Mesh(np.array(jax.devices()), ("x",))
specs = {"rows": P("x"), "columns": P(None, "x"), "alike": P()}
def state(step, side):
    made = {key: jax.device_put(np.full((side, side), step, np.float32), NamedSharding(mesh, spec))
            for key, spec in specs.items()}
    made["one"] = jax.device_put(np.full((side, side), step, np.float32), jax.devices()[2])
    # shards that are cells
    made["cells"] = jax.device_put(np.full((4096, 1024), step, np.float32), NamedSharding(mesh, P("x")))
    made["flags"] = jax.device_put(np.arange(1 << 20) % 3 == 0, NamedSharding(mesh, P("x")))
    return jax.block_until_ready(made)

tiers = {"ram": {"kind": "ram", "path": ram, "capacity": "1 GiB"}}
settings = {"name": "of-jax", "threads": 2, "chunk_size": "4 MiB"}
with CheckpointStore.open({"store": settings, "tiers": tiers}).sync() as store:
    store.save(1, state(0, 4096), capture=capture).reached("ram")  # which compiles
    tree = state(2, 4096)
    gc.collect()
    before = most = anonymous()
    ended = threading.Event()
    def watch():
        global most
        while not ended.wait(0.002):
            most = max(most, anonymous())
    watching = threading.Thread(target=watch)
    watching.start()
    store.save(2, tree, capture=capture).reached("ram")
    ended.set()
    watching.join()
    kept = [array for array in tree.values() for array in (array, *(each.data for each in array.addressable_shards))
            if array._npy_value is not None and np.asarray(array).base is None]
    restored = store.restore(resume=False).tree
    for key, array in tree.items():
        assert restored[key].dtype == array.dtype and np.array_equal(restored[key], array), key
print(most - before, len(kept))
"""


@pytest.mark.parametrize("capture", ["copy", "lazy"])
@pytest.mark.parametrize("where", ["of several devices", "elsewhere"])
def test_a_save_takes_little_memory_and_leaves_no_copy_in_the_callers_arrays(
    where: str, capture: str, shared_memory: Path
) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(shared_memory), where, capture],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    most, kept = map(int, done.stdout.split())
    assert most < MOST
    assert not kept
