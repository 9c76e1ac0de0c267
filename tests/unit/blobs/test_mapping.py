"""Shared memory comes in huge pages where the kernel has them, and is reserved whole or not at all everywhere."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tieredckpt.blobs import mapping
from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.mapping import HUGE_PAGE, Addresses, fill_holes, map_shared, reserve

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
    """Whether the kernel makes huge pages when asked to, of a process's own memory."""
    memory = np.frombuffer(mmap.mmap(-1, 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    memory[:] = 1
    at = -(-memory.ctypes.data // HUGE_PAGE) * HUGE_PAGE
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_PAGE), _MADV_COLLAPSE) == 0


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
    assert huge_pages_of(memory) == 4 * MIB  # the last MiB is less than one
    reserve(file, memory, 5 * MIB, 8 * MIB)
    assert huge_pages_of(memory) == 10 * MIB
    assert had(file) == 13 * MIB
    assert not memory[: 13 * MIB].any()


@pytest.mark.parametrize("nbytes", [ALIGNMENT, 2 * MIB, 2 * MIB + ALIGNMENT, 4 * MIB])
@pytest.mark.parametrize("start", [0, ALIGNMENT, 2 * MIB - ALIGNMENT, 2 * MIB, 12 * MIB])
@pytest.mark.parametrize("huge", [True, False])
def test_all_that_is_reserved_has_its_memory_and_nothing_else(
    file: int, monkeypatch: pytest.MonkeyPatch, start: int, nbytes: int, huge: bool
) -> None:
    if not huge:  # as before Linux 6.1
        monkeypatch.setattr(mapping, "_advise", lambda *_: False)
    memory = map_shared(file, 16 * MIB, writable=True)
    reserve(file, memory, start, nbytes)
    assert had(file) == nbytes


def test_what_cannot_be_reserved_whole_leaves_nothing(small_tmpfs: Path) -> None:
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
    os.pwrite(file, b"seen", ALIGNMENT)
    mine, theirs = map_shared(file, 16 * MIB, writable=True), map_shared(file, 16 * MIB, writable=False)
    assert mine.ctypes.data % HUGE_PAGE == theirs.ctypes.data % HUGE_PAGE == 0
    assert len(mine) == 16 * MIB
    mine[0] = 9
    assert theirs[0] == 9
    assert bytes(theirs[ALIGNMENT : ALIGNMENT + 4]) == b"seen"
    with pytest.raises(ValueError, match="read-only"):
        theirs[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        theirs.flags.writeable = True


def test_holes_that_a_writer_left_when_it_died_are_filled(file: int) -> None:
    os.posix_fallocate(file, 0, 3 * MIB)
    for start in (4 * MIB, 6 * MIB):  # it had begun to ask for huge pages there
        os.posix_fallocate(file, start, ALIGNMENT)
    fill_holes(file, had(file))
    assert had(file) == 3 * MIB + 4 * ALIGNMENT
    fill_holes(file, 0)


def test_addresses_are_given_back_with_the_last_array(file: int) -> None:
    given_back: list[int] = []
    addresses = Addresses(2 * ALIGNMENT, lambda: given_back.append(1))
    addresses.place(ALIGNMENT, file, 0, ALIGNMENT)
    part = addresses.array()[ALIGNMENT : ALIGNMENT + 1]
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
    addresses = Addresses(ALIGNMENT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        addresses.place(0, -1, 0, ALIGNMENT)
