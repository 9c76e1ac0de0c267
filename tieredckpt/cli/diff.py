"""The verb `diff`: tells what differs between two steps, of one store or of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tieredckpt._comparing import ONLY, Difference, Side, compare
from tieredckpt.cli.console import bar, output, print_json, print_table
from tieredckpt.cli.opening import Json, Keys, OtherStep, StorePath, ThisStep, reading
from tieredckpt.cli.show import Serial, brief, shape_text
from tieredckpt.errors import TieredCkptError
from tieredckpt.sync import SyncStore
from tieredckpt.units import format_size

__all__ = ["diff"]


def diff(
    store: StorePath,
    step: ThisStep,
    other: OtherStep,
    other_store: Annotated[
        str | None, typer.Option("--other", metavar="STORE", help="The store of OTHER, if another.", show_default=False)
    ] = None,
    serial: Serial = None,
    other_serial: Annotated[
        int | None, typer.Option(help="The same for OTHER, in its store.", show_default=False)
    ] = None,
    keys: Keys = None,
    as_json: Json = False,
) -> None:
    """Compare two steps: tree, dtypes, shapes, values. Exits with 1 if they differ, with 0 if equal bit for bit."""
    with reading(store) as first, nullcontext(first) if other_store is None else reading(other_store) as second:
        one = _side(store, first, step, serial)
        two = _side(other_store or store, second, other, other_serial)
        with bar("comparing", 1) as progress:
            found = compare(one, two, keys or None, progress)
    arrays = sum(each.of_array for each in found.differences)
    nbytes = sum(each.differing_nbytes for each in found.differences)
    if as_json:
        steps = {"from": one.step._asdict(), "to": two.step._asdict()}
        print_json({**steps, **asdict(found), "differing_arrays": arrays, "differing_nbytes": nbytes})
    else:
        if found.differences:
            columns = ("key", "what", "from", "to", "chunks", "size")
            rows = list(map(_row, found.differences))
            print_table(f"from {one.step} to {two.step}", columns, rows, right=("chunks", "size"))
        others = len(found.differences) - arrays
        output().print(
            f"arrays: {found.same_arrays} the same, {arrays} not; "
            f"{format_size(nbytes)} of {format_size(found.nbytes)} differ"
            + (f"; other leaves and containers: {others} not the same" if others else "")
        )
    if found.differences:
        raise typer.Exit(1)


def _side(source: str, store: SyncStore, number: int, serial: int | None) -> Side:
    try:
        return Side.of(store, number, serial)
    except TieredCkptError as error:
        raise type(error)(f"{source}: {error}") from error


def _row(each: Difference) -> tuple[str, ...]:
    counts = (f"{each.differing_chunks} of {each.chunks}", format_size(each.differing_nbytes))
    forms = (_text(each, each.before), _text(each, each.after))
    return (each.key or "(root)", ", ".join(each.what), *forms, *(counts if each.chunks else ("", "")))


def _text(each: Difference, form: Mapping[str, Any] | None) -> str:
    """What differs of one side; all of it where the kind does, or there is no other side."""
    whole = "kind" in each.what or each.what[0] in ONLY
    shown = [(name, value) for name, value in (form or {}).items() if whole or name in each.what]
    return " ".join(_TEXTS.get(name, str)(value) for name, value in shown)


_TEXTS: Mapping[str, Callable[[Any], str]] = {"shape": shape_text, "value": brief, "about": brief, "keys": brief}
