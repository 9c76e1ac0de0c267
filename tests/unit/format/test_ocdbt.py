"""Step indexes: what is encoded is decoded and found, whatever the size of the nodes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import Invalid
from tieredckpt.format import ocdbt, ocdbt_write
from tieredckpt.format.ocdbt import Extent, Index, Value

BTREE = "steps/0000000001-000001/btree"
UUID = bytes(range(16))

paths = st.sampled_from(["packs/ab/" + "ab" * 16 + ".pack", "packs/ac/" + "ac" * 16 + ".pack", "x", BTREE])
numbers = st.integers(0, (1 << 62) - 1) | st.integers(0, 300)
values = st.binary(max_size=40) | st.builds(Extent, paths, numbers, numbers)
keys = st.binary(max_size=6) | st.text("ab/", max_size=300).map(str.encode)
indexes = st.dictionaries(keys, values, max_size=60).map(lambda index: sorted(index.items()))
node_bytes = st.sampled_from([1, 50, 150, 400, 1 << 20])


def encode(entries: list[tuple[bytes, Value]], max_node_bytes: int = ocdbt.NODE_BYTES) -> Index:
    return ocdbt.encode(entries, BTREE, uuid=UUID, commit_time_ns=123, max_node_bytes=max_node_bytes)


@given(entries=indexes, limit=node_bytes)
def test_what_is_encoded_is_decoded(entries: list[tuple[bytes, Value]], limit: int) -> None:
    index = encode(entries, limit)
    assert ocdbt.decode(index.manifest, index.btree, BTREE) == entries


@given(entries=indexes, limit=node_bytes, others=st.lists(keys, max_size=5))
def test_each_key_is_found_alone_and_no_other(
    entries: list[tuple[bytes, Value]], limit: int, others: list[bytes]
) -> None:
    index = encode(entries, limit)
    known = dict(entries)
    for key in {*known, *others, b""}:
        assert ocdbt.find(index.manifest, index.btree, BTREE)(key) == known.get(key)


@given(entries=indexes, limit=node_bytes)
def test_the_root_tells_what_is_in_the_index(entries: list[tuple[bytes, Value]], limit: int) -> None:
    index = encode(entries, limit)
    root = ocdbt.read_root(index.manifest)
    assert (root.uuid, root.generation, root.commit_time_ns) == (UUID, 1, 123)
    assert root.path == (BTREE if entries else "")
    assert root.num_keys == len(entries)
    assert root.tree_bytes == len(index.btree)
    assert root.indirect_bytes == sum(value.length for _, value in entries if isinstance(value, Extent))


@given(entries=indexes, others=st.lists(values, max_size=60), limit=node_bytes)
def test_keys_that_were_encoded_before_are_encoded_as_new_ones(
    entries: list[tuple[bytes, Value]], others: list[Value], limit: int
) -> None:
    """Whatever the values are meanwhile, which move the borders of nodes."""
    kept = ocdbt.Keys([key for key, _ in entries])
    first = [value for _, value in entries]
    for values in (first, [*others, *first][: len(first)], first[::-1], first):
        index = ocdbt.encode_values(kept, values, BTREE, uuid=UUID, commit_time_ns=123, max_node_bytes=limit)
        assert index == encode(list(zip(kept.all, values, strict=True)), limit)


def test_nodes_keep_to_their_size_and_interior_nodes_join_them() -> None:
    entries: list[tuple[bytes, Value]] = [(b"layer/%04d/c/0" % i, Extent("p", i, 1)) for i in range(2000)]
    index = encode(entries, 1000)
    assert ocdbt.read_root(index.manifest).height >= 2
    sizes: list[int] = []

    def read(path: str, offset: int, length: int) -> bytes:
        assert path == BTREE
        sizes.append(length)
        return index.btree[offset : offset + length]

    assert ocdbt.decode_nodes(index.manifest, read) == entries
    assert sum(sizes) == len(index.btree)
    assert max(sizes) <= 1000
    sizes.clear()
    find = ocdbt.find_in_nodes(index.manifest, read)
    for _ in range(2):  # each node is read once
        assert find(b"layer/1234/c/0") == Extent("p", 1234, 1)
        assert len(sizes) == ocdbt.read_root(index.manifest).height + 1
    sizes.clear()
    assert ocdbt.find_in_nodes(index.manifest, read)(b"a") is None
    assert len(sizes) == 1


def test_nodes_of_inline_values_keep_to_their_size() -> None:
    entries: list[tuple[bytes, Value]] = [(b"%04d" % i, bytes(i % 300)) for i in range(600)]
    index = encode(entries, 1000)
    sizes: list[int] = []

    def read(_: str, offset: int, length: int) -> bytes:
        sizes.append(length)
        return index.btree[offset : offset + length]

    assert ocdbt.decode_nodes(index.manifest, read) == entries
    assert max(sizes) <= 1000


def test_large_inline_values_have_nodes_of_their_own_and_the_tree_still_ends() -> None:
    entries: list[tuple[bytes, Value]] = [(b"%d" % i, bytes(100 + i)) for i in range(9)]
    index = encode(entries, 1)
    assert ocdbt.read_root(index.manifest).height == 4
    assert ocdbt.decode(index.manifest, index.btree, BTREE) == entries


def test_values_may_be_as_large_as_the_format_allows() -> None:
    entries: list[tuple[bytes, Value]] = [
        (b"a", bytes(1 << 20)),
        (b"b" * 65535, Extent("p", (1 << 63) - 1, 0)),
        (b"c", Extent("p", 1, (1 << 63) - 2)),
        (b"d", Extent("p", 0, (1 << 63) - 1)),
        (b"e", Extent("p", 0, (1 << 63) - 1)),
    ]
    for limit in (1, 1 << 20):
        index = encode(entries, limit)
        assert ocdbt.decode(index.manifest, index.btree, BTREE) == entries
        # Three such lengths exceed 64 bits; the statistic is saturated, as TensorStore does it.
        assert ocdbt.read_root(index.manifest).indirect_bytes == (1 << 64) - 1


@pytest.mark.parametrize(
    "entries",
    [
        [(b"b", b""), (b"a", b"")],
        [(b"a", b""), (b"a", b"")],
        [(b"a" * 65536, b"")],
        [(b"a" * 65536, b""), (b"b", b"")],
        [(b"a", bytes((1 << 20) + 1))],
        [(b"a", Extent("/etc/passwd", 0, 1))],
        [(b"a", Extent("packs/../../x", 0, 1))],
        [(b"a", Extent("packs//x", 0, 1))],
        [(b"a", Extent("", 0, 1))],
        [(b"a", Extent("x\n", 0, 1))],
        [(b"a", Extent("p", -1, 1))],
        [(b"a", Extent("p", 0, -1))],
        [(b"a", Extent("p", 1, (1 << 63) - 1))],
        [(b"a", Extent("p", 1 << 63, 0))],
        [(b"a", Extent("p", 0, 1 << 64))],
        [("a", b"")],
        [(b"a", "text")],
        [(b"a", bytearray(b"x"))],
    ],
    ids=lambda entries: str(entries)[:60],
)
def test_entries_that_the_format_cannot_hold_are_refused(entries: list[tuple[bytes, Value]]) -> None:
    with pytest.raises(Invalid):
        encode(entries)


@pytest.mark.parametrize(
    ("path", "uuid", "time_ns", "limit"),
    [
        ("../btree", UUID, 1, 100),
        ("btree", b"short", 1, 100),
        ("btree", UUID, -1, 100),
        ("btree", UUID, 1 << 64, 100),
        ("btree", UUID, 1, 0),
        ("btree", UUID, 1, 1 << 32),
    ],
)
def test_an_index_needs_a_place_an_identity_and_sane_limits(path: str, uuid: bytes, time_ns: int, limit: int) -> None:
    with pytest.raises(Invalid):
        ocdbt.encode([], path, uuid=uuid, commit_time_ns=time_ns, max_node_bytes=limit)


@pytest.mark.parametrize(("limit", "value"), [("MAX_ENTRIES", 3), ("MAX_EXPANDED", 7)])
def test_an_index_too_large_to_be_read_back_is_not_written(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocdbt_write, limit, value)
    three: list[tuple[bytes, Value]] = [(b"a", b""), (b"bb", b""), (b"cccc", b"")]
    encode(three)
    with pytest.raises(Invalid, match="use larger chunks"):
        encode([*three, (b"d", b"")])


def large_index(count: int) -> list[tuple[bytes, Value]]:
    entries: list[tuple[bytes, Value]] = [
        (
            f"params/layer_{i // 1600}/kernel/c/{i // 10 % 160}/{i % 10}".encode(),
            Extent(f"packs/{i % 97:02x}/{i % 97:032x}.pack", i * 4096, 16 << 20),
        )
        for i in range(count)
    ]
    return sorted(entries, key=lambda entry: entry[0])


def round_trip_seconds(count: int) -> tuple[float, float]:
    entries = large_index(count)
    began = time.process_time()
    index = encode(entries)
    encoded = time.process_time()
    found = ocdbt.decode(index.manifest, index.btree, BTREE)
    decoded = time.process_time()
    assert found == entries
    return encoded - began, decoded - encoded


@pytest.mark.benchmark
def test_a_hundred_thousand_entries_take_well_under_a_second_each_way() -> None:
    encoding, decoding = round_trip_seconds(100_000)
    # Measured: 0.1 s and 0.2 s; the bounds only catch a change of order.
    assert encoding < 10
    assert decoding < 10


@pytest.mark.slow
def test_a_million_entries_take_a_few_seconds_each_way() -> None:
    encoding, decoding = round_trip_seconds(1_000_000)
    assert encoding < 6
    assert decoding < 4
