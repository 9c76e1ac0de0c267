"""Compressed chunks come back, stock readers open them, and no frame that somebody made up reaches a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.blobs import codecs
from tieredckpt.blobs.codecs import BLOSC, CODECS, _Numcodecs, _TensorStore, encoding_of
from tieredckpt.errors import Corrupt
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C, FRAME_HEADER, Encoded, Encoding, check_frame
from tieredckpt.format.layout import ALIGNMENT
from tieredckpt.format.zarr import _DTYPES, array_metadata, parse_array_metadata

COMPRESSING = sorted(codec for codec, encoding in CODECS.items() if not encoding.raw)


@pytest.fixture(params=[_Numcodecs, _TensorStore], ids=["numcodecs", "tensorstore"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Either package does it."""
    if request.param is _Numcodecs:
        pytest.importorskip("numcodecs")
    found = request.param()
    monkeypatch.setattr(codecs, "library", lambda: found)
    return found


def encoded(using: Encoding, chunk: bytes, itemsize: int) -> tuple[Encoded, bytes]:
    memory = np.frombuffer(chunk, np.uint8)
    room = np.full(using.room(len(chunk), behind=False), 9, np.uint8)
    found = using.encode(memory, len(chunk), itemsize, room)
    stored = np.concatenate(found.parts).tobytes()
    assert not any(stored[found.length :])  # nothing of what used the memory before
    return found, stored[: found.length]


def chunk_of(items: int, itemsize: int, bits: int, seed: int) -> bytes:
    """Items of which so many bits are random: from zeros to noise."""
    rng = np.random.default_rng(seed)
    kept = (np.arange(8 * itemsize) < bits).astype(np.uint8)
    mask = np.packbits(kept, bitorder="little")
    return bytes((rng.integers(0, 256, (items, itemsize), np.uint8) & mask).tobytes())


CHUNKS = st.builds(
    lambda items, itemsize, bits, seed: (chunk_of(items, itemsize, bits, seed), itemsize),
    st.integers(1, 9000) | st.sampled_from([300_000]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 64),
    st.integers(0, 3),
)


@pytest.mark.parametrize("codec", [*COMPRESSING, None])
def test_a_chunk_of_any_items_comes_back(library: Any, codec: codecs.Codec | None) -> None:
    using = BLOSC if codec is None else CODECS[codec]

    @given(chunk=CHUNKS, wanted=st.floats(0, 1) | st.just(1.0))
    def each(chunk: tuple[bytes, int], wanted: float) -> None:
        data, itemsize = chunk
        found, stored = encoded(using, data, itemsize)
        assert found.digest == digest(data)
        assert using.fits(found.length, len(data))
        assert not CRC32C.fits(found.length, len(data))
        assert encoding_of(found.length, len(data)) is BLOSC
        frame = np.frombuffer(stored, np.uint8)[:-4]
        assert stored[-4:] == crc32c(frame).to_bytes(4, "little")
        if len(data) >= ALIGNMENT:  # it gains something worth having, or has the chunk as it is
            assert check_frame(frame, len(data)) is (frame.size > 0.97 * len(data))
        into = np.full(int(wanted * len(data)), 7, np.uint8)
        assert using.decode(frame, len(data), into) == found.digest
        assert into.tobytes() == data[: into.size]

    each()


@pytest.mark.parametrize("codec", COMPRESSING)
def test_what_can_be_compressed_is(library: Any, codec: codecs.Codec) -> None:
    weights = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    found, _ = encoded(CODECS[codec], weights.tobytes(), 4)
    assert found.length < 0.93 * weights.nbytes


