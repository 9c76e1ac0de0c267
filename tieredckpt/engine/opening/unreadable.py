"""Tells unreadable files from a tier that does not answer: one bad sector must not take a whole tier out of use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tieredckpt.blobs.base import Unanswered
from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.steps import Unreadable
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["Reads"]

_FILES = 16
"""Most unreadable files of one scan: a tier that goes on to fail, or to hang, is not asked file by file."""


@dataclass(slots=True)
class Reads:
    """The reads of one scan.

    Only the file failed if the tier answers for its marker right afterwards, and another step, if there is one, can be
    read. The tier failed if all of several steps fail, or many files.
    """

    tier: Tier
    answered: int = 0
    """Steps that were read, whatever was found."""
    failed: list[TierUnavailable] = field(default_factory=list)
    unreadable: dict[StepId, Unreadable] = field(default_factory=dict)
    """Steps with an unreadable file, unless `check` finds that the tier failed."""

    async def of(
        self, step: StepId, read: Callable[[], Awaitable[Held | TieredCkptError | None]]
    ) -> Held | TieredCkptError | None:
        """The result of reading a step, or that it is `Unreadable`. Raises `TierUnavailable` as `note`."""
        try:
            try:
                found = await read()
            except Unanswered:  # a refusal, which the store itself does not ask for once more
                found = await read()
        except TierUnavailable as error:
            await self.note(error)
            self.unreadable[step] = Unreadable(f"tier {self.tier.name!r} works, but for a file of {step}: {error}")
            return self.unreadable[step]
        self.answered += 1
        return found

    async def note(self, error: TierUnavailable) -> None:
        """Note that a file could not be read. Raises the error if it is the tier that does not answer."""
        self.failed.append(error)
        if self.tier.in_memory or len(self.failed) > _FILES:
            raise error
        try:
            with suppress(Corrupt, NotFound):  # which are answers
                await marker_file.read(self.tier.store)
        except TierUnavailable:
            raise error from error.__cause__  # which `from None` would take away

    def check(self) -> None:
        """Raise the first error if several steps could not be read, and none could."""
        if len(self.failed) > 1 and not self.answered:
            raise self.failed[0]
