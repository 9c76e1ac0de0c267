"""The verb `bench`: what this library costs on this machine, next to the machine's limits and to its peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tieredckpt.bench.compare import compare, unlike
from tieredckpt.bench.html import figure, render
from tieredckpt.bench.report import AIMS, Aim, Report, Row, load_report, make_report
from tieredckpt.bench.run import MEASURED, Outcome, Request, run
from tieredckpt.cli import amounts
from tieredckpt.cli.console import errors, output, print_json, print_table, printable
from tieredckpt.cli.opening import Json
from tieredckpt.errors import Invalid
from tieredckpt.units import format_rate, format_size

__all__ = ["bench"]

_SMALLEST = 1 << 20


def bench(
    context: typer.Context,
    size: Annotated[str, typer.Option(help="Bytes of the state.")] = "1 GiB",
    folder: Annotated[
        Path, typer.Option(help="Where to write: on the device that matters.", exists=True, file_okay=False)
    ] = Path(),
    peers: Annotated[str, typer.Option(help="`all` that are installed, `none`, or names separated by commas.")] = "all",
    workloads: Annotated[
        str, typer.Option(help="What the state looks like; the first is measured in full.")
    ] = ",".join(MEASURED),
    rounds: Annotated[int, typer.Option(min=1, help="How often each peer takes its turn.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="How often a turn does everything.")] = 3,
    steps: Annotated[int, typer.Option(min=0, help="Steps of the long history; 0 for none.")] = 10_000,
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
    )
    report = make_report(_run(request))
    if html is not None:
        html.write_text(render(report, before), "utf-8")
    if as_json:
        print_json(msgspec.to_builtins(report))
        return
    _show(report)
    if before is not None:
        _show_changes(before, report)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _run(request: Request) -> Outcome:
    console = errors()
    if not console.is_terminal:
        return run(request, lambda what: console.print(printable(what)))
    with console.status("") as status:
        return run(request, lambda what: status.update(printable(what)))


def _show(report: Report) -> None:
    machine = report.machine
    output().print(
        f"{printable(machine['processor'])}, {machine['cores']} cores, {format_size(int(machine['memory']))}, "
        f"{printable(machine['file_system'])}; Python {machine['python']}; "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items())
    )
    print_table(
        f"{format_size(report.size)}, medians of {report.rounds} x {report.repeats} repetitions",
        ("", "is", "aim", ""),
        [_aim_row(report, aim) for aim in AIMS],
        right=("is", "aim"),
    )
    print_table(
        "limits of this machine",
        ("", "seconds", "speed"),
        [
            (name.replace("_", " "), f"{took:.3f}", format_rate(report.size / took))
            for name, took in report.limits.items()
        ],
        right=("seconds", "speed"),
    )
    for workload, rows in report.rows.items():
        print_table(workload, _COLUMNS, [_peer_row(row) for row in rows], right=_COLUMNS[1:-1])
    for name, why in report.missing.items():
        output().print(f"missing: {name}: {printable(why)}")
    for name, why in report.failed.items():
        output().print(f"failed: {name}: {printable(why)}")


def _aim_row(report: Report, aim: Aim) -> Sequence[str]:
    value = report.ratios.get(aim.key)
    if value is None:
        return (aim.about, "not measured", figure(aim.most, aim.unit), "")
    met = "" if aim.most is None else ("met" if value <= aim.most else "missed")
    return (aim.about, figure(value, aim.unit), figure(aim.most, aim.unit), met)


_COLUMNS = (
    "",
    "first stall",
    "stall",
    "durable",
    "files",
    "tenth: written",
    "tenth: durable",
    "restore cold",
    "warm",
    "memory",
    "lost per GB",
    "snapshot",
)


def _peer_row(row: Row) -> Sequence[str]:
    cold = row.restore_cold_existing_s if row.restore_cold_existing_s is not None else row.restore_cold_new_s
    warm = row.restore_warm_existing_s if row.restore_warm_existing_s is not None else row.restore_warm_new_s
    return (
        row.peer,
        *(_seconds(value) for value in (row.first_stall_s, row.stall_s, row.durable_s)),
        "" if row.files is None else str(row.files),
        "" if row.tenth_written_ratio is None else f"{row.tenth_written_ratio:.2f}",
        *(_seconds(value) for value in (row.tenth_durable_s, cold, warm)),
        "" if row.peak_save_ratio is None else f"{row.peak_save_ratio:.2f}",
        _seconds(row.interference),
        "yes" if row.snapshot else "NO: it follows the training",
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _show_changes(before: Report, now: Report) -> None:
    for reason in unlike(before, now):
        output().print(f"not comparable: {printable(reason)}")
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
    )
