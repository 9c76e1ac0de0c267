"""Makes the exports that are due, one at a time, behind the training; on the process that promotes to shared tiers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from tieredckpt.blobs.posix.stream import Blocks
from tieredckpt.concurrency import being_cancelled, in_thread, note, on_own_thread, outlast
from tieredckpt.config.exports import ExportConfig
from tieredckpt.config.formats import format_named
from tieredckpt.engine import limits
from tieredckpt.engine.exporting import due
from tieredckpt.engine.exporting.export import Export, ExportInfo
from tieredckpt.engine.exporting.folder import Folder, mapped
from tieredckpt.engine.exporting.held_step import HeldStep, Reading, StepLeft
from tieredckpt.engine.exporting.objects import Objects
from tieredckpt.engine.exporting.places import Place, Record, Writing, folder_name
from tieredckpt.engine.inventory import Inventory
from tieredckpt.engine.promoting.waiting import again
from tieredckpt.engine.restoring.restore import Repair
from tieredckpt.engine.state.state import State
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import ExportFailed, StepExported
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.tree.select import select

__all__ = ["Exporter"]

_log = logging.getLogger("tieredckpt")

_KEYS_TOLD = 100
_SHORTEST_WAIT = 0.05
_LONG = 10.0
"""Seconds after which a deletion that fails is the last one for a while: the others may take as long."""


class Exporter:
    """The background work of all exports of a store. Lives on the engine's loop.

    Args:
        state: of the engine.
        exports: what the configuration says.
        repair: begins to repair what a step turns out to have lost.
    """

    def __init__(self, state: State, exports: Sequence[ExportConfig], repair: Repair) -> None:
        self._state, self._repair = state, repair
        self._inventory = Inventory(state)
        self._blocks: Blocks | None = None
        """Memory that one export after the other uses."""
        self._exports = [
            Export(each, format_named(each.format), _place_of(state, each), due.Exported(state, each))
            for each in exports
        ]
        self._rests = 0
        """How often nothing was found due, or everything that is due has failed."""
        self._waiters = 0
        """How many wait for that."""

    async def run(self) -> None:
        """Work until cancelled. What fails is reported and retried, never raised."""
        try:
            while not being_cancelled():
                for export in self._exports:
                    export.forget_conflicts()
                    await self._look(export)
                if (found := self._next()) is not None:
                    export, step = found
                    await (self._delete_unkept(export) if step is None else self._export(export, step))
                    continue
                self._rests += 1
                if self._waiters:
                    self._state.changed.notify()
                healths = [it.health if it.health.error else it.deleting for it in self._exports if it.hanging is None]
                soonest = min((each.retry_at for each in healths if each.error), default=math.inf)
                soonest = min([soonest, *(each.look_at for each in self._exports)])
                wait = max(_SHORTEST_WAIT, soonest - time.monotonic())
                await self._state.changed.wait(min(wait, limits.in_force.ask_policies_again))
        finally:
            for export in self._exports:
                with suppress(TieredCkptError):
                    await export.place.close()

    def _next(self) -> tuple[Export, StepId | None] | None:
        """The export that waits, and its newest step; None for a deletion that is to be made again."""
        for export in self._exports:
            if not export.known or not self._may_try(export):
                continue
            try:
                step = self._due(export)
            except Exception as error:
                _log.exception("export %r: unexpected failure", export.config.name)
                export.known = False  # it is looked at anew, when this is tried again
                self._failed(
                    export, None, TierUnavailable(f"what is due was not found: {type(error).__name__}: {error}")
                )
                continue
            if step is None:
                self._works_again(export)
            if step is not None or (export.deleting.error and export.deleting.retry_at <= time.monotonic()):
                self._exports.remove(export)
                self._exports.append(export)  # it is the others' turn next
                return export, step
        return None

    def _works_again(self, export: Export) -> None:
        if export.health.recover():
            _log.info("export %r works again", export.config.name)

    def _due(self, export: Export) -> StepId | None:
        return due.next_due(self._state, export.config, export.exported, export.stuck, busy=export.busy is not None)

    def _may_try(self, export: Export) -> bool:
        if export.hanging is not None:
            if not export.hanging.done():  # each attempt would leave one more thread, and its memory
                return False
            export.hanging = None
        return export.health.error is None or export.health.retry_at <= time.monotonic()

    async def _look(self, export: Export) -> None:
        """Find out what is exported, before anything else, and delete what was left unfinished."""
        if export.known or not self._may_try(export) or self._state.identity.marker is None:
            return
        try:
            mine = self._state.identity.marker.store
            found, there = await export.place.exported(), export.exported
            there.clear()
            there.update({step: each for step, each in found.items() if each.store == mine})
            not_kept, steps = due.not_kept(self._state, export.config, there), self._state.records()
            for record in tuple(there.values()):
                # Readers may find one that lacks its record alone: it stays if it can neither be made again nor go.
                if not record.complete and (record in not_kept or StepId(record.serial, record.step) in steps):
                    await export.place.delete(record)
                if not record.complete:
                    del there[record.step]
            export.known = True
        except TieredCkptError as error:
            self._failed(export, None, error)
        except Exception as error:
            _log.exception("export %r: unexpected failure", export.config.name)
            self._failed(export, None, TierUnavailable(str(error)))

    async def _export(self, export: Export, step: StepId) -> None:
        export.busy = step
        try:
            await self._make(export, step)
        except StepLeft as error:
            _log.info("export %r: %s", export.config.name, error)
            await asyncio.sleep(limits.in_force.look_for_room)  # or it would begin anew before the save has its memory
        except Conflict as error:
            export.stuck[step] = error
            delay = limits.in_force.last_retry
            export.look_at = min(export.look_at, time.monotonic() + delay)
            self._tell(export, f"{step} was not exported", step, error, delay)
        except (Invalid, Corrupt) as error:
            export.stuck[step] = error
            self._failed(export, step, error, for_good=True)
        except (TieredCkptError, OSError) as error:
            if isinstance(error, NotFound) and step not in self._state.records():
                _log.warning("export %r: %s left before it was exported: %s", export.config.name, step, error)
            else:
                export.known = False  # what is there may have changed
                self._failed(export, step, error)
        except Exception as error:
            _log.exception("export %r: unexpected failure", export.config.name)
            export.stuck[step] = Invalid(f"{type(error).__name__}: {error}")
            self._failed(export, step, error, for_good=True)
        else:
            self._works_again(export)
            await self._delete_unkept(export)
        finally:
            export.busy = None
            self._state.changed.notify()

    def _failed(self, export: Export, step: StepId | None, error: Exception, *, for_good: bool = False) -> None:
        what = "its place cannot be looked at" if step is None else f"{step} was not exported"
        self._tell(export, what, step, error, None if for_good else export.health.fail(error))

    def _tell(self, export: Export, what: str, step: StepId | None, error: Exception, retry_in: float | None) -> None:
        then = "" if retry_in is None else f", next try in {retry_in:.1f} s"
        _log.warning("export %r: %s%s: %s", export.config.name, what, then, error)
        number, serial = (None, None) if step is None else (step.step, step.serial)
        self._state.events.emit(ExportFailed(number, serial, export.config.name, error, retry_in))

    # -- one export ---------------------------------------------------------------------------------------

    async def _make(self, export: Export, step: StepId) -> None:
        begin = time.monotonic()
        marker = self._state.identity.marker
        assert marker is not None
        reading = Reading(self._state, step, self._repair)
        blocks = self._blocks or Blocks()
        self._blocks = None  # which a thread that is left behind keeps
        with self._state.ram_gate.yielding(reading.give_way):
            try:
                index = await reading.index()
                held = await self._content(export, index, reading, blocks)
                record = Record(
                    export=export.config.name,
                    format=export.config.format,
                    store=marker.store,
                    step=step.step,
                    serial=step.serial,
                    saved_at=index.record.saved_at,
                    nbytes=held.info.nbytes,
                    metrics=index.record.metrics,
                )
                async with export.place.writing(record, export.exported.get(step.step), blocks) as writing:
                    await self._write(export, held, writing)
                    self._blocks = blocks
                    record = msgspec.structs.replace(record, files=tuple(writing.written), complete=True)
                    nbytes = await writing.commit(record)
            finally:
                await reading.close()
        export.exported[step.step] = record
        left_out = [] if export.format.values else list(held.scalars)
        lag = max(0.0, self._state.observation.now() - record.saved_at)
        to = f"{export.to}/{folder_name(step.step)}"
        seconds = time.monotonic() - begin
        _log.info("%s was exported to %s in %.1f s", step, to, seconds)
        told = tuple(left_out[:_KEYS_TOLD])
        self._state.events.emit(
            StepExported(step.step, step.serial, export.config.name, to, nbytes, seconds, lag, told, len(left_out))
        )

    async def _content(self, export: Export, index: StepIndex, reading: Reading, blocks: Blocks) -> HeldStep:
        """The leaves of a step that are exported. Raises `Invalid`, naming a key or part that the step lacks."""
        config, step = export.config, reading.step
        await self._state.ram_gate.quiet()
        chosen: list[tuple[str | None, Sequence[str] | None]]
        if config.part is not None:
            chosen = [(config.part, [config.part])]
        elif config.keys:
            chosen = [(None, config.keys)]
        else:
            chosen = [*((part, [part]) for part in export.format.parts), (None, None)]
        for at, (part, keys) in enumerate(chosen):
            try:
                structure = index.record.structure
                if keys is not None:
                    structure = await in_thread(select, structure, keys)
                details = await in_thread(self._inventory.describe_index, step, index, structure)
                return HeldStep(reading, details, structure, index, part, asyncio.get_running_loop(), blocks)
            except NotFound as error:
                if at == len(chosen) - 1:
                    raise Invalid(f"{step} has nothing to export: {error}") from error
        raise AssertionError

    async def _write(self, export: Export, held: HeldStep, writing: Writing) -> None:
        """Write the step by its format, on a thread of its own."""
        to, options = export.to, export.config.options

        def work() -> None:
            try:
                if export.format.stream is not None:
                    export.format.stream(held, writing.files, **options)
                else:
                    assert export.format.write is not None
                    assert writing.path is not None
                    export.format.write(held, writing.path, **options)
            except Exception as error:
                raise mapped(error, to) from error

        await self._state.ram_gate.quiet()
        running = on_own_thread(f"export {export.config.name}", work)
        running.add_done_callback(note)  # of one that is given up, nobody asks how it ended
        try:
            while not running.done():
                left = held.hangs_in()
                if left <= 0:
                    export.hanging = running
                    running.add_done_callback(lambda _: self._state.changed.notify())
                    raise TierUnavailable(f"{to}: nothing was written for long; is it mounted and answering?")
                await asyncio.wait([running], timeout=left)
            running.result()
        except asyncio.CancelledError:
            held.give_up()
            writing.give_up()
            # One that hangs in its device is left behind.
            await outlast(asyncio.ensure_future(asyncio.wait([running], timeout=limits.in_force.export_gives_up)))
            raise
        except BaseException:
            held.give_up()
            writing.give_up()
            raise

    async def _delete_unkept(self, export: Export) -> None:
        """Delete the exports that are not kept."""
        failure: Exception | None = None
        for record in due.not_kept(self._state, export.config, export.exported):
            begin = time.monotonic()
            try:
                await export.place.delete(record)
            except Exception as error:  # the others may go all the same
                failure = failure or error
                if time.monotonic() - begin > _LONG:
                    export.exported[record.step] = record  # the others are asked for first the next time
                    break
                continue
            del export.exported[record.step]
            _log.info("export %r: step %d was deleted, as `keep` says", export.config.name, record.step)
        if failure is None:
            export.deleting.recover()
        else:
            what = "an export that is not kept cannot be deleted"
            self._tell(export, what, None, failure, export.deleting.fail(failure))

    # -- looking ------------------------------------------------------------------------------------------

    async def drained(self) -> None:
        """Return when nothing more is due. Raises the error of an export that lacks a due step; if it can never make
        the step, only once."""
        before = self._rests
        self._waiters += 1
        try:
            self._state.changed.notify()
            await self._state.changed.until(lambda: self._rests != before)
        finally:
            self._waiters -= 1
        for export in self._exports:
            if export.health.error is not None and (not export.known or self._due(export) is not None):
                raise again(export.health.error, f"export {export.config.name!r}: ")
            for step, error in export.stuck.items():
                if step in self._state.records() and step not in export.told:
                    export.told.add(step)
                    raise again(error, f"export {export.config.name!r}: ")

    def infos(self) -> tuple[ExportInfo, ...]:
        """Every export as it is now, by name."""
        return tuple(export.info() for export in sorted(self._exports, key=lambda each: each.config.name))


def _place_of(state: State, export: ExportConfig) -> Place:
    if export.folder is None:
        return Objects(export.place())

    def owner() -> str:
        marker = state.identity.marker
        assert marker is not None  # which `Exporter._look` waits for
        return f"{marker.store[:8]}-{export.name}"

    return Folder(export.folder, owner)
