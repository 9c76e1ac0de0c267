"""What is stored of a chunk is what comes back, within the bounds that its encoding states; nothing else is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.blobs.codecs import BLOSC
from tieredckpt.errors import Corrupt
from tieredckpt.format import encoding
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C, FRAME_HEADER, PLAIN, Bytes, Encoded, Encoding
from tieredckpt.format.layout import ALIGNMENT

SIZES = st.integers(1, 3 * ALIGNMENT + 9) | st.sampled_from(
    [pages * ALIGNMENT + more for pages in (1, 2) for more in (-4, -3, -1, 0, 1)]
)
ANY = st.sampled_from([PLAIN, CRC32C, BLOSC])


def encoded(using: Encoding, chunk: bytes, *, behind: bool) -> tuple[Encoded, Bytes]:
    """A chunk as stored, and all the bytes that are written of it."""
    memory = np.zeros(using.stored_size(len(chunk)), np.uint8)
    memory[: len(chunk)] = np.frombuffer(chunk, np.uint8)
    memory.flags.writeable = behind
    room = using.room(len(chunk), behind=behind)
    found = using.encode(memory, len(chunk), 1, np.zeros(room, np.uint8) if room else None)
    assert memory[: len(chunk)].tobytes() == chunk
    return found, np.concatenate(found.parts)


@given(using=ANY, nbytes=SIZES, behind=st.booleans(), wanted=st.floats(0, 1))
def test_a_chunk_comes_back_from_what_is_stored_of_it(
    using: Encoding, nbytes: int, behind: bool, wanted: float
) -> None:
    chunk = np.random.default_rng(nbytes).bytes(nbytes)
    found, stored = encoded(using, chunk, behind=behind)
    assert found.digest == digest(chunk)
    assert using.fits(found.length, nbytes)
    assert found.length <= stored.size <= using.stored_size(nbytes)
    assert all(part.size % ALIGNMENT == 0 for part in found.parts)
    into = np.zeros(int(wanted * nbytes), np.uint8)
    assert using.decode(stored[: found.length - using.checksum_size], nbytes, into) == found.digest
    assert into.tobytes() == chunk[: into.size]


@given(using=ANY, nbytes=SIZES, by=st.integers(-5000, 5000).filter(bool))
def test_a_frame_that_is_cut_or_too_long_is_refused(using: Encoding, nbytes: int, by: int) -> None:
    frame = np.zeros(max(nbytes + by, 0), np.uint8)
    with pytest.raises(Corrupt, match=f"a chunk of {nbytes} bytes"):
        using.decode(frame, nbytes, np.zeros(nbytes, np.uint8))


@given(nbytes=SIZES, by=st.integers(-5000, 5000).filter(bool))
def test_only_the_stated_length_fits(nbytes: int, by: int) -> None:
    for using in (PLAIN, CRC32C):
        assert using.fits(nbytes + using.overhead, nbytes)
        assert not using.fits(nbytes + using.overhead + by, nbytes)
    sizes = np.array([nbytes, nbytes + 1], np.uint64)
    least, most = CRC32C.bounds(sizes)
    assert least.tolist() == most.tolist() == [nbytes + 4, nbytes + 5]
    assert most.dtype == np.uint64


@given(nbytes=SIZES, long=st.booleans(), by=st.integers(-25, 45))
def test_below_ram_the_length_tells_how_a_chunk_is_stored(nbytes: int, long: bool, by: int) -> None:
    length = nbytes * long + by
    raw = length == nbytes + 4
    assert CRC32C.fits(length, nbytes) is raw
    assert BLOSC.fits(length, nbytes) is (not raw and FRAME_HEADER < length - 4 <= nbytes + FRAME_HEADER)


@given(nbytes=SIZES)
def test_raw_chunks_need_memory_for_their_last_page_alone_and_none_if_it_may_be_written(nbytes: int) -> None:
    assert PLAIN.room(nbytes, behind=False) == PLAIN.room(nbytes, behind=True) == CRC32C.room(nbytes, behind=True) == 0
    assert CRC32C.room(nbytes, behind=False) in (ALIGNMENT, 2 * ALIGNMENT)


@given(
    using=ANY,
    chunk=st.binary(min_size=1, max_size=300) | st.integers(1, ALIGNMENT).map(bytes),
    cut=st.integers(-3, 3),
)
def test_an_inline_chunk_comes_back_and_no_other_length_is_taken(using: Encoding, chunk: bytes, cut: int) -> None:
    stored = using.encode_inline(chunk, 1)
    assert using.decode_inline(stored, len(chunk), "index") == chunk
    if cut:
        other = stored[:cut] if cut < 0 else stored + bytes(cut)
        with pytest.raises(Corrupt, match="index: a chunk of"):
            using.decode_inline(other, len(chunk), "index")


@given(nbytes=SIZES)
def test_crc32c_has_the_checksum_of_the_chunk_behind_it_and_plain_has_nothing(nbytes: int) -> None:
    chunk = np.random.default_rng(nbytes).bytes(nbytes)
    for behind in (False, True):
        found, stored = encoded(CRC32C, chunk, behind=behind)
        assert stored[: found.length].tobytes() == chunk + crc32c(chunk).to_bytes(4, "little")
        found, stored = encoded(PLAIN, chunk, behind=behind)
        assert stored[: found.length].tobytes() == chunk


def test_every_encoding_is_known_by_its_name_and_told_by_its_codecs() -> None:
    assert {name: each.name for name, each in encoding.ENCODINGS.items()} == {
        "plain": "plain",
        "crc32c": "crc32c",
        "blosc": "blosc",
    }
    assert PLAIN.codecs(4) == []
    assert CRC32C.codecs(4) == [{"name": "crc32c"}]
