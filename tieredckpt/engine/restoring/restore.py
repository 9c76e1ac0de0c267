"""Restores a step: chooses it, fits it to the caller's tree, reads or views its arrays, and builds the tree."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy.typing as npt

from tieredckpt.concurrency import in_thread
from tieredckpt.devices.base import Device, Driver, Stream
from tieredckpt.devices.current import Current
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.restoring.deriving import open_source
from tieredckpt.engine.restoring.lookup import Wanted, copies
from tieredckpt.engine.restoring.pieces import Form
from tieredckpt.engine.restoring.reader import Read, fill
from tieredckpt.engine.restoring.restored import Restored
from tieredckpt.engine.restoring.source import ChosenStep, Damage, StepSource
from tieredckpt.engine.restoring.targets import check_memory, empty_targets, given_on_device, new_on_device
from tieredckpt.engine.restoring.views import damage_of, view_step, viewable
from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.views import numbers
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, Invalid, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import StepRestored
from tieredckpt.format.manifest import StepId, StepIndex, StepRecord
from tieredckpt.format.structure import Node, array_nodes
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.tree.arrays import MadeAs, device_view, load_kinds, writable_arrays, writable_part
from tieredckpt.tree.device_target import DeviceTarget, Filled
from tieredckpt.tree.flatten import plain_tree, unflatten
from tieredckpt.tree.form import Flattener, Refill
from tieredckpt.tree.leaf import ArrayLeaf, array_spec
from tieredckpt.tree.match import AS_SAVED, Match, match
from tieredckpt.tree.select import select

__all__ = ["Repair", "Restorer", "Together", "Unreadable"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")

Arrays = Mapping[str, Filled]
Unreadable = Sequence[tuple[Tier, TieredCkptError]]
"""Tiers whose index of a step could not be read."""
Repair = Callable[[StepId, Sequence[Damage], Unreadable], None]
"""Begins to repair, behind the training, chunks that were found damaged and indexes that could not be read."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Options of a caller about the tree; see `CheckpointStore.restore`."""

    keys: Sequence[str] | None
    like: Any
    into: Any
    as_: MadeAs | Literal["specs"]
    cast: bool
    caller: Current
    copy: bool


