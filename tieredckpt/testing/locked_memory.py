"""Page-locked host memory of a fake driver: the ranges that are registered, and the buffers that are pinned."""

from __future__ import annotations

import threading

import numpy as np

from tieredckpt.devices.base import Bytes, address

__all__ = ["LockedMemory"]


class LockedMemory:
    """Memory that a driver has locked; ``lockable`` is how many bytes it locks in all, None for any."""

    def __init__(self, lockable: int | None) -> None:
        self.registered: dict[int, int] = {}
        """Ends of the registered ranges by their starts."""
        self._pinned: list[tuple[int, int, Bytes]] = []
        self._lockable = lockable
        self._guards_ranges = threading.Lock()

    def register(self, memory: Bytes) -> None:
        with self._guards_ranges:
            self._lock(memory.nbytes)
            start = address(memory)
            if any(start < end and first < start + memory.nbytes for first, end in self.registered.items()):
                raise OSError("cudaHostRegister answered 712: part or all of the requested memory range is mapped")
            self.registered[start] = start + memory.nbytes

    def unregister(self, memory: Bytes) -> None:
        with self._guards_ranges:
            if self.registered.pop(address(memory), None) is None:
                raise OSError("cudaHostUnregister answered 713: the memory is not registered")
            if self._lockable is not None:
                self._lockable += memory.nbytes

    def pinned(self, nbytes: int) -> Bytes:
        with self._guards_ranges:
            self._lock(nbytes)
            memory = np.empty(nbytes, np.uint8)
            self._pinned.append((address(memory), address(memory) + nbytes, memory))
            return memory

    def _lock(self, nbytes: int) -> None:
        if self._lockable is not None:
            if nbytes > self._lockable:
                raise OSError("cudaHostRegister answered 2: out of memory")
            self._lockable -= nbytes

    def is_registered(self, memory: Bytes) -> bool:
        """Whether the memory lies in a registered range, and in none of `pinned`."""
        start = address(memory)
        with self._guards_ranges:
            return any(first <= start < end for first, end in self.registered.items())

    def ranges_of(self, memory: Bytes) -> list[bool]:
        """For each page-locked range that holds some of the memory, whether it holds all of it."""
        start = address(memory)
        end = start + memory.nbytes
        with self._guards_ranges:
            ranges = [*self.registered.items(), *((first, last) for first, last, _ in self._pinned)]
        return [first <= start and end <= last for first, last in ranges if first < end and start < last]
