"""CRC-32C: the native, portable and fallback functions are one function, and the native frees the GIL."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import google_crc32c
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tieredckpt.errors import Invalid
from tieredckpt.format import crc

native = pytest.importorskip(
    "tieredckpt._native", reason="tieredckpt was installed without a C++ compiler", exc_type=ImportError
)

LANES = (8, 3 * 256, 3 * 8192)
"""Sizes at which the native code changes from one loop to the next."""

sizes = st.one_of(
    st.integers(0, 100),
    st.builds(
        lambda lane, times, more: max(0, lane * times + more),
        st.sampled_from(LANES),
        st.integers(0, 4),
        st.integers(-9, 9),
    ),
)
registers = st.integers(0, 2**32 - 1)


def random_bytes(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
@pytest.mark.parametrize("function", [crc.crc32c, native.crc32c, native.crc32c_portable])
def test_known_checksums_of_rfc_3720(function: Callable[[bytes], int], data: bytes, expected: int) -> None:
    assert function(data) == expected


@given(size=sizes, offset=st.integers(0, 15), seed=st.integers(0, 2**32), start=registers)
@example(size=3 * 8192, offset=1, seed=0, start=0)
@example(size=2 * 3 * 8192 + 3 * 256 + 8 + 1, offset=0, seed=1, start=1)
def test_every_implementation_agrees_at_every_size_and_alignment(size: int, offset: int, seed: int, start: int) -> None:
    data = np.frombuffer(random_bytes(size + offset, seed), dtype=np.uint8)[offset:]
    expected = google_crc32c.extend(start, data.tobytes())
    assert native.crc32c(data, start) == expected
    assert native.crc32c_portable(data, start) == expected
    assert crc._crc32c_in_blocks(data, start) == expected


@given(size=sizes, at=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_a_checksum_chains_over_any_split(size: int, at: float, seed: int) -> None:
    data = random_bytes(size, seed)
    cut = int(at * size)
    assert crc.crc32c(data[cut:], crc.crc32c(data[:cut])) == crc.crc32c(data)


@given(size=st.integers(0, 64), seed=st.integers(0, 2**32), native_built=st.booleans())
def test_any_contiguous_buffer_is_taken_for_its_bytes(size: int, seed: int, native_built: bool) -> None:
    data = random_bytes(8 * size, seed)
    expected = google_crc32c.value(data)
    buffers = (
        data,
        bytearray(data),
        memoryview(data),
        memoryview(bytearray(data)),
        np.frombuffer(bytearray(data), dtype=np.uint8),
        np.frombuffer(data, dtype=np.float64),
        np.frombuffer(data, dtype=np.uint16).reshape(-1, 4),
    )
    with pytest.MonkeyPatch.context() as patch:
        if not native_built:
            patch.setattr(crc, "_native", None)
        assert {crc.crc32c(buffer) for buffer in buffers} == {expected}


@pytest.mark.parametrize("native_built", [True, False])
@pytest.mark.parametrize(
    ("data", "start"),
    [
        (memoryview(b"abcdef")[::2], 0),
        (np.zeros(8, dtype=np.uint8)[::2], 0),
        (np.zeros((3, 4)).T, 0),
        ("text", 0),
        (None, 0),
        (b"x", -1),
        (b"x", 2**32),
    ],
)
def test_what_is_no_contiguous_buffer_or_register_is_refused(
    monkeypatch: pytest.MonkeyPatch, native_built: bool, data: crc.Bytes, start: int
) -> None:
    if not native_built:
        monkeypatch.setattr(crc, "_native", None)
    with pytest.raises(Invalid, match="contiguous"):
        crc.crc32c(data, start)


def test_the_fallback_crosses_its_block_boundaries() -> None:
    for size in (crc._FALLBACK_BLOCK - 1, crc._FALLBACK_BLOCK, 2 * crc._FALLBACK_BLOCK + 3):
        data = random_bytes(size, size)
        assert crc._crc32c_in_blocks(memoryview(data), 7) == google_crc32c.extend(7, data)


def test_the_native_function_is_used_where_it_was_built() -> None:
    assert crc.NATIVE
    assert crc._native is native.crc32c


@pytest.fixture
def _nobody_is_made_to_give_up_the_gil() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_nobody_is_made_to_give_up_the_gil")
@pytest.mark.parametrize("function", [native.crc32c, native.crc32c_portable])
def test_another_thread_runs_python_while_a_large_buffer_is_checksummed(
    function: Callable[[crc.Bytes], int],
) -> None:
    data = np.zeros(16 << 20, dtype=np.uint8)
    go = threading.Lock()
    go.acquire()
    ran = False

    def run() -> None:
        nonlocal ran
        with go:
            ran = True

    other = threading.Thread(target=run)
    other.start()
    go.release()
    # From here on this thread keeps the GIL, unless the function gives it up.
    for _ in range(1000):
        function(data)
        if ran:
            break
    seen = ran
    other.join()
    assert seen