class Together(Protocol):
    """The part of a mode that a restore uses to act together with the other ranks."""

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
        """The step that all ranks restore at present; None for one rank."""
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
        prepare: Callable[[Any, Any], Awaitable[None]],
        expect: Callable[[int], None],
        flattener: Flattener,
    ) -> None:
        """``prepare`` allocates memory for saves of a tree on a mesh, ``expect`` for saves of so many bytes.

        The saves use the same ``flattener``: a training saves the tree that it has restored into.
        """
        self._state, self._together, self._repair, self._prepare = state, together, repair, prepare
        self._expect, self._flattener = expect, flattener

    async def restore(
        self,
        loop: EngineLoop,
        caller: Current,
        step: int | None,
        keys: Sequence[str] | None,
        like: Any,
        into: Any,
        as_: MadeAs | Literal["specs"] | None,
        cast: bool,
        copy: bool,
        resume: bool | None,
        lossy: bool | str = False,
    ) -> Restored | None:
        """See `CheckpointStore.restore`.

        ``loop``, the engine's, verifies views later; ``lossy`` may be the name of a tier whose lossy copy is taken.
        """
        if like is not None and into is not None:
            raise Invalid("give `like` or `into`, not both: `into` says already what the tree looks like")
        if into is not None and not copy:
            raise Invalid("copy=False makes views of RAM, so there is nothing to fill `into` with")
        if cast and like is None:
            raise Invalid("cast=True converts arrays to the dtypes of `like`; give `like`")
        if as_ is not None and (like is not None or into is not None):
            raise Invalid("`as_` says what arrays are made without `like` and `into`, which say so themselves")
        if as_ not in (None, "saved", "numpy", "torch", "jax", "specs"):
            raise Invalid(f"as_ is 'saved', 'numpy', 'torch', 'jax' or 'specs', not {as_!r}")
        if lossy and self._state.membership.size > 1:
            raise Invalid(
                "lossy=True is for a store that one process has opened: open it with ranks=None, and restore there"
            )
        if like is AS_SAVED or into is AS_SAVED:
            like, into, as_ = None, None, "saved"
        self._state.fills += into is not None
        wanted, newest = Wanted(step, keys is None, resume), self._state.branch.newest
        shape = _Shape(keys, like, into, as_ or "numpy", cast, caller, copy)
        found = await self._together.restoring(partial(self._restore, loop, wanted, shape, lossy=lossy))
        if found is None:
            if (first := like if into is None else into) is not None and not self._state.read_only:
                with suppress(Invalid):  # which the first save says
                    await self._prepare(first, caller.mesh)
            return None
        restored, chosen, record = found
        if wanted.to_train_on and not self._state.read_only:  # now that of several ranks all have restored it
            # The next save forks at the restored step if a newer step of the branch could not be read, which may be
            # readable later; or if only a lossy copy of it is left, and the branch does not have it.
            unread = step is None and newest is not None and chosen.serial < newest.serial
            astray = unread or (restored.lossy and not self._state.on_line(chosen.serial))
            named, resume = step is not None or astray, resume is True or astray
            copied = f"{chosen} of tier {', '.join(map(repr, restored.sources))}" if restored.lossy else ""
            self._state.branch.note(chosen, record, named=named, resume=resume, lossy=copied)
            self._together.restored()
            self._expect(record.nbytes)
        return restored

    async def _restore(
        self, loop: EngineLoop, wanted: Wanted, shape: _Shape, *, lossy: bool | str
    ) -> tuple[Restored, StepId, StepRecord] | None:
        """This rank's share of a restore, with the step that was restored."""
        if not lossy:
            found = await self._together.look_up(wanted)
            return None if found is None else await self._restore_copy(loop, shape, *found)
        failed: TieredCkptError | None = None
        for step, record, derivation in await copies(self._state, wanted.step, None if lossy is True else lossy):
            place = "its exact copies" if derivation is None else f"its lossy copy on {derivation.tiers[-1].name!r}"
            try:
                return await self._restore_copy(loop, shape, step, record, derivation)
            except (Corrupt, Invalid, NotFound, TierUnavailable) as error:
                if derivation is None and isinstance(error, Invalid):
                    raise  # what does not fit the step fits no lossy copy either
                _log.warning("%s cannot be restored from %s: %s", step, place, error)
                failed = failed or error.with_traceback(None)  # which holds the arrays
        if failed is not None:
            raise failed
        return None

    async def _restore_copy(
        self,
        loop: EngineLoop,
        shape: _Shape,
        step: StepId,
        record: StepRecord | None,
        derivation: State | None = None,
    ) -> tuple[Restored, StepId, StepRecord]:
        """Restore a step wholly from its exact copies, or wholly from the lossy copy of ``derivation``."""
        if derivation is not None:
            record = (await step_index.load(derivation.tiers[-1], step)).record
        assert record is not None
        # Of what several ranks save or restore, each may want its own part only.
        part = record.ranks > 1 or self._state.membership.size > 1
        structure, fitted, forms, targets = await in_thread(_fit, record.structure, shape, part, self._flattener, step)
        if shape.as_ == "specs":
            await self._together.begin_reading()  # as the ranks that read
            tree = plain_tree(structure, array_spec)
            specs = Restored(step.step, step.serial, tree, numbers(record.metrics), {}, derivation is not None)
            return specs, step, record
        in_place = not shape.copy and derivation is None
        seen = await in_thread(viewable, structure, fitted, shape.as_, forms) if in_place else {}
        if (viewed := await self._view(step, seen, forms) if seen else None) is not None:
            read, check = viewed[0], partial(_check_views, loop, viewed[1])
        else:
            read, check = await self._read(step, partial(_targets, step, forms, targets), derivation), None
        tree = await in_thread(_build, structure, fitted, read, shape.as_)
        how = read.sources, derivation is not None, check
        return Restored(step.step, step.serial, tree, numbers(record.metrics), *how), step, read.record

    async def _read(
        self, step: StepId, targets_for: Callable[[StepIndex], Arrays], derivation: State | None = None
    ) -> Read:
        """Fill the arrays that ``targets_for`` gives for the step's index. Raises as `StepSource` does."""
        begin = time.monotonic()
        await self._together.begin_reading()
        read = await (
            self._fill(step, targets_for) if derivation is None else self._fill_lossy(step, targets_for, derivation)
        )
        seconds, lossy = time.monotonic() - begin, derivation is not None
        self._state.events.emit(StepRestored(step.step, step.serial, read.sources, seconds, lossy))
        return read

    async def _fill_lossy(self, step: StepId, targets_for: Callable[[StepIndex], Arrays], derivation: State) -> Read:
        """Fill the targets from a lossy copy; damage there is logged, and repaired by a verification."""
        tier = derivation.tiers[-1]
        async with open_source(derivation, step, tier) as source:
            targets = await asyncio.to_thread(targets_for, source.index)
            sources = await fill(derivation, source, targets)
            record = source.index.record
        _log.warning(
            "%s was restored from the lossy copy on tier %r, within the bounds that `tieredckpt show` lists",
            *(step, tier.name),
        )
        return Read(step, record, dict(targets), sources or {tier.name: 0})

    async def _fill(self, step: StepId, targets_for: Callable[[StepIndex], Arrays]) -> Read:
        state = self._state
        async with StepSource.open(state, step, chosen=self._together.chosen) as source:
            targets = await asyncio.to_thread(targets_for, source.index)
            self._reach({target.device.driver for target in targets.values() if isinstance(target, DeviceTarget)})
            sources = await fill(state, source, targets)
            record, damage, unreadable = source.index.record, source.damage, source.unreadable
        self._together.damaged(step, damage, unreadable)
        if (damage or unreadable) and not state.read_only:
            self._repair(step, damage, unreadable)
        return Read(step, record, dict(targets), sources)

    def _reach(self, drivers: Collection[Driver]) -> None:
        """Register the slab and scratch memory with the devices, range by range, while a restore reads."""
        if not drivers:
            return
        ram, memory = self._state.tiers[0].ram, self._state.host_memory
        for driver in drivers:
            memory.meet(driver)
        for slab in (self._state.scratch.slab, *((ram.slab,) if ram is not None and ram.slab.writable else ())):
            if (mapping := slab.mapped) is None:
                continue
            memory.follow(mapping)
            slab.before_unmapping = memory.forget
            asyncio.get_running_loop().run_in_executor(None, memory.extend, mapping, slab.reserved)

    async def _view(
        self, step: StepId, seen: Mapping[str, Form], forms: Mapping[str, Form]
    ) -> tuple[Read, Callable[[], Coroutine[Any, Any, None]]] | None:
        """View the arrays ``seen`` in RAM, read-only; copy and verify those not there in one piece, and all others.

        Returns:
            The arrays, and a function that verifies the views: it repairs damage, and raises `Corrupt`. None when the
            step is not in RAM.
        """
        begin = time.monotonic()
        found = await view_step(self._state, step, seen)
        if found is None:
            return None
        index, views = found
        arrays: dict[str, Filled] = {**views}
        check = partial(self._check_views, step, index, views)
        sources = {self._state.tiers[0].name: sum(array.nbytes for array in arrays.values())}
        rest = {name: form for name, form in forms.items() if name not in arrays}
        has_others = await self._together.begin_reading()
        if rest or has_others:  # which may need chunks that this rank has
            copied = await self._fill(step, lambda _: empty_targets(step, rest))
            for key, array in copied.arrays.items():
                assert not isinstance(array, DeviceTarget), "views are of the host"
                array.flags.writeable = key not in seen
                arrays[key] = array
            for name, nbytes in copied.sources.items():
                sources[name] = sources.get(name, 0) + nbytes
        self._state.events.emit(StepRestored(step.step, step.serial, sources, time.monotonic() - begin))
        return Read(step, index.record, arrays, sources), check

    async def _check_views(self, step: StepId, index: StepIndex, views: Mapping[str, npt.NDArray[Any]]) -> None:
        damage = await damage_of(self._state, index, views)
        if damage and not self._state.read_only and step in self._state.tiers[0].steps.held:
            self._repair(step, damage, ())
        if damage:
            keys = ", ".join(map(repr, sorted({found.key for found in damage})))
            raise Corrupt(f"views of {step} in RAM are damaged: {keys}; restore it with copy=True")


