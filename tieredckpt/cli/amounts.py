"""Parse sizes, rates and durations of the command line: errors name the option.

A unit is required: ``nvme=2`` rarely means two bytes a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from tieredckpt.errors import Invalid
from tieredckpt.units import parse_duration, parse_rate, parse_size

__all__ = ["duration", "rate", "size"]

T = TypeVar("T")


def size(option: str, text: str) -> int:
    """Bytes of the value of an option. Raises `Invalid`, for 0 and for a number without a unit as well."""
    if (number := _bare(text)) is not None:
        raise Invalid(f"{option}={text}: a size needs a unit; write '{number} GB', '{number} GiB' or '{number} B'")
    return _parsed(parse_size, option, text) or _refuse_zero(option)


def rate(option: str, text: str) -> int:
    """Bytes a second of the value of an option. Raises `Invalid`, for 0 and for a number without a unit as well."""
    if (number := _bare(text.strip().removesuffix("/s"))) is not None:
        raise Invalid(
            f"{option}={text}: a speed needs a unit; write '{number} GB/s', '{number} GiB/s' or '{number} B/s'"
        )
    return _parsed(parse_rate, option, text) or _refuse_zero(option)


def duration(option: str, text: str, *, or_zero: bool = False) -> float:
    """Seconds of the value of an option. Raises `Invalid`, for 0 as well unless it may be."""
    seconds = _parsed(parse_duration, option, text)
    return seconds if seconds or or_zero else _refuse_zero(option)


def _refuse_zero(option: str) -> NoReturn:
    raise Invalid(f"{option}: must be more than 0")


def _parsed(parse: Callable[[object], T], option: str, text: str) -> T:
    try:
        return parse(text)
    except Invalid as error:
        raise Invalid(f"{option}: {error}") from error


def _bare(text: str) -> str | None:
    """The number that ``text`` is, if it is nothing else; 0 needs no unit."""
    number = text.strip()
    return number if re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) and float(number) else None
