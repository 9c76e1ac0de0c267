"""The calls of Orbax's `CheckpointManager`."""

from __future__ import annotations

import datetime as dt
import logging
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
from etils import epath
from orbax.checkpoint import CheckpointManagerOptions, multihost
from orbax.checkpoint import args as orbax_args
from orbax.checkpoint import metadata as orbax_metadata
from orbax.checkpoint.checkpoint_managers import DecisionContext

from tieredckpt import ArraySpec, CheckpointStore, Invalid, NoSpace, NotFound, StepInfo, SyncStore, TierUnavailable
from tieredckpt.integrations._durable import durable_tier
from tieredckpt.integrations.orbax.items import (
    by_name,
    handlers_by_name,
    kinds_of,
    older_restore,
    older_save,
    restored,
    tree_of,
)
from tieredckpt.integrations.orbax.options import BEST, MORE, Known, best_fn, config_for, due_policy
from tieredckpt.integrations.orbax.pending import Pending
from tieredckpt.interchange.orbax_folders import CUSTOM, DEFAULT, METRICS

__all__ = ["CheckpointManager"]

_log = logging.getLogger("tieredckpt")

_NO_NUMBER = (str, Mapping, list, tuple, type(None))
"""Types of metrics besides numbers that Orbax stores as JSON."""


