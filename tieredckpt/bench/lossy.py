"""What the lossy rules of a tier make of arrays: the error that is found, and the stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.bench.codecs import Chunks, larger, rounded
from tieredckpt.blobs.codecs import CODECS
from tieredckpt.config import TierConfig
from tieredckpt.engine.restoring.rules import as_recorded, first_rules, rounding_of
from tieredckpt.format.manifest import INLINE_MAX

__all__ = ["LossyTier", "RuleRow"]


@dataclass(slots=True)
class RuleRow:
    """One rule on the arrays that it means; the last row of a tier is of what no rule means."""

    tier: str
    keys: tuple[str, ...]
    says: str
    """``max_error=0.004``, ``max_abs_error=1e-06``, ``drop`` or ``exact``."""
    arrays: int = 0
    nbytes: int = 0
    stored: int = 0
    """With the tier's codec."""
    worst: float | None = None
    """The largest error found of a value, relative or absolute as the rule is; None if none was rounded."""


class LossyTier:
    """Rounds arrays as a tier with lossy rules does, one after the other."""

    def __init__(self, config: TierConfig, keys: Sequence[str], chunk_size: int, *, every: int = 1) -> None:
        """``keys`` are those of all arrays; of many chunks one in ``every`` is looked at."""
        self._rules, self._encoding = as_recorded(config.lossy), CODECS[config.codec]
        self._first = first_rules(self._rules, keys)
        self._chunks = Chunks(chunk_size, every)
        self._room = np.empty(self._encoding.stored_size(chunk_size), np.uint8)
        self.rows = [RuleRow(config.name, rule.keys, rule.says) for rule in config.lossy]
        self.rows.append(RuleRow(config.name, (), "exact"))

    def add(self, key: str, array: npt.NDArray[Any]) -> None:
        """Count an array in, by the first rule that means it."""
        number = self._first.get(key, -1)
        row = self.rows[number]
        row.arrays += 1
        rule = self._rules[number] if number >= 0 else None
        bound = None
        if rule is not None and array.nbytes > INLINE_MAX:
            bound = rounding_of(rule, key, array.ndim, array.dtype)
        for exact in self._chunks.of(array):
            chunk = exact
            row.nbytes += chunk.size
            if rule is not None and rule.drop:
                continue
            if bound is not None:
                chunk, worst = rounded(chunk, array.dtype, bound)
                row.worst = larger(row.worst, worst)
            row.stored += self._encoding.encode(chunk, chunk.size, array.itemsize, self._room).length
