"""Saves a checkpoint of another library as a step that outlives the process, and verifies it there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tieredckpt.errors import Conflict, Corrupt, Invalid, TierUnavailable
from tieredckpt.interchange.base import Format
from tieredckpt.interchange.formats import find
from tieredckpt.sync import SyncStore
from tieredckpt.tree.flatten import flatten

__all__ = ["Imported", "ReadCheckpoint", "import_step", "read_checkpoint"]

T = TypeVar("T")

_NUMBERED = re.compile(r"(?:(?:.*[-_.])?(?:checkpoint|ckpt|global_step|iter|step)[-_=]?)?([0-9]{1,18})", re.IGNORECASE)
"""Names such as ``checkpoint-1000``, ``global_step500`` and ``1000``, but not ``llama-8``."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Result of an import."""

    step: int
    serial: int
    nbytes: int
    tier: str
    """The nearest tier that outlives the process; every chunk was verified there."""


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """A checkpoint that was read from another library's files, and that a step can hold."""

    tree: Any
    step: int
    """Its step number."""
    metrics: Mapping[str, float]


def read_checkpoint(source: str, step: int | None = None) -> ReadCheckpoint:
    """Read the checkpoint at ``SCHEME:PATH``, for `import_step`. No code that it names is run.

    Raises `NotFound`, `Invalid` and `Corrupt` as `import_step` does, before there is a store.
    """
    format_, path = _located(source)
    number = _number(path) if step is None else step
    assert format_.read is not None
    tree, metrics = _readable(format_.read, path), _readable(format_.metrics, path)
    flatten(tree)
    return ReadCheckpoint(tree, number, metrics)


def _located(source: str) -> tuple[Format, Path]:
    """The format of ``SCHEME:PATH``, and the place of the checkpoint that the path means."""
    _, format_, path = find(source, "read")
    return format_, _readable(format_.locate, path)


def _readable(look: Callable[[Path], T], path: Path) -> T:
    try:
        return look(path)
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror or error}") from error


def import_step(
    source: str | ReadCheckpoint, store: SyncStore, step: int | None = None, *, overwrite: bool = False
) -> Imported:
    """Save the checkpoint at ``SCHEME:PATH`` as a step of ``store``, by one process that has the memory for it.

    It becomes the newest step of the store. No code that the checkpoint names is run.

    Args:
        source: such as ``dcp:/old/checkpoint-1000``, of an installed format; or what `read_checkpoint` gave.
        store: open, of this process alone, with a tier that outlives the process.
        step: its number; None for the number at the end of the path's name, as in ``checkpoint-1000``.
        overwrite: save a step again if the store has its number.

    Raises:
        NotFound: a file is missing.
        Invalid: the checkpoint holds a value that no step can hold, or that needs code to be run; or it has no number.
        Corrupt: a file is damaged; file and key are named. Or the step did not come back from the store.
        TierUnavailable: no tier that outlives the process could be opened, or none took the step.
        Conflict, NoSpace: as `SyncStore.save`.
    """
    exact = [tier for tier in store.tier_infos() if not tier.lossy]
    durable = [tier.name for tier in exact if tier.survives != "process"]
    if not durable:
        if closed := [f"tier {tier.name!r} cannot be opened: {tier.problem}" for tier in exact if not tier.location]:
            raise TierUnavailable("\n".join(closed))
        raise Invalid("the store has no tier that outlives this process, so an imported step would be gone; add one")
    if step is None:
        step = source.step if isinstance(source, ReadCheckpoint) else _number(_located(source)[1])
    if not overwrite and any(info.step == step and not info.off_branch for info in store.steps()):
        raise Conflict(f"the store has step {step}; give another number, or --overwrite (overwrite=True)")
    found = source if isinstance(source, ReadCheckpoint) else read_checkpoint(source, step)
    saved = store.save(step, found.tree, metrics=found.metrics, overwrite=overwrite).saved
    assert saved is not None
    if saved.skipped:
        raise TierUnavailable(f"step {step} was not saved: {saved.skipped}")
    store.flush()
    held = store.where(step)
    tier = next((name for name in durable if name in held), durable[0])
    if tier not in held:  # its policy does not want the step, and RAM would lose it
        store.promote(step, tier)
    for each in store.verify(step, tier):
        if not each.intact:
            raise Corrupt(f"step {step} on tier {tier!r} is not as it was imported: {each.problem}; import it again")
    return Imported(step, saved.step.serial, saved.nbytes, tier)


def _number(path: Path) -> int:
    found = _NUMBERED.fullmatch(path.stem if path.is_file() else path.name)
    if found is None:
        raise Invalid(f"{path}: its name does not end in the number of a step; give --step, or step=")
    return int(found[1])
