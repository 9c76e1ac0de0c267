"""Steps named by small files, for frameworks that find, count and remove their checkpoints by paths."""

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

from tieredckpt import Invalid, NoSpace, NotFound, SyncStore, TieredCkptError, TierUnavailable
from tieredckpt.integrations._durable import outlive_node

__all__ = ["PATHS", "Meant", "NamedSteps", "check_local", "meant_by"]

_log = logging.getLogger("tieredckpt")
_STEP = "tieredckpt"
"""Prefix of the files that name a step."""
_LARGEST = 1 << 20
"""Most bytes of such a file."""
_LAST_BEFORE_THE_END = re.compile(r"hpc_ckpt_\d+\.ckpt")
"""Name of the checkpoint that Lightning saves when Slurm warns that the job ends, to resume from in the next one."""
PATHS = "named_at"
"""The key in the tree of a step that is not the framework's: the paths at which it is named."""


class Meant(NamedTuple):
    """Content of the file at a path."""

    step: int
    serial: int
    only: tuple[str, ...] | None
    """The parts of the step that were saved under this path; None for all."""
    paths: tuple[str, ...]
    """The paths at which the save is named."""


@dataclass
class _Saved:
    """The save of a step that its paths mean."""

    serial: int
    names: frozenset[str]
    paths: dict[str, frozenset[str]]
    """Paths of the files that name the step, and the keys that were saved there."""


