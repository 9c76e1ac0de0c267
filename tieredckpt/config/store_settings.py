"""The settings of a store, each with its range and its default; `store` adds what must hold between them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from tieredckpt._redact import redacted
from tieredckpt.config.exports import Exports
from tieredckpt.config.kinds import Tiers, kind_of
from tieredckpt.config.object_tiers import ObjectTier
from tieredckpt.config.tiers import AbsolutePath, Interval, RamTier, Threads, TierConfig
from tieredckpt.policy.base import AnySchedule, Schedule, parse
from tieredckpt.settings import Settings
from tieredckpt.units import Size

__all__ = ["StoreSettings"]

T = TypeVar("T", bound=TierConfig)


class StoreSettings(Settings):
    """The settings and tiers of a store, each valid by itself."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)] | None = None
    """Names this store's folder in the node's shared memory; see `identity`."""
    chunk_size: Annotated[Size, Field(ge=4096, le=2**30)] = 16 * 2**20
    """Target size of a chunk, in bytes."""
    threads: Threads | None = None
    """Threads that copy and digest; None for the number of cores, at most four."""
    schedule: AnySchedule = Field(default_factory=lambda: parse(Schedule, "always"))
    when_full: Literal["wait", "skip", "replace"] = "wait"
    """What a save does when the nearest tier has no room: wait, skip this save, or replace the oldest
    snapshot that is not promoted yet and is not the last copy."""
    lazy_guard: Literal["versions", "digests"] = "versions"
    """How saves with ``capture="lazy"`` find an array that changed before its copy had ended.

    ``"versions"`` compares the version counters of tensors, and of arrays in CPU memory some bytes at both ends.
    ``"digests"`` also digests all arrays when ``save`` is called, while the training waits: to look for a mistake."""
    promote_in: Literal["trainer", "agent"] = "trainer"
    """Which process promotes: the trainer's own, or an agent that outlives it and is started where there is none."""
    agent_log: AbsolutePath | None = None
    """The file that an agent started by a store writes its log to; None for ``agent.log`` beside the RAM tier."""
    grace: Interval = 3600.0
    """Seconds for which a file that no step refers to is kept: it may belong to a save under way."""
    lease_ttl: Interval = 60.0
    """Seconds after which a writer that has not renewed its lease counts as dead."""
    repack_below: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """A pack whose live share of bytes falls below this is rewritten."""
    replicated: tuple[str, ...] = ()
    """Keys or glob patterns of leaves that every rank has alike: the ranks share the work of storing them."""
    frozen: tuple[str, ...] = ()
    """Keys or glob patterns of leaves that the training does not change, such as ``base/**`` beside an adapter.

    A save does not read them again while they lie where they were, in the version that torch counts; whether they have
    changed is checked behind the training, and `FrozenChanged` tells it."""
    when_replicas_differ: Literal["report", "refuse", "ignore"] = "report"
    """What the ranks do when leaves differ of which each stores a share, such as those of ``replicated``.

    ``"report"`` emits `ReplicasDiffer` and commits the step, unless two nodes store different copies of a share.
    ``"refuse"`` commits no such step. ``"ignore"`` compares no shares and does not read what other ranks store."""
    rank_deadline: Interval = 600.0
    """Seconds for which the ranks of a training wait for each other."""
    restore_group: Annotated[int, Field(strict=True, ge=1)] | None = None
    """How many neighbouring ranks share what one of them reads of a shared tier in a restore; None for all."""
    rack: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Of this node; copies in other nodes' RAM never share one. None for ``TIEREDCKPT_RACK``, and where that is not
    set either for a rack of its own."""
    policies: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?$")], ...] = ()
    """Modules of policies, as ``module`` or ``module:Class``; only `load` of a file imports them, from its folder too.
    """
    tiers: Tiers = ()
    """Nearest first."""
    exports: Exports = ()
    """Exports that are made behind the training."""

    @classmethod
    def noun(cls) -> str:
        return "a store"

    @property
    def ram(self) -> RamTier | None:
        """The tier in shared memory, which is the nearest; None without one."""
        return next(iter(self.tiers_of(RamTier)), None)

    @property
    def slower(self) -> tuple[TierConfig, ...]:
        """The tiers but RAM, nearest first."""
        return tuple(tier for tier in self.tiers if tier is not self.ram)

    def tiers_of(self, model: type[T]) -> tuple[T, ...]:
        """The tiers of the kind that ``model`` configures, nearest first."""
        return tuple(tier for tier in self.tiers if isinstance(tier, model))

    @property
    def exact(self) -> tuple[TierConfig, ...]:
        """The tiers that hold steps as they were saved, each with its place, nearest first."""
        return tuple(tier for tier in self.located if not tier.lossy)

    @property
    def derived(self) -> tuple[TierConfig, ...]:
        """The tiers with `lossy` rules, each with its place, nearest first."""
        return tuple(tier for tier in self.located if tier.lossy)

    @property
    def identity(self) -> str:
        """Name of the RAM folder in earlier versions: ``name``, or 16 digits derived from other tiers' places."""
        return self._identity([tier.location_with_secrets for tier in self.slower if not tier.lossy])

    def _identity(self, where: Sequence[str | None]) -> str:
        if self.name is not None:
            return self.name
        return hashlib.sha256(json.dumps(where).encode()).hexdigest()[:16]

    @property
    def located(self) -> tuple[TierConfig, ...]:
        """The tiers, each with its place; a tier without one may get one named after the store (`TierConfig.located`).

        The store is identified by ``name``, or by the places of the tiers that outlive the nodes.
        """
        shared = [
            tier.location_with_secrets if isinstance(tier, ObjectTier) else kind_of(tier).location(tier)
            for tier in self.slower
            if kind_of(tier).medium == "shared" and not tier.lossy
        ]
        lasting = [str(where) for where in shared if where is not None]
        identity = self._identity(lasting) if self.name is not None or lasting else None
        return tuple(tier.located(identity) for tier in self.tiers)

    @property
    def recorded_policies(self) -> dict[str, Any]:
        """Policies that a step records: the schedule, and each tier's name, kind and policies; never its location."""
        tiers = {"tiers": {"__all__": {"name", "kind", "promote", "retain", "evict"}}}
        found: dict[str, Any] = redacted(self.model_dump(mode="json", include={"schedule": True, **tiers}))
        return found

    @property
    def copy_threads(self) -> int:
        """``threads``, or the number of cores this process may use, at most four."""
        if self.threads is not None:
            return self.threads
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return min(4, usable or 1)
