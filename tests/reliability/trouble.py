"""Trouble with two slower tiers at random: what a soak puts into the scripts of their blob stores, and takes out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reliability.tiers import FaultyTiers
from tieredckpt.errors import NoSpace, TierUnavailable
from tieredckpt.testing.faulty import Faulty, Hold

__all__ = ["SLOWER", "Trouble"]

SLOWER = ("near", "far")
"""The tiers that fail."""

_VERBS = ("get", "get_into", "put", "stat", "list", "delete")
_READS = ("get", "get_into")


class Trouble:
    """Makes and ends it.

    Args:
        faults: the scripts of the tiers.
        chance: what is made.
    """

    def __init__(self, faults: FaultyTiers, chance: random.Random) -> None:
        self._faults = faults
        self._chance = chance
        self._held: list[Hold] = []

    def stir(self) -> None:
        """Perhaps let something happen to a tier, and perhaps let an earlier trouble pass."""
        chance = self._chance
        if self._held and chance.random() < 0.5:
            self._held.pop().release()
        for name in SLOWER:
            fate = chance.random()
            if fate < 0.3:
                self._faults[name].clear()
            elif fate < 0.75:
                chance.choice(self._kinds())(self._faults[name])

    def end(self) -> None:
        """End all faults."""
        self.let_go()
        for name in SLOWER:
            self._faults.allow(name)
            self._faults[name].clear()

    def refuse(self, tier: str) -> None:
        """Make the tier impossible to open until `end`."""
        self._faults.refuse(tier)

    def let_go(self) -> None:
        """Release the calls that hang."""
        while self._held:
            self._held.pop().release()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Release at its end the calls of the block that hang."""
        try:
            yield
        finally:
            self.let_go()

    def _kinds(self) -> list[Callable[[Faulty], None]]:
        calls = [self._error, self._answer_lost, self._hang, self._late]
        return [*calls, self._short, self._wrong, self._full, self._gone]

    def _error(self, tier: Faulty) -> None:
        error = self._chance.choice([TierUnavailable("no answer, by script"), NoSpace("no room, by script")])
        verb = "put" if isinstance(error, NoSpace) else self._chance.choice(_VERBS)
        tier.fail(verb, error, nth=self._nth(), times=self._chance.randrange(1, 4))

    def _answer_lost(self, tier: Faulty) -> None:
        verb = self._chance.choice(("put", "delete"))
        tier.fail(verb, TierUnavailable("the answer is lost, by script"), nth=self._nth(), after=True)

    def _hang(self, tier: Faulty) -> None:
        self._held.append(tier.hold(self._chance.choice(_VERBS), nth=self._nth(), after=self._chance.random() < 0.5))

    def _late(self, tier: Faulty) -> None:
        tier.delay(self._chance.choice(_VERBS), self._chance.uniform(0.0, 0.05), times=self._chance.randrange(1, 9))

    def _short(self, tier: Faulty) -> None:
        tier.cut(self._chance.choice(_READS), self._chance.randrange(5000), nth=self._nth())

    def _wrong(self, tier: Faulty) -> None:
        tier.flip(self._chance.choice(_READS), self._chance.randrange(1 << 15), nth=self._nth())

    def _full(self, tier: Faulty) -> None:
        tier.full_after(self._chance.randrange(40_000))

    def _gone(self, tier: Faulty) -> None:
        if self._chance.random() < 0.5:
            tier.kill()
        else:
            tier.come_and_go(up=self._chance.randrange(1, 20), down=self._chance.randrange(1, 8))

    def _nth(self) -> int:
        return self._chance.randrange(1, 5)
