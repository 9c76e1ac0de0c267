"""Cells of arrays on the host and in the memory of devices, and how each is copied to the slab."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.devices.base import Bytes, Device
from tieredckpt.devices.link import Link
from tieredckpt.format.digest import BLOCK, Digester, copy_and_digest, digest
from tieredckpt.format.grid import Grid, cell_box, cells
from tieredckpt.tree.arrays import device_view, host_reader, host_view, row_major_bytes
from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["Cell", "DeviceCell", "cells_here", "cells_of", "cells_on_device", "in_0_and_1"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell to copy: the bytes of ``view`` that it covers, as a range (contiguous) or as slices."""

    array: int
    ordinal: int
    nbytes: int
    """Of the whole cell; the source may be shorter, the rest is zero padding."""
    source: Bytes | npt.NDArray[Any] | None
    """None for an array that has not changed: it is read only if the slab has lost what ``expected`` names."""
    shape: tuple[int, ...] | None
    """Of the whole cell, where ``source`` is no range of bytes; the source may be shorter along any axis."""
    expected: bytes | None
    """The digest that this cell had in the last two saves: likely unchanged, so digest before copying."""

    def copy_to(self, target: Bytes) -> bytes:
        """Fill ``target`` (``nbytes`` long) and return its digest."""
        assert self.source is not None
        if self.shape is None:
            return copy_and_digest(self.source, target)
        return _gather(self.source, target.view(self.source.dtype).reshape(self.shape))

    def digest(self) -> bytes:
        """What `copy_to` would return."""
        assert self.source is not None
        if self.shape is None:
            return digest(self.source, self.nbytes - self.source.nbytes)
        return _gather(self.source, np.empty(self.shape, self.source.dtype))

    def digest_by(self, link: Link[Any]) -> bytes:
        """What `copy_to` would return; ``link`` copies a cell on a device to the host."""
        return self.digest()


@dataclass(frozen=True, slots=True)
class DeviceCell(Cell):
    """A cell of an array on a device; ``source`` is the part of the array that it covers.

    If ``shape`` is None, the bytes of the part are the start of the cell.
    """

    source: Any
    device: Device
    dtype: np.dtype[Any]

    @property
    def valid(self) -> int:
        """Bytes that the device has of it; the rest is padding."""
        shape: tuple[int, ...] = self.source.shape
        return prod(shape) * self.dtype.itemsize

    def goes_to(self, target: Bytes) -> tuple[Bytes | None, int]:
        """Memory for a direct copy: ``target``, or None if the bytes must be spread out; and the bytes to copy."""
        return (target if self.shape is None else None), self.valid

    def arrived(self, buffer: Bytes | None, target: Bytes) -> bytes:
        """Complete the cell in ``target`` and return its digest; its bytes are there, or in ``buffer``."""
        if buffer is not None:
            view = in_0_and_1(buffer[: self.valid].view(self.dtype).reshape(self.source.shape))
            source = view if self.shape is not None else view.reshape(-1).view(np.uint8)
            return Cell(self.array, self.ordinal, self.nbytes, source, self.shape, None).copy_to(target)
        target[self.valid :] = 0
        if self.dtype.kind == "b" and target.max() > 1:
            np.not_equal(target, 0, out=target.view(np.bool_))
        return digest(target)

    def digest_by(self, link: Link[Any]) -> bytes:
        """What `arrived` would return."""
        link.copy_out(None, self.device, self.source, None, self.valid)
        flight = link.land()
        flight.landed.wait()
        now = self.arrived(flight.buffer, np.empty(self.nbytes, np.uint8))
        link.done(flight)
        return now


