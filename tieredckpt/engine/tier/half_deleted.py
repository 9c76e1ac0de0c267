"""A step whose deletion failed: it may be there or not, which shows when its tier works again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredckpt.errors import TierUnavailable

if TYPE_CHECKING:
    from tieredckpt.engine.tier.tier import Held

__all__ = ["IndeterminateDelete"]


class IndeterminateDelete(TierUnavailable):
    """Stands among the damaged steps of a tier, with the step as it was held."""

    def __init__(self, message: str, held: Held) -> None:
        super().__init__(message)
        self.held = held
