"""Membership of a process in the group of ranks that save together; the group has one member in a process alone."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import StepId, StepIndex

__all__ = ["Membership", "Role", "Streamed"]


class Role(enum.Enum):
    """Which part of the work on a store a process does."""

    WHOLE = "saves and promotes"
    TRAINER = "saves, and has an agent that promotes"
    AGENT = "promotes what a trainer saves"


@dataclass(frozen=True, slots=True)
class Streamed:
    """A rank's part of a step that its RAM could not hold: written to a shared tier, and not committed there yet."""

    tier: Tier
    index: StepIndex
    packs: frozenset[str]
    """Packs to which the part refers: those written for it, and older ones."""
    written: frozenset[str]
    """Those written for it."""


@dataclass
class Membership:
    """This rank, how many there are, and its steps that are not decided yet."""

    rank: int = 0
    size: int = 1
    local_ranks: tuple[int, ...] = (0,)
    """The ranks of this machine, this one included."""
    role: Role = Role.WHOLE
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random name of what this process, or all ranks together, save from opening to closing."""
    streamed: dict[StepId, Streamed] = field(default_factory=dict)
    """This rank's parts of steps that RAM could not hold, until they are committed."""
    failing: frozenset[str] = frozenset()
    """Shared tiers that some rank could not use at the last vote: no rank streams there if another tier takes it."""
    promised: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """At rank 0, by attempt and tier: packs to which parts of other ranks may refer, as it has told them, until it has
    decided on the attempt, or on a later one."""
    undecided: set[StepId] = field(default_factory=set)
    """Steps that this rank saved, and the ranks have not agreed on yet."""
    failed: dict[StepId, TieredCkptError] = field(default_factory=dict)
    """Steps that this rank saved, and the ranks did not agree on."""
    dropping_part: Callable[[StepId], None] = lambda step: None
    """Called before this rank's part of a step that is not committed is dropped, to make room."""
    replicated: dict[StepId, int] = field(default_factory=dict)
    """Steps whose parts all lie in the RAM of several nodes, and of how many."""

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank answers for what former ranks left on its machine."""
        return self.local_ranks[0] == self.rank

    def packs_streamed_to(self, tier: Tier) -> set[str]:
        """Packs of a tier to which saves of several ranks refer that are not committed there yet."""
        own = (part.packs for part in self.streamed.values() if part.tier is tier)
        return tier.packs.streamed_to.union(*own, *(packs.get(tier.name, ()) for packs in self.promised.values()))
