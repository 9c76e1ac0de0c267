"""The device streams and mesh that are current on the thread that calls a store; its work runs on other threads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from tieredckpt.devices.drivers import current_streams

if TYPE_CHECKING:
    from tieredckpt.devices.base import Device, Stream

__all__ = ["Current", "current"]


class Current(NamedTuple):
    """Current streams and mesh of the caller."""

    streams: Mapping[Device, Stream]
    mesh: Any
    """The mesh of `jax.set_mesh`, which gives the shardings of abstract meshes their devices; None without one."""


def current() -> Current:
    """The current streams and mesh of the calling thread."""
    return Current(current_streams(), _mesh())


def _mesh() -> Any:
    """The mesh of `jax.set_mesh` on the calling thread; None without one. Imports nothing."""
    get_mesh = getattr(getattr(sys.modules.get("jax"), "sharding", None), "get_mesh", None)
    if get_mesh is None:
        return None
    with suppress(ValueError):  # inside of jit, where there is nothing to restore
        mesh = get_mesh()
        return None if mesh.empty else mesh
    return None
