"""Restores a step: chooses it, fits it to the caller's tree, reads or views its arrays, and builds the tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy.typing as npt

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.restoring.lookup import Wanted
from tieredckpt.engine.restoring.pieces import Form
from tieredckpt.engine.restoring.reader import Read, fill
from tieredckpt.engine.restoring.restored import Restored
from tieredckpt.engine.restoring.source import ChosenStep, Damage, StepSource
from tieredckpt.engine.restoring.targets import check_memory, empty_targets
from tieredckpt.engine.restoring.views import damage_of, view_step
from tieredckpt.engine.state.state import State, numbers
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, Invalid, TieredCkptError
from tieredckpt.events import StepRestored
from tieredckpt.format.manifest import StepId, StepIndex, StepRecord
from tieredckpt.format.structure import Node, array_nodes
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.tree.arrays import MadeAs, load_kinds, writable_part
from tieredckpt.tree.flatten import plain_tree, unflatten
from tieredckpt.tree.leaf import array_spec
from tieredckpt.tree.match import AS_SAVED, Match, match
from tieredckpt.tree.select import select

__all__ = ["Repair", "Restorer", "Together", "Unreadable"]

T = TypeVar("T")

Arrays = Mapping[str, npt.NDArray[Any]]
Unreadable = Sequence[tuple[Tier, TieredCkptError]]
"""Tiers whose index of a step could not be read."""
Repair = Callable[[StepId, Sequence[Damage], Unreadable], None]
"""Begins to repair, behind the training, chunks that were found damaged and indexes that could not be read."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the caller says of the tree that it gets; see `CheckpointStore.restore`."""

    keys: Sequence[str] | None
    like: Any
    into: Any
    as_: MadeAs | Literal["specs"]