_Fitted = Match | Refill | None
"""How a step fits the caller's tree; None where there is none."""


def _fit(
    structure: Node, shape: _Shape, part: bool, flattener: Flattener, step: StepId
) -> tuple[Node, _Fitted, dict[str, Form], _Fillable | None]:
    """The part of the structure that is wanted, how it fits the caller's tree, and the arrays to make or to fill."""
    streams, mesh = shape.caller
    if shape.into is not None and shape.keys is None:
        refill = flattener.refill(shape.into, structure)
        if refill is not None:
            return structure, refill, {}, _Fillable(_given(refill.leaves, streams), {}, streams)
    wanted = structure if shape.keys is None else select(structure, shape.keys, str(step))
    template = shape.like if shape.into is None else shape.into
    if template is None:
        nodes = tuple(array_nodes(wanted))
        if shape.as_ != "specs":
            load_kinds(nodes, shape.as_)
        return wanted, None, {node.key: Form(node.shape, dtype_from_name(node.dtype)) for node in nodes}, None
    may = {"part": part, "casts": shape.cast, "fills": shape.into is not None}
    fitted = match(template, wanted, **may, keys=shape.keys, whole=structure, mesh=mesh, step=str(step))
    load_kinds(fitted.as_saved, "saved")
    as_stored = (*fitted.as_saved, *fitted.scalars)
    forms = {node.key: Form(node.shape, dtype_from_name(node.dtype)) for node in as_stored}
    if shape.into is not None:
        return wanted, fitted, forms, _Fillable(_given(fitted.leaves, streams), {}, streams)
    leaves = {leaf.key: leaf for leaf in fitted.leaves}
    # Pieces of one tensor are put together on the host, and other dtypes are cast there.
    whole_leaves = {key: leaf for key, leaf in leaves.items() if leaf.part is None and device_view(leaf) is not None}
    new = {key: whole_leaves[key] for key in whole_leaves.keys() - fitted.cast} if shape.copy else {}
    forms |= {key: Form(leaf.shape, leaf.dtype) for key, leaf in leaves.items() if key not in new}
    return wanted, fitted, forms, _Fillable({}, new, streams)


