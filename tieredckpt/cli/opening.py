"""Opens the store that the command line names, leaving what is there as it was found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from tieredckpt.blobs.ram.find import FoundRam
from tieredckpt.blobs.ram.folder import ram_root
from tieredckpt.cli.aside import run_aside
from tieredckpt.cli.console import waiting
from tieredckpt.concurrency import left_behind_after
from tieredckpt.config import PosixTier, RamTier, StoreConfig, TierConfig, load
from tieredckpt.engine.inventory import StepInfo
from tieredckpt.engine.opening.ram import ram_of
from tieredckpt.errors import NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format.layout import MARKER
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncStore

__all__ = ["Json", "Step", "StorePath", "newest_step", "reading", "writing"]

StorePath = Annotated[
    str, typer.Argument(metavar="STORE", help="A configuration (.toml), or the folder of a store.", show_default=False)
]
Step = Annotated[int | None, typer.Argument(metavar="STEP", help="The newest if left out.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@contextmanager
def reading(source: str) -> Iterator[SyncStore]:
    """The store, to look at; a trainer may be writing to it meanwhile. Raises `NotFound` where there is none."""
    with _opened(_existing(source), read_only=True) as store:
        yield store


@contextmanager
def writing(source: str) -> Iterator[SyncStore]:
    """The store, to change it. Raises `NotFound` where there is none, `Conflict` while a trainer writes to it."""
    with _opened(_as_found(_existing(source)), read_only=False) as store:
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
    """The newest step in the folders of a configuration; None where there is none, or it cannot be looked at.

    RAM and what lies elsewhere, as in a bucket, is not asked.
    """
    folders = tuple(tier for tier in config.tiers if isinstance(tier, PosixTier) and _holds_a_store(tier))
    if not folders:
        return None
    try:
        with _opened(config.model_copy(update={"tiers": folders}), read_only=True) as store:
            return next((step for step in reversed(store.steps()) if not step.abandoned), None)
    except TieredCkptError:
        return None


def _existing(source: str) -> StoreConfig:
    config = load(source)
    if not any(_holds_a_store(tier) for tier in config.tiers) and not _ram_of(config):
        roots = (ram_root(tier.path) for tier in config.tiers if isinstance(tier, RamTier))
        paths = (tier.path for tier in config.tiers if isinstance(tier, PosixTier))
        places = ", ".join(map(str, [*roots, *paths]))
        raise NotFound(
            f"{source}: there is no store yet (looked in {places}); give the .toml or the folder that the trainer opens"
        )
    return config


def _holds_a_store(tier: TierConfig) -> bool:
    if isinstance(tier, RamTier):
        return False  # it is looked for by what it notes
    if not isinstance(tier, PosixTier):
        return True  # only opening it can tell
    looking = left_behind_after(
        tier.deadline, tier.name, f"looking for {tier.path}", os.path.lexists, tier.path / MARKER
    )
    try:
        return run_aside(looking)
    except TierUnavailable:
        return True  # opening it tells what is wrong


def _as_found(config: StoreConfig) -> StoreConfig:
    """The configuration with a RAM tier that stays as it is, or, where there is none, leaves nothing behind."""
    nearest = config.tiers[0]
    if not isinstance(nearest, RamTier):
        return config
    if _ram_of(config):
        kept = nearest.model_copy(update={"on_close": "keep"})
    else:
        kept = nearest.model_copy(update={"on_close": "release", "capacity": "auto"})
    return config.model_copy(update={"tiers": (kept, *config.tiers[1:])})


def _ram_of(config: StoreConfig) -> list[FoundRam]:
    return run_aside(ram_of(config))
