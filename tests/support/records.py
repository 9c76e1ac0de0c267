"""Records of steps, for tests that make steps without a store."""

from __future__ import annotations

import uuid
from typing import Any

from tieredckpt.format.manifest import StepRecord
from tieredckpt.format.structure import Node

__all__ = ["first_record"]


def first_record(structure: Node | None, **changes: Any) -> StepRecord:
    """The record of a store's first step, with nothing in it but that tree and the ``changes``."""
    fields: dict[str, Any] = {
        "store": str(uuid.UUID(int=1)),
        "step": 1,
        "serial": 1,
        "line": ((1, 1),),
        "restored_from": None,
        "saved_at": 0.0,
        "nbytes": 0,
        "metrics": {},
        "provenance": {},
        "policy": {},
        "structure": structure,
    }
    return StepRecord(**fields | changes)
