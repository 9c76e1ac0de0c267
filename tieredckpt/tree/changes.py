"""Detects whether an array has changed since it was seen, and keeps references to arrays until they change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import numpy as np

from tieredckpt.devices.base import DeviceArray
from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["Identity", "before_each_step", "held", "stamp", "version"]


def version(leaf: ArrayLeaf) -> int | None:
    """Version counter, which grows with every change of the array through its framework; None where it keeps none."""
    if leaf.kind == "torch":
        from tieredckpt.tree import torch_leaves

        return torch_leaves.version(leaf)
    return leaf.source.version if isinstance(leaf.source, DeviceArray) else None


def held(leaf: ArrayLeaf) -> ArrayLeaf:
    """A leaf that keeps the array's present memory, even if the program gives the array other memory later.

    ``parameter.data = other`` does that, and no version counter shows it.
    """
    if leaf.kind != "torch":
        return leaf
    from tieredckpt.tree import torch_leaves

    return torch_leaves.held(leaf)


def before_each_step(leaves: Iterable[ArrayLeaf], call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` before each step of any torch optimizer, if ``leaves`` has torch tensors.

    Returns a function that stops these calls.
    """
    if not any(leaf.kind == "torch" for leaf in leaves):
        return lambda: None
    from tieredckpt.tree import torch_steps

    return torch_steps.before_each_step(call)


def stamp(leaf: ArrayLeaf) -> object:
    """Address and version of a mutable array; None where they are not known.

    Another stamp means that the array may have changed, or that another array took its freed memory. The same stamp
    proves nothing: NumPy counts no versions, and torch counts no writes through ``.data`` or through memory that it
    shares with others.
    """
    if leaf.kind == "torch":
        from tieredckpt.tree import torch_leaves

        return torch_leaves.stamp(leaf)
    if isinstance(view := leaf.source, np.ndarray):
        owner = view
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        address, _ = view.__array_interface__["data"]  # in half the time of `view.ctypes.data`
        return Identity(owner), address, view.strides, view.shape, view.dtype
    return None


class Identity:
    """Identity of an object while it lives; unlike `id`, never that of a later object at the same address."""

    __slots__ = ("_of",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, of: object) -> None:
        self._of = weakref.ref(of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and (found := self._of()) is not None and found is other._of()
