"""Digests: the same bytes have the same digest, however they were hashed."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tieredckpt.errors import Invalid
from tieredckpt.format import digest as digests
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import BLOCK, Digester, copy_and_digest, digest, digest_and_checksum, digest_array

sizes = st.one_of(
    st.integers(0, 100),
    st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 5, 3 * BLOCK]),
)


def random_bytes(size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def test_the_digest_is_xxh3_128_in_canonical_form() -> None:
    assert digests.NAME == "xxh3-128"
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert len(digest(b"abc")) == digests.SIZE


@given(size=sizes, padding=sizes)
def test_padding_counts_as_zero_bytes(size: int, padding: int) -> None:
    data = random_bytes(size).tobytes()
    assert digest(data, padding) == xxhash.xxh3_128_digest(data + bytes(padding))


@given(size=sizes)
def test_every_way_to_hash_gives_the_same_digest(size: int) -> None:
    array = random_bytes(size)
    data = array.tobytes()
    whole = xxhash.xxh3_128_digest(data)
    digester = Digester()
    digester.update(data[: size // 3])
    digester.update(memoryview(data)[size // 3 :])
    for found in (digest(data), digest(bytearray(data)), digest(array), digest_array(array)):
        assert found == whole
    assert digest_and_checksum(array) == (whole, crc32c(data))
    assert digester.digest() == whole


@given(size=sizes, room=sizes)
def test_a_cell_is_the_copy_with_zeros_behind_it_and_the_digest_is_of_the_whole_cell(size: int, room: int) -> None:
    src = random_bytes(size)
    memory = np.full(size + room + 2, 0xA5, np.uint8)
    dst = memory[1:-1]
    found = copy_and_digest(src, dst)
    cell = src.tobytes() + bytes(room)
    assert dst.tobytes() == cell
    assert found == xxhash.xxh3_128_digest(cell)
    assert memory[0] == memory[-1] == 0xA5


def test_a_source_larger_than_the_cell_is_refused() -> None:
    dst = np.full(3, 7, np.uint8)
    with pytest.raises(Invalid, match="4 bytes do not fit"):
        copy_and_digest(np.zeros(4, np.uint8), dst)
    assert dst.tolist() == [7, 7, 7]


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.uint8), np.zeros(4, np.float32), np.zeros(8, np.uint8)[::2]])
def test_only_flat_contiguous_bytes_are_hashed_in_place(array: NDArray[np.uint8]) -> None:
    with pytest.raises(Invalid, match="one-dimensional"):
        digest_array(array)
    with pytest.raises(Invalid, match="one-dimensional"):
        digest_and_checksum(array)
    with pytest.raises(Invalid, match="src"):
        copy_and_digest(array, np.zeros(64, np.uint8))
    with pytest.raises(Invalid, match="dst"):
        copy_and_digest(np.zeros(1, np.uint8), array)


def test_negative_padding_is_refused() -> None:
    with pytest.raises(Invalid, match="-1"):
        digest(b"", -1)
