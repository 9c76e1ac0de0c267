"""The verb `copy`: brings steps from one store to another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tieredckpt._copying import copy_steps
from tieredckpt.cli.aside import run_aside
from tieredckpt.cli.console import bar, print_json, print_table
from tieredckpt.cli.opening import Json, reading
from tieredckpt.units import format_size

__all__ = ["copy"]


def copy(
    source: Annotated[
        str, typer.Argument(help="A configuration (.toml), or the folder or URL of a store.", show_default=False)
    ],
    target: Annotated[str, typer.Argument(help="The same, of a store or of none yet.", show_default=False)],
    steps: Annotated[
        str | None,
        typer.Option(metavar="STEP,…", help="Only these steps; all without.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy steps to another store, verified, and only what it lacks; repeat it after an interruption."""
    numbers = _numbers(steps)
    with reading(source) as opened:
        nbytes = sum(step.nbytes for step in opened.steps() if numbers is None or step.step in numbers)
    with bar("copying", nbytes) as progress:
        copied = run_aside(copy_steps(source, target, numbers, progress=lambda each: progress(each.nbytes)))
    if as_json:
        print_json([asdict(each) for each in copied])
        return
    rows = [(each.step, each.serial, format_size(each.nbytes), format_size(each.written)) for each in copied]
    columns = ("step", "serial", "size", "written")
    print_table("copied", columns, rows, right=columns)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} should be numbers, as in 100,200", param_hint="--steps") from error
