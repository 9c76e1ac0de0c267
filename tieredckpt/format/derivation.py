"""The record of how a derived step was made: its exact step, the rules, and the errors."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tieredckpt.errors import Invalid
from tieredckpt.format.rounding import Bound

__all__ = ["Derivation", "Rounded", "Rule"]

_Bound = Annotated[float, msgspec.Meta(gt=0.0)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rule for the arrays that its keys choose; exactly one of the other three fields is set."""

    keys: tuple[str, ...]
    max_error: _Bound | None = None
    """Largest relative error of a value."""
    max_abs_error: _Bound | None = None
    """Largest absolute error of a value."""
    drop: bool = False

    @property
    def bound(self) -> Bound | None:
        """The bound on errors; None for arrays that are dropped. Raises `Invalid` for an impossible bound."""
        if self.max_error is not None:
            return Bound(self.max_error)
        return None if self.max_abs_error is None else Bound(self.max_abs_error, absolute=True)

    @property
    def rounds(self) -> bool:
        """Whether the rule has exactly one bound, a valid one, and nothing else."""
        if self.drop or (self.max_error is None) == (self.max_abs_error is None):
            return False
        try:
            return self.bound is not None
        except Invalid:
            return False


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """An array, or a block of one, whose values were rounded."""

    rule: _Count
    """Position in `Derivation.rules`."""
    worst: Annotated[float, msgspec.Meta(ge=0.0)]
    """The largest error found, relative or absolute as the rule is; a relative one rounded up by less than twice."""
    exact_chunks: _Count = 0
    """Chunks that were kept exact, since rounding would exceed the bound for one of their values."""


class Derivation(msgspec.Struct, frozen=True, kw_only=True):
    """How a derived step was made. Its step and serial are those of the exact one."""

    chunks: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """Digest of the digests of all chunks of the exact step, as its index has them."""
    rules: tuple[Rule, ...]
    arrays: dict[str, Rounded]
    """By storage key; arrays that are not listed are exact."""
    dropped: tuple[str, ...] = ()
    """Keys of the arrays that are left out."""

    def __post_init__(self) -> None:
        rules = self.rules
        if not all(each.rule < len(rules) and rules[each.rule].rounds for each in self.arrays.values()):
            raise ValueError("an array of a derived step is of none of its rules that round")
