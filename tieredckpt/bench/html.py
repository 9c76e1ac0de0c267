"""The report as one HTML file that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from tieredckpt.bench.compare import compare, unlike
from tieredckpt.bench.peers import OURS
from tieredckpt.bench.report import AIMS, Aim, Report, Row
from tieredckpt.bench.svg import Bar, bars
from tieredckpt.bench.workloads import workload_named
from tieredckpt.units import format_duration, format_rate, format_size

__all__ = ["figure", "render"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --own: #0969da; --other: #8c959f;
  --page: #ffffff; --bad: #cf222e; --good: #1a7f37 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --own: #4493f8;
  --other: #656c76; --page: #0d1117; --bad: #f85149; --good: #3fb950 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
p.soft, td.soft { color: var(--soft) }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
td.number, th.number { text-align: right; white-space: nowrap }
td.missed, td.worse, td.no { color: var(--bad); font-weight: 600 } td.met, td.better { color: var(--good) }
svg { width: 100%; max-width: 760px; display: block; margin: 1rem 0 }
svg text { font-size: 12px; fill: var(--ink) } svg .title { font-weight: 600; font-size: 13px }
svg .label { text-anchor: end } svg .value { fill: var(--soft) } svg rect { opacity: .45 } svg rect.first { opacity: 1 }
svg rect.own { fill: var(--own) } svg rect.other { fill: var(--other) }
svg line.mark { stroke: var(--bad); stroke-dasharray: 3 3 }
svg text.mark { fill: var(--bad); text-anchor: middle; font-size: 11px }
"""


def render(report: Report, before: Report | None = None) -> str:
    """The page; with what changed since ``before``."""
    sections = [
        f"<h1>tieredckpt bench, {format_size(report.size)}</h1>",
        f'<p class="soft">{escape(_conditions(report))}</p>',
        "<h2>Against this machine's limits</h2>",
        _table(("what", "key", "is", "aim", ""), [_aim_cells(report, aim) for aim in AIMS], numbers=(2, 3)),
        _limits(report),
    ]
    if before is not None:
        sections += _changes(before, report)
    for workload, rows in report.rows.items():
        sections += _workload(report, workload, rows)
    sections += _absent(report)
    title = f"tieredckpt bench, {format_size(report.size)}, {report.begun}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        + "\n".join(sections)
        + "</body></html>\n"
    )


def figure(value: float | None, unit: str) -> str:
    """A figure of `AIMS` for people; empty for None."""
    if value is None:
        return ""
    if unit == "s":
        return format_duration(value)
    if unit == "us":
        return format_duration(value / 1e6)
    if unit == "bytes":
        return format_size(int(value))
    return f"{value:.3g}"


def _conditions(report: Report) -> str:
    machine = report.machine
    packages = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        f"{report.begun}; {machine['processor']}, {machine['cores']} cores, {format_size(int(machine['memory']))} of "
        f"memory, {machine['system']}, {machine['file_system']} on {machine['device']}; Python {machine['python']}, "
        f"native code: {machine['native']}; {packages}. Medians of {report.rounds} rounds of {report.repeats} "
        f"repetitions, interleaved; {format_duration(report.took_s)} in all."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]], numbers: Sequence[int]) -> str:
    """Cells are text and class; those of the columns in ``numbers`` are aligned to the right."""

    def cell(tag: str, column: int, text: str, kind: str = "") -> str:
        kinds = " ".join(filter(None, (kind, "number" if column in numbers else "")))
        return f'<{tag} class="{kinds}">{escape(text)}</{tag}>'

    lines = ["".join(cell("th", column, text) for column, text in enumerate(head))]
    lines += ["".join(cell("td", column, *each) for column, each in enumerate(row)) for row in rows]
    return '<div class="wide"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _aim_cells(report: Report, aim: Aim) -> list[tuple[str, str]]:
    value = report.ratios.get(aim.key)
    if value is None or aim.most is None:
        verdict = ("not measured" if value is None else "", "soft")
    else:
        verdict = ("met", "met") if value <= aim.most else ("missed", "missed")
    shown = figure(value, aim.unit), figure(aim.most, aim.unit)
    return [(aim.about, ""), (aim.key, "soft"), (shown[0], ""), (shown[1], "soft"), verdict]


