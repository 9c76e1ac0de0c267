"""XXH3-128 while copying: native, portable and block by block are one function, of the copy that arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tieredckpt.format import crc
from tieredckpt.format import digest as digests

native = pytest.importorskip(
    "tieredckpt._native", reason="tieredckpt was installed without a C++ compiler", exc_type=ImportError
)

Copy = Callable[[NDArray[np.uint8], NDArray[np.uint8]], bytes]

COPIES: tuple[Copy, ...] = (native.xxh3_copy, native.xxh3_copy_portable)

STREAMED = 256 << 10
"""From so many bytes on, copies bypass the caches."""

SEALED = 24 << 10
"""So many bytes are taken into the digest, and then into the checksum, before the next."""

sizes = st.one_of(
    st.integers(native.XXH3_SHORTEST, 1200),
    st.builds(
        lambda unit, times, more: max(native.XXH3_SHORTEST, unit * times + more),
        st.sampled_from((64, 1024, STREAMED)),
        st.integers(1, 5),
        st.integers(-65, 65),
    ),
)
offsets = st.integers(0, 63)


def random_bytes(size: int, offset: int = 0) -> NDArray[np.uint8]:
    """At an address of any alignment."""
    return np.frombuffer(np.random.default_rng(size).bytes(size + offset), dtype=np.uint8)[offset:]


def blank(size: int, offset: int) -> NDArray[np.uint8]:
    return np.full(size + offset, 7, dtype=np.uint8)[offset:]


@given(size=sizes, offset=offsets)
@example(size=native.XXH3_SHORTEST, offset=0)
def test_the_native_digest_is_xxhashs(size: int, offset: int) -> None:
    data = random_bytes(size, offset)
    assert native.xxh3(data) == xxhash.xxh3_128_digest(data.tobytes())


@given(
    size=st.one_of(sizes, st.builds(lambda times, more: SEALED * times + more, st.integers(1, 4), st.integers(-65, 65)))
)
@example(size=SEALED)
@example(size=SEALED + 1)
def test_the_native_digest_and_checksum_are_those_of_two_passes(size: int) -> None:
    data = random_bytes(size)
    assert native.xxh3_crc32c(data) == digests._digest_and_checksum_in_blocks(data)
    assert native.xxh3_crc32c(data) == (xxhash.xxh3_128_digest(data.tobytes()), crc.crc32c(data))


@pytest.mark.parametrize("copy", COPIES)
@given(size=sizes, part=st.floats(0, 1), source_offset=offsets, target_offset=offsets)
@example(size=3 * STREAMED, part=1.0, source_offset=1, target_offset=16)
@example(size=1024, part=1.0, source_offset=0, target_offset=0)
def test_a_longer_target_is_filled_up_and_digested(
    copy: Copy, size: int, part: float, source_offset: int, target_offset: int
) -> None:
    source, target = random_bytes(int(size * part), source_offset), blank(size, target_offset)
    reference = blank(size, 0)
    found = copy(source, target)
    assert found == digests._copy_and_digest_in_blocks(source, reference)
    assert found == xxhash.xxh3_128_digest(source.tobytes() + bytes(size - source.size))
    assert target.tobytes() == reference.tobytes()


@pytest.mark.parametrize("copy", COPIES)
@given(size=sizes, part=st.floats(0, 1), source_offset=offsets, target_offset=offsets)
@example(size=1024 + 64, part=1024 / 1088, source_offset=0, target_offset=0)
@example(size=1024 + 64, part=1030 / 1088, source_offset=0, target_offset=0)
def test_a_longer_source_is_digested_whole_and_copied_as_far_as_it_goes(
    copy: Copy, size: int, part: float, source_offset: int, target_offset: int
) -> None:
    source, room = random_bytes(size, source_offset), blank(int(size * part) + 1, target_offset)
    target, reference = room[:-1], blank(room.size - 1, 0)
    found = copy(source, target)
    assert found == digests._copy_start_and_digest_in_blocks(source, reference)
    assert found == xxhash.xxh3_128_digest(source.tobytes())
    assert target.tobytes() == reference.tobytes() == source[: target.size].tobytes()
    assert room[-1] == 7


@pytest.mark.parametrize("copy", COPIES)
def test_the_digest_holds_for_the_copy_even_if_the_source_changes_meanwhile(copy: Copy) -> None:
    source, target = np.zeros(8 << 20, dtype=np.uint8), np.zeros(8 << 20, dtype=np.uint8)
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            np.add(source, 1, out=source)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(20):
            assert copy(source, target) == xxhash.xxh3_128_digest(target.data)
    finally:
        stop.set()
        trainer.join()


@pytest.mark.parametrize("native_built", [True, False])
@given(
    pieces=st.lists(st.one_of(st.integers(0, 130), st.sampled_from((1024, STREAMED)), sizes), max_size=8),
    part=st.floats(0, 1),
    offset=offsets,
)
@example(pieces=[64, 64, 64, 64], part=1.0, offset=0)
@example(pieces=[240, 0, 1], part=0.5, offset=0)
def test_a_copy_in_pieces_has_the_digest_of_the_whole(
    native_built: bool, pieces: list[int], part: float, offset: int
) -> None:
    data, at = random_bytes(sum(pieces)), 0
    with pytest.MonkeyPatch.context() as patch:
        if not native_built:
            patch.setattr(digests, "_native_stream", None)
        copier = digests.CopyDigester(data.size)
    for size in pieces:
        piece, room = data[at : at + size], blank(int(size * part) + 1, offset)
        copier.copy(piece, room[:-1])
        assert room[:-1].tobytes() == piece[: room.size - 1].tobytes()
        assert room[-1] == 7
        at += size
    assert copier.digest() == xxhash.xxh3_128_digest(data.tobytes())


def test_a_piece_is_not_copied_beyond_its_end() -> None:
    with pytest.raises(digests.Invalid, match="cannot be filled"):
        digests.CopyDigester(1000).copy(random_bytes(10), blank(11, 0))
    with pytest.raises(ValueError, match="longer"):
        native.Xxh3Stream().copy(random_bytes(10), blank(11, 0))


@pytest.mark.parametrize("size", [0, 1, native.XXH3_SHORTEST - 1])
def test_what_is_too_short_for_the_long_form_is_refused_and_goes_another_way(size: int) -> None:
    data = random_bytes(size)
    with pytest.raises(ValueError, match="long form"):
        native.xxh3(data)
    for copy in COPIES:
        with pytest.raises(ValueError, match="long form"):
            copy(data, blank(size, 0))
    with pytest.raises(ValueError, match="long form"):
        native.xxh3_crc32c(data)
    stream = native.Xxh3Stream()
    stream.copy(data, blank(0, 0))
    with pytest.raises(ValueError, match="long form"):
        stream.digest()
    expected = xxhash.xxh3_128_digest(data.tobytes())
    for copied in (digests.copy_and_digest, digests.copy_start_and_digest):
        assert copied(data, blank(size, 0)) == expected
    assert digests.digest(data) == digests.digest_array(data) == expected
    assert digests.digest_and_checksum(data) == (expected, crc.crc32c(data))


def test_memory_that_may_not_be_written_is_refused() -> None:
    target = np.zeros(1024, dtype=np.uint8)
    target.flags.writeable = False
    for copy in COPIES:
        with pytest.raises((BufferError, ValueError)):
            copy(random_bytes(1024), target)


def test_native_code_is_used_where_the_processor_is_fit_for_it() -> None:
    fit = native.XXH3_ACCELERATED
    assert fit == digests.NATIVE
    assert digests._native_copy is (native.xxh3_copy if fit else None)
    assert digests._native_digest is (native.xxh3 if fit else None)
    assert digests._native_seal is (native.xxh3_crc32c if fit else None)
    assert digests._native_stream is (native.Xxh3Stream if fit else None)


@pytest.mark.parametrize("native_built", [True, False])
def test_a_cell_larger_than_the_target_needs_is_told_from_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch, native_built: bool
) -> None:
    if not native_built:
        monkeypatch.setattr(digests, "_native_copy", None)
    data = random_bytes(1000)
    target = blank(900, 0)
    assert digests.copy_start_and_digest(data, target) == xxhash.xxh3_128_digest(data.tobytes())
    assert target.tobytes() == data[:900].tobytes()
    with pytest.raises(digests.Invalid, match="cannot be filled"):
        digests.copy_start_and_digest(data[:100], target)
