"""The verb `bench sweep`: how the cost of a save, a restore and an opening grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tieredckpt._picture import check_picture
from tieredckpt.bench.sweep import BYTES, LEAVES, STEPS, Curves, Point, draw, sweep
from tieredckpt.cli import amounts
from tieredckpt.cli.console import errors, print_json, print_table, printable
from tieredckpt.cli.opening import Device, Json
from tieredckpt.errors import Invalid
from tieredckpt.units import format_duration, format_size

__all__ = ["bench_sweep"]


def bench_sweep(
    folder: Device = Path(),
    size: Annotated[str, typer.Option(help="The largest state; takes five times as much memory and disk.")] = "4 GiB",
    leaves: Annotated[int, typer.Option(min=1, help="The most leaves.")] = LEAVES[-1],
    steps: Annotated[int, typer.Option(min=1, help="The longest history.")] = STEPS[-1],
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is done.")] = 3,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves, .svg or .png.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how costs grow: with the leaves of a tree, its bytes, and the steps that a store holds."""
    if picture is not None:
        check_picture(picture)
    nbytes = amounts.size("--size", size)
    if nbytes < BYTES[0]:
        raise Invalid(f"--size: should be {format_size(BYTES[0])} or more")
    console = errors()
    curves = sweep(
        folder,
        leaves=_up_to(leaves, LEAVES),
        nbytes=_up_to(nbytes, BYTES),
        steps=_up_to(steps, STEPS),
        repeats=repeats,
        tell=lambda what: console.print(printable(what)),
    )
    if picture is not None:
        draw(picture, curves)
    if as_json:
        print_json(asdict(curves))
        return
    _show(curves)


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """The ``sizes`` below ``most``, and ``most`` itself."""
    return [*(size for size in sizes if size < most), most]


def _show(curves: Curves) -> None:
    _table("leaves of 64 bytes, processor time", curves.leaves, lambda size: f"{size:,}")
    _table("bytes of a transformer's state", curves.nbytes, format_size)
    _table("steps of 100 chunks that a directory holds", curves.steps, lambda size: f"{size:,}")


def _table(title: str, points: Sequence[Point], shown: Callable[[int], str]) -> None:
    columns = ["", *points[0].seconds]
    rows = [(shown(point.size), *map(format_duration, point.seconds.values())) for point in points]
    print_table(title, columns, rows, right=columns[1:])
