"""Copies of a tree's arrays near where they lie, so that the training may change or donate them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from tieredckpt.errors import Invalid
from tieredckpt.tree.arrays import device_view, host_view
from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["Memory", "copies"]

Memory = Literal["device", "pinned_host"]
"""JAX's names of memory: that of the device where an array lies, or host memory that the device copies to by itself."""


def copies(leaves: Sequence[ArrayLeaf], memory: Memory) -> tuple[ArrayLeaf, ...]:
    """``leaves`` with copies of everything that the training may change: jax arrays in ``memory``, NumPy's beside them.

    It returns before jax has made its copies; a computation to which the arrays are donated waits for the copies. Each
    array is copied once; of an array that several devices replicate, one replica is copied.

    Raises:
        Invalid: a leaf is a torch tensor or a `DeviceArray` (the message names it), or the devices have no such memory.
        NoSpace: the devices' memory is full.
    """
    others = (leaf.array for leaf in leaves if leaf.kind == "torch" or device_view(leaf) is not None)
    if names := list(dict.fromkeys(others)):
        raise Invalid(
            f"capture={memory!r} copies arrays of JAX and NumPy, and {', '.join(map(repr, names[:5]))} "
            f"({len(names)} in all) are PyTorch tensors or of a `DeviceArray`; use capture='copy'"
        )
    found = list(leaves)
    for i, leaf in enumerate(leaves):
        if leaf.kind == "numpy" and not leaf.immutable:
            found[i] = replace(leaf, source=host_view(leaf).copy(), part=None)
    of_jax = [i for i, leaf in enumerate(leaves) if leaf.kind in ("jax", "jax-key")]
    if of_jax:
        from tieredckpt.tree import jax_leaves

        sources = jax_leaves.copies([leaves[i] for i in of_jax], memory)
        for i, source in zip(of_jax, sources, strict=True):
            found[i] = replace(leaves[i], source=source)
    return tuple(found)
