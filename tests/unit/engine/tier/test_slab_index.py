"""A chunk lies in the slab once, as long as a step or a save uses it, and no longer."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tieredckpt.blobs.ram.slab import Slab, page_aligned
from tieredckpt.engine.tier.slab_index import SlabIndex
from tieredckpt.format.encoding import CRC32C

CAPACITY = 40 << 12
CONTENTS = st.integers(0, 9)


def new_slab(reserved: int = 0) -> Slab:
    fd = os.memfd_create("slab-under-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, CAPACITY)
    slab = Slab(fd, CAPACITY)
    slab.reserve(reserved)
    return slab


def digest(content: int) -> bytes:
    return bytes([content]) * 16


def size(content: int) -> int:
    """Some fill their pages to the last byte, so that the checksum needs one more."""
    return [1, 4092, 4093, 4096, 8192][content % 5]


class SlabIndexMachine(RuleBasedStateMachine):
    """Against a multiset of uses, and the extents of each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = new_slab(CAPACITY)
        self.index = SlabIndex(self.slab)
        self.uses: Counter[int] = Counter()
        self.offsets: dict[int, int] = {}
        self.distrusted: dict[int, set[int]] = {}

    def teardown(self) -> None:
        self.slab.close()

    @rule(content=CONTENTS)
    def copy(self, content: int) -> None:
        extent = self.index.allocate(size(content))
        if extent is None:
            return
        offset, memory = extent
        memory[:] = content
        assert memory.size == size(content)
        lies_at = self.index.add(digest(content), offset, size(content))
        assert lies_at == self.offsets.setdefault(content, offset)
        self.uses[content] += 1

    @rule(content=CONTENTS)
    def give_up_a_copy(self, content: int) -> None:
        extent = self.index.allocate(size(content))
        if extent is not None:
            self.index.release(extent[0], size(content))

    @rule(content=CONTENTS)
    def use_what_is_there(self, content: int) -> None:
        assert self.index.holds(digest(content)) == (content in self.offsets)
        offset = self.index.take(digest(content))
        assert offset == self.offsets.get(content)
        if offset is not None:
            self.uses[content] += 1

    @rule(content=CONTENTS, page=st.integers(0, 45))
    def find_at_start(self, content: int, page: int) -> None:
        offset = page << 12
        known = {self.offsets.get(content), *self.distrusted.get(content, ())}
        free = all(
            offset + self.taken_by(content) <= other or other + self.taken_by(name) <= offset
            for name, other in self.extents()
        )
        fits = free and offset + self.taken_by(content) <= CAPACITY
        adopted = self.index.adopt(digest(content), offset, size(content))
        assert adopted == (offset in known or fits)
        if not adopted:
            return
        self.uses[content] += 1
        if offset not in known:
            self.slab.array[offset : offset + size(content)] = content
            if content in self.offsets:
                self.distrusted.setdefault(content, set()).add(offset)
            else:
                self.offsets[content] = offset

    @precondition(lambda self: self.offsets)
    @rule(data=st.data())
    def find_damage(self, data: st.DataObject) -> None:
        content = data.draw(st.sampled_from(sorted(self.offsets)))
        self.index.distrust(digest(content), self.offsets[content] + 4096)  # which it is not at
        assert self.index.find(digest(content)) == (self.offsets[content], size(content))
        self.index.distrust(digest(content), self.offsets[content])
        self.distrusted.setdefault(content, set()).add(self.offsets.pop(content))

    @precondition(lambda self: self.distrusted)
    @rule(data=st.data())
    def repair(self, data: st.DataObject) -> None:
        content = data.draw(st.sampled_from(sorted(self.distrusted)))
        offset = data.draw(st.sampled_from(sorted(self.distrusted[content])))
        self.index.trust(digest(content), offset)
        if content not in self.offsets:
            self.offsets[content] = offset
            self.distrusted[content].discard(offset)
            self.forget_what_is_unused()

    def extents(self) -> list[tuple[int, int]]:
        others = [(content, offset) for content, offsets in self.distrusted.items() for offset in offsets]
        return [*self.offsets.items(), *others]

    def forget_what_is_unused(self) -> None:
        self.offsets = {content: offset for content, offset in self.offsets.items() if self.uses[content]}
        self.distrusted = {
            content: offsets for content, offsets in self.distrusted.items() if offsets and self.uses[content]
        }

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        contents = data.draw(st.lists(st.sampled_from(sorted(self.uses.elements())), unique=True, min_size=1))
        self.index.drop(digest(content) for content in contents)
        self.uses.subtract(contents)
        self.uses += Counter()
        self.forget_what_is_unused()

    @staticmethod
    def taken_by(content: int) -> int:
        return page_aligned(size(content) + CRC32C.overhead)

    @invariant()
    def the_slab_holds_each_used_chunk_once_that_is_trusted(self) -> None:
        assert self.slab.used == sum(self.taken_by(content) for content, _ in self.extents())

    @invariant()
    def no_chunk_is_overwritten(self) -> None:
        for content, offset in self.extents():
            assert (self.slab.array[offset : offset + size(content)] == content).all()


TestSlabIndex = SlabIndexMachine.TestCase
TestSlabIndex.settings = settings(max_examples=60, stateful_step_count=30)


def test_threads_that_copy_the_same_chunk_keep_one_copy() -> None:
    slab = new_slab()
    index = SlabIndex(slab)
    go = threading.Barrier(4)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        go.wait()
        for _ in range(200):
            content = rng.randrange(3)
            extent = index.allocate(4096)
            if extent is not None:
                index.add(digest(content), extent[0], 4096)
                index.drop([digest(content)])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slab.used == 0
    slab.close()
