"""Memory near devices: which node each is on, what the system is asked for, and what happens where it refuses."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.devices import EVERY_KIND, rig

from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.devices import numa
from tieredckpt.devices.base import Bytes, Device
from tieredckpt.devices.examine import nearness
from tieredckpt.devices.numa import Numa
from tieredckpt.engine.scratch import Scratch
from tieredckpt.testing.devices import FakeDriver

BUS_IDS = ["0000:17:00.0", "0000:65:00.0", "0001:ca:00.0"]


class Machine:
    """A tree as ``/sys`` has it, of the nodes of devices by their bus ids; and the calls that were made."""

    def __init__(self, sys: Path, monkeypatch: pytest.MonkeyPatch, has_memory: str, on: Sequence[int]) -> None:
        self.asked: list[tuple[int, int, int, list[int]]] = []
        self.error: OSError | None = None
        (sys / "devices/system/node").mkdir(parents=True)
        (sys / "devices/system/node/has_memory").write_text(f"{has_memory}\n")
        for bus_id, node in zip(BUS_IDS, on, strict=False):
            (sys / "bus/pci/devices" / bus_id).mkdir(parents=True)
            (sys / "bus/pci/devices" / bus_id / "numa_node").write_text(f"{node}\n")
        monkeypatch.setattr(numa, "NUMA", Numa(sys, self.mbind))

    def mbind(self, address: int, nbytes: int, mode: int, nodes: Sequence[int]) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append((address, nbytes, mode, list(nodes)))


def grown() -> tuple[int, Bytes]:
    """The address of the memory of a slab that has grown, and a piece of it in use."""
    nbytes = 1 << 20
    slab = Slab(os.memfd_create("of-test"), nbytes)
    try:
        offset = slab.allocate(nbytes)
        assert offset is not None
        memory = slab.bytes_at(offset, nbytes)
        memory[:] = 7
        return slab.array.ctypes.data, memory.copy()
    finally:
        slab.close()


@pytest.mark.parametrize(
    ("has_memory", "on", "mode", "nodes"),
    [
        ("0-1", [1], numa._PREFERRED, [1]),
        ("0-1", [1, 1], numa._PREFERRED, [1]),
        ("0-3", [3, 0, 3], numa._INTERLEAVED, [0, 3]),
        ("0,2", [2, -1], numa._PREFERRED, [2]),
        ("0-1,64-65", [65, 1], numa._INTERLEAVED, [1, 65]),
    ],
)
def test_a_slab_grows_on_the_nodes_of_the_devices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: str, on: list[int], mode: int, nodes: list[int]
) -> None:
    machine = Machine(tmp_path, monkeypatch, has_memory, on)
    with FakeDriver(len(on), bus_ids=BUS_IDS):
        address, _ = grown()
    assert machine.asked == [(address, 1 << 20, mode, nodes)]


@pytest.mark.parametrize(
    ("has_memory", "on"),
    [
        ("0", [0]),  # one node
        ("0-1", [-1]),  # the firmware does not say
        ("0-1", [2]),  # a node without memory
        ("0-1", []),  # no such device on the bus
        ("?", [1]),
    ],
)
def test_nothing_is_asked_for_where_no_node_is_nearer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: str, on: list[int]
) -> None:
    machine = Machine(tmp_path, monkeypatch, has_memory, on)
    with FakeDriver(bus_ids=BUS_IDS[:1]):
        grown()
    with FakeDriver():  # of no bus
        grown()
    grown()  # without any device
    assert machine.asked == []


def test_a_slab_grows_where_the_system_refuses_to_choose_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, "0-1", [1])
    machine.error = OSError(errno.EPERM, "Operation not permitted")
    with FakeDriver(bus_ids=BUS_IDS) as driver:
        _, memory = grown()
        assert (memory == 7).all()
        told = nearness(driver.devices).text
    assert "Operation not permitted" in told
    assert "numactl --preferred" in told


async def test_scratch_memory_is_taken_near_devices_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, "0-1", [1])
    scratch = Scratch(1 << 20)
    with FakeDriver(bus_ids=BUS_IDS):
        async with scratch.lend(1 << 16):
            assert [nodes for _, _, _, nodes in machine.asked] == [[1]]
    scratch.close()


def test_doctor_says_on_which_nodes_devices_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, "0-1", [1, 0, -1])
    with FakeDriver(3, bus_ids=BUS_IDS) as driver:
        told = nearness(driver.devices).text
        assert "fake:0 on 1, fake:1 on 0, fake:2 on an unknown one" in told
        assert "near the devices" in told
        assert machine.asked, "it was tried"
        assert "does not say" in nearness(driver.devices[2:]).text
    monkeypatch.setattr(numa, "NUMA", Numa(tmp_path / "nowhere", machine.mbind))
    assert "no memory that is nearer" in nearness(driver.devices).text


def policy_at(memory: Bytes) -> tuple[int, int]:
    """The mode, and the nodes as bits, of memory; see get_mempolicy(2)."""
    number, of_address = {"x86_64": 239, "aarch64": 236}[os.uname().machine], 2
    mode, nodes = ctypes.c_int(-1), ctypes.c_ulong(0)
    bits, where = ctypes.c_ulong(8 * ctypes.sizeof(nodes) + 1), ctypes.c_void_p(memory.ctypes.data)
    found = ctypes.byref(mode), ctypes.byref(nodes)
    if ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number), *found, bits, where, ctypes.c_ulong(of_address)
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mode.value, nodes.value


def test_the_kernel_takes_the_call_and_it_holds_for_every_mapping_of_a_file() -> None:
    """With the one node that every machine has. Memory is reserved by threads that did not ask for a node."""
    fd = os.memfd_create("of-test")
    os.ftruncate(fd, 1 << 20)
    memory, other = (np.frombuffer(mmap.mmap(fd, 1 << 20), dtype=np.uint8) for _ in range(2))
    os.close(fd)
    try:
        assert policy_at(other) == (0, 0)
        Numa().prefer(memory[1 << 19 :], [0])
    except (KeyError, OSError) as error:
        pytest.skip(f"the system does not choose nodes: {error}")
    assert policy_at(other[: 1 << 19]) == (0, 0)
    assert policy_at(other[1 << 19 :]) == (numa._PREFERRED, 1)


@pytest.mark.parametrize("kind", EVERY_KIND[1:])
def test_a_device_is_on_the_bus_under_its_id(kind: str) -> None:
    pci = Path("/sys/bus/pci/devices")
    if not any(vendor.read_text().strip() == "0x10de" for vendor in pci.glob("*/vendor")):
        pytest.skip("this machine's /sys has no device of NVIDIA, as in gVisor and under WSL")
    with rig(kind) as here:
        here.array(1.0)  # which begins to use a device
        found: list[Device] = list(here.driver.in_use())
        assert found
        for device in found:
            assert device.bus_id is not None
            assert (pci / device.bus_id).is_dir()
