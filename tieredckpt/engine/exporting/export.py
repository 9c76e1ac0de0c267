"""One export: its configuration, its place, and what is known of it."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from tieredckpt.config.exports import ExportConfig
from tieredckpt.config.formats import Format
from tieredckpt.engine.exporting import due
from tieredckpt.engine.exporting.places import Place
from tieredckpt.engine.tier.tier import Health
from tieredckpt.errors import Conflict, TieredCkptError
from tieredckpt.format.manifest import StepId

__all__ = ["Export", "ExportInfo"]


@dataclass(frozen=True, slots=True)
class ExportInfo:
    """An export as it is now."""

    name: str
    format: str
    to: str
    steps: tuple[int, ...]
    """The steps whose exports are there, as far as this process knows, ascending."""
    exporting: int | None
    """The step that is being exported."""
    problem: str
    """Why a step that is due could not be exported, or an export be deleted; empty if nothing failed."""


@dataclass
class Export:
    """One export, and what is known of it."""

    config: ExportConfig
    format: Format
    place: Place
    exported: due.Exported
    known: bool = False
    """Whether ``exported`` is what is there: its place was looked at."""
    stuck: dict[StepId, TieredCkptError] = field(default_factory=dict)
    """Steps that cannot be exported, whatever time passes, or until what is in their place was moved away."""
    look_at: float = math.inf
    """When steps are tried again whose place was taken (monotonic seconds)."""
    told: set[StepId] = field(default_factory=set)
    """Steps of ``stuck`` whose error `Exporter.drained` has raised: it does not raise that again."""
    health: Health = field(default_factory=Health)
    deleting: Health = field(default_factory=Health)
    """Of the deletion of exports that are not kept, which holds up no new one."""
    busy: StepId | None = None
    hanging: asyncio.Future[None] | None = None
    """A thread that was left behind in the device."""

    @property
    def to(self) -> str:
        return self.config.to

    def forget_conflicts(self) -> None:
        """Forget which steps found their place taken, once it is time to try them again."""
        if self.look_at <= time.monotonic():
            self.look_at = math.inf
            for step in [step for step, error in self.stuck.items() if isinstance(error, Conflict)]:
                del self.stuck[step]

    def info(self) -> ExportInfo:
        """The export as it is now."""
        problem: Exception | None = self.health.error
        if problem is None:
            problem = self.stuck[max(self.stuck)] if self.stuck else self.deleting.error
        return ExportInfo(
            name=self.config.name,
            format=self.config.format,
            to=self.to,
            steps=tuple(sorted(self.exported)) if self.known else (),
            exporting=None if self.busy is None else self.busy.step,
            problem="" if problem is None else str(problem),
        )
