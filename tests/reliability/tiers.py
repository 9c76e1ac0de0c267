"""Puts a script of faults under the slower tiers of every store that is opened meanwhile.

::

    with faulty_tiers() as faults:
        faults.refuse("disk")                      # cannot be opened ...
        async with CheckpointStore.open(config) as store:
            faults.allow("disk")                   # ... until now
            faults["disk"].fail("put", error)      # a `tieredckpt.testing.faulty.Faulty`
            faults.kill("disk")                    # dead, however often it is opened again ...
            faults.revive("disk")                  # ... until now
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support.limits import limit

from tieredckpt.blobs.base import BlobStore
from tieredckpt.config import TierConfig
from tieredckpt.errors import TierUnavailable
from tieredckpt.testing.faulty import Faulty, Kind
from tieredckpt.testing.tiers import Opening, tiers_opened_by

__all__ = ["FaultyTiers", "faulty_tiers", "tried_again_soon"]


class FaultyTiers:
    """The faulty blob stores under the tiers, by the tier's name; the latest where one was opened again.

    They lie below the wrappers that retry, limit and time, as a device does. What is opened again has a script of its
    own: a store may open a tier that fails anew, and the old script is none of its.

    Args:
        remembered: as for each `tieredckpt.testing.faulty.Faulty`.
    """

    def __init__(self, *, remembered: int | None = None) -> None:
        self._remembered = remembered
        self._stores: dict[str, Faulty] = {}
        self._struck: Counter[tuple[Kind, str]] = Counter()
        """By stores that were opened again since."""
        self._refused: dict[str, Exception] = {}
        self._scripts: list[Callable[[str, Faulty], None]] = []

    def __getitem__(self, tier: str) -> Faulty:
        return self._stores[tier]

    def refuse(self, tier: str, error: Exception | None = None) -> None:
        """Make every attempt to open the tier raise ``error``, a `TierUnavailable` by default, until `allow`."""
        self._refused[tier] = error or TierUnavailable(f"the tier {tier} cannot be opened, by script")

    def allow(self, tier: str) -> None:
        """Allow the tier to be opened again."""
        self._refused.pop(tier, None)

    def kill(self, tier: str, error: Exception | None = None) -> None:
        """Make every call of the tier, and every attempt to open it again, raise ``error`` until `revive`."""
        error = error or TierUnavailable(f"the tier {tier} is dead by script")
        self.refuse(tier, error)
        self[tier].kill(error)

    def revive(self, tier: str) -> None:
        """End what `kill` began."""
        self[tier].revive()
        self.allow(tier)

    def wrap(self, tier: str, store: BlobStore) -> Faulty:
        """``store`` with a script, found by the tier's name from now on."""
        if tier in self._stores:
            self._struck += self._stores[tier].struck
        self._stores[tier] = Faulty(store, remembered=self._remembered)
        for script in self._scripts:
            script(tier, self._stores[tier])
        return self._stores[tier]

    @contextmanager
    def from_opening(self, script: Callable[[str, Faulty], None]) -> Iterator[None]:
        """Give each tier that is opened in the block its ``script`` of faults before its first call."""
        self._scripts.append(script)
        try:
            yield
        finally:
            self._scripts.remove(script)

    @property
    def struck(self) -> Counter[tuple[Kind, str]]:
        """How many calls met a fault so far, on all tiers, by its kind and their verb."""
        return sum((store.struck for store in self._stores.values()), Counter(self._struck))

    def check(self, tier: str) -> None:
        """Raise what `refuse` said."""
        if tier in self._refused:
            raise self._refused[tier]


@contextmanager
def faulty_tiers(*, remembered: int | None = None) -> Iterator[FaultyTiers]:
    """Wrap the blob store of every slower tier that is opened in the block; their calls are ``remembered``."""
    faults = FaultyTiers(remembered=remembered)

    async def opened(tier: TierConfig, opening: Opening) -> BlobStore:
        faults.check(tier.name)
        store = await opening()
        try:
            faults.check(tier.name)
        except BaseException:  # it died meanwhile
            await store.close()
            raise
        return faults.wrap(tier.name, store)

    with tiers_opened_by(opened):
        yield faults


@contextmanager
def tried_again_soon() -> Iterator[None]:
    """Retry tiers that failed in the block after hundredths of a second instead of half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        limit(patch, first_retry=0.02)
        limit(patch, last_retry=0.2)
        limit(patch, source_retry=0.05)
        yield
