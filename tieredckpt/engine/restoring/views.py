"""Restores without a copy: read-only views of the arrays of a step in RAM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.locks import let_go
from tieredckpt.blobs.ram.slab import page_aligned
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.blobs.ram.view import Placed, window
from tieredckpt.concurrency import in_thread
from tieredckpt.engine.restoring.pieces import Form
from tieredckpt.engine.restoring.source import Damage
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.digest import digest
from tieredckpt.format.grid import cells
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepId, StepIndex
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.structure import Node, array_nodes
from tieredckpt.tree.arrays import MadeAs, made_as
from tieredckpt.tree.form import Refill
from tieredckpt.tree.match import Match

__all__ = ["damage_of", "view_step", "viewable"]

_log = logging.getLogger("tieredckpt")

Views = dict[str, npt.NDArray[Any]]


def viewable(structure: Node, fitted: Match | Refill | None, as_: MadeAs, forms: Mapping[str, Form]) -> dict[str, Form]:
    """Those of ``forms`` that the restored tree has as NumPy arrays, just as they were read.

    Other leaves are made from the bytes that were read, so these are verified before: a repair of RAM reaches views,
    but nothing that was made from them.
    """
    if fitted is None:
        keys = {node.key for node in array_nodes(structure) if made_as(node, as_) == "numpy"}
    else:
        keys = {leaf.key for leaf in fitted.leaves if leaf.kind == "numpy"} - fitted.cast
        keys |= {node.key for node in fitted.as_saved if node.kind == "numpy"}
    return {key: form for key, form in forms.items() if key in keys}


async def view_step(state: State, step: StepId, forms: Mapping[str, Form]) -> tuple[StepIndex, Views] | None:
    """Read-only views of those arrays of a step that can be seen in one piece, by name, and its index.

    Nothing is verified, see `damage_of`. While any view lives, the step's memory is not reused.

    Returns:
        None when the step is not in RAM, or cannot be read there.
    """
    tier = state.tiers[0]
    ram = tier.ram  # as it is now: a reader that finds it gone disconnects it beside this
    if ram is None or step not in tier.steps.held or not tier.steps.has_own(step):
        return None
    try:
        index = await step_index.load(tier, step)
        return index, await in_thread(_view, ram.store, step, index, forms)
    except (Corrupt, NotFound, TierUnavailable) as error:
        _log.warning("%s cannot be seen in RAM and is copied: %s", step, error)
        return None


def _in_one_piece(index: StepIndex, name: str, form: Form) -> bool:
    """Whether the step has an array as it is wanted, each of whose chunks begins with a page of the array."""
    array = index.arrays.get(name)
    if array is None or array.grid.shape != form.shape or not array.grid.contiguous:
        return False
    if array.grid.size <= 1:
        return True
    in_pages = all(cell.start == page_aligned(cell.start) for cell in cells(array.grid))
    return in_pages and all(isinstance(chunk.where, Extent) for chunk in array.chunks)


def _view(ram: RamStore, step: StepId, index: StepIndex, forms: Mapping[str, Form]) -> Views:
    arrays = {name: index.arrays[name] for name, form in forms.items() if _in_one_piece(index, name, form)}
    placed: list[Placed] = []
    starts: dict[str, int] = {}
    size = 0
    for key, array in arrays.items():
        starts[key] = size
        for cell, chunk in zip(cells(array.grid), array.chunks, strict=True):
            if isinstance(chunk.where, Extent):
                length = page_aligned(cell.nbytes)  # without the padding, where the next chunk may begin
                if chunk.where.path != ram.slab_key or chunk.where.offset + length > ram.slab.capacity:
                    raise Corrupt(f"a chunk of {layout.array_key(key)!r} of {step} lies outside the slab")
                placed.append(Placed(starts[key] + cell.start, chunk.where.offset, length))
                size = starts[key] + cell.start + length
    fd = ram.share(step.manifest_key)
    memory = window(ram.slab.fileno(), size, placed, lambda: let_go(fd))
    return {key: _seen(array, memory[starts[key] :]) for key, array in arrays.items()}


def _seen(array: ArrayIndex, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    inline = [chunk.where for chunk in array.chunks if isinstance(chunk.where, bytes)]
    if inline:
        memory = np.frombuffer(inline[0], dtype=np.uint8)
    return memory[: array.grid.nbytes].view(array.dtype).reshape(array.grid.shape)


async def damage_of(state: State, index: StepIndex, views: Mapping[str, npt.NDArray[Any]]) -> list[Damage]:
    """The chunks under the views that are not as they were saved."""
    found = await asyncio.gather(
        *(in_thread(_changed, index.arrays[key], view, pool=state.pool) for key, view in views.items())
    )
    return [
        Damage(state.tiers[0], chunk.digest, key, Corrupt(f"a chunk of {key!r} changed in RAM"))
        for key, chunks in zip(map(layout.array_key, views), found, strict=True)
        for chunk in chunks
    ]


def _changed(array: ArrayIndex, view: npt.NDArray[Any]) -> list[Chunk]:
    memory = view.reshape(-1).view(np.uint8)
    nbytes = array.grid.cell_nbytes
    return [
        chunk
        for cell, chunk in zip(cells(array.grid), array.chunks, strict=True)
        if digest(memory[cell.start : cell.start + cell.nbytes], nbytes - cell.nbytes) != chunk.digest
    ]
