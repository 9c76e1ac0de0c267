"""Transfers move every byte to its place, whatever the alignment and however short the system's calls are."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.blobs import space
from tieredckpt.blobs.base import ALIGNMENT, Stretch
from tieredckpt.blobs.mapping import private_memory
from tieredckpt.blobs.posix import transfer
from tieredckpt.blobs.posix.target import Bytes, Stop, Stopped, Target
from tieredckpt.blobs.posix.transfer import EndOfFile, aligned_batches, as_arrays, plain_batches
from tieredckpt.testing.backdoor import aligned, pattern

MIB = 1 << 20

lengths = st.one_of(
    st.integers(1, 40),
    st.integers(1, 40_000),
    st.integers(1, 10).map(lambda pages: pages * ALIGNMENT),
    st.integers(1, 10).map(lambda pages: pages * ALIGNMENT + 8),
)
part_shapes = st.lists(st.tuples(lengths, st.sampled_from([0, 0, 1, 8, 100, 4095])), max_size=12)


def memory(shapes: Sequence[tuple[int, int]]) -> tuple[Bytes, ...]:
    """Parts of the given lengths, so many bytes past a page's start."""
    return as_arrays([aligned(pattern(n, seed), shift=shift) for seed, (n, shift) in enumerate(shapes)])


def address(array: Bytes) -> int:
    return array.__array_interface__["data"][0]


@given(part_shapes, st.sampled_from([1, 2, 16]))
def test_aligned_batches_are_the_parts_padded_to_a_page(shapes: list[tuple[int, int]], arena_pages: int) -> None:
    parts = memory(shapes)
    whole = b"".join(part.tobytes() for part in parts)
    arena = as_arrays([aligned(bytes(arena_pages * ALIGNMENT))])[0]
    got = b""
    for batch in aligned_batches(parts, arena):
        for buffer in batch:
            assert address(buffer) % ALIGNMENT == 0
            assert len(buffer) % ALIGNMENT == 0
            assert len(buffer)
        got += b"".join(buffer.tobytes() for buffer in batch)
    assert got[: len(whole)] == whole
    assert len(got) - len(whole) == -len(whole) % ALIGNMENT
    assert not any(got[len(whole) :])


def test_only_what_is_not_aligned_goes_through_the_arena() -> None:
    # A pack: chunks on page boundaries, each padded by bytes of the heap, and a footer.
    chunk, padding = 10 * ALIGNMENT - 100, bytes(100)
    slab = aligned(pattern(8 * 10 * ALIGNMENT))
    parts = as_arrays(
        [p for at in range(0, len(slab), 10 * ALIGNMENT) for p in (slab[at : at + chunk], padding)] + [b"footer"]
    )
    arena = as_arrays([aligned(bytes(64 * ALIGNMENT))])[0]
    (batch,) = aligned_batches(parts, arena)
    copied = sum(len(buffer) for buffer in batch if np.may_share_memory(buffer, arena))
    assert copied == 8 * ALIGNMENT + ALIGNMENT
    assert sum(map(len, batch)) == 8 * 10 * ALIGNMENT + ALIGNMENT


@given(part_shapes)
def test_plain_batches_are_the_parts_themselves(shapes: list[tuple[int, int]]) -> None:
    parts = memory(shapes)
    buffers = [buffer for batch in plain_batches(parts) for buffer in batch]
    assert b"".join(b.tobytes() for b in buffers) == b"".join(p.tobytes() for p in parts)
    assert all(any(np.may_share_memory(b, p) for p in parts) for b in buffers)


@pytest.mark.parametrize("batches", [plain_batches, lambda parts: aligned_batches(parts, arena_of(2 * MIB))])
def test_no_call_moves_much_more_than_a_block(
    batches: Callable[[Sequence[Bytes]], Iterator[list[Bytes]]],
) -> None:
    huge = np.lib.stride_tricks.as_strided(arena_of(ALIGNMENT), shape=(5 * transfer.BLOCK + 3,), strides=(0,))
    if batches is plain_batches:
        sizes = [sum(map(len, batch)) for batch in batches([huge])]
        assert sizes == [transfer.BLOCK] * 5 + [3]
    many = [arena_of(ALIGNMENT)] * 5000
    assert max(len(batch) for batch in batches(many)) <= 1024


