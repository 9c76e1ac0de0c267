"""The verb `bench`: what this library costs on this machine, next to the machine's limits and to its peers."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from tieredckpt.bench.peers import OURS
from tieredckpt.bench.report import AIMS, Aim, Report, Row, compare, load_report, make_report, unlike
from tieredckpt.bench.run import MEASURED, Outcome, Request, run
from tieredckpt.bench.workloads import workload_named
from tieredckpt.cli import amounts
from tieredckpt.cli.console import errors, output, print_json, print_table, printable
from tieredckpt.cli.opening import Device, Json
from tieredckpt.errors import Invalid
from tieredckpt.units import format_duration, format_rate, format_size

__all__ = ["bench"]

_SMALLEST = 1 << 20
_FEWEST_LEAVES = 100
"""Fewest leaves of a tree, since a tree with a hundredth of the leaves is measured beside it."""
_PAGE = 260
"""Characters of a line of the HTML page."""
_BAR = 80
"""Characters of the longest bar."""


def bench(
    context: typer.Context,
    size: Annotated[str, typer.Option(help="Bytes of the state.")] = "1 GiB",
    folder: Device = Path(),
    peers: Annotated[str, typer.Option(help="`all` that are installed, `none`, or names separated by commas.")] = "all",
    workloads: Annotated[
        str, typer.Option(help="What the state looks like; the first is measured in full.")
    ] = ",".join(MEASURED),
    rounds: Annotated[int, typer.Option(min=1, help="How often each peer takes its turn.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="How often a turn does everything.")] = 3,
    steps: Annotated[int, typer.Option(min=0, help="Steps of the long history; 0 for none.")] = 10_000,
    leaves: Annotated[int, typer.Option(min=0, help="Leaves of the tree of small ones; 0 for none.")] = 100_000,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that save together, each its share of the state.")] = 1,
    as_json: Json = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as one HTML file.", dir_okay=False, show_default=False)
    ] = None,
    old: Annotated[
        Path | None,
        typer.Option("--compare", metavar="OLD.json", help="Show what changed since that report.", show_default=False),
    ] = None,
) -> None:
    """Measure saves and restores against this machine's limits, and against the peers that are installed."""
    if context.invoked_subcommand is not None:
        return
    nbytes = amounts.size("--size", size)
    if nbytes < _SMALLEST:
        raise typer.BadParameter("should be 1 MiB or more", param_hint="--size")
    if 0 < leaves < _FEWEST_LEAVES:
        raise typer.BadParameter(f"should be {_FEWEST_LEAVES} or more, or 0", param_hint="--leaves")
    before = load_report(old) if old is not None else None
    if html is not None and not html.absolute().parent.is_dir():
        raise Invalid(f"{html}: there is no such folder; make it first")
    request = Request(
        folder,
        nbytes,
        workloads=_names(workloads),
        peers={"all": None, "none": ()}.get(peers, _names(peers)),
        rounds=rounds,
        repeats=repeats,
        steps=steps,
        leaves=leaves,
        ranks=ranks,
    )
    report = make_report(_run(request))
    if html is not None:
        page = Console(record=True, file=io.StringIO(), markup=False, emoji=False, highlight=False, width=_PAGE)
        _show(report, before, page, bars=True)
        html.write_text(page.export_html(), "utf-8")
    if as_json:
        print_json(msgspec.to_builtins(report))
        return
    _show(report, before, output())


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _run(request: Request) -> Outcome:
    console = errors()
    if not console.is_terminal:
        return run(request, lambda what: console.print(printable(what)))
    with console.status("") as status:
        return run(request, lambda what: status.update(printable(what)))


def _show(report: Report, before: Report | None, console: Console, *, bars: bool = False) -> None:
    """Print the report, compared with ``before``; with ``bars``, draw every figure of the peers."""
    machine = report.machine
    console.print(
        f"{report.begun}; {printable(machine['processor'])}, {machine['cores']} cores, "
        f"{format_size(int(machine['memory']))} of memory, {printable(machine['system'])}, "
        f"{printable(machine['file_system'])} on {printable(machine['device'])}; Python {machine['python']}, "
        f"native code: {machine['native']}; "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items())
        + f"; {format_duration(report.took_s)} in all"
    )
    print_table(
        f"{format_size(report.size)}{_of(report.ranks)}, medians of {report.rounds} x {report.repeats} repetitions",
        ("", "key", "is", "aim", ""),
        [_aim_row(report, aim) for aim in AIMS],
        right=("is", "aim"),
        console=console,
    )
    print_table(
        "limits of this machine",
        ("", "seconds", "speed"),
        [
            (name.replace("_", " "), f"{took:.3f}", format_rate(report.size / took))
            for name, took in report.limits.items()
        ],
        right=("seconds", "speed"),
        console=console,
    )
    if before is not None:
        _show_changes(before, report, console)
    for workload, rows in report.rows.items():
        about = f"{workload}: {workload_named(workload).about}; {rows[0].arrays} arrays, {format_size(rows[0].nbytes)}"
        shown = [each for each in _COLUMNS if any(each[1](row) is not None for row in rows)]
        columns = ["", *(name for name, _, _ in shown)]
        cells = [(row.peer, *(_figure(value(row), unit) for _, value, unit in shown)) for row in rows]
        print_table(about, columns, cells, right=columns[1:], console=console)
        ways = [(row.peer, row.way, row.capture, row.durability, _snapshot(row)) for row in rows]
        print_table("", ("", "called", "captures by", "durable means", "a snapshot"), ways, console=console)
        if bars:
            _show_bars(report, rows, console)
    if report.small:
        print_table(
            "one array of 64 KiB",
            ("", "opening", "stall", "durable", "closing"),
            [
                (peer, *(_figure(of.get(name), "s") for name in ("open_s", "save_s", "durable_s", "close_s")))
                for peer, of in report.small.items()
            ],
            right=("opening", "stall", "durable", "closing"),
            console=console,
        )
    for name, why in report.missing.items():
        console.print(f"missing: {name}: {printable(why)}")
    for name, why in report.failed.items():
        console.print(f"failed: {name}: {printable(why)}")


