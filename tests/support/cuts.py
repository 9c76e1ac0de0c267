"""Ways in which ranks cut an array: regular meshes, short last blocks, and cuts at any place."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import strategies as st

from tieredckpt.format.boxes import Box

__all__ = ["boxes_between", "cuts", "meshes"]


def boxes_between(bounds: list[list[int]]) -> list[Box]:
    """The boxes of a cut at ``bounds`` of each axis, its ends included."""
    spans = [list(pairwise(axis)) for axis in bounds]
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*spans)]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it, cut at any places."""
    axes = draw(st.integers(1, 3))
    bounds = []
    for _ in range(axes):
        full = draw(st.integers(1, 12))
        inner = draw(st.sets(st.integers(1, full - 1), max_size=3)) if full > 1 else set()
        bounds.append([0, *sorted(inner), full])
    return tuple(axis[-1] for axis in bounds), boxes_between(bounds)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Box]]:
    """A shape, the shape of a full block, and the boxes of a mesh whose last blocks may be shorter."""
    axes = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 24)) for _ in range(axes))
    ranks = tuple(draw(st.integers(1, 4)) for _ in range(axes))
    cut = tuple(-(-full // n) for full, n in zip(shape, ranks, strict=True))
    bounds = [[*range(0, full, part), full] for full, part in zip(shape, cut, strict=True)]
    return shape, cut, boxes_between(bounds)