class NamedSteps:
    """A store whose steps are found by paths."""

    def __init__(self, store: SyncStore) -> None:
        self.store = store
        self._saved: dict[int, _Saved] = {}
        self._removed: dict[tuple[int, int], set[str]] = {}
        """Steps, with their serials, that lost a name and that the store has yet to delete; with their other paths."""

    def save(
        self,
        step: int,
        checkpoint: Mapping[str, Any],
        path: str | os.PathLike[str],
        rank: int | None = None,
        names: frozenset[str] | None = None,
    ) -> bool:
        """Save a step and name it at ``path``; a failure of the store is only a warning, and the training goes on.

        Lightning saves one step under several paths. A save with fewer parts than the one before, such as weights only,
        becomes a name for these parts of it. A save with as many parts or more replaces the one before if the tensors
        of both are equal, since the other paths then name the same values.

        Args:
            step, checkpoint, path: of Lightning.
            rank: of several that save their shards.
            names: of the parts of the checkpoint, if this rank does not have all of them.

        Returns:
            False if the checkpoint was not saved: it neither extends the save of this step (by this fit or an earlier
            one) nor is a part of it, or it has other tensors in a part. With several ranks, ask `is_of_an_earlier_fit`
            before.
        """
        names = frozenset(checkpoint) if names is None else names
        before = self._saved.get(step) if rank is not None else self._before(step)
        if before is not None:
            if not rank:
                named = {each: meant_by(each) for each in before.paths}
                names_it = {each for each, meant in named.items() if meant and meant[:2] == (step, before.serial)}
                before.paths = {each: has for each, has in before.paths.items() if each in names_it}
            if rank is None and not self._fits(step, before, checkpoint, str(path)):
                if step not in self._saved:
                    self.warn_of_an_earlier_fit(step, path)
                return False
            if names < before.names:
                self._name(step, before, str(path), names, rank)
                return True
        paths = {**({} if before is None else before.paths), str(path): names}
        tree = dict(checkpoint) if rank else {**checkpoint, PATHS: list(paths)}
        try:
            made = self.store.save(step, tree, overwrite=True)
        except (NoSpace, TierUnavailable) as error:
            _log.warning("step %d was not saved, %s does not name it, training goes on: %s", step, path, error)
            return True
        saved = made.saved
        assert saved is not None
        if saved.skipped:
            _log.warning("step %d was not saved, %s does not name it: %s", step, path, saved.skipped)
            return True
        self._saved[step] = _Saved(saved.step.serial, names, paths)
        self._name(step, self._saved[step], str(path), names, rank)
        if _LAST_BEFORE_THE_END.fullmatch(Path(path).name) and not rank:
            outlive_node(self.store, made)
        return True

    def is_of_an_earlier_fit(self, step: int) -> bool:
        """Whether the store has a save of this number that this fit did not make."""
        return step not in self._saved and any(info.step == step and info.tiers for info in self.store.steps())

    def warn_of_an_earlier_fit(self, step: int, path: str | os.PathLike[str]) -> None:
        _log.warning(
            "%s is not in the store but written by the framework itself: the store has a step %d already, of an "
            "earlier training. Give each training a store of its own, or delete the steps that nobody needs",
            *(path, step),
        )

    def _before(self, step: int) -> _Saved | None:
        """The save of a step by this fit or an earlier one, without files that do not name it any more."""
        if not self.is_of_an_earlier_fit(step):
            return self._saved.get(step)
        try:
            found = self.store.restore(step, as_="specs", resume=False)
            serial, named = self._named(step)
        except TieredCkptError:
            return _Saved(0, frozenset(), {})  # nothing is known of it
        names = frozenset(() if found is None else found.tree) - {PATHS}
        paths = {path: names if meant.only is None else frozenset(meant.only) for path, meant in named.items()}
        return _Saved(serial, names, paths)

    def _named(self, step: int, paths: Collection[str] = ()) -> tuple[int, dict[str, Meant]]:
        """Serial of the save that the store gives for a step, and the files that name that save: of ``paths``, of those
        that the step lists, and of those that these list. Raises as ``describe``, and `TierUnavailable` where a file
        cannot be read.
        """
        found = self.store.describe(step, keys=[PATHS])
        listed = {*paths, *map(str, found.scalars.values())}
        listed.update(*(meant.paths for each in listed if (meant := _meant_for_sure(each))))
        meant_at = {each: meant for each in listed if (meant := _meant_for_sure(each))}
        serial = found.info.serial
        return serial, {each: meant for each, meant in meant_at.items() if meant[:2] == (step, serial)}

    def _fits(self, step: int, before: _Saved, checkpoint: Mapping[str, Any], path: str) -> bool:
        """Whether a checkpoint is a part of the save before, or can replace it and leave the other paths their
        tensors.
        """
        if step not in self._saved and not before.paths:
            return False  # files that the step does not list may name parts of it
        if before.names - checkpoint.keys():
            return checkpoint.keys() < before.names and self._same(step, checkpoint)
        others = before.paths.keys() - {path}
        return not others or self._same(step, {name: checkpoint[name] for name in before.names})

    def _same(self, step: int, checkpoint: Mapping[str, Any]) -> bool:
        """Whether the tensors of a checkpoint are those of the step, which a callback may have replaced in it."""
        try:
            found = self.store.restore(step, keys=list(checkpoint), copy=False, resume=False)
        except TieredCkptError:
            return False
        return found is not None and _equal(found.tree, checkpoint)

    def _name(self, step: int, saved: _Saved, path: str, names: frozenset[str], rank: int | None) -> None:
        saved.paths[path] = names
        if rank:
            return
        before = meant_by(path)
        for each, has in saved.paths.items():
            _name(each, Meant(step, saved.serial, tuple(has) if has < saved.names else None, tuple(saved.paths)))
        if before is not None and before.step != step:  # as when Lightning writes over a file
            self._removed.setdefault((before.step, before.serial), set()).update(before.paths)
        self._delete()

    def there(self, path: str | os.PathLike[str], meant: Meant) -> Meant:
        """``meant``, or the save that ``path`` named before it, if the store has lost ``meant``.

        A store loses a save with its node, before a slower tier has it. With several ranks, one calls this.
        """
        held = {(info.step, info.serial): info for info in self.store.steps() if info.tiers}
        if meant[:2] in held or not all(tier.healthy for tier in self.store.tier_infos()):
            return meant
        before = [info for info in held.values() if info.serial < meant.serial and not info.off_branch]
        for info in sorted(before, key=lambda info: info.serial, reverse=True):
            with suppress(TieredCkptError):
                listed = self.store.describe(info.step, keys=[PATHS], serial=info.serial).scalars.values()
                if os.path.abspath(path) in map(os.path.abspath, map(str, listed)):
                    _log.warning(
                        "%s names step %d, which the store does not have: it takes step %d, which it named before",
                        *(path, meant.step, info.step),
                    )
                    return meant._replace(step=info.step, serial=info.serial)
        return meant

    def look_up(self, path: str | os.PathLike[str], meant: Meant) -> dict[str, Any]:
        """The parts of its step that ``path`` names, with specs in place of arrays; all ranks call it.

        Raises `NotFound` where the store has another save of that number, or none.
        """
        try:
            found = self.store.restore(meant.step, as_="specs", resume=False)
        except NotFound:
            found = None
        if found is None or found.serial != meant.serial:
            raise NotFound(
                f"{path} names step {meant.step} (serial {meant.serial}), which the store does not have any more: its "
                f'retention took it (set retain = "all"; Lightning removes what it does not need), or another '
                f"program saved the step again"
            )
        return {name: part for name, part in found.tree.items() if meant.only is None or name in meant.only}

    def remove(self, path: str | os.PathLike[str]) -> bool:
        """Remove ``path``, and delete its step as soon as the store permits it, unless another path names the step.

        Returns False for a path that names no step.
        """
        meant = meant_by(path)
        if meant is None:
            return False
        Path(path).unlink()
        self._removed.setdefault((meant.step, meant.serial), set()).update(meant.paths)
        self._delete()
        return True

    def flush(self) -> None:
        try:
            self.store.flush()
        except TieredCkptError as error:
            _log.warning("the store does not have everything where it should be: %s", error)
        self._delete()
        self._saved.clear()

    def _delete(self) -> None:
        """Delete the removed steps that the store can do without by now: a later step is as safe."""
        for (step, serial), paths in sorted(self._removed.items()):
            try:
                there, named = self._named(step, paths)
                if there == serial and not named:
                    self.store.delete(step)
            except NotFound:
                pass
            except TieredCkptError as error:
                _log.debug("step %d stays in the store for now: %s", step, error)
                continue
            del self._removed[step, serial]