def _of(ranks: int) -> str:
    return "" if ranks == 1 else f" of {ranks} ranks, each time the slowest"


def _figure(value: float | None, unit: str) -> str:
    """A figure for people; empty for None."""
    if value is None:
        return ""
    if unit == "bytes":
        return format_size(int(value))
    return f"{value:.3g}" if not unit else format_duration(value / 1e6 if unit == "us" else value)


def _aim_row(report: Report, aim: Aim) -> Sequence[str]:
    value = report.ratios.get(aim.key)
    if value is None:
        return (aim.about, aim.key, "not measured", _figure(aim.most, aim.unit), "")
    met = "" if aim.most is None else ("met" if value <= aim.most else "missed")
    return (aim.about, aim.key, _figure(value, aim.unit), _figure(aim.most, aim.unit), met)


def _cold(row: Row) -> float | None:
    found = [each for each in (row.restore_cold_existing_s, row.restore_cold_new_s) if each is not None]
    return min(found, default=None)


def _snapshot(row: Row) -> str:
    return "yes" if row.snapshot else "NO: it follows the training"


_Of = Callable[[Row], float | None]

_COLUMNS: tuple[tuple[str, _Of, str], ...] = (
    ("first stall", lambda row: row.first_stall_s, "s"),
    ("stall", lambda row: row.stall_s, "s"),
    ("durable", lambda row: row.durable_s, "s"),
    ("written / state", lambda row: row.written_ratio, ""),
    ("files", lambda row: row.files, ""),
    ("tenth: stall", lambda row: row.tenth_stall_s, "s"),
    ("tenth: durable", lambda row: row.tenth_durable_s, "s"),
    ("tenth: written / state", lambda row: row.tenth_written_ratio, ""),
    ("cold, existing", lambda row: row.restore_cold_existing_s, "s"),
    ("cold, new", lambda row: row.restore_cold_new_s, "s"),
    ("warm, existing", lambda row: row.restore_warm_existing_s, "s"),
    ("warm, new", lambda row: row.restore_warm_new_s, "s"),
    ("memory, save / state", lambda row: row.peak_save_ratio, ""),
    ("memory, restore / state", lambda row: row.peak_restore_ratio, ""),
    ("lost per GB", lambda row: row.interference, "s"),
)

_BARS: tuple[tuple[str, _Of, str, Sequence[str]], ...] = (
    ("stall of a save", lambda row: row.stall_s, "s", ("memcpy",)),
    ("a save until it is durable", lambda row: row.durable_s, "s", ("direct_write",)),
    ("bytes written after a tenth changed, over the state", lambda row: row.tenth_written_ratio, "", ()),
    ("restore from cold files, by the better way of each", _cold, "s", ("direct_read",)),
    ("memory of saves beyond the state, over the state", lambda row: row.peak_save_ratio, "", ()),
    ("what a compute loop loses for each GB written behind", lambda row: row.interference, "s", ()),
)
"""Title, figure, unit, and the machine's limits that are drawn beside the figure."""


def _show_bars(report: Report, rows: Sequence[Row], console: Console) -> None:
    limits = report.limits if any(row.tenth_stall_s is not None for row in rows) else {}
    for title, value_of, unit, beside in _BARS:
        drawn = {row.peer: value for row in rows if (value := value_of(row)) is not None}
        if drawn:
            drawn |= {name.replace("_", " "): limits[name] for name in beside if name in limits}
            console.print(Text(f"\n{title}", "bold"))
            _draw(drawn, unit, console)


def _draw(drawn: Mapping[str, float], unit: str, console: Console) -> None:
    scale = _BAR / max(*drawn.values(), 1e-12)
    for name, value in drawn.items():
        bar = Text("█" * round(value * scale), "blue" if name.startswith(OURS) else "bright_black")
        console.print(Text(f"{printable(name):>32} "), bar, Text(f" {_figure(value, unit)}"), sep="")


def _show_changes(before: Report, now: Report, console: Console) -> None:
    for reason in unlike(before, now):
        console.print(f"not comparable: {printable(reason)}")
    print_table(
        f"since {before.begun}",
        ("", "was", "is", ""),
        [
            (
                change.key,
                "" if change.before is None else f"{change.before:.4g}",
                "" if change.now is None else f"{change.now:.4g}",
                change.verdict,
            )
            for change in compare(before, now)
        ],
        right=("was", "is"),
        console=console,
    )
