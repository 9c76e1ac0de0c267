"""Brings the arrays of a step back: filled with copies from wherever they are intact, or as views of RAM."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import numpy.typing as npt

from tieredckpt.engine.ranks.ranked import Ranked
from tieredckpt.engine.repairing.background import Mending
from tieredckpt.engine.restoring.pieces import Form
from tieredckpt.engine.restoring.reader import Read, fill
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.restoring.targets import empty_targets
from tieredckpt.engine.restoring.views import damage_of, view_step
from tieredckpt.engine.state.state import State
from tieredckpt.errors import Corrupt
from tieredckpt.events import StepRestored
from tieredckpt.format.manifest import StepId, StepIndex

__all__ = ["Reading"]


class Reading:
    """Reads steps for one store, and has the damage mended that it finds. Lives on the engine's loop."""

    def __init__(self, state: State, ranked: Ranked | None, mending: Mending) -> None:
        self._state, self._ranked, self._mending = state, ranked, mending

    async def read(self, step: StepId, targets_for: Callable[[StepIndex], Mapping[str, npt.NDArray[Any]]]) -> Read:
        """Fill the arrays that ``targets_for`` gives for the step's index. Raises as `StepSource` does."""
        begin = time.monotonic()
        read = await self._fill(step, targets_for)
        self._state.events.emit(StepRestored(step.step, step.serial, read.sources, time.monotonic() - begin))
        return read

    async def _fill(self, step: StepId, targets_for: Callable[[StepIndex], Mapping[str, npt.NDArray[Any]]]) -> Read:
        state = self._state
        if self._ranked is not None:
            await self._ranked.restores.begin()
        async with StepSource.open(state, step, chosen=state.chosen) as source:
            targets = await asyncio.to_thread(targets_for, source.index)
            sources = await fill(state, source, targets)
            record, damage, unreadable = source.index.record, source.damage, source.unreadable
        if self._ranked is not None:
            self._ranked.reports.damaged(step, damage, unreadable)
        if (damage or unreadable) and not self._state.read_only:
            self._mending.behind(step, damage, unreadable)
        return Read(step, record, dict(targets), sources)

    async def view(
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
        if rest or self._ranked is not None:  # which may have something for other ranks
            copied = await self._fill(step, lambda _: empty_targets(step, rest))
            for key, array in copied.arrays.items():
                array.flags.writeable = False
                arrays[key] = array
            for name, nbytes in copied.sources.items():
                sources[name] = sources.get(name, 0) + nbytes
        self._state.events.emit(StepRestored(step.step, step.serial, sources, time.monotonic() - begin))
        return Read(step, index.record, arrays, sources), check

    async def _check_views(self, step: StepId, index: StepIndex, views: Mapping[str, npt.NDArray[Any]]) -> None:
        damage = await damage_of(self._state, index, views)
        if damage and not self._state.read_only and step in self._state.tiers[0].held:
            self._mending.behind(step, damage, ())
        if damage:
            keys = ", ".join(map(repr, sorted({found.key for found in damage})))
            raise Corrupt(f"views of {step} in RAM are damaged: {keys}; restore it with copy=True")
