"""Lists what a store holds: its steps, one step in full, its tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from tieredckpt._redact import redacted
from tieredckpt.engine.restoring.deriving import open_derived
from tieredckpt.engine.restoring.lookup import find_derived
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.restoring.tensorstore_spec import array_spec
from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.views import numbers
from tieredckpt.engine.tier import pin_file, step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError
from tieredckpt.format import layout
from tieredckpt.format.derivation import Derivation
from tieredckpt.format.manifest import ArrayIndex, StepId, StepIndex, StepRecord
from tieredckpt.format.scalars import scalar_value
from tieredckpt.format.structure import CONTAINERS, ArrayNode, Node, ObjectNode, walk
from tieredckpt.tree.select import select

__all__ = [
    "ArrayInfo",
    "DamagedStep",
    "Inventory",
    "Pin",
    "Scalar",
    "StepDetails",
    "StepInfo",
    "TierInfo",
    "scalar_of",
]

Scalar = int | float | complex | bool | str | bytes | None
"""A leaf that is no array."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step as the store lists it."""

    step: int
    serial: int
    saved_at: float
    """Seconds since the epoch."""
    nbytes: int
    metrics: Mapping[str, float]
    tiers: tuple[str, ...]
    """Tiers that hold it, nearest first."""
    damaged: tuple[str, ...]
    """Tiers whose commit of it cannot be read."""
    restored_from: int | None
    """Serial of the step at which its branch was continued last after a restore."""
    off_branch: bool
    """Off the branch: an earlier step was restored, and a save has forked there."""
    ranks: int = 1
    """How many processes saved it together."""
    lossy: tuple[str, ...] = ()
    """Tiers that hold a lossy copy of it, not the step as it was saved."""


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array of a step."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: int
    kind: str
    """Kind of the array in the saved tree: ``numpy``, ``torch``, ``jax`` and so on."""


@dataclass(frozen=True, slots=True)
class StepDetails:
    """A step in full, except for the arrays' values."""

    info: StepInfo
    store: str
    """Identity of the store, a UUID."""
    line: tuple[tuple[int, int], ...]
    """Serials of the step's history, as inclusive ranges."""
    provenance: Mapping[str, str]
    policy: Mapping[str, Any]
    """The policies in force, as ``StoreConfig.recorded_policies`` gives them; in steps of earlier versions, the
    configuration without secrets."""
    arrays: tuple[ArrayInfo, ...]
    """In the order of the tree."""
    scalars: Mapping[str, Scalar]
    """The leaves that are no arrays, by key."""
    distinct_nbytes: int
    """Bytes of its distinct chunks, with the padding of the last chunk of an array."""
    derived: Mapping[str, Derivation] = field(default_factory=dict)
    """By tier with a lossy copy of the step: how that was made, and the largest error of each array."""


@dataclass(frozen=True, slots=True)
class DamagedStep:
    """A step whose commit on a tier cannot be read."""

    step: int
    serial: int
    problem: str


@dataclass(frozen=True, slots=True)
class TierInfo:
    """A tier as it is now."""

    name: str
    kind: str
    location: str
    """Empty while the tier could not be opened."""
    survives: Literal["process", "node", "site"]
    used: int
    """Bytes."""
    capacity: int | None
    """Bytes; None where no bound is known."""
    healthy: bool
    problem: str
    """Why it is not healthy, or that there is no RAM of this store just now, which is no fault."""
    note: str
    """Note for people about a tier that works, such as that it has no room for all that it should retain."""
    steps: int
    """How many it holds."""
    damaged: tuple[DamagedStep, ...]
    hanging: int = 0
    """Calls of this process that hang in its device though nobody waits for them any more."""
    lossy: bool = False
    """Whether it holds only lossy copies: no step as it was saved comes there."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A step that stays on a tier until a person takes the pin away."""

    step: int
    serial: int
    tier: str


class Inventory:
    """Tells what a store holds. Lives on the engine's loop."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def steps(self) -> tuple[StepInfo, ...]:
        """Every step that some tier holds, or a lossy copy of it, oldest save first."""
        records = dict(self._state.records())
        for tier in self._state.derived:
            for step, held in tuple(tier.steps.held.items()):
                records.setdefault(step, held.record)
        return tuple(_info(self._state, step, records[step]) for step in sorted(records))

    async def numbers(self) -> tuple[int, ...]:
        """The numbers of the branch's steps, each once, in the order of their last saves."""
        found = [step.step for step in self._state.records() if self._state.on_line(step.serial)]
        return tuple(reversed(dict.fromkeys(reversed(found))))

    async def describe(
        self, step: int | None, serial: int | None, keys: Sequence[str] | None, lossy: str | None = None
    ) -> StepDetails:
        """Describe one step in full, or only the leaves that ``keys`` choose, as in `select`.

        Describes a lossy copy if no tier has the step as it was saved; if ``lossy`` names a tier, the copy there.

        Raises `NotFound`, `Corrupt` and `TierUnavailable` as `State.find`, `StepSource.open` and `select` do.
        """
        state = self._state
        async with _source(state, step, serial, lossy) as source:
            found, index = source.step, source.index
        structure = index.record.structure if keys is None else select(index.record.structure, keys, str(found))
        details = self.describe_index(found, index, structure)
        return replace(details, derived=await _derivations(state, found))

    def describe_index(self, step: StepId, index: StepIndex, structure: Node) -> StepDetails:
        """Describe one step with the leaves of ``structure``, which is the structure of its index or a part of it."""
        record = index.record
        leaves = [(key, node) for key, node in walk(structure) if not isinstance(node, CONTAINERS)]
        arrays = [
            (node, [index.arrays[name] for _, name in index.blocks(key)])
            for key, node in leaves
            if isinstance(node, ArrayNode)
        ]
        return StepDetails(
            info=_info(self._state, step, record),
            store=record.store,
            line=record.line,
            provenance=record.provenance,
            policy=redacted(record.policy),
            arrays=tuple(_array(node, blocks) for node, blocks in arrays),
            scalars={key: scalar_of(node) for key, node in leaves if not isinstance(node, ArrayNode)},
            distinct_nbytes=_distinct_nbytes(block for _, blocks in arrays for block in blocks),
        )

    async def where(self, step: int | None) -> tuple[str, ...]:
        """The tiers that hold a step as it was saved, nearest first. Raises `NotFound`."""
        found = self._state.find(step)
        return tuple(tier.name for tier in self._state.tiers if found in tier.steps.held)

    async def tiers(self) -> tuple[TierInfo, ...]:
        """Every tier, nearest first."""
        return tuple([await _tier(self._state, tier) for tier in self._state.every_tier])

    async def pins(self) -> tuple[Pin, ...]:
        """The pins on the tiers that answer, oldest save first."""
        found: list[Pin] = []
        for tier in self._state.every_tier:
            if not tier.in_memory and tier.answers:
                with suppress(TieredCkptError):
                    steps = pin_file.pinned([info async for info in tier.store.list(layout.PINS)])
                    found += [Pin(step.step, step.serial, tier.name) for step in steps]
        return tuple(sorted(found, key=lambda pin: pin.serial))

    async def spec(self, step: int, key: str, tier: str | None) -> dict[str, Any]:
        """See `array_spec`."""
        return await array_spec(self._state, step, key, tier)