def _given(leaves: Sequence[ArrayLeaf], streams: Mapping[Device, Stream]) -> dict[str, Filled]:
    """The memory of the caller's arrays, by key. Raises `Invalid` for one that cannot be filled."""
    if (arrays := writable_arrays(leaves)) is not None:
        return dict(arrays)
    devices = {found[0] for leaf in leaves if (found := device_view(leaf)) is not None}
    ready = {device: streams[device].record() for device in devices & streams.keys()}
    return {leaf.key: given_on_device(leaf, ready) or writable_part(leaf) for leaf in leaves}


@dataclass(frozen=True, slots=True)
class _Fillable:
    """Targets that are filled beside new arrays of the host."""

    given: Mapping[str, Filled]
    like: Mapping[str, ArrayLeaf]
    """Examples of new arrays on devices."""
    streams: Mapping[Device, Stream]
    """Those on which the trainer works."""


def _targets(
    step: StepId, forms: Mapping[str, Form], fillable: _Fillable | None, index: StepIndex
) -> dict[str, Filled]:
    """The arrays to fill from a step of that index: those that were given, and new ones."""
    found: dict[str, Filled] = {**empty_targets(step, forms)}
    if fillable is not None:
        check_memory(index, fillable.given)
        found |= fillable.given
        found |= {key: new_on_device(leaf, fillable.streams) for key, leaf in fillable.like.items()}
    return found


async def _check_views(loop: EngineLoop, check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await loop.call(check())


def _build(wanted: Node, fitted: _Fitted, read: Read, as_: MadeAs) -> Any:
    return unflatten(wanted, read.arrays, as_) if fitted is None else fitted.build(read.arrays)
