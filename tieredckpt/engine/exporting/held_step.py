"""The arrays of a step for an export behind the training: read part by part from the tiers, ahead of their writing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tieredckpt._batches import batches
from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.posix.stream import BLOCK, Blocks, StreamedFile
from tieredckpt.config.formats import Output
from tieredckpt.engine import limits
from tieredckpt.engine.exporting.content import Arrays, Dtypes, StepContent, Took
from tieredckpt.engine.inventory import ArrayInfo, StepDetails
from tieredckpt.engine.restoring.pieces import CastTarget, Target
from tieredckpt.engine.restoring.reader import fill
from tieredckpt.engine.restoring.restore import Repair
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.state.state import State
from tieredckpt.errors import Closed, NotFound
from tieredckpt.format import grid as grids
from tieredckpt.format.grid import Grid
from tieredckpt.format.layout import block_key
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.structure import Node
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.tree.flatten import plain_tree
from tieredckpt.tree.leaf import array_spec

__all__ = ["HeldStep", "Reading", "StepLeft"]

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

_AHEAD = 2
"""Parts that are read, one after the other, while one is written: threads do not wait for the format between them."""

_ALIGNMENT = 64
"""Of the arrays in a block, where they need not lie side by side."""


class StepLeft(NotFound):
    """A step has left all tiers while it was exported, because a save needed its memory."""


class Reading:
    """Reads a step that stays meanwhile on the tier that it is read from. Lives on the engine's loop.

    A save that needs the memory of a step in RAM gets it: the rest is read from the next tier that has the step.
    """

    def __init__(self, state: State, step: StepId, repair: Repair) -> None:
        self._state, self.step, self._repair = state, step, repair
        self._turn = asyncio.Lock()
        """Held while the step is read, and while its tier is released."""
        self._reading = AsyncExitStack()
        self._source: StepSource | None = None
        self._not_from_ram = False
        self._ended = False

    async def index(self) -> StepIndex:
        """The step's index. Raises as `StepSource.open`."""
        async with self._turn:
            return (await self._open()).index

    async def fill(self, targets: Mapping[str, Target]) -> dict[str, int]:
        """See `tieredckpt.engine.restoring.reader.fill`; not while a training waits for a save."""
        gate = self._state.ram_gate
        found: dict[str, int] | None = None
        while found is None:
            await gate.quiet()  # without the turn, which a save needs that waits for the step's memory
            async with self._turn:
                if gate.is_closed:
                    continue
                source = await self._open()
                found = await fill(self._state, source, targets)
                damage, source.damage = source.damage, []
                unreadable, source.unreadable = source.unreadable, []
        if damage or unreadable:
            self._repair(self.step, damage, unreadable)
        return found

    async def _open(self) -> StepSource:
        if self._ended:  # a thread that was left behind asks once more, and nobody would let go of the step
            raise Closed("the export was given up")
        if self._not_from_ram and self._source is not None and self._source.tier.in_memory:
            await self._release_now()  # a save waits for that, behind reads that were asked for before
        if self._source is None:
            only = self._other_than_ram() if self._not_from_ram else None
            if self._not_from_ram and only is None:
                raise StepLeft(f"{self.step} was let go for a newer save before it was exported")
            source = StepSource.open(self._state, self.step, only=only)
            self._source = await self._reading.enter_async_context(source)
        return self._source

    def _other_than_ram(self) -> Any:
        size = self._state.membership.size
        holders = (tier for tier in self._state.holders(self.step) if not tier.in_memory)
        return next((tier for tier in holders if tier.shared or size == 1), None)

    async def give_way(self, *, must: bool) -> None:
        """Release the step in RAM for a save, if another tier has it; with ``must`` in any case."""
        if self._source is None or self._source.in_slab is None or self._not_from_ram:
            return
        if not must and self._other_than_ram() is None:
            return
        self._not_from_ram = True
        await self._release()

    async def close(self) -> None:
        """Release the tier for good: later reads fail."""
        self._ended = True
        await self._release()

    async def _release(self) -> None:
        """Release the tier; the next read opens it anew."""
        async with self._turn:
            await self._release_now()

    async def _release_now(self) -> None:
        self._source = None
        await self._reading.aclose()
        self._reading = AsyncExitStack()