def _source(
    state: State, number: int | None, serial: int | None, lossy: str | None
) -> AbstractAsyncContextManager[StepSource]:
    """See `Inventory.describe`. Raises as `State.find`."""
    derived = find_derived(state, number, lossy, serial=serial)
    if lossy is None:
        try:
            return StepSource.open(state, state.find(number, serial))
        except NotFound:
            if (number is None and serial is None) or not derived:
                raise
    return open_derived(derived)


async def _derivations(state: State, step: StepId) -> dict[str, Derivation]:
    found = {}
    for tier in state.derived:
        if step in tier.steps.held:
            with suppress(TieredCkptError):  # one that cannot be read must not hide the step
                how = (await step_index.load(tier, step)).record.derived
                if how is not msgspec.UNSET:
                    found[tier.name] = how
    return found


def _info(state: State, step: StepId, record: StepRecord) -> StepInfo:
    line = state.branch.line
    last_serial = line[-1][1] if line else 0
    return StepInfo(
        step=step.step,
        serial=step.serial,
        saved_at=record.saved_at,
        nbytes=record.nbytes,
        metrics=numbers(record.metrics),
        tiers=tuple(tier.name for tier in state.tiers if step in tier.steps.held),
        damaged=tuple(tier.name for tier in state.every_tier if step in tier.steps.damaged.not_stale()),
        restored_from=record.restored_from,
        # A lossy copy may be of a later save than any that this machine finds as it was saved: that is no fork yet.
        off_branch=not state.on_line(step.serial) and (step in state.records() or step.serial < last_serial),
        ranks=record.ranks,
        lossy=tuple(tier.name for tier in state.derived if step in tier.steps.held),
    )


def _array(node: ArrayNode, blocks: Sequence[ArrayIndex]) -> ArrayInfo:
    nbytes = sum(block.grid.nbytes for block in blocks)
    chunks = sum(block.grid.size for block in blocks)
    return ArrayInfo(node.key, node.dtype, node.shape, nbytes, chunks, node.kind)


def scalar_of(node: Node) -> Scalar:
    """The value of a leaf that is no array; of an object, its kind and content as text."""
    assert not isinstance(node, (*CONTAINERS, ArrayNode))
    if isinstance(node, ObjectNode):
        return f"{node.of}({msgspec.json.encode(node.value).decode()})"
    return scalar_value(node)


def _distinct_nbytes(arrays: Iterable[ArrayIndex]) -> int:
    sizes = {chunk.digest: array.grid.cell_nbytes for array in arrays for chunk in array.chunks}
    return sum(sizes.values())


async def _tier(state: State, tier: Tier) -> TierInfo:
    view, damaged = state.tier_view(tier), tier.steps.damaged
    unused = state.is_unused(tier)  # which is no fault
    return TierInfo(
        name=tier.name,
        kind=tier.config.kind,
        location="" if tier.blobs is None else tier.blobs.location,
        survives=view.survives,
        used=await _used(tier),
        capacity=view.capacity,
        healthy=view.healthy or unused,
        problem="" if tier.health.error is None else str(tier.health.error),
        note=tier.health.note,
        steps=len(tier.steps.held),
        damaged=tuple(DamagedStep(step.step, step.serial, str(damaged[step])) for step in sorted(damaged.not_stale())),
        hanging=tier.hanging,
        lossy=tier.derived,
    )


async def _used(tier: Tier) -> int:
    if tier.ram is None or tier.ram.slab.writable:
        return tier.used
    # Only the slab's writer keeps count of its extents; a reader adds up those of the steps.
    extents: set[tuple[int, int]] = set()
    for step in tuple(tier.steps.held):
        with suppress(Corrupt, NotFound):  # one that cannot be read must not hide the others
            found = unique_extents((await step_index.load(tier, step)).arrays).values()
            extents.update((extent.offset, extent.length) for extent in found)
    return tier.used + sum(slab_size(length) for _, length in extents)
