"""Output for people and programs: text that a checkpoint cannot abuse, tables, JSON, progress.

Keys, names of metrics and messages come from a checkpoint, which is not trusted: all text for a terminal goes through
`printable`, and none of it is read as markup.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

__all__ = [
    "LOSSY",
    "bar",
    "errors",
    "jsonable",
    "metrics_text",
    "output",
    "print_json",
    "print_table",
    "printable",
    "waiting",
    "when",
]

LOSSY = "this is a lossy copy: its values are within the bounds that `tieredckpt show` lists"

_HUGE = 1 << 256

_WORD = 24
"""Words up to this many columns are not split; longer ones, such as paths, may be."""

_UNBOUNDED = 10_000
"""Columns of output that is no terminal: a file or pipe gets each row whole, on a line of its own."""


def printable(value: object) -> str:
    """``value`` as text of one line without control, invisible and direction-changing characters.

    They are shown as Python escapes, such as ``\\x1b`` and ``\\u202e``.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in str(value)
    )


def output() -> Console:
    """The console for results."""
    return _console(stderr=False)


def errors() -> Console:
    """The console for errors, notes and progress."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    # Made again for each call, because sys.stdout may be replaced, as tests do.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=width)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Print a table, without a header where no column has a name; those in ``right`` hold numbers.

    Numbers, times and words up to `_WORD` characters stay whole: on a narrow terminal the table loses its margins
    first, and is wider than the terminal before it splits them. ``console`` is standard output unless another is given.
    """
    console = console or output()
    texts = [[printable(cell) for cell in row] for row in rows]
    least = [_least(name, [row[at] for row in texts], name in right) for at, name in enumerate(columns)]
    tight = sum(least) + 3 * len(least) > console.width
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0) if tight else (0, 1),
        show_header=any(columns),
    )
    for name, width in zip(columns, least, strict=True):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", min_width=width)
    for row in texts:
        table.add_row(*map(Text, row))
    console.print(table, width=max(console.width, sum(least) + len(least) + 1), crop=False)


def _least(name: str, cells: Sequence[str], number: bool) -> int:
    """The least width of a column."""
    words = [name, *cells] if number else [word for cell in (name, *cells) for word in cell.split()]
    widths = [cell_len(word) for word in words]
    return max((width if number else min(width, _WORD) for width in widths), default=0)


def print_json(value: object) -> None:
    """Print ``value`` as JSON in ASCII; `jsonable` turns numbers that JSON lacks into text."""
    sys.stdout.write(json.dumps(jsonable(value), indent=2, allow_nan=False) + "\n")


def jsonable(value: object) -> Any:
    """``value`` converted to JSON types: NaN and infinities, complex numbers, bytes and huge integers become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) >= _HUGE:
        return hex(value)  # Python refuses to print thousands of decimal digits
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Metrics for people, on one line."""
    return ", ".join(f"{name}={value:.6g}" for name, value in metrics.items())


def when(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):  # a hostile record may say anything
        return "unknown"


@contextmanager
def bar(what: str, whole: float) -> Iterator[Callable[[float], None]]:
    """A progress bar on a terminal, with the time that is left.

    Yields a function to report each finished part of ``whole``, such as bytes, from any thread.
    """
    text = TextColumn("{task.description}", markup=False)
    with _on_terminal(text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(printable(what), total=max(whole, 1))
        yield lambda part: progress.advance(task, part)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A sign of life on a terminal, for work whose extent is not known."""
    with _on_terminal(SpinnerColumn(), TextColumn("{task.description}", markup=False)) as progress:
        progress.add_task(printable(what), total=None)
        yield


@contextmanager
def _on_terminal(*columns: ProgressColumn) -> Iterator[Progress]:
    console = errors()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with nullcontext() if progress.disable else progress:  # rich before 14.3 ends a line that nothing began
        yield progress