def _equal(stored: Any, live: Any) -> bool:
    """Whether the tensors in ``live`` equal those in ``stored``, which has arrays in their place."""
    if isinstance(live, Mapping):
        return isinstance(stored, Mapping) and all(key in stored and _equal(stored[key], live[key]) for key in live)
    if isinstance(live, list | tuple):
        return len(stored) == len(live) and all(map(_equal, stored, live))
    if not isinstance(live, torch.Tensor):
        return True
    host = live.detach().cpu().contiguous()
    same = isinstance(stored, np.ndarray) and stored.shape == tuple(host.shape)
    return same and np.array_equal(
        np.ascontiguousarray(stored).reshape(-1).view(np.uint8), host.reshape(-1).view(torch.uint8).numpy()
    )


def check_local(path: str | os.PathLike[str]) -> None:
    """Raise `Invalid` for a URL, where no file that names a step can lie."""
    if "://" in str(path):
        raise Invalid(
            f"{path}: the files that name steps lie in a folder that all nodes see, and no URL is one; give such a "
            f"folder as dirpath or default_root_dir, and the object store as a tier"
        )


def _name(path: str, meant: Meant) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(f"{path}.tmp")  # by one process, which overwrites the rest of a killed one
    unfinished.write_text(json.dumps({_STEP: meant._asdict()}) + "\n")
    unfinished.replace(path)


def meant_by(path: str | os.PathLike[str]) -> Meant | None:
    """Read the file at ``path`` that names a step; None if it is missing, not ours, or cannot be read."""
    try:
        return _meant_for_sure(path)
    except TierUnavailable:
        return None


def _meant_for_sure(path: str | os.PathLike[str]) -> Meant | None:
    """As `meant_by`, for code that deletes unnamed steps. Raises `TierUnavailable` where the file cannot be read."""
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
        return Meant(int(ours["step"]), int(ours["serial"]), only, tuple(map(str, ours.get("paths", ()))))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
