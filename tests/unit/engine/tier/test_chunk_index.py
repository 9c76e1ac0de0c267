"""`ChunkIndex` is a dict of extents by digest, whatever is done with it, and knows the packs besides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tieredckpt.engine.tier.chunk_index import ChunkIndex
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.pack import RECORD

PATHS = [f"packs/{i:02x}/{i:02x}{'0' * 30}.pack" for i in range(5)]

# Few digests, and halves of them that are equal, so that all ways to be alike occur.
digests = st.builds(
    lambda high, low: high.to_bytes(8, "big") + low.to_bytes(8, "big"),
    st.sampled_from([0, 1, 1 << 63, (1 << 64) - 1]),
    st.sampled_from([0, 7, 1 << 63, (1 << 64) - 1]),
)
extents = st.builds(Extent, st.sampled_from(PATHS), st.sampled_from([0, 4096, 1 << 40]), st.integers(1, 1 << 40))
entries = st.lists(st.tuples(digests, extents), max_size=12)


def as_footers(found: list[tuple[bytes, Extent]]) -> tuple[Any, Any]:
    """As `fill` takes them: counts by path and one table."""
    by_path = sorted(found, key=lambda entry: entry[1].path)
    table = np.empty(len(found), RECORD)
    for row, (digest, at) in enumerate(by_path):
        table[row] = (digest, at.offset, at.length)
    return np.array([sum(at.path == path for _, at in found) for path in PATHS]), table


class ChunkIndexMachine(RuleBasedStateMachine):
    """Does the same to both."""

    def __init__(self) -> None:
        super().__init__()
        self.known = ChunkIndex()
        self.model: dict[bytes, Extent] = {}

    @initialize(found=entries)
    def fill(self, found: list[tuple[bytes, Extent]]) -> None:
        self.filled: dict[bytes, Extent] = {}
        self._fill(found)

    @rule(found=entries)
    def fill_again(self, found: list[tuple[bytes, Extent]]) -> None:
        self._fill(found)

    def _fill(self, found: list[tuple[bytes, Extent]]) -> None:
        duplicates = self.known.fill(PATHS, *as_footers(found))
        listed: dict[bytes, set[Extent]] = {}
        for digest, at in found:
            listed.setdefault(digest, set()).add(at)
        for digest, places in listed.items():
            kept = duplicates.get(digest, [])
            assert {self.known[digest], *kept} <= places
            assert len({self.known[digest], *kept}) == len(kept) + 1 == min(len(places), 9)
        assert duplicates.keys() == {digest for digest, places in listed.items() if len(places) > 1}
        self.model = {digest: self.known[digest] for digest in listed}
        self.filled = dict(self.model)

    @rule(digest=digests, at=extents)
    def put(self, digest: bytes, at: Extent) -> None:
        self.known[digest] = at
        self.model[digest] = at
        self.filled.pop(digest, None)

    @rule(digest=digests, at=extents)
    def put_if_missing(self, digest: bytes, at: Extent) -> None:
        assert self.known.setdefault(digest, at) == self.model.setdefault(digest, at)

    @rule(digest=digests)
    def pop(self, digest: bytes) -> None:
        assert self.known.pop(digest, None) == self.model.pop(digest, None)
        self.filled.pop(digest, None)

    @rule(digest=digests)
    def delete(self, digest: bytes) -> None:
        if digest in self.model:
            del self.known[digest], self.model[digest]
        else:
            with pytest.raises(KeyError):
                del self.known[digest]
        self.filled.pop(digest, None)

    @rule()
    def clear(self) -> None:
        self.known.clear()
        self.model.clear()
        self.filled.clear()

    @rule(wanted=st.sets(digests))
    def are_found(self, wanted: set[bytes]) -> None:
        assert {digest for digest in wanted if self.known.was_found(digest)} == wanted & self.filled.keys()

    @rule(paths=st.sets(st.sampled_from([*PATHS, "packs/none"])))
    def lie_in_packs(self, paths: set[str]) -> None:
        found = self.known.in_packs(paths)
        assert len(found) == len(set(found))
        assert set(found) == {digest for digest, at in self.model.items() if at.path in paths}

    @rule(paths=st.lists(st.sampled_from(PATHS), unique=True), besides=entries)
    def is_listed_as_it_was_filled_in(self, paths: list[str], besides: list[tuple[bytes, Extent]]) -> None:
        counts, table = self.known.listed(paths, besides)
        again = ChunkIndex()
        duplicates = again.fill(paths, counts, table)
        wanted = {entry for entry in [*self.model.items(), *besides] if entry[1].path in paths}
        found = {*again.items(), *((digest, at) for digest, places in duplicates.items() for at in places)}
        assert found <= wanted
        assert again.keys() == {digest for digest, _ in wanted}

    @invariant()
    def both_are_alike(self) -> None:
        assert dict(self.known.items()) == self.model
        assert len(self.known) == len(self.model)
        for digest in [b"", b"short", bytes(16), *self.model]:
            assert (digest in self.known) == (digest in self.model)
            assert self.known.get(digest) == self.model.get(digest)


TestChunkIndex = ChunkIndexMachine.TestCase


@given(entries)
def test_what_is_filled_in_takes_the_place_of_all_before(found: list[tuple[bytes, Extent]]) -> None:
    known = ChunkIndex()
    known.fill(PATHS, *as_footers([(b"\7" * 16, Extent(PATHS[0], 0, 1))]))
    known[b"\1" * 16] = Extent(PATHS[0], 0, 1)
    known.fill(PATHS, *as_footers(found))
    assert known.keys() == {digest for digest, _ in found}


def before_each_instruction(work: Callable[[], object], call: Callable[[int], object]) -> int:
    """Call ``call`` with its number before each instruction of ``work``, as another thread might; returns how many."""
    count, before = 0, sys.gettrace()

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            sys.settrace(None)
            call(count)
            sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("refill", [False, True])
def test_a_reader_on_another_thread_finds_a_chunk_where_it_was_or_where_it_is(refill: bool) -> None:
    digest, was, now = b"\1" * 16, Extent(PATHS[0], 0, 5), Extent(PATHS[1], 4096, 7)
    found: set[Extent | None] = set()
    known = ChunkIndex()

    def fill(at: Extent) -> None:
        paths = [at.path, *PATHS]
        counts, table = as_footers([(digest, at)])
        known.fill(paths, np.array([1, *np.zeros_like(counts)]), table)

    def change() -> None:
        if refill:
            fill(now)
        else:
            known[digest] = now

    def read(_: int = 0) -> None:
        found.add(known.get(digest))
        assert digest in known

    def change_before(place: int, number: int) -> None:
        if number == place:
            change()

    fill(was)
    before_each_instruction(change, read)
    fill(was)
    for place in range(1, 1 + before_each_instruction(read, lambda _: None)):
        fill(was)
        before_each_instruction(read, partial(change_before, place))
    assert found == {was, now}
