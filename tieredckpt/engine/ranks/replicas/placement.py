"""Chooses where the replicas of each rank's part go: on other nodes and, where racks are named, in other racks.

Nodes form groups, and every node of a group keeps the parts of the whole group. With N nodes and m copies, the loss of
k nodes loses a part only if a whole group is lost, and fewer sets of k nodes contain a whole group than under any other
placement. If m does not divide N, one group has the remaining nodes as well and is a ring: the copies of a node lie on
the m - 1 nodes after it. Both are the placement of Gemini (Wang et al., "GEMINI: Fast Failure Recovery in Distributed
Training with In-Memory Checkpoints", SOSP 2023, algorithm 1, "mixed placement").
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence

from tieredckpt.errors import Invalid

__all__ = ["copies_possible", "place_nodes", "place_ranks"]


def copies_possible(racks: Sequence[Hashable], copies: int) -> int:
    """How many of ``copies`` can be kept when no two may share a rack; ``racks`` has that of every node."""
    return max(1, min(copies, len(set(racks))))


def place_nodes(racks: Sequence[Hashable], copies: int) -> list[tuple[int, ...]]:
    """The nodes that keep a copy of each node's parts.

    Args:
        racks: of each node, by its number; nodes of one rack never keep copies of each other. Where racks do not
            matter, each node is its own.
        copies: of every part, the node's own included.

    Returns:
        ``copies - 1`` nodes for each. Every node keeps as much for others as they keep for it, unless racks are so
        uneven that nothing but an uneven load keeps copies apart.

    Raises:
        Invalid: there are fewer racks than copies.
    """
    if copies < 1 or copies > len(set(racks)):
        raise Invalid(
            f"{copies} copies that may not share a rack need as many racks, and {len(racks)} nodes stand in "
            f"{len(set(racks))}; lower `replicas`, or name the racks more finely"
        )
    groups = _groups(racks, copies)
    if groups is None:
        return _least_loaded(racks, copies)
    placed: list[tuple[int, ...]] = [()] * len(racks)
    for group in groups:
        for position, node in enumerate(group):  # a group of just ``copies`` nodes is a ring, too
            placed[node] = tuple(group[(position + hop) % len(group)] for hop in range(1, copies))
    return placed


def place_ranks(
    nodes: Sequence[str], copies: int, racks: Mapping[str, str] | None = None
) -> tuple[tuple[int, ...], ...]:
    """The ranks on other nodes that keep a copy of each rank's part.

    Args:
        nodes: that each rank runs on, by rank.
        copies: of every part, the rank's own included; fewer where there are not enough nodes or racks.
        racks: of each node, if copies may not share a rack; None if they may.

    The ranks of one node spread their copies over the ranks of the other, so that no rank keeps more than its share.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    on = list(ranks_of.values())
    standing: list[Hashable] = [racks[node] if racks is not None else node for node in ranks_of]
    placed: list[tuple[int, ...]] = [()] * len(nodes)
    if nodes:
        for mine, others in zip(on, place_nodes(standing, copies_possible(standing, copies)), strict=True):
            for position, rank in enumerate(mine):
                placed[rank] = tuple(on[other][position % len(on[other])] for other in others)
    return tuple(placed)


def _groups(racks: Sequence[Hashable], copies: int) -> list[list[int]] | None:
    """Groups of at least ``copies`` nodes, no two of one rack; None if there are none.

    One group takes the remaining nodes; if that has too few racks, all groups share them.
    """
    count, rest = divmod(len(racks), copies)
    as_in_the_paper = [copies + rest] + [copies] * (count - 1)
    even = [len(racks) // count + (group < len(racks) % count) for group in range(count)]
    return _filled(racks, as_in_the_paper) or _filled(racks, even)


def _filled(racks: Sequence[Hashable], sizes: Sequence[int]) -> list[list[int]] | None:
    """Groups of these sizes, largest first, each filled from the racks that have the most nodes left.

    If that fails, no other way works: Gale and Ryser's condition on the sizes of rows and columns.
    """
    nodes_of: dict[Hashable, list[int]] = {}
    for node, rack in enumerate(racks):
        nodes_of.setdefault(rack, []).append(node)
    fullest = [(-len(nodes), nodes[0], nodes[::-1]) for nodes in nodes_of.values()]
    heapq.heapify(fullest)
    groups: list[list[int]] = []
    for size in sizes:
        if len(fullest) < size:
            return None
        taken = [heapq.heappop(fullest)[2] for _ in range(size)]
        groups.append(sorted(nodes.pop() for nodes in taken))
        for nodes in taken:
            if nodes:
                heapq.heappush(fullest, (-len(nodes), nodes[-1], nodes))
    return groups


def _least_loaded(racks: Sequence[Hashable], copies: int) -> list[tuple[int, ...]]:
    """Copies in other racks, each on the node that keeps the fewest by then."""
    load = [0] * len(racks)
    placed: list[tuple[int, ...]] = []
    for node, rack in enumerate(racks):
        taken = {rack}
        chosen: list[int] = []
        while len(chosen) < copies - 1:
            free = [other for other in range(len(racks)) if racks[other] not in taken]
            best = min(free, key=lambda other: (load[other], (other - node) % len(racks)))
            load[best] += 1
            taken.add(racks[best])
            chosen.append(best)
        placed.append(tuple(chosen))
    return placed
