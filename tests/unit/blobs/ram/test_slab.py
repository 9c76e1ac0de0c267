"""The slab hands out each byte once, takes it back, and never holds more memory than it was given."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tieredckpt.blobs import mapping
from tieredckpt.blobs.mapping import HUGE_PAGE
from tieredckpt.blobs.ram import slab as slabs
from tieredckpt.blobs.ram.slab import PAGE, Slab, page_aligned
from tieredckpt.errors import Corrupt, NoSpace
from tieredckpt.units import format_size

MIB = 1 << 20
PAGES = min(64, HUGE_PAGE // PAGE - 1)  # it grows by huge pages from the first one on
SIZES = st.one_of(st.integers(1, 3 * PAGE), st.sampled_from([PAGE, PAGE + 1, 20 * PAGE, PAGES * PAGE]))


def memfd(nbytes: int) -> int:
    fd = os.memfd_create("slab-under-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab(memfd(PAGES * PAGE), PAGES * PAGE)
    yield slab
    slab.close()


@contextlib.contextmanager
def slab_of(capacity: int) -> Iterator[Slab]:
    slab = Slab(memfd(capacity), capacity)
    yield slab
    slab.close()


class SlabMachine(RuleBasedStateMachine):
    """Against a set of pages that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(memfd(PAGES * PAGE), PAGES * PAGE)
        self.extents: dict[int, int] = {}
        self.reserved = 0

    def teardown(self) -> None:
        self.slab.close()

    def taken(self) -> set[int]:
        return {page for offset, nbytes in self.extents.items() for page in pages(offset, nbytes)}

    def longest_run(self) -> int:
        """Pages of the longest extent that could be handed out, memory that is not reserved yet included."""
        edges = [-1, *sorted(self.taken()), PAGES]
        return max(after - before - 1 for before, after in pairwise(edges))

    @rule(nbytes=SIZES)
    def allocate(self, nbytes: int) -> None:
        fits = page_aligned(nbytes) // PAGE <= self.longest_run()
        offset = self.slab.allocate(nbytes)
        assert (offset is not None) == fits
        if offset is not None:
            assert not self.taken() & set(pages(offset, nbytes))
            self.extents[offset] = nbytes

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.extents)))
        self.slab.release(offset, self.extents.pop(offset))

    @rule(page=st.integers(0, PAGES + 2), nbytes=SIZES, shift=st.sampled_from([0, 0, 0, 1, PAGE // 2]))
    def claim(self, page: int, nbytes: int, shift: int) -> None:
        wanted = set(pages(page * PAGE, nbytes))
        free = set(range(self.slab.reserved // PAGE)) - self.taken()
        claimed = self.slab.claim(page * PAGE + shift, nbytes)
        assert claimed == (shift == 0 and wanted <= free)
        if claimed:
            self.extents[page * PAGE] = nbytes

    @rule(nbytes=st.integers(0, 2 * PAGES * PAGE))
    def reserve(self, nbytes: int) -> None:
        before = self.slab.reserved
        self.slab.reserve(nbytes)
        assert self.slab.reserved == max(before, min(page_aligned(nbytes), PAGES * PAGE))

    @invariant()
    def what_is_used_is_what_was_handed_out(self) -> None:
        used = len(self.taken()) * PAGE
        assert self.slab.used == used
        assert self.slab.room == PAGES * PAGE - used

    @invariant()
    def extents_begin_at_pages_within_memory_that_is_reserved(self) -> None:
        assert self.slab.reserved <= self.slab.capacity
        assert os.fstat(self.slab.fileno()).st_blocks * 512 == self.slab.reserved
        for offset, nbytes in self.extents.items():
            assert offset % PAGE == 0
            assert offset + page_aligned(nbytes) <= self.slab.reserved

    @invariant()
    def memory_never_shrinks_and_grows_for_need_alone(self) -> None:
        assert self.slab.reserved >= self.reserved
        self.reserved = self.slab.reserved


def pages(offset: int, nbytes: int) -> range:
    return range(offset // PAGE, (offset + page_aligned(nbytes)) // PAGE)


TestSlab = SlabMachine.TestCase
TestSlab.settings = settings(max_examples=60, stateful_step_count=40)


def test_what_was_handed_out_in_pieces_is_one_piece_when_it_is_back(slab: Slab) -> None:
    offsets = [slab.allocate(PAGE) for _ in range(PAGES)]
    assert slab.allocate(1) is None
    random.Random(7).shuffle(offsets)
    for offset in offsets:
        assert offset is not None
        slab.release(offset, PAGE)
    assert slab.allocate(PAGES * PAGE) == 0


def test_an_extent_that_is_not_out_cannot_come_back(slab: Slab) -> None:
    first, second = slab.allocate(PAGE), slab.allocate(2 * PAGE)
    assert first is not None
    assert second is not None
    slab.release(first, PAGE)
    for offset, nbytes in ((first, PAGE), (first, 2 * PAGE)):
        with pytest.raises(AssertionError):
            slab.release(offset, nbytes)
    slab.release(second, 2 * PAGE)
    with pytest.raises(AssertionError):
        slab.release(second, PAGE)


def test_bytes_of_an_extent_are_those_of_the_file(slab: Slab) -> None:
    offset = slab.allocate(100)
    assert offset is not None
    slab.array[offset : offset + 100] = 7
    assert os.pread(slab.fileno(), 100, offset) == b"\7" * 100


def test_a_slab_that_is_refused_memory_stays_at_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab(memfd(PAGES * PAGE), PAGES * PAGE)
    slab.reserve(8 * PAGE)

    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapping, "reserve", refuse)
    with pytest.raises(
        NoSpace, match=f"no room for a slab of {format_size(16 * PAGE)}; it has {format_size(8 * PAGE)} already"
    ):
        slab.reserve(16 * PAGE)
    assert slab.capacity == PAGES * PAGE, "who asks for less may still get it"
    assert slab.allocate(6 * PAGE) == 0
    assert slab.allocate(3 * PAGE) is None
    assert slab.capacity == slab.reserved == 8 * PAGE
    assert slab.room == 2 * PAGE
    assert slab.allocate(2 * PAGE) == 6 * PAGE
    slab.close()


def test_a_slab_grows_by_whole_huge_pages_as_far_as_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    with slab_of(9 * MIB) as slab:
        assert slab.allocate(3 * MIB) == 0
        assert slab.reserved == 4 * MIB
        slab.reserve(5 * MIB)
        assert slab.reserved == 6 * MIB
        reserve = mapping.reserve

        def refuse_much(fd: int, mapped: npt.NDArray[np.uint8], offset: int, nbytes: int) -> None:
            if nbytes > MIB:
                raise OSError(28, "No space left on device")
            reserve(fd, mapped, offset, nbytes)

        monkeypatch.setattr(mapping, "reserve", refuse_much)
        assert slab.allocate(4 * MIB) == 3 * MIB
        assert (slab.reserved, slab.capacity) == (7 * MIB, 9 * MIB)
        monkeypatch.undo()
        assert slab.allocate(2 * MIB) == 7 * MIB
        assert slab.reserved == 9 * MIB


def test_a_slab_grows_and_is_handed_out_by_the_pages_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they have 64 KiB, the system refuses to map, register or populate memory that begins within one."""
    page, asked = 64 << 10, []
    monkeypatch.setattr(slabs, "PAGE", page)
    monkeypatch.setattr(mapping, "reserve", lambda _, mapped, offset, nbytes: asked.append((offset, nbytes)))
    with slab_of(8 * MIB) as slab:
        extents = [(slab.allocate(nbytes), nbytes) for nbytes in (1, 4096, 5000, page, page + 1, MIB + 1, 3 * MIB)]
        slab.release(*extents.pop(1))
        slab.reserve(slab.reserved + 1)
        assert [offset for offset, _ in extents] == [0, *(n * page for n in (2, 3, 4, 6, 23))]
        assert not slab.claim(page + 4096, 4096)
        assert slab.claim(page, 4096)
    assert [number % page for growth in asked for number in growth] == [0] * 2 * len(asked)


def test_a_slab_is_not_closed_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor could be that of another file meanwhile."""
    slab, asked, go_on = Slab(memfd(4 * MIB), 4 * MIB), threading.Event(), threading.Event()
    reserve, open_then = mapping.reserve, []

    def wait(fd: int, mapped: npt.NDArray[np.uint8], offset: int, nbytes: int) -> None:
        asked.set()
        assert go_on.wait(60)
        open_then.append(os.readlink(f"/proc/self/fd/{fd}"))
        reserve(fd, mapped, offset, nbytes)

    monkeypatch.setattr(mapping, "reserve", wait)
    with ThreadPoolExecutor() as pool:
        growing = pool.submit(slab.allocate, MIB)
        assert asked.wait(60)
        closing = pool.submit(slab.close)
        while not slab._closed:
            time.sleep(0.001)
        go_on.set()
        assert growing.result(60) == 0
        closing.result(60)
    assert ["slab-under-test" in name for name in open_then] == [True]
    with pytest.raises(NoSpace):
        slab.reserve(2 * MIB)
    assert slab.allocate(2 * MIB) is None


def test_memory_is_reserved_by_writing_where_it_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with slab_of(3 << 20) as slab:
        slab.reserve((2 << 20) + PAGE)
        assert os.fstat(slab.fileno()).st_blocks * 512 == 3 << 20


def test_threads_share_a_slab_without_sharing_extents(slab: Slab) -> None:
    mine: list[list[int]] = [[], [], [], []]

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(300):
            if mine[number] and rng.random() < 0.5:
                offset = mine[number].pop(rng.randrange(len(mine[number])))
                assert (slab.array[offset : offset + PAGE] == number).all()
                slab.release(offset, PAGE)
            elif (taken := slab.allocate(PAGE)) is not None:
                slab.array[taken : taken + PAGE] = number
                mine[number].append(taken)

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    out = [offset for offsets in mine for offset in offsets]
    assert len(set(out)) == len(out)
    assert slab.used == len(out) * PAGE


class Paused:
    """Answers `mapping.reserve`, one stride at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.strides: list[int] = []
        self.asked, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self._reserve = mapping.reserve
        monkeypatch.setattr(mapping, "reserve", self)

    def __call__(self, fd: int, mapped: npt.NDArray[np.uint8], offset: int, nbytes: int) -> None:
        self.asked.release()
        assert self.go_on.acquire(timeout=60)
        self.strides.append(nbytes)
        self._reserve(fd, mapped, offset, nbytes)


def test_extents_are_handed_out_while_the_slab_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_RESERVED_AT_ONCE", 2 * MIB)
    memory = Paused(monkeypatch)
    with slab_of(6 * MIB) as slab, ThreadPoolExecutor() as pool:
        growing = pool.submit(slab.reserve, 6 * MIB)
        memory.go_on.release()
        assert memory.asked.acquire(timeout=60)
        assert memory.asked.acquire(timeout=60)  # the second stride is under way
        assert slab.allocate(MIB) == 0
        slab.release(0, MIB)
        assert slab.allocate(2 * MIB) == 0
        waiting = pool.submit(slab.allocate, 2 * MIB)
        assert not growing.done()
        assert not waiting.done()
        memory.go_on.release()
        assert waiting.result(60) == 2 * MIB
        memory.go_on.release()
        growing.result(60)
        assert slab.reserved == 6 * MIB
    assert memory.strides == [2 * MIB] * 3, "who waits takes what comes"


def test_memory_is_taken_behind_at_a_share_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_PREPARED_AT_ONCE", 2 * MIB)
    with slab_of(10 * MIB) as slab:
        rests: list[float] = []
        monkeypatch.setattr(slab._ending, "wait", rests.append)
        slab.expect(6 * MIB)
        begin = time.monotonic()
        slab.prepare(share=0.2)
        assert slab.reserved == 6 * MIB
        assert len(rests) >= 3
        assert 0 < sum(rests) <= (5 * mapping.THREADS - 1) * (time.monotonic() - begin)


def test_a_slab_closes_at_once_while_memory_is_taken_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab(memfd(64 * MIB), 64 * MIB)
    memory = Paused(monkeypatch)
    monkeypatch.setattr(slabs, "_PREPARED_AT_ONCE", 2 * MIB)
    slab.expect(64 * MIB)
    with ThreadPoolExecutor() as pool:
        preparing = pool.submit(slab.prepare, share=1e-9)  # it would rest for days
        memory.go_on.release()
        while not memory.strides:
            time.sleep(0.001)
        slab.close()
        preparing.result(60)
    assert memory.strides == [2 * MIB]


def test_what_is_expected_while_memory_is_taken_is_taken_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Paused(monkeypatch)
    with slab_of(8 * MIB) as slab, ThreadPoolExecutor() as pool:
        slab.expect(2 * MIB)
        preparing = pool.submit(slab.prepare, share=1)
        assert memory.asked.acquire(timeout=60)
        slab.expect(100 * MIB)
        slab.prepare()  # one thread does it for all
        memory.go_on.release(9)
        preparing.result(60)
        assert slab.reserved == slab.capacity == 8 * MIB


def test_where_there_is_less_as_much_is_taken_behind_as_is_needed_at_least() -> None:
    quota: list[bool] = []

    def may_have(nbytes: int, *, tell: bool) -> bool:
        quota.append(tell)
        return nbytes <= 6 * MIB

    slab = Slab(memfd(16 * MIB), 16 * MIB, quota=may_have)
    slab.expect(8 * MIB, at_least=4 * MIB)
    slab.prepare(share=1)
    assert slab.reserved == 4 * MIB
    assert not quota[0], "nobody waits, so nothing is said"
    with pytest.raises(NoSpace):
        slab.check_room(8 * MIB)
    slab.close()


def test_preparing_ends_where_the_system_gave_less_than_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = mapping.reserve

    def refuse(fd: int, mapped: npt.NDArray[np.uint8], offset: int, nbytes: int) -> None:
        if offset >= 4 * MIB:
            raise OSError(28, "No space left on device")
        reserve(fd, mapped, offset, nbytes)

    monkeypatch.setattr(mapping, "reserve", refuse)
    with slab_of(16 * MIB) as slab:
        slab.expect(16 * MIB)
        slab.reserve(4 * MIB)
        assert slab.allocate(8 * MIB) is None
        assert slab.capacity == 4 * MIB
        slab.prepare(share=1)
        assert slab.reserved == 4 * MIB


def test_nothing_is_taken_behind_of_what_would_not_suffice(small_tmpfs: Path) -> None:
    with (small_tmpfs / "slab").open("w+b") as file:
        os.ftruncate(file.fileno(), 100 * MIB)
        slab = Slab(os.dup(file.fileno()), 100 * MIB)
        slab.expect(65 * MIB)
        slab.prepare(share=1)
        assert slab.reserved == 0
        slab.expect(60 * MIB)
        slab.prepare(share=1)
        assert slab.reserved == 60 * MIB
        slab.close()


def test_memory_is_mapped_as_far_as_it_is_there_and_no_more_of_a_closed_slab() -> None:
    with slab_of(8 << 20) as slab:
        slab.reserve(4 << 20)
        slab.prepare(share=1)
        slab.reserve(8 << 20)
        slab.prepare(share=1)
        assert slab.array[(8 << 20) - 1] == 0
    slab.prepare(share=1)  # closed: nothing to do, and nothing touched


def test_views_outlive_the_slab() -> None:
    with slab_of(PAGE) as slab:
        offset = slab.allocate(PAGE)
        assert offset == 0
        view = slab.array[:10]
        view[:] = 5
    assert (view == 5).all()
    slab.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-PAGE, 1), (0, 1 << 40), (1 << 40, 1), (0, -1)])
def test_an_extent_outside_of_the_slab_is_corrupt(slab: Slab, offset: int, nbytes: int) -> None:
    with pytest.raises(Corrupt, match="outside the slab"):
        slab.bytes_at(offset, nbytes)


def test_a_closed_slab_tells_that_it_is_mapped_no_more() -> None:
    """Whoever prepares memory or registers it with devices may ask while the tier's failure closes the slab."""
    slab = Slab(memfd(PAGE), PAGE)
    assert slab.mapped is slab.array
    slab.close()
    assert slab.mapped is None


def test_a_closed_slab_keeps_its_memory_and_no_descriptor_beyond_its_last_view() -> None:
    def mapped_and_open() -> tuple[int, int]:
        opened = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the listing's own
                opened += "slab-of-views" in os.readlink(f"/proc/self/fd/{fd}")
        return Path("/proc/self/maps").read_text().count("slab-of-views"), opened

    fd = os.memfd_create("slab-of-views", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE)
    slab = Slab(fd, PAGE)
    view = slab.array[:10]
    assert mapped_and_open() == (1, 1)
    slab.close()
    assert view.sum() == 0
    assert mapped_and_open() == (1, 0)
    del view
    assert mapped_and_open() == (0, 0)
