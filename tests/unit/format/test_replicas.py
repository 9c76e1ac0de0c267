"""Whose bytes differ from the rest is named; where no value is that of most, all are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.format.layout import block_key
from tieredckpt.format.replicas import Difference, differences, show_difference

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


def ranks_of(*digests: list[bytes]) -> list[tuple[int, ...]]:
    return [found.ranks for found in differences({"w": dict(enumerate(digests))})]


def test_the_minority_of_each_chunk_is_named() -> None:
    assert ranks_of([A, B], [A, B], [A, B]) == []
    assert ranks_of([A, B], [A, C], [A, B]) == [(1,)]
    assert ranks_of([A, B], [A, C], [B, B], [A, B]) == [(1, 2)]
    assert ranks_of([A], [B]) == [(0, 1)]
    assert ranks_of([A], [A], [B], [B]) == [(0, 1, 2, 3)]
    assert ranks_of([A], [A], [B], [C]) == [(0, 1, 2, 3)]
    assert ranks_of([A], [], [A]) == [(1,)]


def test_arrays_of_the_same_ranks_are_one_difference_and_blocks_count_as_their_array() -> None:
    odd = {0: [A], 1: [B], 2: [A]}
    blocks = {block_key("layer", (start, 0)): odd for start in (0, 4)}
    found = differences({**blocks, "bias": odd, "even": {0: [A], 1: [A]}, "z": {0: [A], 1: [B]}})
    assert found == [Difference("bias", (1,), 3, 1), Difference("z", (0, 1), 2)]
    assert differences({"v": odd, block_key("a", (0,)): odd}) == [Difference("a", (1,), 3, 1)]
    assert (
        show_difference(found[0]) == "array 'bias' (and 1 more) is not the same on rank 1 as on most of the 3 ranks "
        "that have it"
    )
    assert show_difference(found[1]) == "array 'z' is not the same on ranks 0, 1"


@given(st.lists(st.lists(st.sampled_from([A, B, C]), min_size=2, max_size=2), min_size=2, max_size=7))
def test_who_agrees_with_most_in_everything_is_never_named_alone(digests: list[list[bytes]]) -> None:
    for ranks in ranks_of(*digests):
        for rank in set(range(len(digests))) - set(ranks):
            for values in zip(*digests, strict=True):
                assert 2 * values.count(values[rank]) > len(digests)
