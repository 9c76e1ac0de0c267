"""Steps named by small files, for Lightning, which finds, counts and removes its checkpoints by paths.

A file at a path has a *reference* to a save of the store. The keys at the top of a framework's checkpoint are its
*parts*; a reference may be to some of them only.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tieredckpt import Invalid, NoSpace, NotFound, StepId, SyncStore, TieredCkptError, TierUnavailable
from tieredckpt.integrations._durable import outlive_node

__all__ = ["PATHS", "NamedSteps", "Reference", "check_local", "reference_at"]

_log = logging.getLogger("tieredckpt")
_STEP = "tieredckpt"
"""Prefix of the files that name a step."""
_LARGEST = 1 << 20
"""Most bytes of such a file."""
_REMOVED = ".tieredckpt-removed"
"""Prefix of files beside removed paths, before the identity of the store: each names a save that is to be deleted as
soon as the store permits it, also by a later process."""
_LAST_BEFORE_THE_END = re.compile(r"hpc_ckpt_\d+\.ckpt")
"""Name of the checkpoint that Lightning saves when Slurm warns that the job ends, to resume from in the next one."""
PATHS = "named_at"
"""The key in the tree of a step that is not the framework's: the paths at which it is named."""


class Reference(NamedTuple):
    """Content of a file that names a step."""

    step: int
    serial: int
    only: tuple[str, ...] | None
    """The parts of the step that were saved under this path; None for all."""
    paths: tuple[str, ...]
    """The paths at which the save is named."""

    @property
    def save(self) -> StepId:
        return StepId(self.serial, self.step)


@dataclass
class _NamedSave:
    """A save of a step, and where it is named."""

    id: StepId
    parts: frozenset[str]
    paths: dict[str, frozenset[str]]
    """Paths of the files that name it, and the parts that were saved there."""


