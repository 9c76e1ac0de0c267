"""Chooses the lossy rule of an array, and the bound within which its values may be rounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tieredckpt.config.lossy import LossyRule
from tieredckpt.format.derivation import Rule
from tieredckpt.format.rounding import Bound, can_round
from tieredckpt.tree.select import choose

__all__ = ["as_recorded", "first_rules", "rounding_of"]


def as_recorded(rules: Iterable[LossyRule]) -> tuple[Rule, ...]:
    """The rules of a tier as a derived step has them."""
    return tuple(
        Rule(keys=each.keys, max_error=each.max_error, max_abs_error=each.max_abs_error, drop=each.drop)
        for each in rules
    )


def first_rules(rules: Sequence[Rule], keys: Sequence[str]) -> dict[str, int]:
    """For each key, the number of the first rule that chooses it; keys that no rule chooses are left out."""
    first: dict[str, int] = {}
    for number, rule in enumerate(rules):
        for _, chosen in choose(rule.keys, keys):
            for key in chosen:
                first.setdefault(key, number)
    return first


def rounding_of(rule: Rule, key: str, axes: int, dtype: np.dtype[Any]) -> Bound | None:
    """The bound that a rule sets for an array; None if the array is dropped, or stays exact."""
    if rule.bound is None or not can_round(dtype):
        return None
    # Biases and norms are few and matter: only a rule that has their very key rounds them.
    return None if axes < 2 and key not in rule.keys else rule.bound