class Together(Protocol):
    """What a restore asks of the mode: to act together with the other ranks."""

    async def restoring(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run this rank's work of a restore. Raises if it fails on any rank."""
        ...

    async def look_up(self, wanted: Wanted) -> tuple[StepId, StepRecord] | None:
        """The step that a restore takes, the same on all ranks; None when the store is empty.

        Raises:
            Invalid: the ranks do not want the same.
            NotFound: a step number that no tier holds.
            TierUnavailable: nothing was found, and a tier that may hold something does not answer.
            Corrupt: every step there is has a damaged commit.
            RanksUnavailable: other ranks do not restore too.
        """
        ...

    @property
    def chosen(self) -> ChosenStep | None:
        """What all ranks restore at present; None for one rank."""
        ...

    async def begin_reading(self) -> bool:
        """Return when all ranks can read; whether there are other ranks, which may need chunks that this one has."""
        ...

    def damaged(self, step: StepId, damage: Sequence[Damage], unreadable: Unreadable) -> None:
        """Report damage that this process does not repair itself."""
        ...

    def restored(self) -> None:
        """A step was restored to train on."""
        ...


class Restorer:
    """Restores steps of one store. Lives on the engine's loop."""

    def __init__(
        self,
        state: State,
        together: Together,
        repair: Repair,
        prepare: Callable[[Any], Awaitable[None]],
        expect: Callable[[int], None],
    ) -> None:
        """``prepare`` takes memory for saves of trees like one, ``expect`` for saves of so many bytes."""
        self._state, self._together, self._repair, self._prepare = state, together, repair, prepare
        self._expect = expect

    async def restore(
        self,
        loop: EngineLoop,
        step: int | None,
        keys: Sequence[str] | None,
        like: Any,
        into: Any,
        as_: MadeAs | Literal["specs"] | None,
        *,
        copy: bool,
        resume: bool | None,
    ) -> Restored | None:
        """See `CheckpointStore.restore`; ``loop``, the engine's, verifies views later."""
        if like is AS_SAVED or into is AS_SAVED:
            like, into, as_ = None, None, "saved"
        wanted = Wanted(step, keys is None, resume)
        shape = _Shape(keys, like, into, as_ or "numpy")
        found = await self._together.restoring(partial(self._restore, loop, wanted, shape, copy=copy))
        if found is None:
            if (first := like if into is None else into) is not None and not self._state.read_only:
                with suppress(Invalid):  # which the first save says
                    await self._prepare(first)
            return None
        restored, chosen, record = found
        if wanted.to_train_on and not self._state.read_only:  # now that of several ranks all have restored it
            self._state.branch.note(chosen, record, named=step is not None, resume=resume is True)
            self._together.restored()
            self._expect(record.nbytes)
        return restored

    async def _restore(
        self, loop: EngineLoop, wanted: Wanted, shape: _Shape, *, copy: bool
    ) -> tuple[Restored, StepId, StepRecord] | None:
        """This rank's share of a restore, with the step that was restored."""
        found = await self._together.look_up(wanted)
        if found is None:
            return None
        step, record = found
        # Of what several ranks save or restore, each may want its own part only.
        part = record.ranks > 1 or self._state.membership.size > 1
        structure, fitted, forms, targets = await in_thread(_fit, record.structure, shape, part)
        if shape.as_ == "specs":
            await self._together.begin_reading()  # as the ranks that read
            tree = plain_tree(structure, array_spec)
            return Restored(step.step, step.serial, tree, numbers(record.metrics), {}), step, record
        viewed = None if copy else await self._view(step, forms)
        if viewed is not None:
            read, check = viewed[0], partial(_check_views, loop, viewed[1])
        else:
            read, check = await self._read(step, partial(_targets, step, forms, targets)), None
        tree = await in_thread(_build, structure, fitted, read, shape.as_)
        restored = Restored(step.step, step.serial, tree, numbers(record.metrics), read.sources, check)
        return restored, step, read.record

    async def _read(self, step: StepId, targets_for: Callable[[StepIndex], Arrays]) -> Read:
        """Fill the arrays that ``targets_for`` gives for the step's index. Raises as `StepSource` does."""
        begin = time.monotonic()
        await self._together.begin_reading()
        read = await self._fill(step, targets_for)
        self._state.events.emit(StepRestored(step.step, step.serial, read.sources, time.monotonic() - begin))
        return read

    async def _fill(self, step: StepId, targets_for: Callable[[StepIndex], Arrays]) -> Read:
        state = self._state
        async with StepSource.open(state, step, chosen=self._together.chosen) as source:
            targets = await asyncio.to_thread(targets_for, source.index)
            sources = await fill(state, source, targets)
            record, damage, unreadable = source.index.record, source.damage, source.unreadable
        self._together.damaged(step, damage, unreadable)
        if (damage or unreadable) and not state.read_only:
            self._repair(step, damage, unreadable)
        return Read(step, record, dict(targets), sources)

    async def _view(
        self, step: StepId, forms: Mapping[str, Form]
    ) -> tuple[Read, Callable[[], Coroutine[Any, Any, None]]] | None:
        """Read-only arrays: views of RAM, and copies of what does not lie there in one piece.

        Returns:
            The arrays, and what verifies the views, which raises `Corrupt` and mends them. None when the step is
            not in RAM.
        """
        begin = time.monotonic()
        found = await view_step(self._state, step, forms)
        if found is None:
            return None
        index, arrays = found
        check = partial(self._check_views, step, index, dict(arrays))
        sources = {self._state.tiers[0].name: sum(array.nbytes for array in arrays.values())}
        rest = {name: form for name, form in forms.items() if name not in arrays}
        has_others = await self._together.begin_reading()
        if rest or has_others:  # which may need chunks that this rank has
            copied = await self._fill(step, lambda _: empty_targets(step, rest))
            for key, array in copied.arrays.items():
                array.flags.writeable = False
                arrays[key] = array
            for name, nbytes in copied.sources.items():
                sources[name] = sources.get(name, 0) + nbytes
        self._state.events.emit(StepRestored(step.step, step.serial, sources, time.monotonic() - begin))
        return Read(step, index.record, arrays, sources), check

    async def _check_views(self, step: StepId, index: StepIndex, views: Arrays) -> None:
        damage = await damage_of(self._state, index, views)
        if damage and not self._state.read_only and step in self._state.tiers[0].steps.held:
            self._repair(step, damage, ())
        if damage:
            keys = ", ".join(map(repr, sorted({found.key for found in damage})))
            raise Corrupt(f"views of {step} in RAM are damaged: {keys}; restore it with copy=True")


def _fit(
    structure: Node, shape: _Shape, part: bool
) -> tuple[Node, Match | None, dict[str, Form], dict[str, npt.NDArray[Any]] | None]:
    """The part of the structure that is wanted, how it fits the caller's tree, and the arrays to make or to fill."""
    wanted = structure if shape.keys is None else select(structure, shape.keys)
    template = shape.like if shape.into is None else shape.into
    if template is None:
        nodes = tuple(array_nodes(wanted))
        if shape.as_ != "specs":
            load_kinds(nodes, shape.as_)
        return wanted, None, {node.key: Form(node.shape, dtype_from_name(node.dtype)) for node in nodes}, None
    fitted = match(template, wanted, part=part)
    load_kinds(fitted.as_saved, "saved")
    forms = {node.key: Form(node.shape, dtype_from_name(node.dtype)) for node in fitted.as_saved}
    if shape.into is None:
        return wanted, fitted, forms | {leaf.key: Form(leaf.shape, leaf.dtype) for leaf in fitted.leaves}, None
    return wanted, fitted, forms, {leaf.key: writable_part(leaf) for leaf in fitted.leaves}


def _targets(
    step: StepId, forms: Mapping[str, Form], given: dict[str, npt.NDArray[Any]] | None, index: StepIndex
) -> dict[str, npt.NDArray[Any]]:
    """The arrays to fill from a step of that index: those that were given, and new ones."""
    if given is not None:
        check_memory(index, given)
    return empty_targets(step, forms) | (given or {})


async def _check_views(loop: EngineLoop, check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await loop.call(check())


def _build(wanted: Node, fitted: Match | None, read: Read, as_: MadeAs) -> Any:
    return unflatten(wanted, read.arrays, as_) if fitted is None else fitted.build(read.arrays)
