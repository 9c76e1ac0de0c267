"""Examine this machine's GPUs for `doctor`: which there are, and whether shared memory is page-locked and near them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tieredckpt.devices import numa
from tieredckpt.devices.base import Device, Driver
from tieredckpt.devices.memory import BUFFER
from tieredckpt.units import format_rate, format_size

__all__ = ["Finding", "facts", "nearness", "page_locking"]

_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Device files of NVIDIA's driver; the last one under WSL."""


class Finding(NamedTuple):
    """A finding about a GPU."""

    text: str
    """For people."""
    slower: bool = False
    """It works, but slower than it could; the text says how to fix that."""


def facts() -> Iterator[tuple[str, Finding]]:
    """Findings by name. Imports torch only where there is a device; blocking."""
    if not any(Path(node).exists() for node in _NODES):
        yield "GPU", Finding("no NVIDIA device on this machine")
        return
    if find_spec("torch") is None:
        yield "GPU", Finding("there is one, and PyTorch is not installed: its memory can be neither saved nor filled")
        return
    from tieredckpt.devices import cuda

    devices = cuda.devices()
    if not devices:
        yield "GPU", Finding("there is one, and PyTorch does not see it: compare its CUDA version with the driver's")
        return
    for index, name in enumerate(devices.values()):
        yield f"GPU {index}", Finding(name)
    yield "page-locking", page_locking(cuda.DRIVER)
    yield "NUMA", nearness(devices)


def page_locking(driver: Driver) -> Finding:
    """Whether ``driver`` registers shared memory; if not, the cost, and how to fix it."""
    shared = mmap.mmap(-1, BUFFER)
    memory = np.frombuffer(shared, dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 0  # with its pages, as a slab has them
    try:
        driver.register(memory)  # the first call of a process makes what a device holds for it, which takes far longer
        driver.unregister(memory)
        begin = time.perf_counter()
        driver.register(memory)
    except OSError as error:
        import resource  # of POSIX alone

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        locked = "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
        return Finding(
            f"refused ({error}): page-locked buffers of {format_size(BUFFER)} for each copy thread take its place, and "
            f"saves and restores copy once more on the host. The limit of locked "
            f"memory is {locked}; raise it with `ulimit -l unlimited`, for containers with `--ulimit memlock=-1`, for "
            f"systemd with `LimitMEMLOCK=infinity`, for Slurm with `PropagateResourceLimitsExcept=MEMLOCK`. In a "
            f"sandbox such as gVisor it cannot be had",
            slower=True,
        )
    took = time.perf_counter() - begin
    driver.unregister(memory)
    return Finding(f"the driver registers shared memory, at {format_rate(memory.nbytes / max(took, 1e-9))}")


def nearness(devices: Collection[Device]) -> Finding:
    """On which NUMA nodes the devices are, and whether memory can be taken there; if not, how to fix that."""
    if len(numa.NUMA.nodes()) < 2:
        return Finding("the machine has one node, or does not say which: there is no memory that is nearer than other")
    nodes = {device: numa.NUMA.node_of(device) for device in devices}
    if not any(node is not None for node in nodes.values()):
        return Finding(
            "several nodes, and the system does not say which devices are on which: memory lies where it puts it"
        )
    where = ", ".join(f"{each.name} on {'an unknown one' if at is None else at}" for each, at in nodes.items())
    try:
        numa.NUMA.prefer(np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=np.uint8), numa.NUMA.near(devices))
    except OSError as error:
        return Finding(
            f"several nodes ({where}), and memory cannot be asked for near a device ({error}): it lies where the "
            f"system puts it. Start each trainer with `numactl --preferred NODE`, or give its container CAP_SYS_NICE",
            slower=True,
        )
    return Finding(f"several nodes ({where}): new memory of the RAM tier is taken near the devices that a process uses")
