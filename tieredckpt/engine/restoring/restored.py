"""`Restored`: the result of a restore."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Restored"]


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored step."""

    step: int
    serial: int
    tree: Any
    metrics: Mapping[str, float]
    sources: Mapping[str, int]
    """Bytes read from each tier; under ``peers``, those that other ranks sent."""
    lossy: bool = False
    """Whether it is a lossy copy, whose values are not all as they were saved; see ``restore(lossy=True)``."""
    _check: Callable[[], Awaitable[None]] | None = field(default=None, repr=False, compare=False)

    @property
    def views(self) -> bool:
        """Whether some arrays are views of RAM, for `verified` to check."""
        return self._check is not None

    async def verified(self) -> None:
        """Return when every digest was checked; `Corrupt` names the arrays that are damaged.

        Copies are verified before `CheckpointStore.restore` returns, and this returns at once. Views
        (``copy=False``) are handed out first and checked when this is called.
        """
        if self._check is not None:
            await self._check()
