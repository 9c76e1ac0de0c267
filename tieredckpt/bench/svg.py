"""Bars as inline SVG: a row for each thing, with the part that matters first drawn darker, and marks for limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "bars"]

_WIDTH = 720
_LABEL = 170
_VALUE = 130
_ROW = 24
_TOP = 34


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: a value of at least 0, and the part of it that comes first."""

    label: str
    value: float
    text: str
    first: float = 0.0
    own: bool = False
    """Whether it is this library's."""


def bars(title: str, rows: Sequence[Bar], marks: Mapping[str, float] = {}) -> str:
    """A picture of ``rows`` on one scale from 0 on; ``marks`` are vertical lines with their names."""
    top = max([row.value for row in rows] + list(marks.values()) + [1e-12])
    scale = (_WIDTH - _LABEL - _VALUE) / top
    height = _TOP + _ROW * len(rows) + (22 if marks else 6)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text x="0" y="18" class="title">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        kind = "own" if row.own else "other"
        parts += [
            f'<text x="{_LABEL - 8}" y="{y + 15}" class="label">{escape(row.label)}</text>',
            f'<rect x="{_LABEL}" y="{y + 3}" width="{row.value * scale:.1f}" height="{_ROW - 7}" class="{kind}"/>',
        ]
        if row.first:
            parts.append(
                f'<rect x="{_LABEL}" y="{y + 3}" width="{row.first * scale:.1f}" height="{_ROW - 7}" '
                f'class="{kind} first"/>'
            )
        parts.append(
            f'<text x="{_LABEL + row.value * scale + 6:.1f}" y="{y + 15}" class="value">{escape(row.text)}</text>'
        )
    for name, value in marks.items():
        x = _LABEL + value * scale
        end = _TOP + _ROW * len(rows)
        parts += [
            f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{end}" class="mark"/>',
            f'<text x="{x:.1f}" y="{end + 14}" class="mark">{escape(name)}</text>',
        ]
    return "".join([*parts, "</svg>"])