class CheckpointManager:
    """Saves and restores steps of one or several items, as ``orbax.checkpoint.CheckpointManager`` does.

    Args:
        directory: a folder or URL, which gets RAM before it and retains steps by ``options``; or any other argument of
            `CheckpointStore.open`, such as ``"ckpt.toml"``, or an open store, with their own retention.
        checkpointers: None, or Orbax's by name, of which only the handlers are used.
        options: ``docs/guides/orbax.md`` has the table of what each does here.
        metadata: None, since a store has no root folder to describe.
        item_names: accepted; the arguments of each call name the items.
        item_handlers: for items that are neither trees nor JSON, by name.
        logger: accepted, and not used: the store logs as ``tieredckpt``, and emits events.
        handler_registry: for such items too.
    """

    def __init__(
        self,
        directory: Any,
        checkpointers: Any = None,
        options: CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        if metadata:
            raise Invalid("metadata of a root folder has no place in a store; save it as an item, with JsonSave")
        self._options = CheckpointManagerOptions() if options is None else options
        self._handlers = handlers_by_name(checkpointers, item_handlers)
        self._registry = handler_registry
        self._due, (self._best, self._lower) = due_policy(self._options), best_fn(self._options)
        self._opened = not isinstance(directory, SyncStore)
        source = config_for(directory, self._options)
        read_only = self._options.read_only
        self.store: SyncStore = CheckpointStore.open_sync(source, read_only=read_only) if self._opened else source
        """The store that keeps the steps: ``manager.store.where(step)`` lists the tiers that have one."""
        durable = durable_tier(self.store)
        self._tier = None if durable is None else durable.name
        self._directory = epath.Path("" if durable is None else durable.location)
        self._pending: list[Pending] = []
        self._resumed: int | None = None
        """The step that was restored last, until one is saved."""
        self._steps: list[Known] = []
        self._saved: Known | None = None
        """The step that this manager saved last. All processes know it at once, but list it at different times."""
        self.reload()

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def directory(self) -> epath.Path:
        """Place of the nearest tier that outlives the process. It has no folder for each step."""
        return self._directory

    def all_steps(self, read: bool = False) -> list[int]:
        """The numbers of the steps, ascending; ``read`` is not needed."""
        return sorted(self.store.all_steps())

    def latest_step(self) -> int | None:
        """The number of the newest step; None when there is none."""
        return self.store.latest_step()

    def best_step(self) -> int | None:
        """The step with the best metrics by ``best_fn``, of those that have any, and not NaN; without it the newest."""
        if self._best is None:
            return self.latest_step()
        self.reload()
        known = [each for each in self._steps if each.metrics or each.best is not None]
        values = [(self._value(each.metrics) if each.best is None else each.best, each.step) for each in known]
        found = [(-value if self._lower else value, step) for value, step in values if not math.isnan(value)]
        return max(found)[1] if found else None

    def reload(self) -> None:
        """Read the list of steps again, since another process may have saved some."""
        # A step without a tier has only lossy copies, which no method of Orbax uses.
        found = {info.step: _known(info) for info in self.store.steps() if info.tiers and not info.off_branch}
        self._steps = [found[step] for step in sorted(found)]
        if self._saved is not None and self._saved.step in found:
            self._saved = None

    def metrics(self, step: int) -> dict[str, Any] | None:
        """The metrics that were given to `save`, without ``best_fn`` only numbers; None for a step without metrics."""
        known = _known(self._info(step))
        others = {} if known.best is None else self._specs(step)[METRICS]
        return {**(known.metrics or {}), **others} or None

    def item_metadata(self, step: int) -> Any:
        """Shape and dtype of each array in its place; by name, where the step has several items."""
        stored = self._specs(step)
        kinds = kinds_of(stored)
        if kinds is None:
            return _described(stored, ())
        found = {name: _described(stored[name], ()) if kind == "tree" else None for name, kind in kinds.items()}
        return orbax_args.Composite(**found)

    def metadata(self, step: int | None = None) -> Any:
        """Metadata of a step without its values; an empty root metadata without a step."""
        if step is None:
            return orbax_metadata.RootMetadata()
        stored, info = self._specs(step), self._info(step)
        nanoseconds = int(info.saved_at * 1e9)
        return orbax_metadata.StepMetadata(
            item_metadata=self.item_metadata(step),
            metrics=self.metrics(step) or {},
            init_timestamp_nsecs=nanoseconds,
            commit_timestamp_nsecs=nanoseconds,
            custom_metadata=stored.get(CUSTOM, {}) if kinds_of(stored) is not None else {},
        )

    def _info(self, step: int) -> StepInfo:
        return self.store.describe(step).info

    def _specs(self, step: int, *, resume: bool = False) -> Any:
        found = self.store.restore(step, as_="specs", resume=resume)
        if found is None:
            raise NotFound(f"the store has no step {step}")
        return found.tree

    # -- saving -------------------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether the options want this step saved; never for a step number up to the newest.

        After an older step was restored, later steps are ignored: they are another branch.
        """
        if self._options.read_only:
            return False
        before = [known for known in self._steps if self._resumed is None or known.step <= self._resumed]
        if self._saved is not None and (not before or before[-1].step < self._saved.step):
            before.append(self._saved)
        if before and before[-1].step >= step:
            return False
        context = DecisionContext(
            is_saving_in_progress=self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        now = Known(step, dt.datetime.now(tz=dt.UTC), None)
        return bool(self._due.should_save(now, before, context=context))

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Copy a step into RAM, if it is due; on return the state may be changed or donated.

        It is promoted to slower tiers in the background. A tier that fails does not stop the training: the failure is a
        warning here, and `check_for_errors` and `wait_until_finished` raise it.

        Args:
            step: its number.
            items, save_kwargs: of Orbax's older interface: a tree, or trees by name.
            metrics: numbers by name.
            force: save it although it is not due.
            args: ``StandardSave``, ``PyTreeSave``, ``JsonSave`` and others, or a ``Composite`` of them by name.
            custom_metadata: JSON that `metadata` gives back.

        Returns:
            Whether it was saved.

        Raises:
            Invalid: something cannot be stored; it is named, and nothing was saved.
            Conflict: the step was saved before.
        """
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        args = older_save(items, save_kwargs, self._handlers) if args is None else args
        handlers = {name: self._handler(name, each) for name, each in by_name(args).items()}
        numbers, others = self._measured(step, metrics)
        notes = {CUSTOM: custom_metadata, METRICS: others}
        tree = tree_of(args, handlers, {key: note for key, note in notes.items() if note})
        try:
            saved = self.store.save(step, tree, metrics=numbers)
        except (NoSpace, TierUnavailable) as error:
            _log.warning("step %s was not saved, training goes on: %s", step, error)
            return False
        if saved.skipped:
            _log.warning("step %s was not saved: %s", step, saved.skipped)
            return False
        if self._tier is not None:
            self._pending.append(Pending(self.store, saved, self._tier))
        self._resumed, self._saved = None, Known(step, dt.datetime.now(tz=dt.UTC), None)
        self.reload()
        if not self._options.enable_async_checkpointing:
            self.wait_until_finished()
        return True

    def _measured(self, step: int, metrics: Any) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
        """The metrics for the store, which are numbers, and the other JSON metrics."""
        if metrics is None and self._best is not None:
            _log.warning("step %s has no metrics for best_fn: it is kept while it is the newest", step)
        if not isinstance(metrics, Mapping):
            return metrics, {}
        others = {name: value for name, value in metrics.items() if isinstance(value, _NO_NUMBER)}
        numbers = {name: value for name, value in metrics.items() if name not in others}
        if self._best is None:  # Orbax stores no metrics without it
            return numbers, {}
        more = {MORE: len(others)} if others else {}
        return {**numbers, BEST: self._value(metrics), **more}, others

    def _value(self, metrics: Any) -> float:
        assert self._best is not None
        return float(self._best(metrics))

    def is_saving_in_progress(self) -> bool:
        """Whether a saved step is not yet on a tier that outlives the process."""
        self._pending = [saved for saved in self._pending if not saved.is_over()]
        return bool(self._pending)

    def wait_until_finished(self) -> None:
        """Wait until all saved steps are on the nearest tier that outlives the process; raises what prevents it."""
        pending, self._pending = self._pending, []
        for at, saved in enumerate(pending):
            try:
                saved.wait()
            except BaseException:
                self._pending = pending[at:]
                raise

    def check_for_errors(self) -> None:
        """Raise the error that keeps a saved step from the nearest tier that outlives the process; does not wait."""
        if not self.is_saving_in_progress():
            return
        problem = next((tier for tier in self.store.tier_infos() if tier.name == self._tier and not tier.healthy), None)
        if problem is not None:
            raise TierUnavailable(f"step {self._pending[0].step} is not on tier {problem.name!r}: {problem.problem}")

    def reached_preemption(self, step: int) -> bool:
        """Whether the machine is about to be preempted, by JAX; if so, the newest step is promoted at once."""
        reached = bool(multihost.reached_preemption(step))
        if reached:
            self.store.signal("preempt")
        return reached

    def delete(self, step: int) -> None:
        """Delete every copy of a step. Raises `NotFound`, and `Conflict` for one that is needed, as the newest is.

        Every process may call it; rank 0 does it for all.
        """
        try:
            self.store.delete(step)
        except Invalid:
            if jax.process_index() == 0:
                raise
        self.reload()

    # -- restoring ----------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: Any = None,
        args: Any = None,
    ) -> Any:
        """Restore a step; every chunk is verified, and the next save continues from it.

        Args:
            step: which; None for the newest.
            items, restore_kwargs: of Orbax's older interface: a target, or targets by name.
            directory: None, or that of the manager; import what lies elsewhere first.
            args: ``StandardRestore``, ``PyTreeRestore``, ``JsonRestore`` and others, or a ``Composite`` by name.
                Without them all items are restored as they were saved.

        Returns:
            The item; a ``Composite`` where the step has several, or ``args`` is one.

        Raises:
            NotFound: there is no such step or item.
            Invalid: the step does not fit the target; the leaves are named.
            Corrupt, TierUnavailable: as `SyncStore.restore`.
        """
        if directory is not None and epath.Path(directory) != self.directory:
            raise Invalid(f"{directory} is not the manager's directory; `tieredckpt import orbax:{directory}` first")
        number = self.latest_step() if step is None else step
        if number is None:
            raise NotFound("the store has no step yet")
        args = older_restore(items, restore_kwargs, self._handlers) if args is None else args
        stored = self._specs(number)
        kinds = kinds_of(stored)
        if args is None and kinds is not None:
            wanted = {name: None for name, kind in kinds.items() if kind != "files" or self._handler(name, None)}
        else:
            wanted = by_name(args)
        found = {
            name: restored(self.store, number, stored, name, each, self._handler(name, each))
            for name, each in wanted.items()
        }
        if not self._options.read_only:  # only now: after a failed restore the training goes on as before
            self._specs(number, resume=True)
        self._resumed, self._saved = number, None
        several = isinstance(args, orbax_args.Composite) or (args is None and kinds not in (None, {DEFAULT: "tree"}))
        return orbax_args.Composite(**found) if several else found[DEFAULT]

    def _handler(self, name: str, args: Any) -> Any:
        registry = self._registry
        if name not in self._handlers and registry is not None and args is not None and registry.has(name, args):
            return registry.get(name, args)
        return self._handlers.get(name)

    # -- life ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the saves, and close the store if it was opened here."""
        try:
            self.wait_until_finished()
        finally:
            if self._opened:
                self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._opened:  # the error of the block must not be hidden by that of a tier
            self.store.close()


def _known(info: StepInfo) -> Known:
    metrics = {name: value for name, value in info.metrics.items() if name not in (BEST, MORE)}
    best = info.metrics[BEST] if MORE in info.metrics else None
    return Known(info.step, dt.datetime.fromtimestamp(info.saved_at, tz=dt.UTC), metrics or None, best)


def _described(node: Any, path: tuple[str, ...]) -> Any:
    """The tree with Orbax's metadata in place of each array."""
    if isinstance(node, dict):
        return {key: _described(value, (*path, str(key))) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_described(value, (*path, str(at))) for at, value in enumerate(node)]
    name = ".".join(path)
    if isinstance(node, ArraySpec):
        return orbax_metadata.ArrayMetadata(
            name=name, directory=None, shape=node.shape, sharding=None, dtype=node.dtype
        )
    if isinstance(node, bool | int | float):
        return orbax_metadata.ScalarMetadata(name=name, directory=None, dtype=type(node))
    return node
