"""Replicas lie where the loss of a few nodes leaves one of everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.engine.ranks.replicas.placement import copies_possible, place_nodes, place_ranks
from tieredckpt.errors import Invalid


def chance(placed: Sequence[tuple[int, ...]], lost: int) -> Fraction:
    """Of all sets of so many nodes, the share whose loss leaves a copy of what every node had."""
    count = len(placed)
    kept_by = [{node, *others} for node, others in enumerate(placed)]
    good = sum(not any(kept <= failed for kept in kept_by) for failed in map(set, combinations(range(count), lost)))
    return Fraction(good, comb(count, lost))


def of_the_paper(nodes: int, copies: int, lost: int) -> Fraction:
    """Gemini's corollary 1, where copies divide nodes: exact below twice the copies, a lower bound from there on."""
    if lost < copies:
        return Fraction(1)
    bad = Fraction(nodes // copies * comb(nodes - copies, lost - copies), comb(nodes, lost))
    return max(Fraction(0), 1 - bad)


@pytest.mark.parametrize(("nodes", "copies"), [(2, 2), (4, 2), (8, 2), (12, 2), (16, 2), (6, 3), (9, 3), (12, 4)])
def test_groups_recover_with_the_probability_of_the_paper(nodes: int, copies: int) -> None:
    placed = place_nodes(range(nodes), copies)
    for lost in range(min(nodes, 2 * copies + 1) + 1):
        if lost < 2 * copies:
            assert chance(placed, lost) == of_the_paper(nodes, copies, lost)
        else:
            assert chance(placed, lost) >= of_the_paper(nodes, copies, lost)


def test_the_figures_of_the_paper_for_sixteen_nodes_and_two_copies() -> None:
    placed = place_nodes(range(16), 2)
    assert round(float(chance(placed, 2)), 3) == 0.933
    assert round(float(chance(placed, 3)), 3) == 0.8


@pytest.mark.parametrize("copies", [2, 3])
def test_groups_lose_less_than_a_ring(copies: int) -> None:
    nodes = 4 * copies
    ring = [tuple((node + hop) % nodes for hop in range(1, copies)) for node in range(nodes)]
    assert chance(place_nodes(range(nodes), copies), copies) > chance(ring, copies)


@pytest.mark.parametrize(
    ("nodes", "copies"), [(3, 2), (5, 2), (7, 2), (11, 2), (5, 3), (7, 3), (8, 3), (11, 3), (7, 4)]
)
def test_nodes_that_copies_do_not_divide_are_near_the_best(nodes: int, copies: int) -> None:
    """Theorem 1 bounds the distance to the best placement by (2m - 3) / C(N, m) at the loss of m nodes.

    At best each set of nodes that keeps something serves m nodes, so that there are at least N / m of them.
    """
    best = 1 - Fraction(-(-nodes // copies), comb(nodes, copies))
    found = chance(place_nodes(range(nodes), copies), copies)
    assert best - Fraction(2 * copies - 3, comb(nodes, copies)) <= found <= best


@given(st.integers(1, 40), st.integers(1, 5))
def test_fewer_losses_than_copies_lose_nothing_and_loads_are_even(nodes: int, copies: int) -> None:
    copies = copies_possible(range(nodes), copies)
    placed = place_nodes(range(nodes), copies)
    for node, others in enumerate(placed):
        assert len({node, *others}) == copies
    load = Counter(other for others in placed for other in others)
    assert all(load[node] == copies - 1 for node in range(nodes))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 4))
def test_no_two_copies_share_a_rack(racks: list[int], copies: int) -> None:
    copies = copies_possible(racks, copies)
    for node, others in enumerate(place_nodes(racks, copies)):
        assert len({racks[each] for each in (node, *others)}) == copies


@given(st.integers(2, 4), st.integers(1, 6), st.integers(0, 3), st.randoms(use_true_random=False))
def test_even_racks_keep_loads_even(copies: int, height: int, more: int, random: object) -> None:
    racks = [rack for rack in range(copies + more) for _ in range(height)]
    random.shuffle(racks)
    load = Counter(other for others in place_nodes(racks, copies) for other in others)
    assert all(load[node] == copies - 1 for node in range(len(racks)))


def test_a_rack_that_is_much_larger_spreads_its_copies_over_the_others() -> None:
    placed = place_nodes(["a"] * 6 + ["b"] * 2, 2)
    load = Counter(other for others in placed for other in others)
    assert load[6] == load[7] == 3


def test_too_few_racks_are_refused_with_the_numbers() -> None:
    with pytest.raises(Invalid, match=r"3 copies .* 4 nodes stand in 2"):
        place_nodes(["a", "a", "b", "b"], 3)
    assert copies_possible(["a", "a", "b", "b"], 3) == 2
    assert copies_possible([], 3) == 1


@given(st.lists(st.sampled_from("abcdef"), max_size=24), st.integers(1, 4), st.booleans())
def test_copies_of_ranks_lie_on_other_nodes_and_racks(nodes: list[str], copies: int, racked: bool) -> None:
    racks = {"a": "1", "b": "1", "c": "2", "d": "2", "e": "3", "f": "3"} if racked else None
    placed = place_ranks(nodes, copies, racks)
    assert len(placed) == len(nodes)
    far = racks or {node: node for node in nodes}
    possible = copies_possible([far[node] for node in set(nodes)], copies)
    for rank, others in enumerate(placed):
        assert len({far[nodes[each]] for each in (rank, *others)}) == possible


@given(st.integers(1, 8), st.integers(2, 8), st.integers(2, 3))
def test_equal_nodes_give_every_rank_as_much_to_keep(width: int, count: int, copies: int) -> None:
    nodes = [f"n{rank // width}" for rank in range(width * count)]
    load = Counter(other for others in place_ranks(nodes, copies) for other in others)
    assert len(set(load.values())) == 1
    assert len(load) == len(nodes)
