"""A restore, on the engine's loop: which part of a step is wanted, read or viewed, and built into a tree."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from tieredckpt.checkpoint import Restored
from tieredckpt.concurrency import in_thread
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.restoring.lookup import Wanted
from tieredckpt.engine.restoring.pieces import Form
from tieredckpt.engine.restoring.reader import Read
from tieredckpt.engine.restoring.targets import check_memory, empty_targets
from tieredckpt.engine.state.state import numbers
from tieredckpt.format.manifest import StepId, StepIndex, StepRecord
from tieredckpt.format.structure import Node, array_nodes
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.tree.arrays import writable_part
from tieredckpt.tree.flatten import unflatten
from tieredckpt.tree.match import Match, match
from tieredckpt.tree.select import select

__all__ = ["restore"]


async def restore(
    engine: Engine,
    loop: EngineLoop,
    step: int | None,
    keys: Sequence[str] | None,
    like: Any,
    into: Any,
    *,
    copy: bool,
    resume: bool | None,
) -> Restored | None:
    """See `CheckpointStore.restore`; runs on ``loop``, the engine's."""
    wanted = Wanted(step, keys is None, resume)
    found = await engine.restoring(partial(_restore, engine, loop, wanted, keys, like, into, copy=copy))
    if found is None:
        return None
    restored, chosen, record = found
    if wanted.to_train_on and not engine.state.read_only:  # now that of several ranks all have restored it
        engine.note_restored(chosen, record, named=step is not None, resume=resume is True)
    return restored


async def _restore(
    engine: Engine,
    loop: EngineLoop,
    asked: Wanted,
    keys: Sequence[str] | None,
    like: Any,
    into: Any,
    *,
    copy: bool,
) -> tuple[Restored, StepId, StepRecord] | None:
    """This rank's share of a restore, with the step that was restored."""
    found = await engine.look_up(asked)
    if found is None:
        return None
    chosen, record = found
    # Of what several ranks save or restore, each may want its own part only.
    part = record.ranks > 1 or engine.state.membership.size > 1
    wanted, fitted, forms, targets = await in_thread(_fit, record.structure, keys, like, into, part)
    viewed = None if copy else await engine.reading.view(chosen, forms)
    if viewed is not None:
        read, check = viewed[0], partial(_check_views, loop, viewed[1])
    else:
        read, check = await engine.reading.read(chosen, partial(_targets, chosen, forms, targets)), None
    tree = await in_thread(_build, wanted, fitted, read)
    restored = Restored(chosen.step, chosen.serial, tree, numbers(record.metrics), read.sources, check)
    return restored, chosen, read.record


def _targets(
    step: StepId, forms: Mapping[str, Form], given: dict[str, npt.NDArray[Any]] | None, index: StepIndex
) -> dict[str, npt.NDArray[Any]]:
    """The arrays to fill from a step of that index: those that were given, or new ones."""
    if given is None:
        return empty_targets(step, forms)
    check_memory(index, given)
    return given


async def _check_views(loop: EngineLoop, check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await loop.call(check())


def _fit(
    structure: Node, keys: Sequence[str] | None, like: Any, into: Any, part: bool
) -> tuple[Node, Match | None, dict[str, Form], dict[str, npt.NDArray[Any]] | None]:
    """The part of the structure that is wanted, how it fits the caller's tree, and the arrays to make or to fill."""
    wanted = structure if keys is None else select(structure, keys)
    template = like if into is None else into
    if template is None:
        nodes = array_nodes(wanted)
        return wanted, None, {node.key: Form(node.shape, dtype_from_name(node.dtype)) for node in nodes}, None
    fitted = match(template, wanted, part=part)
    if into is None:
        return wanted, fitted, {leaf.key: Form(leaf.shape, leaf.dtype) for leaf in fitted.leaves}, None
    return wanted, fitted, {}, {leaf.key: writable_part(leaf) for leaf in fitted.leaves}


def _build(wanted: Node, fitted: Match | None, read: Read) -> Any:
    return unflatten(wanted, read.arrays) if fitted is None else fitted.build(read.arrays)
