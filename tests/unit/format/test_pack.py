"""Pack footers: they lead back to the entries, and a damaged or foreign one is never believed."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.crc import crc32c
from tieredckpt.format.pack import (
    MAX_CHUNKS,
    TRAILER_BLOCK,
    PackEntry,
    decode_footer,
    decode_table,
    encode_footer,
    footer_range,
)


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[PackEntry], int]:
    entries, end = [], 0
    for length in draw(st.lists(st.integers(1, 20_000), max_size=300)):
        entries.append(PackEntry(draw(st.binary(min_size=16, max_size=16)), end, length))
        end += -(-length // 4096) * 4096
    return draw(st.permutations(entries)) if len(entries) < 20 else entries, end


def last_block(end: int, footer: bytes) -> bytes:
    return (bytes(end and TRAILER_BLOCK) + footer)[-TRAILER_BLOCK:]


@given(packs())
def test_a_footer_leads_back_to_its_entries(pack: tuple[list[PackEntry], int]) -> None:
    entries, end = pack
    footer = encode_footer(entries, end)
    size = end + len(footer)
    assert size % TRAILER_BLOCK == 0
    assert footer_range(last_block(end, footer), size) == (end, len(footer))
    assert decode_footer(footer, size) == entries
    table = decode_table(footer, size)
    assert table["offset"].tolist() == [entry.offset for entry in entries]
    assert [bytes(digest) for digest in table["digest"]] == [entry.digest for entry in entries]


def test_digests_that_end_in_zero_bytes_keep_them() -> None:
    entry = PackEntry(b"a" + bytes(15), 0, 1)
    footer = encode_footer([entry], 4096)
    assert decode_footer(footer, 4096 + len(footer)) == [entry]


def test_a_chunk_may_fill_the_data_to_the_end() -> None:
    entries = [PackEntry(bytes(16), 0, 4096), PackEntry(bytes(16), 4096, 8192)]
    footer = encode_footer(entries, 12288)
    assert decode_footer(footer, 12288 + len(footer)) == entries


ONE = [PackEntry(bytes(range(16)), 4096, 5000)]
FOOTER = encode_footer(ONE, 12288)
SIZE = 12288 + len(FOOTER)


def sealed(footer: bytes | bytearray) -> bytes:
    """The footer with a checksum that fits."""
    return bytes(footer[:-4]) + crc32c(bytes(footer[:-4])).to_bytes(4, "little")


@given(bit=st.integers(0, len(FOOTER) * 8 - 1))
def test_a_flipped_bit_is_noticed(bit: int) -> None:
    damaged = bytearray(FOOTER)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        decode_footer(bytes(damaged), SIZE)


@given(cut=st.integers(1, SIZE))
def test_a_cut_pack_is_noticed(cut: int) -> None:
    whole = bytes(12288) + FOOTER
    part = whole[:-cut]
    with pytest.raises(Corrupt):
        footer_range(part[-TRAILER_BLOCK:], len(part))


@given(
    position=st.sampled_from([*range(40), *range(len(FOOTER) - 40, len(FOOTER) - 4)]),
    value=st.integers(0, 255),
)
def test_a_footer_with_a_forged_checksum_gives_entries_inside_the_data_or_corrupt(position: int, value: int) -> None:
    forged = bytearray(FOOTER)
    forged[position] = value
    footer = sealed(forged)
    try:
        offset, length = footer_range(footer[-TRAILER_BLOCK:], SIZE)
        entries = decode_footer(footer, SIZE)
    except Corrupt:
        return
    assert offset + length == SIZE
    for entry in entries:
        assert entry.offset % 4096 == 0
        assert 0 < entry.length <= offset - entry.offset


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 0),
        (1, 10),
        (0, 12289),
        (8192, 4097),
        (12288, 1),
        (1 << 63, 1),
        ((1 << 64) - 4096, 8192),
        (0, (1 << 64) - 1),
    ],
)
def test_an_entry_outside_the_data_is_refused_on_both_ways(offset: int, length: int) -> None:
    with pytest.raises(Invalid):
        encode_footer([PackEntry(bytes(16), offset, length)], 12288)
    forged = bytearray(FOOTER)
    forged[16:32] = struct.pack("<QQ", offset, length)
    with pytest.raises(Corrupt):
        decode_footer(sealed(forged), SIZE)


@pytest.mark.parametrize("count", [0, 2, 126, 127, 1000, 1 << 40, (1 << 64) - 1])
def test_a_count_that_the_footer_cannot_have_is_refused_or_covered(count: int) -> None:
    forged = bytearray(FOOTER)
    forged[-16:-8] = struct.pack("<Q", count)
    footer = sealed(forged)
    if count == 0:
        assert decode_footer(footer, SIZE) == []
        return
    with pytest.raises(Corrupt):
        decode_footer(footer, SIZE)


def test_a_reader_is_never_sent_for_a_footer_that_is_larger_than_the_largest() -> None:
    for count in (MAX_CHUNKS, MAX_CHUNKS + 1):
        forged = bytearray(FOOTER)
        forged[-16:-8] = struct.pack("<Q", count)
        length = -(-(32 * count + 40) // TRAILER_BLOCK) * TRAILER_BLOCK
        size = 12288 + length  # as a file with a hole has it
        if count <= MAX_CHUNKS:
            assert footer_range(bytes(forged), size) == (12288, length)
        else:
            with pytest.raises(Corrupt):
                footer_range(bytes(forged), size)


def test_no_pack_is_written_with_more_chunks_than_can_be_read() -> None:
    with pytest.raises(Invalid):
        encode_footer([PackEntry(bytes(16), 0, 1)] * (MAX_CHUNKS + 1), 4096)


@pytest.mark.parametrize(
    ("position", "field"),
    [(-40, b"TCKPACK\n"), (-32, b"\2"), (-28, b"\1"), (-24, b"\1"), (-8, b"\1")],
    ids=["magic", "version", "zero", "end", "zero again"],
)
def test_a_trailer_of_another_kind_is_refused_though_its_checksum_fits(position: int, field: bytes) -> None:
    forged = bytearray(FOOTER)
    forged[position : position + len(field)] = field
    footer = sealed(forged)
    with pytest.raises(Corrupt, match="trailer"):
        footer_range(footer, SIZE)
    with pytest.raises(Corrupt, match="trailer"):
        decode_footer(footer, SIZE)


@pytest.mark.parametrize("size", [0, 4096, SIZE - 4096, SIZE + 4096, SIZE + 1])
def test_a_footer_in_a_file_of_another_size_is_refused(size: int) -> None:
    assert footer_range(FOOTER, SIZE) == (12288, 4096)
    with pytest.raises(Corrupt):
        footer_range(FOOTER, size)
    with pytest.raises(Corrupt):
        decode_footer(FOOTER, size)


@pytest.mark.parametrize("size", [0, 39, 4095, 4097])
def test_only_a_whole_block_is_taken_for_the_last_one(size: int) -> None:
    with pytest.raises(Corrupt, match="whole pack"):
        footer_range(FOOTER[-size:].ljust(size, b"\0") if size else b"", SIZE)


@pytest.mark.parametrize("end", [-4096, 1, 4095, 1 << 63])
def test_data_must_end_on_a_block(end: int) -> None:
    with pytest.raises(Invalid, match="4096"):
        encode_footer([], end)


@pytest.mark.parametrize(
    "entry", [PackEntry(b"short", 0, 1), PackEntry(bytes(16), -4096, 1), PackEntry(bytes(16), 0, -1)]
)
def test_impossible_entries_are_refused(entry: PackEntry) -> None:
    with pytest.raises(Invalid):
        encode_footer([entry], 4096)


@given(footer=st.binary(max_size=200), size=st.integers(0, 10**6))
def test_any_other_bytes_are_corrupt(footer: bytes, size: int) -> None:
    block = footer.rjust(TRAILER_BLOCK, b"\0")
    with pytest.raises(Corrupt):
        footer_range(block, size)
    with pytest.raises(Corrupt):
        decode_footer(block, size)
    with pytest.raises(Corrupt):
        decode_footer(footer, len(footer))


@pytest.mark.benchmark
def test_a_hundred_thousand_entries_take_well_under_a_second() -> None:
    digests = np.random.default_rng(0).bytes(16 * 100_000)
    entries = [PackEntry(digests[16 * i : 16 * i + 16], 4096 * i, 4096) for i in range(100_000)]
    began = time.process_time()
    footer = encode_footer(entries, 4096 * 100_000)
    assert decode_footer(footer, 4096 * 100_000 + len(footer)) == entries
    # Measured: 0.1 s.
    assert time.process_time() - began < 5