class _Wrong:
    """A library whose frames are sound but for their content."""

    def __init__(self, of: Any, how: str) -> None:
        self._of, self._how = of, how

    def encode(self, chunk: Any, typesize: int, how: Any) -> bytes:
        if self._how == "other values":
            chunk = chunk.copy()
            chunk[chunk.size // 2] ^= 1
        frame = bytearray(self._of.encode(chunk, typesize, how))
        if self._how == "no frame":
            frame[:4] = bytes(4)
        elif self._how == "cannot be decoded":
            frame[40:] = bytes(len(frame) - 40)
        return bytes(frame)

    def decode(self, frame: Any, into: Any) -> None:
        self._of.decode(frame, into)


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("wrong", ["other values", "no frame", "cannot be decoded"])
def test_a_chunk_is_stored_as_it_is_where_its_frame_would_not_bring_it_back(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, codec: codecs.Codec, wrong: str
) -> None:
    monkeypatch.setattr(codecs, "library", lambda: _Wrong(library, wrong))
    codecs._tell_of_wrong_frames.cache_clear()
    data = np.arange(9000, dtype=np.int64).tobytes()
    for _ in range(2):
        found, stored = encoded(CODECS[codec], data, 8)
        assert found.digest == digest(data)
        assert stored[FRAME_HEADER:-4] == data
        into = np.zeros(len(data), np.uint8)
        assert BLOSC.decode(np.frombuffer(stored, np.uint8)[:-4], len(data), into) == found.digest
    assert [record.levelname for record in caplog.records] == ["ERROR"], "once"


@pytest.mark.parametrize("name", sorted(_DTYPES))
@pytest.mark.parametrize("codec", COMPRESSING)
async def test_stock_tensorstore_opens_a_chunk_of_every_dtype(codec: codecs.Codec, name: str) -> None:
    dtype = _DTYPES[name]
    data = chunk_of(3000, dtype.itemsize, 8 if dtype.itemsize > 1 else 1, 0)
    metadata = array_metadata((3000,), dtype, (3000,), CODECS[codec])
    assert parse_array_metadata(metadata)[2] is BLOSC
    context = ts.Context()
    kvstore = await ts.KvStore.open({"driver": "memory"}, context=context)
    _, stored = encoded(CODECS[codec], data, dtype.itemsize)
    await kvstore.write("zarr.json", metadata)
    await kvstore.write("c/0", stored)
    array = await ts.open({"driver": "zarr3", "kvstore": {"driver": "memory"}}, context=context)
    assert np.asarray(await array.read()).tobytes() == data
    await kvstore.write("c/0", stored[:100] + bytes([stored[100] ^ 1]) + stored[101:])
    with pytest.raises(ValueError, match="Digest mismatch"):
        await array.read()


def test_zarr_python_opens_a_chunk(tmp_path: Any) -> None:
    zarr = pytest.importorskip("zarr", minversion="3")
    data = np.arange(6000, dtype=np.float32)
    (tmp_path / "c").mkdir()
    (tmp_path / "zarr.json").write_bytes(array_metadata(data.shape, data.dtype, (3000,), CODECS["small"]))
    for place in (0, 1):
        _, stored = encoded(CODECS["fast"], data[3000 * place :][:3000].tobytes(), 4)
        (tmp_path / "c" / str(place)).write_bytes(stored)
    np.testing.assert_array_equal(zarr.open_array(tmp_path, mode="r")[:], data)


def test_one_encoding_is_told_by_its_codecs_for_every_item() -> None:
    for itemsize, shuffle in ((1, "noshuffle"), (2, "shuffle"), (16, "shuffle")):
        blosc, checksum = BLOSC.codecs(itemsize)
        assert checksum == {"name": "crc32c"}
        assert blosc["configuration"]["shuffle"] == shuffle
        assert blosc["configuration"]["typesize"] == min(itemsize, 8)
        assert all(CODECS[codec].codecs(itemsize) == BLOSC.codecs(itemsize) for codec in COMPRESSING)


_FRAME = np.frombuffer(encoded(CODECS["small"], np.arange(3 * 4096, dtype=np.uint32).tobytes(), 4)[1], np.uint8)[:-4]
_NBYTES = 3 * 4 * 4096


@given(
    changes=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=4)
    | st.lists(st.tuples(st.integers(0, _FRAME.size - 1), st.integers(0, 255)), max_size=40),
    cut=st.integers(0, 3) | st.integers(0, _FRAME.size),
)
def test_a_frame_that_was_tampered_with_gives_other_bytes_or_is_refused(
    changes: list[tuple[int, int]], cut: int
) -> None:
    forged = _FRAME.copy()
    for place, value in changes:
        forged[place] = value
    forged = forged[: forged.size - cut]
    into = np.zeros(_NBYTES, np.uint8)
    try:
        found = BLOSC.decode(forged, _NBYTES, into)
    except Corrupt:
        return
    assert found == digest(into.tobytes())


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (0, b"\x01", "no frame of Blosc 1"),
        (2, b"\x21\x03", "no frame of Blosc 1"),
        (2, b"\x61", "nothing here has written"),
        (2, b"\x99", "no frame of Blosc 1"),
        (2, b"\x93", "lies as it is"),
        (3, b"\x10", "no frame of Blosc 1"),
        (4, b"\x00\x00\x00\x01", "no frame of Blosc 1"),
        (8, bytes(4), "no frame of Blosc 1"),
        (8, b"\x01\x00\x00\x00", "nothing here has written"),
        (8, b"\x04\x00\x00\x00", "nothing here has written"),
        (8, (_NBYTES - 1).to_bytes(4, "little"), "nothing here has written"),
        (12, b"\xff\xff\xff\x7f", "no frame of Blosc 1"),
        (16, b"\xff\xff\xff\x7f", "blocks outside"),
        (16, b"\x00\x00\x00\x00", "blocks outside"),
        (16, (_FRAME.size - 3).to_bytes(4, "little"), "blocks outside"),
    ],
)
def test_a_header_is_checked_before_any_decoder_sees_the_frame(
    monkeypatch: pytest.MonkeyPatch, place: int, value: bytes, why: str
) -> None:
    monkeypatch.setattr(codecs, "library", lambda: pytest.fail("a decoder was given it"))
    forged = _FRAME.copy()
    forged[place : place + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(Corrupt, match=why):
        BLOSC.decode(forged, _NBYTES, np.zeros(_NBYTES, np.uint8))
    with pytest.raises(Corrupt, match="in a frame of"):
        BLOSC.decode(_FRAME[: FRAME_HEADER - 1], _NBYTES, np.zeros(_NBYTES, np.uint8))


@pytest.mark.parametrize("length", [_NBYTES, _NBYTES + 8])
def test_a_compressed_frame_no_shorter_than_its_chunk_is_refused(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(codecs, "library", lambda: pytest.fail("a decoder was given it"))
    forged = np.zeros(length, np.uint8)
    forged[: _FRAME.size] = _FRAME
    forged[12:FRAME_HEADER] = np.frombuffer(length.to_bytes(4, "little"), np.uint8)
    with pytest.raises(Corrupt, match="nothing here has written"):
        BLOSC.decode(forged, _NBYTES, np.zeros(_NBYTES, np.uint8))
