"""A restore, on the engine's loop: which part of a step is wanted, read or viewed, and built into a tree."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from tieredckpt.blobs.settle import in_thread
from tieredckpt.checkpoint import Restored
from tieredckpt.engine.engine import Engine, Read
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.state import numbers
from tieredckpt.engine.targets import empty_targets
from tieredckpt.format.structure import Node, array_nodes
from tieredckpt.tree.arrays import writable_view
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
    resume: bool,
) -> Restored | None:
    """See `CheckpointStore.restore`; runs on ``loop``, the engine's."""
    found = await engine.look_up(step)
    if found is None:
        return None
    chosen, record = found
    wanted, fitted, targets = await in_thread(_fit, record.structure, keys, like, into)
    names = [node.key for node in array_nodes(wanted)]
    viewed = None if copy else await engine.view(chosen, names)
    if viewed is not None:
        read, check = viewed[0], partial(_check_views, loop, viewed[1])
    else:
        read, check = await engine.read(chosen, lambda index: targets or empty_targets(index, names)), None
    tree = await in_thread(_build, wanted, fitted, read)
    if resume and not engine.state.read_only:
        await engine.resume_from(chosen, read.record)
    return Restored(chosen.step, chosen.serial, tree, numbers(record.metrics), read.sources, check)


async def _check_views(loop: EngineLoop, check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await loop.call(check())


def _fit(
    structure: Node, keys: Sequence[str] | None, like: Any, into: Any
) -> tuple[Node, Match | None, dict[str, npt.NDArray[Any]] | None]:
    """The part of the structure that is wanted, how it fits the caller's tree, and the arrays to fill."""
    wanted = structure if keys is None else select(structure, keys)
    template = like if into is None else into
    if template is None:
        return wanted, None, None
    fitted = match(template, wanted)
    if into is None:
        return wanted, fitted, None
    return wanted, fitted, {leaf.key: writable_view(leaf.key, leaf.source) for leaf in fitted.leaves}


def _build(wanted: Node, fitted: Match | None, read: Read) -> Any:
    return unflatten(wanted, read.arrays) if fitted is None else fitted.build(read.arrays)