@dataclass(frozen=True, slots=True)
class ReadCell(Cell):
    """A cell of an array without a view on the host; ``source`` reads its ``box`` when its turn comes.

    If ``shape`` is None, the bytes of the box are the start of the cell.
    """

    source: Any
    box: tuple[slice, ...]

    def copy_to(self, target: Bytes) -> bytes:
        return self._here().copy_to(target)

    def digest(self) -> bytes:
        return self._here().digest()

    def _here(self) -> Cell:
        view = in_0_and_1(self.source(self.box))
        source = view if self.shape is not None else np.ascontiguousarray(view).reshape(-1).view(np.uint8)
        return Cell(self.array, self.ordinal, self.nbytes, source, self.shape, None)


def cells_of(array: int, leaf: ArrayLeaf, grid: Grid) -> Iterator[Cell]:
    """The cells of a leaf, on the host or on a device; ``array`` is its index."""
    there = device_view(leaf)
    return cells_here(array, leaf, grid, ()) if there is None else cells_on_device(array, leaf, grid, *there)


def cells_here(array: int, leaf: ArrayLeaf, grid: Grid, known: Sequence[bytes | None]) -> Iterator[Cell]:
    """The cells of an array on the host, or to be read by its framework; ``known`` are digests they may have again."""
    if (read := host_reader(leaf)) is not None:
        yield from _cells_to_read(array, leaf, grid, read)
        return
    view = in_0_and_1(host_view(leaf))
    flat = row_major_bytes(view) if leaf.place is None or grid.contiguous else None
    if len(known) != grid.size or flat is None:
        known = (None,) * grid.size
    shape = None if flat is not None else grid.cell
    for ordinal, source in enumerate(_sources(view, flat, grid)):
        yield Cell(array, ordinal, grid.cell_nbytes, source, shape, known[ordinal])


def _cells_to_read(
    array: int, leaf: ArrayLeaf, grid: Grid, read: Callable[[tuple[slice, ...]], npt.NDArray[Any]]
) -> Iterator[ReadCell]:
    shape = None if leaf.place is None or grid.contiguous else grid.cell
    for ordinal, cell in enumerate(cells(grid)):
        yield ReadCell(array, ordinal, grid.cell_nbytes, read, shape, None, cell_box(grid, cell.index).slices())


def cells_on_device(array: int, leaf: ArrayLeaf, grid: Grid, device: Device, view: Any) -> Iterator[DeviceCell]:
    """The cells of an array that is ``view`` on its device."""
    shape = None if leaf.place is None or grid.contiguous else grid.cell
    for ordinal, cell in enumerate(cells(grid)):
        source = view[cell_box(grid, cell.index).slices()]
        yield DeviceCell(array, ordinal, grid.cell_nbytes, source, shape, None, device, leaf.dtype)


def in_0_and_1(view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A bool array with no bytes but 0 and 1, as other readers need it; any other byte is true, as in NumPy."""
    if view.dtype.kind != "b":
        return view
    items = view.view(np.uint8)
    return items != 0 if items.size and items.max() > 1 else view


def _sources(view: npt.NDArray[Any], flat: Bytes | None, grid: Grid) -> Iterator[Bytes | npt.NDArray[Any]]:
    if flat is not None:
        for cell in cells(grid):
            yield flat[cell.start : cell.start + cell.nbytes]
        return
    for cell in cells(grid):
        yield view[cell_box(grid, cell.index).slices()]


def _gather(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> bytes:
    """Copy ``source`` to the start of ``target`` along every axis, zero the rest, and return the target's digest.

    What is digested is what was copied just before, while it is in the cache.
    """
    memory = target.reshape(-1).view(np.uint8)
    while target.ndim > 1 and target.shape[0] == 1:
        source, target = source[0], target[0]
    row = target.nbytes // target.shape[0]
    rows = max(1, BLOCK // row)
    digester = Digester()
    for first in range(0, target.shape[0], rows):
        block = memory[first * row : (first + rows) * row]
        part = source[first : first + rows]
        copy = target[first : first + rows]
        if part.shape != copy.shape:
            block[:] = 0
        np.copyto(copy[tuple(map(slice, part.shape))], part)
        digester.update(block)
    return digester.digest()
