"""The input of a plan or a simulation: a configuration, the training, the machines and their failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tieredckpt.blobs.base import Survives
from tieredckpt.config import StoreConfig, TierConfig
from tieredckpt.config.kinds import kind_of
from tieredckpt.engine.inventory import ArrayInfo
from tieredckpt.errors import Invalid
from tieredckpt.plan import assumed
from tieredckpt.plan.lossy import EXACT, Kept, kept_by
from tieredckpt.units import format_size

__all__ = ["KINDS", "Kind", "Rung", "Scenario", "derived_rungs", "doubts", "rungs"]

Kind = Literal["process", "node", "rack", "site"]
"""What fails: the training processes, a node with its memory, a rack with all in its nodes, or everything."""

KINDS: dict[Kind, Survives] = {
    "process": Survives.PROCESS,
    "node": Survives.NODE,
    "rack": Survives.SITE,
    "site": Survives.SITE,
}
"""What a tier must survive to hold its steps through a failure."""

_SNAPSHOTS, _SNAPSHOTS_AT_MOST = 2, 4
"""Snapshots for which a RAM tier with the capacity ``auto`` has room, and for which it has if more must stay."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One tier of the job: sizes and rates are those of all nodes together."""

    config: TierConfig
    survives: Survives
    capacity: int | None
    at_most: int | None
    """The largest size, if nothing that the tier holds may go; None if that is ``capacity``."""
    write: float
    """Bytes of the state a second, with its codec."""
    read: float
    """Bytes of the state a second, with its codec."""
    device: float
    """Write speed of the device, in bytes a second."""
    assumed: bool
    """Whether its speed is assumed."""
    kept: Kept = EXACT
    """The shares of a state that its lossy rules keep."""

    @property
    def share(self) -> float:
        """Share of a state's bytes that it stores."""
        return self.kept.share(self.config.codec)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def survives_name(self) -> Literal["process", "node", "site"]:
        """As policies see it."""
        return "site" if self.survives is Survives.SITE else "node" if self.survives is Survives.NODE else "process"

    @property
    def ram(self) -> bool:
        return kind_of(self.config).in_memory


@dataclass(frozen=True, slots=True)
class Scenario:
    """A training and its machines."""

    config: StoreConfig
    state: int
    """Bytes of the whole state, over all nodes."""
    step_seconds: float
    nodes: int
    rungs: tuple[Rung, ...]
    """Nearest first."""
    mtbf: Mapping[Kind, float] = field(default_factory=dict)
    """Mean seconds between failures of the job, by kind; kinds that are missing do not occur."""
    restart: float = 60.0
    """Seconds from a failure until the trainers run again and begin to restore."""
    changed: float = 1.0
    """Share of the chunks that differ from one save to the next."""
    tier_mtbf: Mapping[str, float] = field(default_factory=dict)
    """Mean seconds between outages of a tier; what it holds is there again afterwards."""
    tier_repair: float = 1800.0
    """Mean seconds of such an outage."""
    derived: tuple[Rung, ...] = ()
    """The tiers of lossy copies, from which nothing is restored by itself."""

    def __post_init__(self) -> None:
        if self.state <= 0 or self.step_seconds <= 0 or self.nodes < 1 or self.restart < 0:
            raise Invalid("the state, the step time and the nodes must be more than 0, the restart not negative")
        if not 0 <= self.changed <= 1:
            raise Invalid(f"the share of changed chunks is from 0 to 1, not {self.changed}")
        if any(mean <= 0 for mean in (*self.mtbf.values(), *self.tier_mtbf.values(), self.tier_repair)):
            raise Invalid("a mean time between failures, or of an outage, must be more than 0 s")
        for name in self.tier_mtbf:
            if name not in (names := [rung.name for rung in (*self.rungs, *self.derived)]):
                raise Invalid(f"there is no tier {name!r} (tiers: {', '.join(names)})")

    @property
    def job_mtbf(self) -> float:
        """Mean seconds between failures of any kind; infinite without any."""
        rate = sum(1 / mean for mean in self.mtbf.values())
        return 1 / rate if rate else math.inf

    def survives(self, rung: Rung, kind: Kind) -> bool:
        """Whether steps on a tier outlive such a failure, at least some time after they were saved."""
        return rung.survives >= KINDS[kind] or (kind == "node" and self.copied_after(rung) is not None)

    def copied_after(self, rung: Rung) -> float | None:
        """Seconds from a save until RAM of another node has it too; None if it never has.

        Copies may lie in one rack, so a failure of the rack loses all.
        """
        tier = self.config.ram
        if not rung.ram or tier is None or not 1 < tier.replicas <= self.nodes:
            return None
        rate = self.nodes * (tier.rate_limit or assumed.NETWORK_OF_A_NODE)
        return self.added(1) * (tier.replicas - 1) / rate

    def added(self, held: int, share: float = 1.0) -> int:
        """Bytes that one more step takes on a tier that holds ``held`` steps and stores that share of the bytes."""
        return math.ceil(share * (math.ceil(self.state * self.changed) if held else self.state))

    def used(self, held: int, share: float = 1.0) -> int:
        """Bytes that so many steps take on a tier: equal chunks are stored once."""
        return math.ceil(share * (self.state + (held - 1) * math.ceil(self.state * self.changed))) if held else 0

    def stall(self) -> float:
        """Seconds that a save takes from the training when its tier has room."""
        first = self.rungs[0]
        if first.ram and (first.capacity is None or first.capacity >= self.state):
            return self.state / first.write
        slower = next((rung for rung in self.rungs if not rung.ram), first)
        return self.state * self.changed / slower.write