@given(
    part_shapes.filter(bool),
    st.sampled_from([1, 3, 16]).map(lambda pages: pages * ALIGNMENT),
    st.sampled_from([1, 2]).map(lambda pages: pages * ALIGNMENT),
)
def test_no_call_crosses_the_end_of_a_block(shapes: list[tuple[int, int]], block: int, arena: int) -> None:
    parts = memory(shapes)
    for batches in (plain_batches(parts, block), aligned_batches(parts, arena_of(arena), block)):
        position = 0
        for batch in batches:
            end = position + sum(map(len, batch))
            assert position // block == (end - 1) // block
            position = end
        assert position >= sum(map(len, parts))


def arena_of(nbytes: int) -> Bytes:
    return as_arrays([aligned(bytes(nbytes))])[0]


def fill(fd: int, offset: int, into: memoryview, *, direct: bool) -> None:
    transfer.fill(fd, offset, as_arrays([into])[0], Stop(), direct=direct)


def read(fd: int, offset: int, into: memoryview, *, direct: bool) -> None:
    transfer.read(fd, Target([Stretch(offset, into.nbytes, into)], digested=False), direct=direct)


Reads = Callable[..., None]
reads = pytest.mark.parametrize("reads", [fill, read])
"""In place, and through memory of the thread."""


def opened(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & transfer.O_DIRECT)


