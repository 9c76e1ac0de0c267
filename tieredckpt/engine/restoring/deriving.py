"""Derived steps: applies lossy rules to an exact step, chunk by chunk, and reads derived steps.

A `RoundedSource` gives the chunks of a step as a tier with rules is to have them; promotion copies it like any other.
A `DerivedSource` reads a derived step from the one tier that has it, and derives a damaged chunk again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tieredckpt.concurrency import in_thread, together
from tieredckpt.config.lossy import LossyRule
from tieredckpt.engine.restoring.rules import as_recorded, first_rules, rounding_of
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.state.state import DerivedState, State
from tieredckpt.engine.tier.tier import RoundedChunk, Tier, ToRound
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.derivation import Derivation, Rounded, Rule
from tieredckpt.format.digest import digest, digest_array
from tieredckpt.format.layout import aligned
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepId, StepIndex, StepRecord
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.rounding import Bound, can_round, round_values
from tieredckpt.format.structure import array_nodes
from tieredckpt.tree.select import without

__all__ = ["DerivedSource", "RoundedSource", "open_derived", "open_source"]

_log = logging.getLogger("tieredckpt")

_AT_A_TIME = 8
"""Chunks that are read to be rounded: as many as a promotion reads."""

Bytes = npt.NDArray[np.uint8]


def open_source(
    state: State, step: StepId, tier: Tier, *, anew: bool = False
) -> AbstractAsyncContextManager[StepSource]:
    """Open a step as one tier has it, exact or derived. ``anew`` and what is raised: as `StepSource.open`."""
    return (DerivedSource if tier.derived else StepSource).open(state, step, only=tier, anew=anew)


@asynccontextmanager
async def open_derived(copies: Sequence[tuple[StepId, State]]) -> AsyncIterator[StepSource]:
    """Open the first lossy copy of a step whose index can be read; ``copies`` have each one's derivation.

    Raises as `StepSource.open` where none can.
    """
    async with AsyncExitStack() as opened:
        error: TieredCkptError = NotFound("no tier holds a lossy copy of that step any more")
        for step, derivation in copies:
            try:
                source = await opened.enter_async_context(open_source(derivation, step, derivation.tiers[-1]))
            except (Corrupt, NotFound, TierUnavailable) as why:
                error = why
            else:
                yield source
                return
        raise error


@dataclass
class RoundedSource(StepSource):
    """An exact step, rounded as a tier with lossy rules requires. Use `rounding`.

    Its index has the digests of the rounded chunks, and the places of the exact ones.
    """

    exact: StepSource | None = field(kw_only=True, default=None)
    bounds: Mapping[str, Bound] = field(kw_only=True, default_factory=dict)
    """Bounds of the arrays that are rounded, by storage key."""
    remembered: dict[ToRound, RoundedChunk] = field(kw_only=True, default_factory=dict)
    """Results of earlier roundings, which the tier remembers."""

    @classmethod
    @asynccontextmanager
    async def rounding(cls, state: State, step: StepId, tier: Tier) -> AsyncIterator[StepSource]:
        """Round a step by the rules of ``tier``, from the nearest tier that has it exact; each chunk is rounded once.

        Raises as `StepSource.open` and `StepSource.read`.
        """
        async with StepSource.open(_exact(state), step) as exact:
            plan = await in_thread(_Plan.of, exact.index, tier.config.lossy)
            index = await _rounded_index(state, exact, tier, plan)
            yield cls(state, step, exact.tier, index, exact=exact, bounds=plan.bounds, remembered=tier.rounded)

    @property
    def in_slab(self) -> None:
        """None: no chunk may be written as it lies in RAM."""

    async def read(self, key: str, ordinal: int, memory: Bytes, *, bad: Tier | None = None) -> Tier:
        """See `StepSource.read`."""
        assert self.exact is not None
        array = self.index.arrays[key]
        chunk, bound = array.chunks[ordinal], self.bounds.get(key)
        found = await self.exact.read(key, ordinal, memory, bad=bad)
        if bound is None or self.exact.index.arrays[key].chunks[ordinal].digest == chunk.digest:
            return found
        rounded = await in_thread(_round, memory[: array.grid.cell_nbytes], array.dtype, bound, pool=self.state.pool)
        if rounded is None or rounded.digest != chunk.digest:
            self.remembered.clear()  # or the next try would believe it once more
            raise TierUnavailable(
                f"{self.step}: a chunk of {layout.array_key(key)!r} was rounded to other values than a moment ago, so "
                f"the memory of this machine is not to be trusted; try again"
            )
        return found


@dataclass
class DerivedSource(StepSource):
    """Reads a derived step from the tier that holds it; a chunk that is damaged there is derived from an exact copy."""

    async def read(self, key: str, ordinal: int, memory: Bytes, *, bad: Tier | None = None) -> Tier:
        """See `StepSource.read`."""
        try:
            return await super().read(key, ordinal, memory, bad=bad)
        except (Corrupt, TierUnavailable) as error:
            try:
                again = await self._derive(key, ordinal, memory)
            except TieredCkptError as why:
                _log.info("%s: a chunk of %r cannot be derived again: %s", self.step, layout.array_key(key), why)
                again = None
            if again is None:
                raise error
            return again

    async def _derive(self, key: str, ordinal: int, memory: Bytes) -> Tier | None:
        """Derive a chunk again from an exact copy by the step's rules; the tier read, or None if the digest differs."""
        array, how = self.index.arrays[key], self.index.record.derived
        nbytes, wanted = array.grid.cell_nbytes, array.chunks[ordinal].digest
        async with StepSource.open(_exact(self.state), self.step) as exact:
            there = exact.index.arrays.get(key)
            if there is None or there.grid != array.grid or there.dtype != array.dtype:
                return None
            found = await exact.read(key, ordinal, memory)
        if there.chunks[ordinal].digest == wanted:
            return found
        if how is msgspec.UNSET or (rounded := how.arrays.get(key)) is None or not can_round(array.dtype):
            return None
        bound = how.rules[rounded.rule].bound
        chunk = None if bound is None else await in_thread(_round, memory[:nbytes], array.dtype, bound)
        return found if chunk is not None and chunk.digest == wanted else None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Effect of a tier's rules on the arrays of a step."""

    rules: tuple[Rule, ...]
    chosen: Mapping[str, int]
    """The rule by which an array is rounded, by storage key."""
    bounds: Mapping[str, Bound]
    dropped: frozenset[str]
    """Keys of arrays that are left out."""

    @classmethod
    def of(cls, index: StepIndex, settings: Sequence[LossyRule]) -> _Plan:
        rules = as_recorded(settings)
        nodes = {node.key: node for node in array_nodes(index.record.structure)}
        first = first_rules(rules, tuple(nodes))
        dropped = frozenset(key for key, number in first.items() if rules[number].drop)
        chosen: dict[str, int] = {}
        bounds: dict[str, Bound] = {}
        for name, array in index.arrays.items():
            key = layout.array_key(name)
            number = first.get(key, -1)
            if number < 0 or (bound := rounding_of(rules[number], key, len(nodes[key].shape), array.dtype)) is None:
                continue
            if any(isinstance(chunk.where, Extent) for chunk in array.chunks):
                chosen[name], bounds[name] = number, bound
        return cls(rules, chosen, bounds, dropped)


