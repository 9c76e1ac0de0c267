"""Parse sizes and rates of the command line. A unit is required: ``nvme=2`` rarely means two bytes a second."""

from __future__ import annotations

import re

from tieredckpt.errors import Invalid
from tieredckpt.units import parse_rate, parse_size

__all__ = ["rate", "size"]


def size(option: str, text: str) -> int:
    """Bytes of the value of an option. Raises `Invalid`, for a number without a unit as well."""
    if (number := _bare(text)) is not None:
        raise Invalid(f"{option}={text}: a size needs a unit; write '{number} GB', '{number} GiB' or '{number} B'")
    return parse_size(text)


def rate(option: str, text: str) -> int:
    """Bytes a second of the value of an option. Raises `Invalid`, for a number without a unit as well."""
    if (number := _bare(text.strip().removesuffix("/s"))) is not None:
        raise Invalid(
            f"{option}={text}: a speed needs a unit; write '{number} GB/s', '{number} GiB/s' or '{number} B/s'"
        )
    return parse_rate(text)


def _bare(text: str) -> str | None:
    """The number that ``text`` is, if it is nothing else; 0 needs no unit."""
    number = text.strip()
    return number if re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) and float(number) else None
