"""A step of an open store, in the form that formats get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from tieredckpt._batches import batches
from tieredckpt.devices.current import current
from tieredckpt.engine.exporting.content import Arrays, StepContent
from tieredckpt.engine.inventory import ArrayInfo, StepDetails
from tieredckpt.engine.restoring.lookup import copies
from tieredckpt.engine.restoring.restored import Restored
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.sync import SyncStore
from tieredckpt.tree.flatten import flatten

__all__ = ["Arrays", "StepCopy", "StoredStep", "from_copies"]

T = TypeVar("T")

_PART = 256 << 20
"""Bytes that are restored together; a larger array is restored alone."""


@dataclass
class StepCopy:
    """The exact step of an open store, or one lossy copy of it: all parts that are read come from the same content."""

    store: SyncStore
    step: int | None = None
    """Its number; None for the newest."""
    lossy: str | None = None
    """The tier with the lossy copy."""
    failure: TieredCkptError | None = None
    """Why it could not be read."""

    def describe(self, keys: Sequence[str] | None = None) -> StepDetails:
        """See `SyncStore.describe`. Afterwards it stays with the step of that number."""
        step, lossy, life = self.step, self.lossy, self.store._life
        with self._reading():
            if lossy is None:
                found = self.store.describe(step, keys=keys)
            else:
                found = self.store._run(life.look(lambda engine: engine.inventory.describe(step, None, keys, lossy)))
        self.step = found.info.step
        return found

    def restore(self, keys: Sequence[str] | None, as_: Literal["specs"] | None = None) -> Restored:
        """See `SyncStore.restore`. Nothing is resumed: the training's branch does not change."""
        how = (None, None, as_, False, True, False, self.lossy or False)
        with self._reading():
            found = self.store._run(self.store._life.restore(current(), self.step, keys, *how))
        assert found is not None
        return found

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (Corrupt, NotFound, TierUnavailable) as error:
            self.failure = error
            raise


def from_copies(store: SyncStore, step: int | None, work: Callable[[StepCopy], T], *, lossy: bool) -> T:
    """Call ``work`` with the exact step or, with ``lossy``, with a lossy copy if no exact one can be read.

    It is called again, with the next copy, if it raises because its copy cannot be read.
    """
    if not lossy:
        return work(StepCopy(store, step))
    found = store._run(store._life.look(lambda engine: copies(engine.state, step)))
    failure: TieredCkptError | None = None
    for number, _, derivation in found:
        copy = StepCopy(store, number.step, None if derivation is None else derivation.tiers[-1].name)
        try:
            return work(copy)
        except TieredCkptError as error:
            if error is not copy.failure:
                raise
            failure = failure or error
    if failure is not None:
        raise failure
    return work(StepCopy(store, step))  # an empty store, which `work` reports


class StoredStep(StepContent):
    """A step, or a part of it.

    Args:
        copy: of the step.
        part: the path of a container, such as ``model``, which is taken for the whole; names begin below it.
        keys: only the leaves under these keys or patterns.
        progress: called with the bytes that were restored.

    Raises `NotFound`, `Corrupt` and `TierUnavailable` as `SyncStore.describe` does.
    """

    def __init__(
        self,
        copy: StepCopy,
        *,
        part: str | None = None,
        keys: Sequence[str] | None = None,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        chosen = keys if part is None else [part]
        super().__init__(copy.describe(chosen), part)
        self.copy, self._keys, self._progress = copy, chosen, progress

    def _tree(self) -> Any:
        found = self.copy.restore(self._keys, "specs")
        self._compare(found.serial)
        return found.tree

    def read(self, arrays: Sequence[ArrayInfo] | None = None) -> Arrays:
        """See `StepContent.read`."""
        for part in batches(self.arrays if arrays is None else arrays, lambda array: array.nbytes, _PART):
            found = self.copy.restore([array.key for array in part])
            self._compare(found.serial)
            self.sources.update(found.sources)
            values = {leaf.key: np.asarray(leaf.source) for leaf in flatten(found.tree).arrays}
            for array in part:
                yield array, values.pop(array.key)
                self._progress(array.nbytes)

    def folders(self) -> Iterator[tuple[Path, str]]:
        """The local files outside of RAM that hold the step: the folder of a tier, and the index's folder in it.

        The nearest tier first. What lies there may be collected or moved by the store's writer at any time.
        """
        if self.copy.lossy is not None:
            return  # a lossy copy is not the exact step
        for tier in self.copy.store.tier_infos():
            if tier.survives == "process" or not self.arrays:
                continue
            with suppress(NotFound, Invalid, TierUnavailable):  # it does not hold the step, or has no files
                kvstore = self.copy.store.spec(self.info.step, self.arrays[0].key, tier.name)
                kvstore = (kvstore["layers"][0] if "layers" in kvstore else kvstore)["kvstore"]
                base, index = kvstore["base"], kvstore["manifest"]
                if base["driver"] == "file":
                    yield Path(base["path"]), str(Path(index["path"]).relative_to(base["path"]))

    def _compare(self, serial: int) -> None:
        if serial != self.info.serial:
            raise Conflict(f"step {self.info.step} was saved again while it was read; begin anew")
