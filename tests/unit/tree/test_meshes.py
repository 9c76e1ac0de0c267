"""The cuts of device meshes: what PyTorch gives each process, item by item."""

from __future__ import annotations

from itertools import pairwise, product
from math import gcd

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.tree.meshes import Cut, common_step, spans


def chunk(items: np.ndarray, parts: int) -> list[np.ndarray]:
    """As ``torch.chunk`` divides, with empty ones for the parts that get nothing."""
    size = -(-len(items) // parts) or 1
    return [items[i * size : (i + 1) * size] for i in range(parts)]


def items_of(length: int, cuts: list[Cut], coordinates: tuple[int, ...]) -> list[int]:
    items = np.arange(length)
    for cut, i in zip(cuts, coordinates, strict=True):
        items = np.concatenate([chunk(part, cut.parts)[i] for part in chunk(items, cut.stride)])
    return items.tolist()


CUTS = st.lists(st.builds(Cut, st.integers(1, 5), st.integers(1, 4)), max_size=3)


@given(length=st.integers(0, 60), cuts=CUTS)
def test_the_spans_of_all_processes_are_what_torch_gives_them(length: int, cuts: list[Cut]) -> None:
    everything = []
    for coordinates in product(*(range(cut.parts) for cut in cuts)):
        found = spans(length, cuts, coordinates)
        mine = [item for span in found for item in range(span.start, span.start + span.size)]
        assert mine == items_of(length, cuts, coordinates)
        assert all(a.start + a.size != b.start for a, b in pairwise(found))
        everything += mine
    assert sorted(everything) == list(range(length))


@given(length=st.integers(0, 60), cuts=CUTS)
def test_the_common_step_divides_every_boundary_and_nothing_larger_does(length: int, cuts: list[Cut]) -> None:
    boundaries = {0}
    for coordinates in product(*(range(cut.parts) for cut in cuts)):
        for span in spans(length, cuts, coordinates):
            boundaries |= {span.start, span.start + span.size}
    boundaries -= {0, length}
    expected = gcd(*boundaries) if boundaries else max(1, length)
    assert common_step(length, tuple(cuts)) == expected


def test_the_common_step_of_an_even_cut_is_its_shard() -> None:
    assert common_step(1 << 20, (Cut(64), Cut(16))) == 1024
    assert common_step(10, (Cut(4),)) == 3