async def _rounded_index(state: State, exact: StepSource, tier: Tier, plan: _Plan) -> StepIndex:
    """The index of the derived step; remembers on the tier what each chunk became."""
    before, after = tier.rounded, dict[ToRound, RoundedChunk]()

    async def find(key: str, ordinal: int, array: ArrayIndex, wanted: ToRound) -> None:
        async with state.scratch.lend(aligned(array.grid.cell_nbytes)) as memory:
            await exact.read(key, ordinal, memory)
            chunk = memory[: array.grid.cell_nbytes]
            found = await in_thread(_round, chunk, wanted.dtype, wanted.bound, pool=state.pool)
            after[wanted] = found or RoundedChunk(wanted.digest, 0.0, exact=True)

    work = []
    for key, bound in plan.bounds.items():
        array = exact.index.arrays[key]
        for ordinal, chunk in enumerate(array.chunks):
            wanted = ToRound(chunk.digest, array.dtype, bound)
            if not isinstance(chunk.where, Extent) or wanted in after:
                continue
            if (known := before.get(wanted)) is not None:
                after[wanted] = known
            else:
                after[wanted] = RoundedChunk(chunk.digest, 0.0, exact=True)  # until it is found
                work.append(find(key, ordinal, array, wanted))
    await together(work, _AT_A_TIME)
    tier.rounded = after
    arrays: dict[str, ArrayIndex] = {}
    rounded: dict[str, Rounded] = {}
    for key, array in exact.index.arrays.items():
        if layout.array_key(key) in plan.dropped:
            continue
        arrays[key] = array
        if (its := plan.bounds.get(key)) is not None:
            became = [
                after[ToRound(chunk.digest, array.dtype, its)] if isinstance(chunk.where, Extent) else None
                for chunk in array.chunks
            ]
            chunks = [
                chunk if new is None else Chunk(new.digest, chunk.where)
                for chunk, new in zip(array.chunks, became, strict=True)
            ]
            arrays[key] = ArrayIndex(array.grid, array.dtype, chunks)
            rounded[key] = Rounded(
                rule=plan.chosen[key],
                worst=max((new.worst for new in became if new is not None), default=0.0),
                exact_chunks=sum(new is not None and new.exact for new in became),
            )
    return StepIndex(_record(exact.index, plan, rounded), arrays)


def _record(index: StepIndex, plan: _Plan, rounded: dict[str, Rounded]) -> StepRecord:
    table = b"".join(chunk.digest for key in sorted(index.arrays, key=str.encode) for chunk in index.arrays[key].chunks)
    gone = (array.grid.nbytes for key, array in index.arrays.items() if layout.array_key(key) in plan.dropped)
    return msgspec.structs.replace(
        index.record,
        nbytes=max(0, index.record.nbytes - sum(gone)),
        structure=without(index.record.structure, plan.dropped),
        derived=Derivation(
            chunks=digest(table).hex(), rules=plan.rules, arrays=rounded, dropped=tuple(sorted(plan.dropped))
        ),
    )


def _round(memory: Bytes, dtype: np.dtype[Any], bound: Bound) -> RoundedChunk | None:
    """Round a chunk in place; None if the chunk stays exact (``memory`` may be changed all the same)."""
    worst = round_values(memory, dtype, bound)
    return None if worst is None else RoundedChunk(digest_array(memory), worst)


def _exact(state: State) -> State:
    """The state of the exact steps, from which ``state`` derives its own."""
    return state.exact if isinstance(state, DerivedState) else state
