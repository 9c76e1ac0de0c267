"""Saves a checkpoint of another library as a step that outlives the process, and verifies it there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tieredckpt.errors import Conflict, Corrupt, Invalid, TierUnavailable
from tieredckpt.interchange.formats import find
from tieredckpt.sync import SyncStore

__all__ = ["Imported", "import_step"]

_NUMBERED = re.compile(r"(?:(?:.*[-_.])?(?:checkpoint|ckpt|global_step|iter|step)[-_=]?)?([0-9]{1,18})", re.IGNORECASE)
"""Names such as ``checkpoint-1000``, ``global_step500`` and ``1000``, but not ``llama-8``."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import saved."""

    step: int
    serial: int
    nbytes: int
    tier: str
    """The nearest tier that outlives the process; every chunk was verified there."""


def import_step(source: str, store: SyncStore, step: int | None = None, *, overwrite: bool = False) -> Imported:
    """Save the checkpoint at ``SCHEME:PATH`` as a step of ``store``, by one process that has the memory for it.

    It is the newest step of the store then. Nothing that the checkpoint names is run.

    Args:
        source: such as ``dcp:/old/checkpoint-1000``; `formats.FORMATS` has the schemes.
        store: open, of this process alone, with a tier that outlives the process.
        step: the number that it gets; None for that at which the name of the path ends, as ``checkpoint-1000``.
        overwrite: save a step number again that the store has.

    Raises:
        NotFound: a file is not there.
        Invalid: the checkpoint has something that no step can have, or that would have to be run; or no number.
        Corrupt: a file is damaged; file and key are named. Or the step did not come back from the store.
        TierUnavailable: no tier that outlives the process took the step.
        Conflict, NoSpace: as `SyncStore.save`.
    """
    _, format_, path = find(source, "read")
    durable = [tier.name for tier in store.tier_infos() if tier.survives != "process"]
    if not durable:
        raise Invalid("the store has no tier that outlives this process, so an imported step would be gone; add one")
    number = _number(path) if step is None else step
    if not overwrite and any(info.step == number and not info.abandoned for info in store.steps()):
        raise Conflict(f"the store has step {number}; give another number, or --overwrite (overwrite=True)")
    assert format_.read is not None
    try:
        tree = format_.read(path)
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror or error}") from error
    saved = store.save(number, tree, overwrite=overwrite).saved
    assert saved is not None
    if saved.skipped:
        raise TierUnavailable(f"step {number} was not saved: {saved.skipped}")
    store.flush()
    held = store.where(number)
    tier = next((name for name in durable if name in held), durable[0])
    if tier not in held:  # its policy has not asked for the step, and from RAM it would be gone
        store.promote(number, tier)
    for found in store.verify(number, tier):
        if not found.intact:
            raise Corrupt(f"step {number} on tier {tier!r} is not as it was imported: {found.problem}; import it again")
    return Imported(number, saved.step.serial, saved.nbytes, tier)


def _number(path: Path) -> int:
    found = _NUMBERED.fullmatch(path.stem if path.is_file() else path.name)
    if found is None:
        raise Invalid(f"{path}: its name does not end in the number of a step; give --step, or step=")
    return int(found[1])
