"""Damaged and hostile step indexes are `Corrupt`, never another error, and never read beyond their bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.errors import Corrupt
from tieredckpt.format import ocdbt, ocdbt_read
from tieredckpt.format.crc import crc32c
from tieredckpt.format.ocdbt import Extent, Value
from tieredckpt.format.ocdbt_codec import (
    MANIFEST_MAGIC,
    MAX_UINT64,
    NODE_MAGIC,
    Cursor,
    column,
    file_table,
    frame,
    is_data_path,
    varint,
)

BTREE = "steps/0000000001-000001/btree"
PACK = "packs/ab/" + "ab" * 16 + ".pack"
UUID = bytes(range(16))

ENTRIES: list[tuple[bytes, Value]] = [
    (b"layer/%02d/c/%d" % divmod(i, 3), b"v" * i if i % 4 == 0 else Extent(PACK[: 30 + i % 3], 4096 * i, 777))
    for i in range(40)
]
INDEX = ocdbt.encode(ENTRIES, BTREE, uuid=UUID, commit_time_ns=1, max_node_bytes=200)


def nodes_of(index: ocdbt.Index) -> list[tuple[int, int]]:
    places: list[tuple[int, int]] = []

    def read(_: str, offset: int, length: int) -> bytes:
        places.append((offset, length))
        return index.btree[offset : offset + length]

    ocdbt.decode_nodes(index.manifest, read)
    return places


NODES = nodes_of(INDEX)


def resealed(data: bytes, magic: int) -> bytes:
    """The frame with its checksum and length made to fit again."""
    return frame(magic, data[14:-4])


def manifest_of(
    length: int,
    *,
    height: int = 0,
    keys: int = 1,
    tree_bytes: int | None = None,
    indirect: int = 0,
    offset: int = 0,
    path: str = BTREE,
    place: int = 0,
    generations: tuple[int, ...] = (1,),
    older: int = 0,
    head: bytes = UUID + b"\0\0\0\4\0",
) -> bytes:
    numbers = [offset, length, keys, length if tree_bytes is None else tree_bytes, indirect]
    table = file_table([path]) if is_data_path(path) else b"\1" + varint(len(path)) + b"\0" + path.encode()
    versions = len(generations)
    body = head + table + varint(versions) + column(generations) + bytes([height] * versions)
    body += bytes([place] * versions) + b"".join(varint(number) * versions for number in numbers) + bytes(8 * versions)
    return frame(MANIFEST_MAGIC, body + varint(older))


def leaf(
    keys: list[tuple[int, bytes]],
    *,
    paths: list[str] | None = None,
    values: bytes | None = None,
    height: int = 0,
) -> bytes:
    """A leaf of keys as (shared, suffix); empty inline values unless ``values`` gives the columns."""
    body = bytes((height,)) + file_table(paths or []) + varint(len(keys))
    body += column([shared for shared, _ in keys[1:]]) + column([len(suffix) for _, suffix in keys])
    body += b"".join(suffix for _, suffix in keys)
    return frame(NODE_MAGIC, body + (bytes(2 * len(keys)) if values is None else values))


def decode_leaf(node: bytes, keys: int = 1, indirect: int = 0) -> list[tuple[bytes, Value]]:
    return ocdbt.decode(manifest_of(len(node), keys=keys, indirect=indirect), node, BTREE)


def assert_corrupt_or_sound(manifest: bytes, btree: bytes) -> None:
    try:
        entries = ocdbt.decode(manifest, btree, BTREE)
    except Corrupt:
        pass
    else:
        keys = [key for key, _ in entries]
        assert keys == sorted(set(keys))
        for _, value in entries:
            if isinstance(value, Extent):
                assert is_data_path(value.path)
                assert 0 <= value.offset <= value.offset + value.length < 1 << 63
            else:
                assert len(value) <= len(btree)
    for key in (ENTRIES[0][0], ENTRIES[20][0], b"", b"zzz"):
        try:
            ocdbt.find(manifest, btree, BTREE)(key)
        except Corrupt:
            continue


def test_the_builders_of_these_tests_make_readable_indexes() -> None:
    assert ocdbt.read_root(manifest_of(9, generations=(1, 2, 5))).generation == 5
    node = leaf([(0, b"abc"), (1, b"x")])
    assert decode_leaf(node, 2) == [(b"abc", b""), (b"ax", b"")]
    assert ocdbt.read_root(INDEX.manifest).height >= 2
    assert ocdbt.decode(INDEX.manifest, INDEX.btree, BTREE) == ENTRIES


@given(bit=st.integers(0, 8 * len(INDEX.manifest) - 1))
def test_a_flipped_bit_in_the_manifest_is_noticed(bit: int) -> None:
    damaged = bytearray(INDEX.manifest)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        ocdbt.decode(bytes(damaged), INDEX.btree, BTREE)


@given(bit=st.integers(0, 8 * len(INDEX.btree) - 1))
def test_a_flipped_bit_in_the_nodes_is_noticed(bit: int) -> None:
    damaged = bytearray(INDEX.btree)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        ocdbt.decode(INDEX.manifest, bytes(damaged), BTREE)


@given(size=st.integers(0, len(INDEX.manifest) - 1))
def test_a_torn_manifest_is_noticed(size: int) -> None:
    with pytest.raises(Corrupt):
        ocdbt.read_root(INDEX.manifest[:size])
    with pytest.raises(Corrupt):
        ocdbt.read_root(INDEX.manifest[:size].ljust(len(INDEX.manifest), b"\0"))


@given(size=st.integers(0, len(INDEX.btree) - 1))
def test_a_torn_file_of_nodes_is_noticed(size: int) -> None:
    with pytest.raises(Corrupt):
        ocdbt.decode(INDEX.manifest, INDEX.btree[:size], BTREE)


changes = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4)


@settings(max_examples=150)
@given(changes=changes)
def test_a_forged_manifest_is_corrupt_or_gives_sound_entries(changes: list[tuple[int, int]]) -> None:
    forged = bytearray(INDEX.manifest)
    for position, value in changes:
        forged[12 + position % (len(forged) - 16)] = value
    forged[12:14] = b"\0\0"
    assert_corrupt_or_sound(resealed(bytes(forged), MANIFEST_MAGIC), INDEX.btree)


@settings(max_examples=300)
@given(node=st.sampled_from(NODES), changes=changes)
def test_a_forged_node_is_corrupt_or_gives_sound_entries(node: tuple[int, int], changes: list[tuple[int, int]]) -> None:
    offset, length = node
    forged = bytearray(INDEX.btree[offset : offset + length])
    for position, value in changes:
        forged[14 + position % (length - 18)] = value
    btree = bytearray(INDEX.btree)
    btree[offset : offset + length] = resealed(bytes(forged), NODE_MAGIC)
    assert_corrupt_or_sound(INDEX.manifest, bytes(btree))


@settings(max_examples=150)
@given(
    cut=st.tuples(st.integers(0, 500), st.integers(0, 20)),
    insert=st.binary(max_size=20),
    keys=st.integers(0, 40),
    height=st.integers(0, 2),
)
def test_a_forged_root_of_another_length_is_corrupt_or_gives_sound_entries(
    cut: tuple[int, int], insert: bytes, keys: int, height: int
) -> None:
    root = ocdbt.read_root(INDEX.manifest)
    for offset, length in (NODES[0], NODES[-1]):
        body = INDEX.btree[offset + 14 : offset + length - 4]
        start = cut[0] % len(body)
        node = frame(NODE_MAGIC, body[:start] + insert + body[start + cut[1] :])
        manifest = manifest_of(
            len(node), height=height, keys=keys, indirect=root.indirect_bytes, offset=len(INDEX.btree)
        )
        assert_corrupt_or_sound(manifest, INDEX.btree + node)


@given(body=st.binary(max_size=200), keys=st.integers(1, 5))
def test_any_bytes_in_a_sound_frame_are_corrupt_or_sound(body: bytes, keys: int) -> None:
    node = frame(NODE_MAGIC, body)
    assert_corrupt_or_sound(manifest_of(len(node), keys=keys), node)
    with pytest.raises(Corrupt):
        ocdbt.read_root(frame(MANIFEST_MAGIC, body))


NODE = leaf([(0, b"k")])

FORGED: dict[str, Callable[[], object]] = {
    "another magic": lambda: decode_leaf(frame(MANIFEST_MAGIC, NODE[14:-4])),
    "bytes after the last field": lambda: decode_leaf(frame(NODE_MAGIC, NODE[14:-4] + b"\0")),
    "no entries": lambda: decode_leaf(leaf([]), 1),
    "keys that descend": lambda: decode_leaf(leaf([(0, b"b"), (0, b"a")]), 2),
    "a key twice": lambda: decode_leaf(leaf([(0, b"b"), (1, b"")]), 2),
    "a prefix longer than the key before": lambda: decode_leaf(leaf([(0, b"b"), (2, b"c")]), 2),
    "a key beyond 65535 bytes": lambda: decode_leaf(leaf([(0, b"b" * 65535), (65535, b"c")]), 2),
    "fewer keys than the parent says": lambda: decode_leaf(NODE, 2),
    "another sum of value bytes": lambda: decode_leaf(NODE, 1, 5),
    "an unknown kind of value": lambda: decode_leaf(leaf([(0, b"k")], values=b"\0\2")),
    "an inline value longer than the node": lambda: decode_leaf(leaf([(0, b"k")], values=b"\5\0abc")),
    "an inline value beyond 1 MiB": lambda: decode_leaf(
        leaf([(0, b"k")], values=varint((1 << 20) + 1) + b"\0" + bytes((1 << 20) + 1))
    ),
    "an extent of a file that is not in the table": lambda: decode_leaf(
        leaf([(0, b"k")], paths=["p"], values=b"\5\1\1\0"), 1, 5
    ),
    "an extent without any file": lambda: decode_leaf(leaf([(0, b"k")], values=b"\5\1\0\0"), 1, 5),
    "an extent that ends beyond 2**63": lambda: decode_leaf(
        leaf([(0, b"k")], paths=["p"], values=b"\1\1\0" + varint((1 << 63) - 1)), 1, 1
    ),
    "an integer beyond 64 bits": lambda: decode_leaf(
        leaf([(0, b"k")], paths=["p"], values=b"\xff" * 9 + b"\x02\1\0\0")
    ),
    "an integer of eleven bytes": lambda: decode_leaf(leaf([(0, b"k")], values=b"\x80" * 10 + b"\1\0")),
    "an integer not in shortest form": lambda: decode_leaf(leaf([(0, b"k")], values=b"\x80\0\0")),
    "a million entries in no bytes": lambda: decode_leaf(frame(NODE_MAGIC, b"\0\0" + varint(1 << 20)), 1 << 20),
    "more entries than a node has": lambda: decode_leaf(
        frame(NODE_MAGIC, b"\0\0" + varint((1 << 20) + 1) + bytes(1 << 22)), (1 << 20) + 1
    ),
    "a million files in no bytes": lambda: decode_leaf(frame(NODE_MAGIC, b"\0" + varint(1 << 20) + b"\1")),
    "another height": lambda: decode_leaf(leaf([(0, b"k")], height=1)),
    "an absolute path": lambda: decode_leaf(forged_path(b"/etc/passwd")),
    "a path with dots": lambda: decode_leaf(forged_path(b"packs/../../x")),
    "a path with a null byte": lambda: decode_leaf(forged_path(b"packs/\0")),
    "a path that is no ASCII": lambda: decode_leaf(forged_path("é".encode())),
    "an empty path": lambda: decode_leaf(forged_path(b"")),
    "a node elsewhere": lambda: ocdbt.decode(manifest_of(len(NODE), path="other/file"), NODE, BTREE),
    "a root above the root folder": lambda: ocdbt.decode(manifest_of(len(NODE), path="../btree"), NODE, BTREE),
    "a root in a file that is not in the table": lambda: ocdbt.read_root(manifest_of(len(NODE), place=1)),
    "bytes after the last field of a manifest": lambda: ocdbt.read_root(
        frame(MANIFEST_MAGIC, manifest_of(len(NODE))[14:-4] + b"\0")
    ),
    "a root beyond the file": lambda: ocdbt.decode(manifest_of(len(NODE), offset=1), NODE + b"x"[:0], BTREE),
    "a root beyond 2**63": lambda: ocdbt.read_root(manifest_of(len(NODE), offset=(1 << 63) - 1)),
    "a root without a path": lambda: ocdbt.read_root(manifest_of(len(NODE), path="")),
    "a root larger than its tree": lambda: ocdbt.read_root(manifest_of(len(NODE), tree_bytes=5)),
    "node bytes that do not add up": lambda: ocdbt.decode(
        manifest_of(len(NODE), tree_bytes=len(NODE) + 1), NODE + b"x", BTREE
    ),
    "a root without keys": lambda: ocdbt.read_root(manifest_of(len(NODE), keys=0)),
    "more keys than any index has": lambda: ocdbt.read_root(manifest_of(len(NODE), keys=1 << 40)),
    "an empty index with a path": lambda: ocdbt.read_root(empty_manifest(path=BTREE)),
    "an empty index with a height": lambda: ocdbt.read_root(empty_manifest(height=1)),
    "an empty index with keys": lambda: ocdbt.read_root(empty_manifest(keys=1)),
    "an empty index with nodes": lambda: ocdbt.read_root(empty_manifest(tree_bytes=1)),
    "an empty index with values": lambda: ocdbt.read_root(empty_manifest(indirect=1)),
    "a frame with another length": lambda: decode_leaf(resummed(NODE, 4, b"\0")),
    "a frame of another version": lambda: decode_leaf(resummed(NODE, 12, b"\1")),
    "a compressed node": lambda: decode_leaf(resummed(NODE, 13, b"\1")),
    "a path that continues more than there was": lambda: decode_leaf(
        forged_files(b"\2" + b"\5" + b"\1\1" + b"\0\0" + b"pq")
    ),
    "a base path longer than the path": lambda: decode_leaf(forged_files(b"\1\1\2p")),
    "a tower of nodes": lambda: ocdbt.read_root(manifest_of(len(NODE), height=33)),
    "a numbered manifest": lambda: ocdbt.read_root(manifest_of(9, head=UUID + b"\1\0\0\4\0")),
    "a compressed database": lambda: ocdbt.read_root(manifest_of(9, head=UUID + b"\0\0\0\4\1")),
    "an impossible arity": lambda: ocdbt.read_root(manifest_of(9, head=UUID + b"\0\0\0\x3f\0")),
    "generation zero": lambda: ocdbt.read_root(manifest_of(9, generations=(0,))),
    "generations that do not ascend": lambda: ocdbt.read_root(manifest_of(9, generations=(1, 1))),
    "no versions": lambda: ocdbt.read_root(manifest_of(9, generations=())),
    "versions outside the manifest": lambda: ocdbt.read_root(manifest_of(9, older=1)),
    "more versions than the arity allows": lambda: ocdbt.read_root(manifest_of(9, generations=tuple(range(1, 18)))),
}


def forged_files(table: bytes) -> bytes:
    """A leaf with one extent of the first file in that table."""
    return frame(NODE_MAGIC, b"\0" + table + b"\1\1k" + b"\0\1\0\0")


def forged_path(path: bytes) -> bytes:
    return forged_files(b"\1" + varint(len(path)) + b"\0" + path)


def resummed(data: bytes, position: int, change: bytes) -> bytes:
    """The frame with a changed header and a checksum that fits."""
    head = data[:position] + change + data[position + len(change) : -4]
    return head + crc32c(head).to_bytes(4, "little")


def empty_manifest(**changes: Any) -> bytes:
    empty: dict[str, Any] = {"offset": MAX_UINT64, "path": "", "keys": 0, "tree_bytes": 0}
    return manifest_of(MAX_UINT64, **empty | changes)


def test_what_is_forged_would_be_read_if_it_were_sound() -> None:
    assert decode_leaf(forged_path(b"p/q")) == [(b"k", Extent("p/q", 0, 0))]
    assert decode_leaf(forged_files(b"\2" + b"\1" + b"\1\1" + b"\1\1" + b"pq"))[0][1] == Extent("p", 0, 0)
    assert decode_leaf(resummed(NODE, 12, b"\0")) == [(b"k", b"")]
    assert ocdbt.decode(empty_manifest(), b"", BTREE) == []
    assert ocdbt.read_root(manifest_of(len(NODE), height=32)).height == 32


def read_integers(data: bytes, count: int) -> list[int]:
    integers = Cursor(data, 0, len(data), "column").column(count, MAX_UINT64).tolist()
    assert isinstance(integers, list)
    return integers


@given(st.lists(st.integers(0, MAX_UINT64) | st.integers(0, 127), max_size=30))
def test_a_column_of_integers_is_read_back(values: list[int]) -> None:
    data = b"".join(map(varint, values))
    assert column(values) == data
    assert read_integers(data + b"\x80\1", len(values)) == values


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x80" * 10 + b"\1" + b"\1" * 20, "shortest form"),
        (b"\x80\0", "shortest form"),
        (b"\xff" * 9 + b"\2", "64 bits"),
        (b"\x80", "ends within"),
        (b"", "ends within"),
    ],
)
def test_bytes_that_are_no_integer_are_corrupt(data: bytes, complaint: str) -> None:
    with pytest.raises(Corrupt, match=complaint):
        read_integers(data, max(1, len(data) - 10))


def test_paths_are_below_the_root_and_of_bounded_length() -> None:
    assert is_data_path("a" * 4096)
    assert not is_data_path("a" * 4097)


@pytest.mark.parametrize("name", FORGED)
def test_forged_indexes_are_corrupt(name: str) -> None:
    with pytest.raises(Corrupt):
        FORGED[name]()


def interior(
    children: list[tuple[bytes, int, int, int]],
    *,
    common: int = 0,
    tree_bytes: int | None = None,
    place: int = 0,
) -> bytes:
    """An interior node of height 1; a child is (first key, offset, length, number of keys)."""
    keys, offsets, lengths, counts = zip(*children, strict=True)
    body = b"\1" + file_table([BTREE]) + varint(len(children))
    body += bytes(len(children) - 1) + column([len(key) for key in keys])
    body += column([common] * len(children)) + b"".join(keys) + bytes([place] * len(children))
    trees = lengths if tree_bytes is None else [tree_bytes] * len(children)
    return frame(
        NODE_MAGIC,
        body + column(offsets) + column(lengths) + column(counts) + column(trees) + bytes(len(children)),
    )


def decode_tree(leaves: list[bytes], root: bytes, *, keys: int = 2) -> list[tuple[bytes, Value]]:
    btree = b"".join(leaves) + root
    manifest = manifest_of(len(root), height=1, keys=keys, offset=len(btree) - len(root), tree_bytes=len(btree))
    return ocdbt.decode(manifest, btree, BTREE)


A, B = leaf([(0, b"a")]), leaf([(0, b"b")])


def test_the_tree_of_these_tests_is_readable() -> None:
    root = interior([(b"a", 0, len(A), 1), (b"b", len(A), len(B), 1)])
    assert decode_tree([A, B], root) == [(b"a", b""), (b"b", b"")]


def test_an_interior_node_with_other_sums_bytes_or_files_than_it_should_have_is_corrupt() -> None:
    children = [(b"a", 0, len(A), 1), (b"b", len(A), len(B), 1)]
    with pytest.raises(Corrupt, match="its parent says"):
        decode_tree([A, B], interior(children), keys=3)
    with pytest.raises(Corrupt, match="1 bytes too many"):
        decode_tree([A, B], frame(NODE_MAGIC, interior(children)[14:-4] + b"\0"))
    with pytest.raises(Corrupt, match="larger than 0"):
        decode_tree([A, B], interior(children, place=1))


def test_the_keys_of_all_nodes_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(len(key) for key, _ in ENTRIES)
    monkeypatch.setattr(ocdbt_read, "MAX_EXPANDED", total)
    assert ocdbt.decode(INDEX.manifest, INDEX.btree, BTREE) == ENTRIES
    monkeypatch.setattr(ocdbt_read, "MAX_EXPANDED", total - 1)
    with pytest.raises(Corrupt, match="impossible lengths"):
        ocdbt.decode(INDEX.manifest, INDEX.btree, BTREE)


@pytest.mark.parametrize("child", [A, B], ids=["below it", "in that of the next"])
def test_a_child_whose_keys_are_not_in_its_range_is_corrupt(child: bytes) -> None:
    with pytest.raises(Corrupt, match="range"):
        decode_tree([child, child], interior([(b"a", 0, len(child), 1), (b"b", len(child), len(child), 1)]))


def test_a_common_prefix_longer_than_the_key_is_corrupt() -> None:
    empty = leaf([(0, b"")])
    assert decode_tree([empty], interior([(b"a", 0, len(empty), 1)], common=1), keys=1) == [(b"a", b"")]
    with pytest.raises(Corrupt, match="impossible lengths"):
        decode_tree([empty], interior([(b"a", 0, len(empty), 1)], common=2), keys=1)


def test_a_node_that_is_its_own_child_is_corrupt() -> None:
    length = len(interior([(b"a", 0, 0, 1)], tree_bytes=1))
    root = interior([(b"a", 0, length, 1)], tree_bytes=1)
    assert len(root) == length
    with pytest.raises(Corrupt, match="height"):
        ocdbt.decode(manifest_of(length, height=1, tree_bytes=length + 1), root + b"x", BTREE)


def test_one_leaf_under_many_prefixes_is_corrupt_by_its_bytes() -> None:
    # Each child is the same leaf with another prefix: few bytes would stand for very many entries.
    shared = leaf([(0, b""), (0, b"x")])
    root = interior([(b"%02d" % i, 0, len(shared), 2) for i in range(50)], common=2)
    btree = shared + root
    manifest = manifest_of(len(root), height=1, keys=100, offset=len(shared), tree_bytes=len(root) + 50 * len(shared))
    with pytest.raises(Corrupt, match="bytes"):
        ocdbt.decode(manifest, btree, BTREE)


def test_keys_that_would_expand_to_gigabytes_are_refused_before_they_are_made() -> None:
    count = 200_000
    body = b"\0\0" + varint(count) + column([60_000] * (count - 1)) + varint(60_000) + column([4] * (count - 1))
    body += b"a" * 60_000 + b"".join(i.to_bytes(4, "big") for i in range(count - 1)) + bytes(2 * count)
    node = frame(NODE_MAGIC, body)
    tracemalloc.start()
    with pytest.raises(Corrupt, match="impossible lengths"):
        decode_leaf(node, count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(node)


def test_few_nodes_are_kept_in_memory_however_many_are_looked_into() -> None:
    """An opening looks for the parts of a record, which a hostile index may have in many nodes."""
    rest, count = bytes(60_000), 100
    firsts = [bytes([65 + part]) for part in range(8)]
    leaves = [leaf([(0, key), (1, rest), *[(60_001, i.to_bytes(2, "big")) for i in range(1, count)]]) for key in firsts]
    starts = accumulate(map(len, leaves), initial=0)
    root = interior([(key, at, len(node), count + 1) for key, at, node in zip(firsts, starts, leaves, strict=False)])
    size = sum(map(len, leaves))
    manifest = manifest_of(
        len(root), height=1, keys=len(firsts) * (count + 1), offset=size, tree_bytes=size + len(root)
    )
    find = ocdbt.find(manifest, b"".join(leaves) + root, BTREE)
    tracemalloc.start()
    assert all(find(key) is not None for key in firsts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * count * len(rest)


@pytest.mark.parametrize(("path", "offset"), [("", 0), (BTREE, (1 << 63) - 1)], ids=["without a path", "beyond 2**63"])
def test_a_child_that_can_be_nowhere_is_refused_before_it_is_read(path: str, offset: int) -> None:
    table = b"\1" + varint(len(path)) + b"\0" + path.encode()
    numbers = column([offset]) + column([len(A)]) + b"\1" + column([len(A)]) + b"\0"
    root = frame(NODE_MAGIC, b"\1" + table + b"\1" + b"\1\0a" + b"\0" + numbers)
    manifest = manifest_of(len(root), height=1, tree_bytes=len(root) + len(A))

    def read(path: str, offset: int, length: int) -> bytes:
        assert (path, offset, length) == (BTREE, 0, len(root))
        return root

    with pytest.raises(Corrupt, match="without a place"):
        ocdbt.decode_nodes(manifest, read)


def test_a_reader_that_returns_too_little_is_noticed() -> None:
    with pytest.raises(Corrupt, match="instead of"):
        ocdbt.decode_nodes(manifest_of(len(NODE)), lambda path, offset, length: NODE[:-1])