def rungs(
    config: StoreConfig,
    state: int,
    nodes: int,
    writes: Mapping[str, float],
    reads: Mapping[str, float],
) -> tuple[Rung, ...]:
    """The tiers of ``config`` for a job of so many nodes, without the lossy ones.

    Every node has its own RAM. Any other tier is one place that all nodes see, with one capacity. ``writes`` and
    ``reads`` are bytes a second of the whole job, by tier; a read rate that is missing is the write rate.
    """
    names = [tier.name for tier in config.tiers]
    if unknown := sorted((writes.keys() | reads.keys()) - set(names)):
        raise Invalid(f"there is no tier {unknown[0]!r} (tiers: {', '.join(names)})")
    exact = (tier for tier in config.tiers if not tier.lossy)
    return tuple(_rung(tier, state, nodes, config.copy_threads, writes, reads) for tier in exact)


def derived_rungs(
    config: StoreConfig,
    state: int,
    nodes: int,
    writes: Mapping[str, float],
    reads: Mapping[str, float],
    arrays: Sequence[ArrayInfo] | None = None,
) -> tuple[Rung, ...]:
    """As `rungs`, for the lossy tiers, and a state with ``arrays`` if they are known."""
    threads = config.copy_threads
    return tuple(_rung(tier, state, nodes, threads, writes, reads, arrays) for tier in config.tiers if tier.lossy)


def doubts(config: StoreConfig, nodes: int, state: int) -> list[str]:
    """Settings that do not suit a job of so many nodes with so large a state, and how the plan reads them."""
    found = []
    if config.ram is not None and isinstance(config.ram.capacity, int) and config.ram.capacity * nodes < state:
        found.append(
            f"tier {config.ram.name} has {format_size(config.ram.capacity * nodes)}, less than the state of "
            f"{format_size(state)}: each save streams to the next tier and stalls training for as long as that takes, "
            "whatever `promote` says there"
        )
    if config.ram is not None and config.ram.replicas > nodes:
        found.append(f"tier {config.ram.name} keeps no copies on {config.ram.replicas} nodes, for there are {nodes}")
    found += [
        f"tier {tier.name} is taken for one place that all {nodes} nodes see, as every tier but RAM must be; a disk of "
        f"each node's own cannot be a tier of several nodes: use RAM with replicas = 2, CHFS, or "
        f'survives = "site" for a shared file system'
        for tier in config.slower
        if nodes > 1 and kind_of(tier).medium != "nodes" and kind_of(tier).survives(tier) < Survives.SITE
    ]
    return found


def _rung(
    tier: TierConfig,
    state: int,
    nodes: int,
    threads: int,
    writes: Mapping[str, float],
    reads: Mapping[str, float],
    arrays: Sequence[ArrayInfo] | None = None,
) -> Rung:
    kind, codec, kept = kind_of(tier), assumed.CODECS[tier.codec], kept_by(tier, arrays)
    share = kept.share(tier.codec) or math.ulp(1.0)
    device = writes.get(tier.name, _assumed_speed(tier, nodes))
    capacity, at_most = None, None
    if tier.capacity == "auto":
        capacity, at_most = _SNAPSHOTS * state, _SNAPSHOTS_AT_MOST * state
    elif tier.capacity is not None:
        capacity = tier.capacity * (nodes if kind.in_memory else 1)
    return Rung(
        tier,
        kind.survives(tier),
        capacity,
        at_most,
        min(device / share, kept.encode(tier.codec) * tier.codec_threads * nodes),
        min(reads.get(tier.name, device) / share, codec.decode * threads * nodes),
        device,
        tier.name not in writes,
        kept,
    )


def _assumed_speed(tier: TierConfig, nodes: int) -> float:
    kind = kind_of(tier)
    if kind.in_memory:
        return assumed.COPY_OF_A_NODE * nodes
    if kind.medium == "nodes" or (nodes == 1 and kind.survives(tier) < Survives.SITE):
        return assumed.MEDIUM_OF_A_NODE * nodes
    return min(assumed.SHARED_BY_A_NODE * nodes, assumed.SHARED_AT_MOST)
