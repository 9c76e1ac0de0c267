"""Folders of Orbax: imports a whole training, and exports steps."""

from __future__ import annotations

from tieredckpt.interchange.base import Format
from tieredckpt.interchange.orbax_folders import locate, metrics_of
from tieredckpt.interchange.orbax_read import read
from tieredckpt.interchange.orbax_write import read_back, write

__all__ = ["ORBAX"]

ORBAX = Format(
    read=read,
    write=write,
    read_back=read_back,
    options=frozenset({"copy"}),
    values=True,
    locate=locate,
    metrics=metrics_of,
)
