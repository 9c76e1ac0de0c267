"""Allocate host memory near devices: on the NUMA node that the device is attached to.

Copies between a device and memory of another node cross the link between the processors, which all devices share. See
mbind(2), set_mempolicy(2) for preferred nodes, and ``numa_node`` in sysfs-bus-pci of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tieredckpt.devices.base import Bytes, Device, address
from tieredckpt.devices.drivers import drivers
from tieredckpt.errors import DeviceUnavailable

__all__ = ["NUMA", "Numa", "take_near_devices"]

_PREFERRED, _INTERLEAVED = 1, 3
"""Modes of mbind(2). Both take memory elsewhere when a node is full; ``MPOL_BIND`` would end a process instead."""
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call, for which the C library has no function."""
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def _mbind(address: int, nbytes: int, mode: int, nodes: Sequence[int]) -> None:
    uname = os.uname()
    if uname.sysname != "Linux" or uname.machine not in _MBIND:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mask = (ctypes.c_ulong * (max(nodes) // _WORD + 1))()
    for node in nodes:
        mask[node // _WORD] |= 1 << node % _WORD
    bits = ctypes.c_ulong(len(mask) * _WORD + 1)  # the kernel reads one bit less
    where = ctypes.c_void_p(address), ctypes.c_ulong(nbytes)
    if _libc().syscall(ctypes.c_long(_MBIND[uname.machine]), *where, ctypes.c_int(mode), mask, bits, ctypes.c_uint(0)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@dataclass(frozen=True, slots=True)
class Numa:
    """The nodes of this machine; made with another tree and another call for tests."""

    sys: Path = Path("/sys")
    mbind: Callable[[int, int, int, Sequence[int]], None] = _mbind
    """Called with an address, bytes, a mode and nodes. Raises `OSError`."""

    def nodes(self) -> set[int]:
        """The nodes that have memory; empty where the system does not say."""
        with suppress(OSError, ValueError):
            return set(_listed((self.sys / "devices/system/node/has_memory").read_text()))
        return set()

    def node_of(self, device: Device) -> int | None:
        """The node that a device is attached to; None where the system does not say, or it has no memory."""
        if (bus_id := device.bus_id) is None:
            return None
        with suppress(OSError, ValueError):
            node = int((self.sys / "bus/pci/devices" / bus_id / "numa_node").read_text())
            return node if node in self.nodes() else None
        return None

    def near(self, devices: Iterable[Device]) -> list[int]:
        """The nodes of some devices; empty on a machine of one node, where all memory is near."""
        if len(self.nodes()) < 2:
            return []
        return sorted({node for device in devices if (node := self.node_of(device)) is not None})

    def prefer(self, memory: Bytes, nodes: Sequence[int]) -> None:
        """Take pages of ``memory``, from now on, on these nodes: in turn if there are several. Raises `OSError`.

        ``memory`` begins at a page. For shared memory this affects every process that allocates pages of that file.
        """
        mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVED
        self.mbind(address(memory), memory.nbytes, mode, nodes)


NUMA = Numa()


def take_near_devices(memory: Bytes) -> None:
    """Allocate the pages of ``memory``, none of which exists yet, near the devices that this process uses.

    Does nothing on a machine of one node, without devices, or if the system refuses: `doctor` reports that.
    """
    with suppress(OSError, DeviceUnavailable):
        if nodes := NUMA.near([device for driver in drivers() for device in driver.in_use()]):
            NUMA.prefer(memory, nodes)


def _listed(text: str) -> Iterator[int]:
    """The numbers of a list of Linux, such as ``0-1,4``."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