def takes_direct(folder: Path) -> bool:
    if not transfer.O_DIRECT:
        return False
    try:
        os.close(opened(folder / "probe", os.O_RDWR | transfer.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture(params=["buffered", "direct"])
def direct(request: pytest.FixtureRequest, tmp_path: Path) -> bool:
    if request.param == "direct" and not takes_direct(tmp_path):
        pytest.skip("the file system refuses direct I/O")
    return request.param == "direct"


def shortened(call: Callable[..., int], rng: random.Random) -> Callable[..., int]:
    """``pwritev`` or ``preadv`` that moves less than it was asked to, as the system may."""

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        keep = rng.choice([1, 100, ALIGNMENT, 3 * ALIGNMENT, 1 << 30])
        if is_direct(fd):
            keep = max(ALIGNMENT, keep - keep % ALIGNMENT)
        cut = []
        for buffer in buffers:
            cut.append(buffer[:keep])
            keep -= len(cut[-1])
            if not keep:
                break
        return call(fd, cut, offset)

    return short


@pytest.mark.parametrize("seed", range(6))
def test_short_writes_are_continued(tmp_path: Path, direct: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    shapes = [(rng.choice([1, 100, 4096, 40_960, 100_001]), rng.choice([0, 3])) for _ in range(6)]
    parts = memory(shapes)
    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev, rng))
    fd = opened(tmp_path / "file", os.O_RDWR | (transfer.O_DIRECT if direct else 0))
    transfer.write(fd, parts, Stop(), direct=direct)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"".join(part.tobytes() for part in parts)


@reads
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("offset", "shift"), [(0, 0), (ALIGNMENT, 0), (0, 5), (77, 0), (77, 9)])
def test_short_reads_are_continued(
    tmp_path: Path, reads: Reads, direct: bool, seed: int, offset: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pattern(300_007)
    (tmp_path / "file").write_bytes(data)
    rng = random.Random(seed)
    nbytes = rng.choice([1, 4096, 100_000, len(data) - offset])
    into = aligned(bytes(nbytes), shift=shift)
    monkeypatch.setattr(os, "preadv", shortened(os.preadv, rng))
    fd = opened(tmp_path / "file", os.O_RDONLY | (transfer.O_DIRECT if direct else 0))
    reads(fd, offset, into, direct=direct)
    os.close(fd)
    assert into == data[offset : offset + nbytes]


@reads
@pytest.mark.parametrize(("offset", "shift"), [(0, 0), (0, 5), (77, 0)])
def test_the_end_of_the_file_tells_how_far_it_came(
    tmp_path: Path, reads: Reads, direct: bool, offset: int, shift: int
) -> None:
    data = pattern(3 * ALIGNMENT + 9)
    (tmp_path / "file").write_bytes(data)
    into = aligned(bytes(5 * ALIGNMENT), shift=shift)
    fd = opened(tmp_path / "file", os.O_RDONLY | (transfer.O_DIRECT if direct else 0))
    with pytest.raises(EndOfFile) as raised:
        reads(fd, offset, into, direct=direct)
    os.close(fd)
    assert raised.value.got == len(data) - offset
    assert into[: raised.value.got] == data[offset:]


def assert_digested(path: Path, stretches: list[tuple[int, int, int]], *, direct: bool) -> None:
    """Of each stretch, its offset, its bytes, and those of its memory."""
    data = path.read_bytes()
    rooms = [aligned(b"\xa5" * (kept + 1), shift=3) for _, _, kept in stretches]
    asked = [Stretch(offset, n, into[:-1]) for (offset, n, _), into in zip(stretches, rooms, strict=True)]
    fd = opened(path, os.O_RDONLY | (transfer.O_DIRECT if direct else 0))
    try:
        target = Target(asked, digested=True)
        transfer.read(fd, target, direct=direct)
    finally:
        os.close(fd)
    for (offset, nbytes, kept), memory, found in zip(stretches, rooms, target.digests, strict=True):
        assert found == xxhash.xxh3_128_digest(data[offset : offset + nbytes])
        assert memory == data[offset : offset + kept] + b"\xa5"


@pytest.mark.parametrize("seed", range(6))
def test_stretches_are_digested_whatever_the_system_reads_at_a_time(
    tmp_path: Path, direct: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(pattern(300_007))
    rng = random.Random(seed)
    arena = private_memory(rng.choice([ALIGNMENT, 8 * ALIGNMENT]))
    monkeypatch.setattr(transfer, "_arena", lambda: arena)
    monkeypatch.setattr(os, "preadv", shortened(os.preadv, rng))
    at, stretches = rng.choice([0, 77, ALIGNMENT]), []
    while (nbytes := min(rng.choice([1, 100, ALIGNMENT, 40_000, 150_000]), 300_007 - at)) > 0:
        stretches.append((at, nbytes, rng.choice([0, nbytes // 2, nbytes])))
        at += nbytes + rng.choice([0, 4, ALIGNMENT, 20_000])
    assert_digested(tmp_path / "file", stretches, direct=direct)


@pytest.mark.parametrize("offset", [0, 77])
def test_the_end_of_the_file_is_told_where_stretches_go_beyond(tmp_path: Path, direct: bool, offset: int) -> None:
    (tmp_path / "file").write_bytes(pattern(3 * ALIGNMENT + 9))
    with pytest.raises(EndOfFile) as raised:
        assert_digested(tmp_path / "file", [(offset, 100, 100), (200, 5 * ALIGNMENT, 0)], direct=direct)
    assert raised.value.got == 3 * ALIGNMENT + 9 - offset


def refusing(call: Callable[..., int], after: int) -> Callable[..., int]:
    """A call that answers EINVAL to direct I/O, ``after`` so many calls."""

    def refuse(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal after
        after -= 1
        if is_direct(fd) and after < 0:
            raise OSError(errno.EINVAL, "refused")
        # One page at a time, so that there is a second call.
        return call(fd, [buffers[0][:ALIGNMENT]], offset)

    return refuse


@reads
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_file_system_that_refuses_direct_transfers_gets_buffered_ones(
    tmp_path: Path, reads: Reads, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("the file system refuses direct I/O")
    data = pattern(10 * ALIGNMENT + 5)
    monkeypatch.setattr(os, "pwritev", refusing(os.pwritev, after))
    fd = opened(tmp_path / "file", os.O_WRONLY | transfer.O_DIRECT)
    transfer.write(fd, as_arrays([aligned(data)]), Stop(), direct=True)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == data

    monkeypatch.setattr(os, "preadv", refusing(os.preadv, after))
    for shift in (0, 1):
        into = aligned(bytes(len(data)), shift=shift)
        fd = opened(tmp_path / "file", os.O_RDONLY | transfer.O_DIRECT)
        reads(fd, 0, into, direct=True)
        os.close(fd)
        assert into == data
    assert_digested(tmp_path / "file", [(0, 5000, 5000), (5000, len(data) - 5000, 7)], direct=True)


def test_a_write_that_is_refused_while_another_leaves_direct_transfers_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two writes in flight the second finds the descriptor buffered already."""
    if not takes_direct(tmp_path):
        pytest.skip("the file system refuses direct I/O")
    fd = opened(tmp_path / "file", os.O_WRONLY | transfer.O_DIRECT)
    write, data = os.pwritev, pattern(ALIGNMENT)

    def refused(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not is_direct(fd):
            return write(fd, buffers, offset)
        transfer._leave_direct(fd)  # the other one
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(os, "pwritev", refused)
    assert transfer.write_batch(fd, [*as_arrays([aligned(data)])], 0, Stop()) == ALIGNMENT
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == data


def test_a_transfer_stops_before_its_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()
    real, calls = os.pwritev, []

    def once(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        stop.set()
        return real(fd, [buffers[0][:ALIGNMENT]], offset)

    monkeypatch.setattr(os, "pwritev", once)
    fd = opened(tmp_path / "file", os.O_RDWR)
    with pytest.raises(Stopped):
        transfer.write(fd, memory([(3 * ALIGNMENT, 0)]), stop, direct=False)
    assert calls == [0]
    into = memoryview(bytearray(ALIGNMENT))
    with pytest.raises(Stopped):
        transfer.fill(fd, 0, as_arrays([into])[0], stop, direct=False)
    with pytest.raises(Stopped):
        transfer.read(fd, Target([Stretch(0, ALIGNMENT, into)], digested=False, stop=stop), direct=False)
    os.close(fd)


class TestReserve:
    """A file system is played here: one that is really asked for all its room has none for anybody else."""

    @pytest.fixture
    def fd(self, tmp_path: Path) -> Iterator[int]:
        fd = opened(tmp_path / "file", os.O_RDWR)
        yield fd
        os.close(fd)

    def with_room(self, monkeypatch: pytest.MonkeyPatch, nbytes: int, *, blocks: int = 1 << 40) -> None:
        free = SimpleNamespace(f_blocks=blocks, f_bavail=nbytes, f_frsize=1)
        monkeypatch.setattr(os, "fstatvfs", lambda fd: free)

    def test_a_device_without_room_says_so_before_it_is_filled(self, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_room(monkeypatch, 99_999)
        with pytest.raises(OSError, match="space") as raised:
            space.check_room(fd, 100_000)
        assert raised.value.errno == errno.ENOSPC
        assert os.fstat(fd).st_blocks == 0
        space.check_room(fd, 99_999)

    def test_a_file_system_that_does_not_tell_its_room_is_not_full(
        self, fd: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.with_room(monkeypatch, 0, blocks=0)
        space.check_room(fd, 100_000)

    def test_room_is_taken_before_the_bytes_come(self, fd: int) -> None:
        space.reserve(fd, 0)
        space.reserve(fd, 100_000)
        if not hasattr(space._libc, "fallocate"):
            pytest.skip("the platform cannot reserve")
        assert os.fstat(fd).st_blocks * 512 >= 100_000

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
    def test_a_refusal_of_the_file_system_is_an_error(
        self, fd: int, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(space, "_libc", Libc(number))
        with pytest.raises(OSError, match=r"\d") as raised:
            space.reserve(fd, 100)
        assert raised.value.errno == number

    @pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
    def test_a_file_system_that_cannot_reserve_does_without(
        self, fd: int, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(space, "_libc", Libc(number))
        space.reserve(fd, 100)


class Libc:
    """A C library whose fallocate fails."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fallocate(self, *_: object) -> int:
        ctypes.set_errno(self._number)
        return -1
