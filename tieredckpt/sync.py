"""`SyncStore`: the blocking face of a store, for trainers without an event loop.

Every method is that of `tieredckpt.CheckpointStore` of the same name, and blocks until it has ended. The work
runs on the store's own thread in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from tieredckpt.checkpoint import Checkpoint, Restored
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.errors import Closed
from tieredckpt.events import Event
from tieredckpt.inventory import StepDetails, StepInfo, TierInfo
from tieredckpt.policy.views import Observed

if TYPE_CHECKING:
    from tieredckpt.config import StoreConfig
    from tieredckpt.engine.keeping.collector import Collected
    from tieredckpt.engine.repairing.verify import Verified
    from tieredckpt.engine.saving.save import Saved
    from tieredckpt.store import CheckpointStore

__all__ = ["SyncCheckpoint", "SyncRestored", "SyncStore"]

T = TypeVar("T")


class SyncCheckpoint:
    """A save; see `Checkpoint`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __repr__(self) -> str:
        return f"Sync{self.checkpoint!r}"

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def saved(self) -> Saved | None:
        return self.checkpoint.saved

    @property
    def skipped(self) -> str:
        return self.checkpoint.skipped

    def reached(self, tier: str) -> None:
        """See `Checkpoint.reached`."""
        self.checkpoint.engine_loop.call_blocking(self.checkpoint.reached(tier))


@dataclass(frozen=True, slots=True)
class SyncRestored:
    """A step brought back; see `Restored`."""

    step: int
    serial: int
    tree: Any
    metrics: Mapping[str, float]
    sources: Mapping[str, int]
    _restored: Restored = field(repr=False, compare=False)
    _loop: EngineLoop | None = field(repr=False, compare=False)
    """Of views alone: copies need the store no more, and do not keep it open."""

    def verified(self) -> None:
        """See `Restored.verified`."""
        if self._loop is not None:
            self._loop.call_blocking(self._restored.verified())


class SyncStore:
    """A store without ``await``; use it with ``with``."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            loop = self.store.engine_loop
        except Closed:
            coroutine.close()
            raise
        return loop.call_blocking(coroutine)

    def __enter__(self) -> Self:
        self.store.open_blocking()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.store.close_blocking(clean=kind is None)

    def close(self) -> None:
        """See `CheckpointStore.close`."""
        self.store.close_blocking(clean=True)

    @property
    def tiers(self) -> tuple[str, ...]:
        return self.store.tiers

    @property
    def config(self) -> StoreConfig:
        return self.store.config

    def due(self, step: int) -> bool:
        return self.store.due(step)

    def observed(self) -> Observed:
        return self.store.observed()

    def signal(self, name: str, *, on: bool = True) -> None:
        self.store.signal(name, on=on)

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        return self.store.subscribe(listener)

    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        capture: Literal["copy", "reference"] = "copy",
        overwrite: bool = False,
        replicated: Sequence[str] = (),
    ) -> SyncCheckpoint:
        saving = self.store.save(
            step, tree, metrics=metrics, capture=capture, overwrite=overwrite, replicated=replicated
        )
        return SyncCheckpoint(self._run(saving))

    def restore(
        self,
        step: int | None = None,
        *,
        keys: Sequence[str] | None = None,
        like: Any = None,
        into: Any = None,
        copy: bool = True,
        resume: bool | None = None,
    ) -> SyncRestored | None:
        found = self._run(self.store.restore(step, keys=keys, like=like, into=into, copy=copy, resume=resume))
        if found is None:
            return None
        loop = self.store.engine_loop if found.views else None
        return SyncRestored(found.step, found.serial, found.tree, found.metrics, found.sources, found, loop)

    def steps(self) -> tuple[StepInfo, ...]:
        return self._run(self.store.steps())

    def describe(
        self, step: int | None = None, *, serial: int | None = None, keys: Sequence[str] | None = None
    ) -> StepDetails:
        return self._run(self.store.describe(step, serial=serial, keys=keys))

    def tier_infos(self) -> tuple[TierInfo, ...]:
        return self._run(self.store.tier_infos())

    def where(self, step: int | None = None) -> tuple[str, ...]:
        return self._run(self.store.where(step))

    def spec(self, step: int, key: str, tier: str | None = None) -> dict[str, Any]:
        return self._run(self.store.spec(step, key, tier))

    def promote(self, step: int, tier: str) -> int:
        return self._run(self.store.promote(step, tier))

    def evict(self, step: int, tier: str) -> None:
        self._run(self.store.evict(step, tier))

    def collect(self) -> list[Collected]:
        return self._run(self.store.collect())

    def verify(
        self,
        step: int | None = None,
        tier: str | None = None,
        *,
        serial: int | None = None,
        repair: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[Verified]:
        return self._run(self.store.verify(step, tier, serial=serial, repair=repair, progress=progress))

    def scrub(
        self,
        tier: str | None = None,
        *,
        repair: bool = False,
        rate: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Verified]:
        return self._run(self.store.scrub(tier, repair=repair, rate=rate, progress=progress))

    def flush(self) -> None:
        self._run(self.store.flush())
