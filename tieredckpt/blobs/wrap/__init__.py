"""Wrappers that add a behaviour to a blob store; each takes a store, and is one.

From the outside in: ``Metered(Paced(Limited(Retrying(Deadline(store)))))``. Retries inside the meter count as one
operation. A deadline outside the limit would cover the waiting; inside, it covers only the work. `Below`, if used, is
next to the store.
"""

from __future__ import annotations

from tieredckpt.blobs.wrap.below import Below
from tieredckpt.blobs.wrap.deadline import Deadline, Overdue
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.blobs.wrap.limited import Limited
from tieredckpt.blobs.wrap.mapped import mapped
from tieredckpt.blobs.wrap.metered import Metered, Usage, VerbUsage
from tieredckpt.blobs.wrap.paced import Pace, Paced
from tieredckpt.blobs.wrap.retrying import Retrying

__all__ = [
    "Below",
    "Deadline",
    "Forward",
    "Limited",
    "Metered",
    "Operation",
    "Overdue",
    "Pace",
    "Paced",
    "Retrying",
    "Usage",
    "VerbUsage",
    "mapped",
]
