"""How the small objects of one type are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Codec"]


@dataclass(frozen=True, slots=True)
class Codec:
    """How the objects of one type are stored."""

    of: str
    """The name of the type in the format."""
    parts: Callable[[Any], object]
    """Gives the parts of an object; raises `ValueError` or `TypeError` for one that cannot be stored."""
    make: Callable[[Any], Any]
    """Makes the object of its parts; for malformed parts it raises any error except those of the system."""
