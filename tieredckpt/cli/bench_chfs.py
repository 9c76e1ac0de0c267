"""The verb `bench chfs`: a chfs tier next to its limits, measured side by side in one run."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tieredckpt.bench.chfs import ChfsFigures, measure_chfs
from tieredckpt.cli import amounts
from tieredckpt.cli.console import output, print_json, print_table, waiting
from tieredckpt.cli.opening import Json
from tieredckpt.config import ChfsTier, load
from tieredckpt.errors import Invalid
from tieredckpt.units import format_rate, format_size

__all__ = ["bench_chfs"]


def bench_chfs(
    store: Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration with a chfs tier.")],
    tier: Annotated[str | None, typer.Option(help="Which one; the only one without.", show_default=False)] = None,
    size: Annotated[str, typer.Option(help="Bytes of a round.")] = "1 GiB",
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is done.")] = 5,
    directory: Annotated[
        Path | None,
        typer.Option(help="A folder on the medium that CHFS uses.", exists=True, file_okay=False, show_default=False),
    ] = None,
    shared: Annotated[
        Path | None,
        typer.Option(help="A folder on the shared file system.", exists=True, file_okay=False, show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a chfs tier against a bare loop over libchfs, a directory, and the shared file system."""
    nbytes = amounts.size("--size", size)
    if nbytes < 1 << 20:
        raise typer.BadParameter("should be 1 MiB or more", param_hint="--size")
    chosen = _chosen(store, tier)
    with waiting(f"measuring tier {chosen.name}"):
        figures = asyncio.run(measure_chfs(chosen, nbytes, rounds, directory=directory, shared=shared))
    if as_json:
        print_json(asdict(figures))
    else:
        _show(figures, rounds)


def _chosen(source: str, name: str | None) -> ChfsTier:
    tiers = [tier for tier in load(source).located if isinstance(tier, ChfsTier) and name in (None, tier.name)]
    if len(tiers) != 1:
        which = "no chfs tier" if not tiers else "several chfs tiers; choose one with --tier"
        raise Invalid(f"{source} has {which}" + (f" of the name {name!r}" if name and not tiers else ""))
    return tiers[0]


def _show(figures: ChfsFigures, rounds: int) -> None:
    title = (
        f"{format_size(figures.nbytes)}, {figures.servers} servers, chunks of {format_size(figures.chunk_size)}, "
        f"{figures.threads} threads, medians of {rounds} rounds"
    )
    output().print(f"libchfs {figures.library}")
    rows = [
        (name, f"{seconds:.3f}", format_rate(figures.nbytes / seconds)) for name, seconds in figures.seconds.items()
    ]
    print_table(title, ("", "seconds", "speed"), rows, right=("seconds", "speed"))
    print_table(
        "speeds over each other", ("", "ratio"), [(name, f"{ratio:.2f}") for name, ratio in figures.ratios.items()]
    )