class NamedSteps:
    """A store whose steps are found by paths."""

    def __init__(self, store: SyncStore, *, writes_files: bool = True) -> None:
        """``writes_files``: whether this process names the steps; of several ranks, one does."""
        self.store = store
        self._writes_files = writes_files
        self._saved: dict[int, _NamedSave] = {}
        """The saves of this fit, by step."""
        self._folders: set[Path] = set()
        """Folders of the paths of this process, which may have files of removed paths."""
        self._identity: str | None = None

    def save(self, step: int, checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> bool:
        """Save a step and name it at ``path``; a failure of the store is only a warning, and the training goes on.

        Lightning saves one step under several paths. A save with fewer parts than the one before, such as weights only,
        becomes a name for these parts of it. A save with as many parts or more replaces the one before if the tensors
        of both are equal, since the other paths then name the same values.

        Returns:
            False if the checkpoint was not saved: it neither extends the save of this step (by this fit or an earlier
            one) nor is a part of it, or it has other tensors in a part.
        """
        before = self._of_an_earlier_fit(step) if self.is_of_an_earlier_fit(step) else self._of_this_fit(step)
        if before is not None and not self._fits(before, checkpoint, str(path)):
            if step not in self._saved:
                self.warn_of_an_earlier_fit(step, path)
            return False
        self._save(step, checkpoint, str(path), frozenset(checkpoint), before)
        return True

    def save_shards(self, step: int, checkpoint: Mapping[str, Any], path: str, parts: frozenset[str]) -> None:
        """`save` of one of several ranks; ``parts`` are those of all ranks. Ask `is_of_an_earlier_fit` before."""
        self._save(step, checkpoint, path, parts, self._of_this_fit(step))

    def _save(
        self, step: int, checkpoint: Mapping[str, Any], path: str, parts: frozenset[str], before: _NamedSave | None
    ) -> None:
        if before is not None and parts < before.parts:
            before.paths[path] = parts
            self._name(before, path)
            return
        paths = {**({} if before is None else before.paths), path: parts}
        listed = {PATHS: list(paths)} if self._writes_files else {}
        why: object
        try:
            metrics = _scores(checkpoint.get("callbacks"), paths)
            made = self.store.save(step, {**checkpoint, **listed}, metrics=metrics, overwrite=True)
            why = made.skipped
        except (NoSpace, TierUnavailable) as error:
            why = error
        if why:
            _log.warning("step %d was not saved, %s does not name it, training goes on: %s", step, path, why)
            return
        assert made.saved is not None
        self._saved[step] = _NamedSave(made.saved.step, parts, paths)
        self._name(self._saved[step], path)
        if self._writes_files and _LAST_BEFORE_THE_END.fullmatch(Path(path).name):
            outlive_node(self.store, made)

    def _name(self, save: _NamedSave, path: str) -> None:
        """Write the files that name a save, of which ``path`` is new, and delete the save that it named before."""
        if not self._writes_files:
            return
        lost = reference_at(path)
        if lost and lost.step != save.id.step:  # as when Lightning writes over a file
            _write(str(self._removed(path, lost)), lost)
        for each, parts in save.paths.items():
            only = tuple(parts) if parts < save.parts else None
            _write(each, Reference(save.id.step, save.id.serial, only, tuple(save.paths)))
        self._folders.add(Path(path).parent)
        self._delete_unnamed()

    def is_of_an_earlier_fit(self, step: int) -> bool:
        """Whether the store has a save of this number that this fit did not make."""
        return step not in self._saved and any(info.step == step and info.tiers for info in self.store.steps())

    def warn_of_an_earlier_fit(self, step: int, path: str | os.PathLike[str]) -> None:
        _log.warning(
            "%s is not in the store but written by the framework itself: the store has a step %d already, of an "
            "earlier training, or of this one before it was killed. Give each training a store of its own, or delete "
            "the steps that nobody needs",
            *(path, step),
        )

    def _of_this_fit(self, step: int) -> _NamedSave | None:
        """The save of a step by this fit, without paths whose files do not name it any more."""
        save = self._saved.get(step)
        if save is not None and self._writes_files:
            found = {path: reference_at(path) for path in save.paths}
            save.paths = {path: save.paths[path] for path, named in found.items() if named and named.save == save.id}
        return save

    def _of_an_earlier_fit(self, step: int) -> _NamedSave:
        try:
            found = self.store.restore(step, as_="specs", resume=False)
            save, references = self._references(step)
        except TieredCkptError:
            return _NamedSave(StepId(0, step), frozenset(), {})  # nothing is known of it
        parts = frozenset(() if found is None else found.tree) - {PATHS}
        paths = {path: parts if named.only is None else frozenset(named.only) for path, named in references.items()}
        return _NamedSave(save, parts, paths)

    def _references(self, step: int, paths: Collection[str] = ()) -> tuple[StepId, dict[str, Reference]]:
        """The save that the store gives for a step, and the references to it: at ``paths``, at those that the step
        lists, and at those that these list. Raises as ``describe``, and `TierUnavailable` where a file cannot be read.
        """
        found = self.store.describe(step, keys=[PATHS])
        listed = {*paths, *map(str, found.scalars.values())}
        listed.update(*(named.paths for each in listed if (named := _read(each))))
        references = {each: named for each in listed if (named := _read(each))}
        save = StepId(found.info.serial, step)
        return save, {each: named for each, named in references.items() if named.save == save}

    def _fits(self, before: _NamedSave, checkpoint: Mapping[str, Any], path: str) -> bool:
        """Whether a checkpoint is a part of the save before, or can replace it and leave the other paths their
        tensors.
        """
        step = before.id.step
        if step not in self._saved and not before.paths:
            return False  # files that the step does not list may name parts of it
        if before.parts - checkpoint.keys():
            return checkpoint.keys() < before.parts and self._same(step, checkpoint)
        others = before.paths.keys() - {path}
        return not others or self._same(step, {name: checkpoint[name] for name in before.parts})

    def _same(self, step: int, checkpoint: Mapping[str, Any]) -> bool:
        """Whether the tensors of a checkpoint are those of the step, which a callback may have replaced in it.

        The states of ModelCheckpoints are left out: their scores change between the saves of a step.
        """
        callbacks = checkpoint.get("callbacks")
        compared = dict(checkpoint)
        if isinstance(callbacks, Mapping):
            compared["callbacks"] = {key: state for key, state in callbacks.items() if not _chooses(state)}
        try:
            found = self.store.restore(step, keys=list(compared), copy=False, resume=False)
        except TieredCkptError:
            return False
        return found is not None and _equal(found.tree, compared)

    def resolve(self, path: str | os.PathLike[str], reference: Reference) -> Reference:
        """``reference``, or if the store has lost its save, one to the save that ``path`` named before.

        A store loses a save with its node, before a slower tier has it. With several ranks, one calls this.
        """
        held = {StepId(info.serial, info.step): info for info in self.store.steps() if info.tiers}
        if reference.save in held or not all(tier.healthy for tier in self.store.tier_infos()):
            return reference
        before = [save for save, info in held.items() if save.serial < reference.serial and not info.off_branch]
        for serial, step in sorted(before, reverse=True):
            with suppress(TieredCkptError):
                listed = self.store.describe(step, keys=[PATHS], serial=serial).scalars.values()
                if os.path.abspath(path) in map(os.path.abspath, map(str, listed)):
                    _log.warning(
                        "%s names step %d, which the store does not have: it takes step %d, which it named before",
                        *(path, reference.step, step),
                    )
                    return reference._replace(step=step, serial=serial)
        return reference

    def look_up(self, path: str | os.PathLike[str], reference: Reference) -> dict[str, Any]:
        """The parts of its step that ``path`` names, with specs in place of arrays; all ranks call it.

        Raises `NotFound` where the store has another save of that number, or none.
        """
        try:
            found = self.store.restore(reference.step, as_="specs", resume=False)
        except NotFound:
            found = None
        if found is None or found.serial != reference.serial:
            raise NotFound(
                f"{path} names {reference.save}, which the store does not have any more: its retention took it (set "
                f'retain = "all"; Lightning removes what it does not need), or another program saved the step again'
            )
        return {name: part for name, part in found.tree.items() if reference.only is None or name in reference.only}

    def remove(self, path: str | os.PathLike[str]) -> bool:
        """Remove ``path``, and delete its step as soon as the store permits it, unless another path names the step.

        Returns False for a path that names no step.
        """
        reference = reference_at(path)
        if reference is None:
            return False
        Path(path).replace(self._removed(path, reference))
        self._folders.add(Path(path).parent)
        self._delete_unnamed()
        return True

    def flush(self) -> None:
        try:
            self.store.flush()
        except TieredCkptError as error:
            _log.warning("the store does not have everything where it should be: %s", error)
        self._delete_unnamed()
        self._saved.clear()

    def _delete_unnamed(self) -> None:
        """Delete the saves that lost a path and that no other path names, when a later step is as safe."""
        found = (path for folder in self._folders for path in folder.glob(f"{_REMOVED}-{self._store_identity()}-*"))
        for path, lost in sorted((path, reference_at(path)) for path in found):
            if lost is None:
                continue
            mine = self._saved.get(lost.step)
            try:
                held, references = self._references(lost.step, {*lost.paths, *(mine.paths if mine else ())})
                if held == lost.save and not references:
                    self.store.delete(lost.step)
            except NotFound:
                if not all(tier.healthy for tier in self.store.tier_infos()):
                    continue
            except TieredCkptError as error:
                _log.debug("step %d stays in the store for now: %s", lost.step, error)
                continue
            with suppress(OSError):  # it is found again
                path.unlink()

    def _removed(self, path: str | os.PathLike[str], lost: Reference) -> Path:
        """The file that names a save after ``path`` is removed."""
        return Path(path).parent / f"{_REMOVED}-{self._store_identity()}-{lost.step}-{lost.serial}"

    def _store_identity(self) -> str:
        """Identity of the store, by which it knows its own files in a folder; empty while no step can tell it."""
        if self._identity is None:
            held = [info for info in self.store.steps() if info.tiers]
            with suppress(TieredCkptError):
                self._identity = self.store.describe(held[-1].step, serial=held[-1].serial).store if held else None
        return self._identity or ""


def _chooses(state: Any) -> bool:
    """Whether a callback's state is that of a ModelCheckpoint, which chooses checkpoints."""
    return isinstance(state, Mapping) and {"best_k_models", "monitor"} <= state.keys()


def _scores(callbacks: Any, paths: Collection[str]) -> dict[str, float]:
    """What the callbacks that chose ``paths`` monitor; their ``current_score`` may be of an earlier step."""
    states = callbacks.values() if isinstance(callbacks, Mapping) else ()
    found: dict[str, float] = {}
    for state in filter(_chooses, states):
        name, chosen = state["monitor"], state["best_k_models"]
        if isinstance(name, str) and isinstance(chosen, Mapping):
            for score in (chosen[path] for path in paths if path in chosen):
                with suppress(TypeError, ValueError, RuntimeError):  # of a state that another program defines
                    found[name] = float(score)
    return found


def _equal(stored: Any, live: Any) -> bool:
    """Whether the tensors in ``live`` equal those in ``stored``, which has arrays in their place."""
    if isinstance(live, Mapping):
        return isinstance(stored, Mapping) and all(key in stored and _equal(stored[key], live[key]) for key in live)
    if isinstance(live, list | tuple):
        return len(stored) == len(live) and all(map(_equal, stored, live))
    if not isinstance(live, torch.Tensor):
        return True
    host = live.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not isinstance(stored, np.ndarray) or stored.shape != tuple(host.shape):
        return False
    flat = host.as_strided((host.numel(),), (1,))  # one item is contiguous whatever its strides are
    return np.array_equal(np.ascontiguousarray(stored).reshape(-1).view(np.uint8), flat.view(torch.uint8).numpy())


def check_local(path: str | os.PathLike[str]) -> None:
    """Raise `Invalid` for a URL, where no file that names a step can lie."""
    if "://" in str(path):
        raise Invalid(
            f"{path}: the files that name steps lie in a folder that all nodes see, and no URL is one; give such a "
            f"folder as dirpath or default_root_dir, and the object store as a tier"
        )


def _write(path: str, reference: Reference) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(f"{path}.tmp")  # by one process, which overwrites the rest of a killed one
    unfinished.write_text(json.dumps({_STEP: reference._asdict()}) + "\n")
    unfinished.replace(path)


def reference_at(path: str | os.PathLike[str]) -> Reference | None:
    """Read the file at ``path`` that names a step; None if it is missing, not ours, or cannot be read."""
    try:
        return _read(path)
    except TierUnavailable:
        return None


def _read(path: str | os.PathLike[str]) -> Reference | None:
    """As `reference_at`, for code that deletes saves without a path. Raises `TierUnavailable` where the file cannot be
    read.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise TierUnavailable(f"{path} cannot be read, so it is not known which step it names: {error}") from error
    try:
        ours = json.loads(content)[_STEP]
        only = None if ours.get("only") is None else tuple(map(str, ours["only"]))
        return Reference(int(ours["step"]), int(ours["serial"]), only, tuple(map(str, ours.get("paths", ()))))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
