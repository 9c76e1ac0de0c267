"""The branch that a training continues: what the next save extends, and the origin at which it forks.

A restore notes an origin and changes nothing else. A save decides once its turn comes, by the restores that were
called before it and by what became of the saves before it; the branch changes when that save is committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tieredckpt.engine.state.step_table import Line, on
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["RESTORED_LOSSY", "Branch", "Continued", "Origin"]

RESTORED_LOSSY = "restored_lossy"
"""In the provenance of a step: the lossy copy that its state goes back to."""


@dataclass(eq=False, slots=True)
class Origin:
    """A step that this process has restored to train on."""

    step: StepId
    line: Line
    """The branch that ends with it."""
    named: bool
    """Whether it was asked for by number: otherwise no save forks there."""
    resume: bool
    """Whether the next save forks there whatever its number is."""
    lossy: str = ""
    """The lossy copy that this step was restored from, or that it goes back to; empty where there is none."""
    cleared: bool = False
    """Whether a save that was called after the restore is committed."""

    def forks(self, step: int, newest: StepId | None, *, overwrite: bool) -> bool:
        """Whether a save of ``step`` forks here, where ``newest`` is the newest step of the branch."""
        if not self.named or self.step == newest:
            return False
        return self.resume or newest is None or step < newest.step or (step == newest.step and not overwrite)


@dataclass(frozen=True, slots=True)
class Continued:
    """The branch that a save continues."""

    line: Line
    """Serials of the branch before it."""
    restored_from: int | None
    newest: StepId | None
    """The newest step of the branch that was trained when it was called."""
    origin: Origin | None
    """The last restore before the save was called."""
    ignores_origin: bool
    """Whether it extends the branch although another step was restored last."""
    lossy: str = ""
    """The lossy copy that its state goes back to; empty where there is none."""

    def __contains__(self, serial: int) -> bool:
        return on(self.line, serial)

    def line_with(self, serial: int) -> Line:
        """The branch with this save, of that serial, at its end."""
        if self.line and self.line[-1][1] == serial - 1:
            return (*self.line[:-1], (self.line[-1][0], serial))
        return (*self.line, (serial, serial))


@dataclass(slots=True)
class Branch:
    """The branch of one process. Changed on the engine's loop alone; `due_from` answers any thread."""

    line: Line = ()
    """Serials of its saves, as inclusive ranges."""
    newest: StepId | None = None
    restored_from: int | None = None
    """Serial of the step at which the branch was continued last after a restore."""
    adopted: int = 0
    """Serial of the step from which this process continued the branch before any restore."""
    origin: Origin | None = None
    lossy: str = ""
    """The lossy copy that the branch goes back to; empty where there is none."""
    last_serial: int = 0
    """The highest that any save of the store has taken, as far as this process knows."""
    _pending: dict[StepId, Continued] = field(default_factory=dict)
    """Saves that are not committed yet, in the order of their turns."""
    _indeterminate: dict[StepId, Continued] = field(default_factory=dict)
    """Saves of several ranks that nobody waits for any more, and that may be committed all the same."""
    _counted: Origin | None = None
    """The last restore before the save from which schedules count."""

    def __contains__(self, serial: int) -> bool:
        return on(self.line, serial)

    def adopt(self, line: Line, newest: StepId | None, lossy: str = "") -> None:
        """Continue what was found, as after a restart; ``lossy`` as the attribute."""
        self.line, self.newest, self.restored_from, self.lossy = line, newest, None, lossy
        self.adopted = 0 if newest is None else newest.serial

    def note(self, step: StepId, record: StepRecord, *, named: bool, resume: bool, lossy: str = "") -> None:
        """Note what was restored to train on; the next save decides what becomes of it."""
        line = tuple((first, min(last, step.serial)) for first, last in record.line if first <= step.serial)
        self.origin = Origin(step, line, named, resume, lossy or record.provenance.get(RESTORED_LOSSY, ""))

    # -- saves --------------------------------------------------------------------------------------------

    def decide(self, step: int, origin: Origin | None, *, overwrite: bool) -> Continued:
        """Decide at its turn which branch a save of ``step`` continues; ``origin`` is the last restore before it."""
        line, newest, restored_from, lossy = self.line, self.newest, self.restored_from, self.lossy
        if (pending := self._newest_pending()) is not None:
            newest, before = pending
            line, restored_from, lossy = before.line_with(newest.serial), before.restored_from, before.lossy
            if before.origin is origin:
                return Continued(line, restored_from, newest, origin, ignores_origin=False, lossy=lossy)
        if origin is None or origin.cleared:
            return Continued(line, restored_from, newest, origin, ignores_origin=False, lossy=lossy)
        if origin.forks(step, newest, overwrite=overwrite):
            return Continued(origin.line, origin.step.serial, newest, origin, ignores_origin=False, lossy=origin.lossy)
        if origin.named and origin.step != newest:
            return Continued(line, restored_from, newest, origin, ignores_origin=True, lossy=lossy)
        return Continued(line, origin.step.serial, newest, origin, ignores_origin=False, lossy=origin.lossy)

    def _newest_pending(self) -> tuple[StepId, Continued] | None:
        """The last save that is not committed yet; None if a later save is: ranks may still wait for votes on it.

        From any thread.
        """
        last, line = next(reversed(tuple(self._pending.items())), None), self.line
        return last if last is not None and (not line or last[0].serial > line[-1][1]) else None

    def begin(self, step: StepId, continued: Continued) -> None:
        """Take a save for the newest of its branch until it is `committed` or `failed`."""
        self._pending[step] = continued

    def failed(self, step: StepId) -> None:
        """Forget a save that failed: branch and origin stay as they were."""
        self._pending.pop(step, None)
        self._indeterminate.pop(step, None)

    def indeterminate(self, step: StepId) -> None:
        """Count a save with an unknown outcome as `failed`, unless it is `committed` after all."""
        if (continued := self._pending.pop(step, None)) is not None:
            self._indeterminate[step] = continued

    def committed(self, record: StepRecord) -> None:
        """Continue the branch with a committed save, as its record says, unless a later save was committed first."""
        pending = self._pending.pop(record.id, None) or self._indeterminate.pop(record.id, None)
        if pending is not None and pending.origin is not None:
            pending.origin.cleared = True
        if not self.line or record.serial > self.line[-1][1]:
            self.line, self.newest, self.restored_from = record.line, record.id, record.restored_from
            self.lossy = record.provenance.get(RESTORED_LOSSY, "")

    def continued_by(self, step: StepId) -> Continued:
        """The branch that a save continues that is not committed yet."""
        return self._pending[step]

    # -- schedules ----------------------------------------------------------------------------------------

    def count_from(self, origin: Origin | None) -> None:
        """Make schedules count from a save before which ``origin`` was restored last."""
        self._counted = origin

    def due_from(self, step: int) -> int | None:
        """The restored step from which a schedule counts to a save of ``step``; None to count from the last save."""
        origin = self.origin
        if origin is None or origin.cleared or origin is self._counted:
            return None
        pending = self._newest_pending()
        newest = self.newest if pending is None else pending[0]
        if not origin.named or origin.step == newest or origin.forks(step, newest, overwrite=False):
            return origin.step.step
        return None