class _Target(NamedTuple):
    """An array, or a box of one, that is read."""

    info: ArrayInfo
    name: str
    """As `fill` takes it."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """In which it is wanted."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def filling(self, array: npt.NDArray[Any]) -> Target:
        """The target that fills ``array``, with a cast if the step has another dtype."""
        stored = dtype_from_name(self.info.dtype)
        return array if stored == self.dtype else CastTarget(array, stored)


class _Part(NamedTuple):
    """Targets that are read together, and their place in a block."""

    targets: list[_Target]
    arrays: list[npt.NDArray[Any]]
    block: Bytes
    start: int
    end: int


class HeldStep(StepContent):
    """A step that the engine holds, for a format that writes on a thread of its own.

    Args:
        reading: of the step.
        details: of the step, with the leaves that are exported.
        structure: of those leaves.
        index: of the step.
        part: as of `StepContent`.
        loop: of the engine.
        blocks: memory for what is read.
    """

    compared = False

    def __init__(
        self,
        reading: Reading,
        details: StepDetails,
        structure: Node,
        index: StepIndex,
        part: str | None,
        loop: asyncio.AbstractEventLoop,
        blocks: Blocks,
    ) -> None:
        super().__init__(details, part)
        self._blocks = blocks
        self._reading, self._structure, self._index, self._loop = reading, structure, index, loop
        self._asked: set[concurrent.futures.Future[Any]] = set()
        self._awaited: concurrent.futures.Future[Any] | None = None
        """The one of `_asked` that the thread waits for."""
        self._ended = threading.Event()
        self._given, self._given_at = 0, time.monotonic()
        """The most bytes that the format got at a time, and when it got some last."""
        self._unflushed = 0
        """Bytes that the format's library may flush only at its end."""

    def _tree(self) -> Any:
        return plain_tree(self._structure, array_spec)

    def read(self, arrays: Sequence[ArrayInfo] | None = None) -> Arrays:
        """See `StepContent.read`: one array at a time."""
        for info in self.arrays if arrays is None else arrays:
            dtype = dtype_from_name(info.dtype)
            array = np.empty(info.shape, dtype)
            self.sources.update(self._ask(self._reading.fill({info.key: array})))
            self._unflushed += array.nbytes
            self._gives(array.nbytes)
            yield info, array

    def pieces(self, arrays: Sequence[ArrayInfo] | None = None, dtypes: Dtypes = MappingProxyType({})) -> Arrays:
        """See `StepContent.pieces`. Arrays are cast by the threads that read them."""
        for part in self._parts(self.arrays if arrays is None else arrays, dtypes):
            for target, array in zip(part.targets, part.arrays, strict=True):
                yield target.info, array.reshape(-1)
            self._blocks.give_back(part.block)

    def write_to(self, file: Output, arrays: Sequence[ArrayInfo], dtypes: Dtypes, took: Took) -> None:
        """See `StepContent.write_to`. A `StreamedFile` writes from the block that the bytes were read into."""
        if not isinstance(file, StreamedFile) or sys.byteorder == "big":
            super().write_to(file, arrays, dtypes, took)
            return
        for part in self._parts(arrays, dtypes, at=file.size % ALIGNMENT, unit=1):
            file.lend(part.block, part.start, part.end)

    def _parts(
        self, arrays: Sequence[ArrayInfo], dtypes: Dtypes, at: int = 0, unit: int = _ALIGNMENT
    ) -> Iterator[_Part]:
        """Read the arrays part by part, each into a block of its own, which belongs to the caller from then on.

        The first part begins ``at`` that offset of its block, each later one at the offset in a page where the one
        before ended. In a part, arrays begin at multiples of ``unit``.
        """
        most = min(limits.in_force.export_part, BLOCK)
        batched = batches(self._targets(arrays, dtypes, most), lambda target: _up(target.nbytes, unit), most)
        coming: deque[tuple[_Part, concurrent.futures.Future[Any]]] = deque()

        def begin() -> None:
            nonlocal at
            if (targets := next(batched, None)) is not None:
                part = _placed(targets, self._blocks.take(), at, unit)
                at = part.end % ALIGNMENT
                wanted = {
                    target.name: target.filling(array) for target, array in zip(targets, part.arrays, strict=True)
                }
                coming.append((part, self._begin(self._reading.fill(wanted))))

        for _ in range(_AHEAD):
            begin()
        while coming:
            part, reading = coming.popleft()
            self.sources.update(self._end(reading))
            begin()
            self._gives(part.end - part.start)
            yield part

    def _targets(self, arrays: Sequence[ArrayInfo], dtypes: Dtypes, most: int) -> Iterator[_Target]:
        for info in arrays:
            dtype = dtypes.get(info.key, dtype_from_name(info.dtype))
            whole = _Target(info, info.key, info.shape, dtype)
            if whole.nbytes <= most:
                yield whole
                continue
            grid = _cut(self._index, info.key, info.shape, dtype.itemsize, most)
            for cell in grids.cells(grid):
                box = grids.cell_box(grid, cell.index)
                yield _Target(info, block_key(info.key, box.offset), box.shape, dtype)

    # -- the engine's loop, from the thread ----------------------------------------------------------------

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        return self._end(self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._ended.is_set():
            work.close()
            raise Closed("the export was given up")
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._asked.add(asked)
        return asked

    def _end(self, asked: concurrent.futures.Future[T]) -> T:
        self._awaited = asked
        try:
            return asked.result()
        except concurrent.futures.CancelledError as error:
            raise Closed("the export was given up") from error
        finally:
            self._given_at = time.monotonic()
            self._awaited = None
            self._asked.discard(asked)

    def _gives(self, nbytes: int) -> None:
        self._given, self._given_at = max(self._given, nbytes), time.monotonic()

    def hangs_in(self) -> float:
        """Seconds until the format counts as hanging, unless it asks for more or ends before."""
        if self._awaited is not None:
            return limits.in_force.export_silence  # it waits for tiers, which have limits of their own
        writing = self._given / limits.in_force.export_rate + self._unflushed / limits.in_force.export_flush_rate
        return self._given_at + limits.in_force.export_silence + writing - time.monotonic()

    def give_up(self) -> None:
        """Cancel the reads that the thread waits for, and refuse later ones; on the loop."""
        self._ended.set()
        for asked in tuple(self._asked):
            asked.cancel()

    @property
    def given_up(self) -> bool:
        return self._ended.is_set()


def _cut(index: StepIndex, key: str, shape: tuple[int, ...], itemsize: int, most: int) -> Grid:
    """Divide an array, of items of so many bytes, into ranges of at most ``most`` bytes that are read together.

    If the array is stored whole, a range is of whole chunks, for each chunk is verified.
    """
    blocks = index.blocks(key)
    if len(blocks) == 1 and (stored := index.arrays[blocks[0][1]].grid).shape == shape:
        times = most // max(1, prod(stored.cell) * itemsize)
        if stored.contiguous and times:
            axis = next((axis for axis, size in enumerate(stored.cell) if size > 1), len(shape) - 1)
            height = min(stored.cell[axis] * times, shape[axis])
            return Grid(shape, (*stored.cell[:axis], height, *stored.cell[axis + 1 :]), itemsize)
    return grids.plan(shape, itemsize, most)


def _placed(targets: list[_Target], block: Bytes, start: int, unit: int) -> _Part:
    arrays: list[npt.NDArray[Any]] = []
    at = start
    for target in targets:
        arrays.append(block[at : at + target.nbytes].view(target.dtype).reshape(target.shape))
        at += _up(target.nbytes, unit)
    return _Part(targets, arrays, block, start, at)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
