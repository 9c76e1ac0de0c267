"""Sizes in bytes, rates in bytes a second and durations in seconds, as people write them.

Binary units (KiB, MiB, GiB, TiB, PiB) are powers of 1024, decimal ones (KB, MB, GB, TB, PB) powers of 1000.
`Size`, `Rate` and `Duration` are field types for pydantic models: they hold plain numbers, take text as
well, and are dumped to JSON as text wherever the text says exactly the same number.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from tieredckpt.errors import Invalid

__all__ = [
    "Duration",
    "Rate",
    "Size",
    "format_duration",
    "format_rate",
    "format_size",
    "parse_duration",
    "parse_rate",
    "parse_size",
]

_SIZES = {"": 1, "B": 1, "bytes": 1, "kB": 1000}
for _power, _letter in enumerate("KMGTP", start=1):
    _SIZES[f"{_letter}iB"] = 1024**_power
    _SIZES[f"{_letter}B"] = 1000**_power

_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_SIZE_LIMIT = 2**62
"""4096 PiB: sums of two sizes still fit the signed 64-bit offsets of files."""

_DURATION_LIMIT = 1000 * 366 * 86400.0
"""A millennium; beyond it somebody mistook the unit."""

_TEXT_LIMIT = 80
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse_size(value: object) -> int:
    """Bytes of an int, or of text such as ``"64 MiB"``, ``"1.5GB"``, ``"4096"``.

    A fraction of a byte is dropped. Raises `Invalid` for anything else, and outside 0 to 4096 PiB.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip()) if len(value) <= _TEXT_LIMIT else None
        if match is None:
            raise Invalid(f"{_short(value)} is not a size; write for example '64 MiB' or '1.5 GB'")
        number, unit = match.groups()
        if unit not in _SIZES:
            raise Invalid(f"{_short(value)} is not a size: {_unknown_unit(unit)}")
        nbytes = int(Decimal(number) * _SIZES[unit])
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        raise Invalid(f"{_short(value)} is not a size; write whole bytes, or text such as '64 MiB'")
    if not 0 <= nbytes <= _SIZE_LIMIT:
        raise Invalid(f"{_short(value)} is not a size: it must be from 0 to 4096 PiB")
    return nbytes


def parse_rate(value: object) -> int:
    """Bytes a second of an int, or of text such as ``"200 MB/s"`` or ``"1 GiB"``; raises `Invalid`."""
    if isinstance(value, str):
        value = value.strip().removesuffix("/s")
    return parse_size(value)


def parse_duration(value: object) -> float:
    """Seconds of a number, or of text such as ``"15 min"``, ``"500 ms"``, ``"1h30m"``.

    Units are us, ms, s, min (or m), h and d; several stand from the largest to the smallest. Raises `Invalid`
    for anything else, for numbers that are negative or not finite, and beyond a thousand years.
    """
    if isinstance(value, str):
        seconds: float = _parse_parts(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    else:
        raise Invalid(f"{_short(value)} is not a duration; write seconds, or text such as '15 min'")
    if not 0 <= seconds <= _DURATION_LIMIT:
        raise Invalid(f"{_short(value)} is not a duration: it must be from 0 s to a thousand years")
    return float(seconds)


def format_size(nbytes: int) -> str:
    """``nbytes`` for people, in binary units, rounded to three digits: ``"16 MiB"``, ``"1.5 GiB"``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if round(value) < 1024:
            return f"{_three_digits(value)} {unit}"
    return f"{_three_digits(value / 1024)} PiB"


def format_rate(rate: float) -> str:
    """Bytes a second for people: ``"1.5 GiB/s"``."""
    return f"{format_size(round(rate))}/s"


def format_duration(seconds: float) -> str:
    """``seconds`` for people, in the two largest units: ``"500 ms"``, ``"12.5 s"``, ``"1 h 30 min"``."""
    if seconds < 1e-9:
        return "0 s"
    for unit, limit in (("us", 1e-3), ("ms", 1.0), ("s", 60.0)):
        if seconds < limit:
            return f"{_three_digits(seconds / _DURATIONS[unit])} {unit}"
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    first = next(i for i, (_, length) in enumerate(units) if seconds >= length)
    finest = units[min(first + 1, len(units) - 1)][1]
    rest = round(seconds / finest) * finest
    parts = []
    for unit, length in units:
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts)


def _parse_parts(text: str) -> float:
    wrong = f"{_short(text)} is not a duration; write for example '30 s', '15 min' or '1h30m'"
    rest = text.strip()
    if not rest or len(text) > _TEXT_LIMIT:
        raise Invalid(wrong)
    seconds, before = Decimal(0), math.inf
    while rest:
        match = _PART.match(rest)
        if match is None:
            raise Invalid(wrong)
        number, unit = match.groups()
        if unit not in _DURATIONS:
            raise Invalid(f"{_short(text)} is not a duration: the units are us, ms, s, min, h and d")
        if _DURATIONS[unit] >= before:
            raise Invalid(f"{_short(text)} is not a duration: units stand once, from the largest down")
        before = _DURATIONS[unit]
        seconds += Decimal(number) * Decimal(repr(before))
        rest = rest[match.end() :]
    return float(seconds)


def _unknown_unit(unit: str) -> str:
    if unit.upper() in "KMGTP":
        return f"write {unit.upper()}iB (powers of 1024) or {unit.upper()}B (powers of 1000)"
    for known in _SIZES:
        if known and known.casefold() == unit.casefold():
            return f"the unit is written {known}, not {unit}"
    return f"{unit} is no unit; use B, KiB, MiB, GiB, TiB, PiB, or KB, MB, GB, TB, PB"


def _three_digits(value: float) -> str:
    decimals = max(0, 2 - math.floor(math.log10(value)))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}…"


def _dump_size(nbytes: int) -> str | int:
    text = format_size(nbytes)
    if parse_size(text) == nbytes:
        return text
    for unit in ("PB", "TB", "GB", "MB", "KB"):
        if nbytes % _SIZES[unit] == 0:
            return f"{nbytes // _SIZES[unit]} {unit}"
    return nbytes


def _dump_rate(rate: int) -> str | int:
    size = _dump_size(rate)
    return f"{size}/s" if isinstance(size, str) else size


def _dump_duration(seconds: float) -> str | float:
    text = format_duration(seconds)
    return text if parse_duration(text) == seconds else seconds


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(_dump_size, when_used="json")]
"""Field type: bytes."""

Rate = Annotated[int, BeforeValidator(parse_rate), PlainSerializer(_dump_rate, when_used="json")]
"""Field type: bytes a second."""

Duration = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(_dump_duration, when_used="json")]
"""Field type: seconds."""
