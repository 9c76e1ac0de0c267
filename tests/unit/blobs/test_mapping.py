"""Shared memory comes in huge pages where the kernel has them, and is reserved whole or not at all everywhere."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tieredckpt.blobs import mapping
from tieredckpt.blobs.mapping import HUGE_PAGE, Addresses, give_back, map_shared, reserve
from tieredckpt.blobs.ram.slab import PAGE

MIB = 1 << 20
_MADV_COLLAPSE = 25


@pytest.fixture
def file(shared_memory: Path) -> Iterator[int]:
    fd = os.open(shared_memory / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 16 * MIB)
    yield fd
    os.close(fd)


def had(fd: int) -> int:
    """Bytes of memory that a file has."""
    return os.fstat(fd).st_blocks * 512


def huge_here() -> bool:
    """Whether the kernel makes huge pages when asked to: of a process's own memory, and of what is shared."""
    memory = np.frombuffer(mmap.mmap(-1, 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    memory[:] = 1
    at = -(-memory.ctypes.data // HUGE_PAGE) * HUGE_PAGE
    made = ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_PAGE), _MADV_COLLAPSE) == 0
    return made and "[deny]" not in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()


def huge_pages_of(memory: npt.NDArray[np.uint8]) -> int:
    """Bytes of a mapping that are mapped as huge pages, see proc_pid_smaps(5)."""
    start = f"{memory.ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(start) for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped:"))


@pytest.mark.skipif(not huge_here(), reason="this kernel makes no huge pages when asked to")
def test_what_is_reserved_comes_in_huge_pages(file: int) -> None:
    memory = map_shared(file, 16 * MIB, writable=True)
    reserve(file, memory, 0, 5 * MIB)
    assert 0 < huge_pages_of(memory) <= 4 * MIB  # the last MiB is less than one; a busy system has not always two
    reserve(file, memory, 5 * MIB, 8 * MIB)
    assert 2 * MIB < huge_pages_of(memory) <= 10 * MIB
    assert had(file) == 13 * MIB
    assert not memory[: 13 * MIB].any()


@pytest.mark.parametrize("nbytes", [PAGE, 2 * MIB, 2 * MIB + PAGE, 4 * MIB])
@pytest.mark.parametrize("start", [0, PAGE, 2 * MIB - PAGE, 2 * MIB, 12 * MIB])
@pytest.mark.parametrize("huge", [True, False])
def test_all_that_is_reserved_has_its_memory_and_nothing_else(
    file: int, monkeypatch: pytest.MonkeyPatch, start: int, nbytes: int, huge: bool
) -> None:
    if not huge:  # as before Linux 6.1
        monkeypatch.setattr(mapping, "_advise", lambda *_: errno.EINVAL)
    memory = map_shared(file, 16 * MIB, writable=True)
    reserve(file, memory, start, nbytes)
    assert had(file) == nbytes


@pytest.mark.parametrize("said", [True, False], ids=["as it says", "as it turns out"])
def test_what_cannot_be_reserved_whole_leaves_nothing(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch, said: bool
) -> None:
    if not said:  # somebody else takes it meanwhile
        monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs("/proc"))
    (small_tmpfs / "filler").write_bytes(bytes(57 * MIB))
    fd = os.open(small_tmpfs / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 16 * MIB)
    memory = map_shared(fd, 16 * MIB, writable=True)
    reserve(fd, memory, 0, 3 * MIB)
    memory[: 3 * MIB] = 7
    with pytest.raises(OSError, match="No space left"):
        reserve(fd, memory, 3 * MIB, 8 * MIB)
    assert had(fd) == 3 * MIB
    assert (memory[: 3 * MIB] == 7).all()
    os.close(fd)


