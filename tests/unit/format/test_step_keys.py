"""What is kept of the trees that are saved now: as many as there is memory for, whatever the size of one."""

from __future__ import annotations

import tracemalloc

import pytest

from tieredckpt.format import step_keys
from tieredckpt.format.grid import Grid
from tieredckpt.format.step_keys import Entries, entries_of


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_keys, "_kept", [])


def tree(name: str, arrays: int = 1, chunks: int = 1) -> tuple[tuple[str, ...], tuple[Grid, ...], int]:
    return tuple(f"{name}/{i}" for i in range(arrays)), (Grid((chunks,), (1,), 1),) * arrays, 1


def test_entries_are_kept_as_far_as_their_bytes_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_keys, "_KEPT_BYTES", Entries(*tree("many", chunks=100)).nbytes)
    for chunks, kept in ((100, True), (101, False)):
        asked = tree("many", chunks=chunks)
        assert (entries_of(*asked) is entries_of(*asked)) == kept


def test_entries_of_more_than_a_hundred_thousand_leaves_are_kept() -> None:
    asked = tree("leaf", arrays=120_000)
    assert entries_of(*asked) is entries_of(*asked)


def test_trees_that_are_saved_in_turns_are_all_kept_and_the_one_not_used_for_longest_goes() -> None:
    first, *others = (tree(f"tree{i}") for i in range(step_keys._KEPT_TREES))
    made = [entries_of(*asked) for asked in (first, *others)]
    assert [entries_of(*asked) for asked in (*others, first)] == [*made[1:], made[0]]
    entries_of(*tree("one more"))
    assert entries_of(*first) is made[0]
    assert entries_of(*others[0]) is not made[1]


@pytest.mark.parametrize("asked", [tree("leaf", arrays=5000), tree("chunked", chunks=10_000)], ids=["arrays", "chunks"])
def test_the_bytes_of_entries_are_about_those_that_they_take(
    asked: tuple[tuple[str, ...], tuple[Grid, ...], int],
) -> None:
    tracemalloc.start()
    entries = Entries(*asked)
    entries.keys.columns([(0, len(entries.keys.all))])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 2 < entries.nbytes < 2 * taken
