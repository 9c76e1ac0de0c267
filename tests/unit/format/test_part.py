"""The part of a rank: what is encoded is what is decoded, and nothing else is believed."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import first_record

from tieredckpt._decoders import msgpack_decoder
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format import layout
from tieredckpt.format.crc import crc32c
from tieredckpt.format.grid import Grid
from tieredckpt.format.manifest import StepRecord
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.part import Part, PartArray, PartChunk, decode_extents, decode_part, encode_part
from tieredckpt.format.structure import ArrayNode, DictNode

PACK = layout.pack_key("ab" * 16)
HEAD = 16
FIELDS = ("record", "structure", "packs", "arrays", "digests", "kinds", "files", "offsets", "lengths", "inline")


def record(rank: int | None = 1, **changes: Any) -> StepRecord:
    whole = ArrayNode("whole", "bfloat16", (3,), "numpy")
    cut = ArrayNode("cut", "datetime64[s]", (8, 4), "numpy")
    empty = ArrayNode("empty", "int8", (0, 2), "torch")
    fields: dict[str, Any] = {"nbytes": 6 + 128, "metrics": {"loss": "nan"}, "rank": rank, "ranks": 4}
    return first_record(DictNode(["whole", "cut", "empty"], [whole, cut, empty]), **fields | changes)


def chunk(number: int, nbytes: int, kind: int) -> PartChunk:
    places: list[Extent | bytes | None] = [Extent(PACK, 4096 * number, nbytes + 4), bytes(nbytes), None]
    return bytes([number]) * 16, places[kind]


def part(kinds: tuple[int, int, int] = (0, 1, 2)) -> Part:
    return Part(
        record(),
        {
            "whole": PartArray(Grid((3,), (3,), 2), np.dtype("V2"), [chunk(1, 6, kinds[0])]),
            layout.block_key("cut", (4, 2)): PartArray(
                Grid((4, 2), (2, 2), 8), np.dtype("<M8[s]"), [chunk(2, 32, kinds[1]), chunk(3, 32, kinds[2])]
            ),
            "empty": PartArray(Grid((0, 2), (1, 1), 1), np.dtype(np.int8), []),
        },
    )


def same(found: Part, expected: Part) -> bool:
    return found.record == expected.record and {
        key: (array.grid, [tuple(chunk) for chunk in array.chunks]) for key, array in found.arrays.items()
    } == {key: (array.grid, [tuple(chunk) for chunk in array.chunks]) for key, array in expected.arrays.items()}


@given(kinds=st.tuples(*[st.integers(0, 2)] * 3))
def test_a_part_is_decoded_to_what_it_was(kinds: tuple[int, int, int]) -> None:
    expected = part(kinds)
    found = decode_part(encode_part(expected), "parts/1")
    assert same(found, expected)
    assert found.arrays[layout.block_key("cut", (4, 2))].dtype == np.dtype("<M8[s]")


def test_only_the_record_of_a_rank_makes_a_part() -> None:
    with pytest.raises(Invalid, match="no rank"):
        encode_part(Part(record(rank=None), {}))


def test_an_array_with_a_chunk_too_few_makes_no_part() -> None:
    with pytest.raises(Invalid, match="'whole' has 0 chunks"):
        encode_part(Part(record(), {"whole": PartArray(Grid((3,), (3,), 2), np.dtype("V2"), [])}))


@given(data=st.data())
def test_a_part_with_any_byte_changed_or_cut_is_corrupt(data: st.DataObject) -> None:
    whole = encode_part(part())
    position = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(changed), whole[:position], whole + b"\0"):
        with pytest.raises(Corrupt, match="parts/1"):
            decode_part(damaged, "parts/1")
        with pytest.raises(Corrupt, match="parts/1"):
            decode_extents(damaged, "parts/1")


@pytest.mark.parametrize("position", [0, 8, 12])
def test_a_part_of_another_kind_or_version_is_refused_though_its_checksum_fits(position: int) -> None:
    changed = bytearray(encode_part(part())[:-4])
    changed[position] ^= 1
    changed += crc32c(changed).to_bytes(4, "little")
    for decode in (decode_part, decode_extents):
        with pytest.raises(Corrupt, match="parts/1: no part of version 1"):
            decode(bytes(changed), "parts/1")


@given(kinds=st.tuples(*[st.integers(0, 2)] * 3))
def test_the_extents_of_a_part_are_those_of_its_arrays(kinds: tuple[int, int, int]) -> None:
    arrays = part(kinds).arrays.values()
    chunks = [(digest, where) for array in arrays for digest, where in array.chunks if isinstance(where, Extent)]
    assert decode_extents(encode_part(part(kinds)), "parts/1") == chunks


@pytest.mark.parametrize("field", ["digests", "files", "offsets", "lengths"])
def test_extents_that_are_too_few_or_out_of_range_are_corrupt(field: str) -> None:
    for value in (b"", b"\xff" * 40):
        with pytest.raises(Corrupt, match="parts/1"):
            decode_extents(rewritten(**{field: value}), "parts/1")
    where: dict[str, Any]
    for where in ({"packs": ["packs/../secret"]}, {"packs": []}, {"lengths": b"\xff" * 8}, {"offsets": b"\x64" * 8}):
        with pytest.raises(Corrupt, match="parts/1"):
            decode_extents(rewritten(**where), "parts/1")


def rewritten(**changes: Any) -> bytes:
    """A part with other fields in it, and the right CRC."""
    data = encode_part(part())
    body = dict(zip(FIELDS, msgpack_decoder(list).decode(data[HEAD:-4]), strict=True))
    data = data[:HEAD] + msgspec.msgpack.encode([(body | changes)[name] for name in FIELDS])
    return data + crc32c(data).to_bytes(4, "little")


BLOCK = layout.block_key("cut", (4, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"record": b"{}"},
        {"record": msgspec.json.encode(record(rank=None))},
        {"record": msgspec.json.encode(record(rank=4))},
        {"record": msgspec.json.encode(record(rank=-1))},
        {"record": msgspec.json.encode(record(format_version=2))},
        {"record": msgspec.json.encode(record(digest="md5"))},
        {"structure": b"[" * 100_000},
        {"structure": b'{"type":"none"}'},
        {"packs": ["packs/../secret"]},
        {"packs": []},
        {"packs": ["slab"]},
        {"arrays": []},
        {"arrays": [["whole", [3], [3]]] * 3},
        {"arrays": [["whole", [4], [3]], [BLOCK, [4, 2], [2, 2]], ["empty", [0, 2], [1, 1]]]},
        {"arrays": [["whole", [3], [0]], [BLOCK, [4, 2], [2, 2]], ["empty", [0, 2], [1, 1]]]},
        {"arrays": [["whole", [3], [1 << 62]], [BLOCK, [4, 2], [2, 2]], ["empty", [0, 2], [1, 1]]]},
        {"arrays": [["whole", [3], [3]], [BLOCK, [4], [2]], ["empty", [0, 2], [1, 1]]]},
        {"arrays": [["whole", [3], [3]], [layout.block_key("cut", (6, 2)), [4, 2], [2, 2]]]},
        {"arrays": [["whole", [3], [3]], [layout.block_key("cut", (4,)), [4, 2], [2, 2]]]},
        {"arrays": [["whole", [3], [3]], ["tieredckpt/step.json", [4, 2], [2, 2]]]},
        {"arrays": [["whole", [3], [3]], [BLOCK, [4, 2], [1, 1]]]},
        {"arrays": [["whole", [3], [3]], [BLOCK, [-4, 2], [2, 2]]]},
        {"digests": bytes(47)},
        {"kinds": b"\0\1\3"},
        {"kinds": b"\0\1\2\2"},
        {"kinds": b"\0\0\2"},
        {"files": struct.pack("<I", 1)},
        {"files": b""},
        {"offsets": struct.pack("<Q", 100)},
        {"offsets": struct.pack("<Q", (1 << 64) - 4096)},
        {"lengths": struct.pack("<Q", 7)},
        {"lengths": struct.pack("<Q", 0)},
        {"lengths": b""},
        {"inline": bytes(31)},
    ],
    ids=lambda changes: f"{next(iter(changes))}={next(iter(changes.values()))!r:.60}",
)
def test_a_part_that_contradicts_itself_is_corrupt(changes: dict[str, Any]) -> None:
    assert same(decode_part(rewritten(), "parts/1"), part())
    with pytest.raises(Corrupt, match="parts/1"):
        decode_part(rewritten(**changes), "parts/1")


@given(st.binary(max_size=200))
def test_bytes_behind_a_good_head_are_corrupt_whatever_they_are(body: bytes) -> None:
    data = encode_part(part())[:HEAD] + body
    with pytest.raises(Corrupt):
        decode_part(data + crc32c(data).to_bytes(4, "little"), "parts/1")