def test_a_mapping_shows_the_file_at_a_boundary_of_huge_pages(file: int) -> None:
    os.pwrite(file, b"seen", PAGE)
    mine, theirs = map_shared(file, 16 * MIB, writable=True), map_shared(file, 16 * MIB, writable=False)
    assert mine.ctypes.data % HUGE_PAGE == theirs.ctypes.data % HUGE_PAGE == 0
    assert len(mine) == 16 * MIB
    mine[0] = 9
    assert theirs[0] == 9
    assert bytes(theirs[PAGE : PAGE + 4]) == b"seen"
    with pytest.raises(ValueError, match="read-only"):
        theirs[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        theirs.flags.writeable = True


@pytest.fixture(autouse=True)
def forgotten_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process has learnt of the machine before teaches a test nothing."""
    monkeypatch.setattr(mapping, "_speed", mapping._Speed())


class Kernel:
    """Answers calls for huge pages with these errors, one for each, and then with success; fills no small pages."""

    def __init__(self, *errors: int) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self, address: int, nbytes: int, advice: int) -> int:
        if advice != mapping._MADV_COLLAPSE:
            return errno.EINVAL
        self.calls += 1
        return self.errors.pop(0) if self.errors else 0


@pytest.mark.parametrize(
    ("errors", "calls"),
    [
        ((errno.EINVAL,), 1),  # it never makes any
        ((errno.EAGAIN,), 8),
        ((errno.ENOMEM,) * 3, 8),
        ((0, *(errno.ENOMEM,) * 99), 5),
    ],
)
def test_huge_pages_are_asked_for_until_there_seem_to_be_no_more(
    file: int, monkeypatch: pytest.MonkeyPatch, errors: tuple[int, ...], calls: int
) -> None:
    kernel = Kernel(*errors)
    monkeypatch.setattr(mapping, "_advise", kernel)
    monkeypatch.setattr(mapping, "_STRIDE", HUGE_PAGE)
    monkeypatch.setattr(mapping, "THREADS", 1)  # on several, some are asked for by then
    reserve(file, map_shared(file, 16 * MIB, writable=True), 0, 16 * MIB)
    assert kernel.calls == calls
    assert had(file) == 16 * MIB


def test_small_pages_do_where_huge_ones_come_slowly(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host that takes idle memory back; they are tried again after a while."""
    kernel = Kernel()
    clock = iter(range(1 << 20))
    monkeypatch.setattr(mapping, "_advise", kernel)
    monkeypatch.setattr(mapping, "_STRIDE", 2 * HUGE_PAGE)
    monkeypatch.setattr(mapping, "_TRIED_AGAIN_AFTER", 8 * MIB)
    monkeypatch.setattr(mapping, "THREADS", 1)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    reserve(file, map_shared(file, 32 * MIB, writable=True), 0, 32 * MIB)
    # The first page, then of strides of 4 MiB every third, and what is left at the end.
    assert kernel.calls == 1 + 3
    assert had(file) == 32 * MIB


def test_where_no_thread_can_be_started_small_pages_do(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(mapping, "ThreadPoolExecutor", refuse)
    reserve(file, map_shared(file, 16 * MIB, writable=True), 0, 16 * MIB)
    assert had(file) == 16 * MIB


def test_the_small_pages_that_huge_ones_are_made_of_are_spread_over_the_nodes(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(mapping, "_advise", Kernel())
    monkeypatch.setattr(os, "posix_fallocate", lambda _, offset, nbytes: asked.append(offset))
    reserve(file, map_shared(file, 16 * MIB, writable=True), 0, 16 * MIB)
    assert {offset // PAGE % 8 for offset in asked[:8]} == set(range(8))  # for any number of nodes up to that


def test_what_is_reserved_is_mapped_so_that_a_copy_meets_no_page_fault(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_have_huge_pages", lambda *_: None)
    memory = map_shared(file, 16 * MIB, writable=True)
    reserve(file, memory, 0, 16 * MIB)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[::PAGE] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100, "of 4,096 pages"


def test_what_is_given_back_has_no_memory(file: int) -> None:
    os.posix_fallocate(file, 0, 8 * MIB)
    os.pwrite(file, b"kept", MIB)
    give_back(file, 2 * MIB, 14 * MIB)
    assert had(file) == 2 * MIB
    assert os.pread(file, 4, MIB) == b"kept"


def test_addresses_are_given_back_with_the_last_array(file: int) -> None:
    given_back: list[int] = []
    addresses = Addresses(2 * PAGE, lambda: given_back.append(1))
    addresses.place(PAGE, file, 0, PAGE)
    part = addresses.array()[PAGE : PAGE + 1]
    del addresses
    gc.collect()
    assert part[0] == 0
    assert not given_back
    del part
    assert given_back == [1]


def test_what_cannot_be_mapped_is_an_error_and_gives_back_what_it_had() -> None:
    given_back: list[int] = []
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Addresses(1 << 62, lambda: given_back.append(1))
    assert given_back == [1]
    addresses = Addresses(PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        addresses.place(0, -1, 0, PAGE)