def _limits(report: Report) -> str:
    rows = [
        [(name.replace("_", " "), ""), (f"{took:.3f} s", ""), (format_rate(report.size / took), "")]
        for name, took in report.limits.items()
    ]
    return _table(("limit", "for the state", "speed"), rows, numbers=(1, 2))


def _changes(before: Report, report: Report) -> list[str]:
    rows = [
        [
            (change.key, ""),
            ("" if change.before is None else f"{change.before:.4g}", "soft"),
            ("" if change.now is None else f"{change.now:.4g}", ""),
            (change.verdict, change.verdict),
        ]
        for change in compare(before, report)
    ]
    reasons = [f"<p>Not comparable: {escape(reason)}.</p>" for reason in unlike(before, report)]
    head = f"<h2>Since {escape(before.begun)}</h2>"
    return [head, *reasons, _table(("figure", "was", "is", ""), rows, numbers=(1, 2))]


def _workload(report: Report, name: str, rows: Sequence[Row]) -> list[str]:
    arrays, nbytes = rows[0].arrays, rows[0].nbytes
    about = f"{workload_named(name).about}. {arrays} arrays, {format_size(nbytes)}."
    full = any(row.tenth_stall_s is not None for row in rows)
    marks = {}
    if full and report.limits:
        marks = {"memcpy": report.limits.get("memcpy", 0.0), "direct write": report.limits.get("direct_write", 0.0)}
    sections = [
        f"<h2>{escape(name)}</h2>",
        f"<p>{escape(about)}</p>",
        _saves("a save: stall (dark), and until it is durable", rows, marks),
    ]
    pictures: list[tuple[str, Callable[[Row], float | None], str, dict[str, float]]] = [
        ("bytes written after a tenth changed, over the state", lambda row: row.tenth_written_ratio, "", {}),
        (
            "restore from cold files, by the better way of each",
            _cold,
            "s",
            {"direct read": report.limits["direct_read"]} if full and "direct_read" in report.limits else {},
        ),
        ("memory of saves beyond the state, over the state", lambda row: row.peak_save_ratio, "", {}),
        ("what a compute loop loses for each GB written behind", lambda row: row.interference, "s", {}),
    ]
    for title, value_of, unit, lines in pictures:
        drawn = [
            Bar(row.peer, value, figure(value, unit), own=_own(row))
            for row in rows
            if (value := value_of(row)) is not None
        ]
        if drawn:
            sections.append(bars(title, drawn, lines))
    return [*sections, _figures(rows), _ways(rows)]


def _own(row: Row) -> bool:
    return row.peer.startswith(OURS)


def _saves(title: str, rows: Sequence[Row], marks: dict[str, float]) -> str:
    drawn = [
        Bar(
            row.peer,
            row.durable_s,
            f"{figure(row.stall_s, 's')}, {figure(row.durable_s, 's')}",
            first=row.stall_s,
            own=_own(row),
        )
        for row in rows
        if row.stall_s is not None and row.durable_s is not None
    ]
    return bars(title, drawn, marks)


def _cold(row: Row) -> float | None:
    found = [each for each in (row.restore_cold_existing_s, row.restore_cold_new_s) if each is not None]
    return min(found, default=None)


_COLUMNS: tuple[tuple[str, Callable[[Row], float | None], str], ...] = (
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


def _figures(rows: Sequence[Row]) -> str:
    columns = [each for each in _COLUMNS if any(each[1](row) is not None for row in rows)]
    body = [[(row.peer, ""), *((figure(value(row), unit), "") for _, value, unit in columns)] for row in rows]
    return _table(("", *(name for name, _, _ in columns)), body, numbers=range(1, len(columns) + 1))


def _ways(rows: Sequence[Row]) -> str:
    body = [
        [
            (row.peer, ""),
            (row.way, ""),
            (row.capture, ""),
            (row.durability, ""),
            ("yes", "") if row.snapshot else ("no: its bytes follow the training", "no"),
        ]
        for row in rows
    ]
    return _table(("", "called", "captures by", "durable means", "a snapshot"), body, numbers=())


def _absent(report: Report) -> list[str]:
    lines = [f"<li>{escape(name)} was not measured: {escape(why)}</li>" for name, why in report.missing.items()]
    lines += [f"<li>{escape(what)} failed: {escape(why)}</li>" for what, why in report.failed.items()]
    return ["<h2>Missing</h2><ul>" + "".join(lines) + "</ul>"] if lines else []
