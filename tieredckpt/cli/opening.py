"""Opens the store named on the command line, and leaves it as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tieredckpt.blobs.ram.find import FoundRam
from tieredckpt.blobs.ram.folder import ram_root
from tieredckpt.blobs.wrap import mapped
from tieredckpt.cli.aside import run_aside
from tieredckpt.cli.console import waiting
from tieredckpt.config import StoreConfig, TierConfig, load
from tieredckpt.config.kinds import exists, kind_of
from tieredckpt.engine.inventory import ArrayInfo, StepInfo
from tieredckpt.engine.opening.ram import ram_of
from tieredckpt.errors import NotFound, TieredCkptError, TierUnavailable
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncStore

__all__ = [
    "Device",
    "Json",
    "Keys",
    "Lossy",
    "MaybeStore",
    "OtherStep",
    "Step",
    "StorePath",
    "ThisStep",
    "creating",
    "existing",
    "is_there",
    "newest_arrays",
    "newest_step",
    "reading",
    "writing",
]

T = TypeVar("T")

_STORE = "A configuration (.toml), or the folder or URL of a store."
StorePath = Annotated[str, typer.Argument(metavar="STORE", help=_STORE, show_default=False)]
MaybeStore = Annotated[str | None, typer.Argument(metavar="[STORE]", help=_STORE, show_default=False)]


def _step(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not the number of a step") from error


ThisStep = Annotated[int, typer.Argument(metavar="STEP", parser=_step, show_default=False)]
OtherStep = Annotated[int, typer.Argument(metavar="OTHER", parser=_step, show_default=False)]
Step = Annotated[
    int | None,
    typer.Argument(metavar="STEP", help="The newest if left out.", parser=_step, show_default=False),
]
Keys = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Only these keys or patterns (params/**); repeat for more.")
]
Lossy = Annotated[bool, typer.Option("--lossy", help="Take a lossy copy where the step cannot be had as it was saved.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Device = Annotated[Path, typer.Option(help="Where to write: on the device that matters.", exists=True, file_okay=False)]


@contextmanager
def reading(source: str) -> Iterator[SyncStore]:
    """Open the store read-only; a trainer may write to it meanwhile. Raises `NotFound` if there is none."""
    with _opened(existing(source), read_only=True) as store:
        yield store


@contextmanager
def writing(source: str) -> Iterator[SyncStore]:
    """Open the store to change it. Raises `NotFound` if there is none, `Conflict` while a trainer writes to it."""
    with _opened(_as_found(existing(source)), read_only=False) as store:
        yield store


@contextmanager
def creating(source: str) -> Iterator[SyncStore]:
    """Open the store, or a new one, to add steps; raises `Conflict` while a trainer writes to it."""
    with _opened(_as_found(load(source)), read_only=False) as store:
        yield store


@contextmanager
def _opened(config: StoreConfig, *, read_only: bool) -> Iterator[SyncStore]:
    store = CheckpointStore.open(config, read_only=read_only, ranks=None).sync()
    with waiting("opening the store"):
        store.__enter__()
    clean = False
    try:
        yield store
        clean = True
    finally:
        store._life.close_blocking(clean=clean)


def newest_step(config: StoreConfig) -> StepInfo | None:
    """The newest step in the folders of a configuration; None if there is none, or it cannot be read.

    RAM and tiers elsewhere, such as buckets, are not asked.
    """
    return _looked_at(config, lambda store, step: step)


def newest_arrays(config: StoreConfig) -> tuple[ArrayInfo, ...] | None:
    """The arrays of the step that `newest_step` finds."""
    return _looked_at(config, lambda store, step: store.describe(step.step).arrays)


def _looked_at(config: StoreConfig, look: Callable[[SyncStore, StepInfo], T]) -> T | None:
    exact = (tier for tier in config.slower if not tier.lossy)
    folders = tuple(tier for tier in exact if isinstance(kind_of(tier).location(tier), Path) and _holds_a_store(tier))
    if not folders:
        return None
    try:
        with _opened(config.model_copy(update={"tiers": folders}), read_only=True) as store:
            newest = next((step for step in reversed(store.steps()) if not step.off_branch), None)
            return None if newest is None else look(store, newest)
    except TieredCkptError:
        return None


def is_there(source: str) -> bool:
    """Whether there may be a store already."""
    return _is_there(load(source))


def _is_there(config: StoreConfig) -> bool:
    return any(_holds_a_store(tier) for tier in config.tiers) or bool(_ram_of(config))


def existing(source: str) -> StoreConfig:
    """The configuration of a store that may be there. Raises `NotFound` if there is certainly none."""
    config = load(source)
    if not _is_there(config):
        roots = [ram_root(config.ram.path)] if config.ram is not None else []
        places = ", ".join(map(str, [*roots, *(tier.location for tier in config.slower)]))
        raise NotFound(
            f"{source}: there is no store yet (looked in {places}); give the .toml or the folder that the trainer opens"
        )
    return config


def _holds_a_store(tier: TierConfig) -> bool:
    try:
        with mapped(f"tier {tier.name!r}", set()):
            return run_aside(exists(tier))
    except TierUnavailable:
        return True  # opening it reports the error


def _as_found(config: StoreConfig) -> StoreConfig:
    """The configuration with a RAM tier that stays as it is or, if there is none yet, leaves nothing behind."""
    if config.ram is None:
        return config
    if _ram_of(config):
        kept = config.ram.model_copy(update={"on_close": "keep"})
    else:
        kept = config.ram.model_copy(update={"on_close": "release", "capacity": "auto"})
    return config.model_copy(update={"tiers": (kept, *config.slower)})


def _ram_of(config: StoreConfig) -> list[FoundRam]:
    return run_aside(ram_of(config))
