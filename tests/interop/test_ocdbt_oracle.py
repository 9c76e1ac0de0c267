"""Stock TensorStore reads our step indexes, and we read its OCDBT databases, to the last byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.errors import Corrupt
from tieredckpt.format import layout, ocdbt
from tieredckpt.format.crc import crc32c
from tieredckpt.format.encoding import CRC32C, PLAIN
from tieredckpt.format.grid import cell_key, cells, plan
from tieredckpt.format.ocdbt import Extent, Value
from tieredckpt.format.zarr import array_metadata

UUID = bytes(range(16))
STEP = (1000, 7)
BTREE = layout.btree_key(*STEP)

PACKS = {f"packs/{digit * 2}/{digit * 32}.pack": np.random.default_rng(int(digit, 16)).bytes(3000) for digit in "3a7"}


@st.composite
def indexes(draw: st.DrawFn) -> list[tuple[bytes, Value]]:
    keys = draw(st.sets(st.text("ab/é\0", min_size=1, max_size=12), max_size=40))
    extents = st.builds(
        lambda path, start, end: Extent(path, min(start, end), abs(start - end)),
        st.sampled_from(sorted(PACKS)),
        st.integers(0, 3000),
        st.integers(0, 3000),
    )
    values = st.one_of(st.binary(max_size=50), extents)
    return [(key, draw(values)) for key in sorted(key.encode() for key in keys)]


def resolve(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    return PACKS[value.path][value.offset : value.offset + value.length]


@settings(max_examples=60)
@given(entries=indexes(), node_bytes=st.sampled_from([1, 60, 200, 1 << 20]))
def test_stock_tensorstore_lists_and_reads_what_we_encode(entries: list[tuple[bytes, Value]], node_bytes: int) -> None:
    index = ocdbt.encode(entries, BTREE, uuid=UUID, commit_time_ns=1, max_node_bytes=node_bytes)
    context = ts.Context()
    base = ts.KvStore.open("memory://", context=context).result()
    files = {BTREE: index.btree, layout.manifest_key(*STEP): index.manifest, **PACKS}
    for path, data in files.items():
        base.write(path, data).result()
    spec = {
        "driver": "ocdbt",
        "base": {"driver": "memory"},
        "manifest": {"driver": "memory", "path": layout.step_folder(*STEP)},
    }
    store = ts.KvStore.open(spec, context=context).result()
    assert sorted(store.list().result()) == [key for key, _ in entries]
    for key, value in entries:
        found = store.read(key).result()
        assert found.state == "value"
        assert found.value == resolve(value)
    assert store.read(b"b/missing").result().state == "missing"


def stock_files(base: ts.KvStore) -> dict[str, bytes]:
    return {key.decode(): base.read(key).result().value for key in base.list().result()}


def read_from(files: dict[str, bytes], seen: set[str]) -> ocdbt.NodeReader:
    def read(path: str, offset: int, length: int) -> bytes:
        seen.add(path)
        return files[path][offset : offset + length]

    return read


keys_of_stock = st.text("ab/x", min_size=1, max_size=10).map(str.encode)


@settings(max_examples=60)
@given(
    commits=st.lists(
        st.dictionaries(keys_of_stock, st.none() | st.binary(max_size=60), min_size=1, max_size=30),
        min_size=1,
        max_size=4,
    ),
    node_bytes=st.sampled_from([1, 100, 1000, 1 << 20]),
    inline=st.sampled_from([0, 20, 1000]),
)
def test_we_read_what_stock_tensorstore_writes(
    commits: list[dict[bytes, bytes | None]], node_bytes: int, inline: int
) -> None:
    context = ts.Context()
    base = ts.KvStore.open("memory://", context=context).result()
    config = {"compression": None, "max_decoded_node_bytes": node_bytes, "max_inline_value_bytes": inline}
    spec = {"driver": "ocdbt", "base": {"driver": "memory"}, "config": config}
    store = ts.KvStore.open(spec, context=context).result()
    expected: dict[bytes, bytes] = {}
    for commit in commits:
        with ts.Transaction(atomic=True) as transaction:
            for key, value in commit.items():
                store.with_transaction(transaction).write(key, value).result()
        expected.update({key: value for key, value in commit.items() if value is not None})
        for key in [key for key, value in commit.items() if value is None]:
            expected.pop(key, None)
    files = stock_files(base)
    manifest = files.get("manifest.ocdbt")
    if manifest is None:  # only deletions, and nothing was there
        assert not expected
        return
    seen: set[str] = set()
    read = read_from(files, seen)
    values = {
        key: value if isinstance(value, bytes) else read(value.path, value.offset, value.length)
        for key, value in ocdbt.decode_nodes(manifest, read)
    }
    assert values == expected
    assert list(values) == sorted(expected)
    for key in {*expected, b"a", b"zz"}:
        found = ocdbt.find_in_nodes(manifest, read)(key)
        assert (found is None) == (key not in expected)
    assert ocdbt.read_root(manifest).num_keys == len(expected)


def test_interior_nodes_of_stock_tensorstore_are_read() -> None:
    context = ts.Context()
    base = ts.KvStore.open("memory://", context=context).result()
    config = {"compression": None, "max_decoded_node_bytes": 300}
    store = ts.KvStore.open(
        {"driver": "ocdbt", "base": {"driver": "memory"}, "config": config}, context=context
    ).result()
    expected = {b"layer/%04d/c/0" % i: b"%d" % i for i in range(500)}
    with ts.Transaction(atomic=True) as transaction:
        for key, value in expected.items():
            store.with_transaction(transaction).write(key, value).result()
    files = stock_files(base)
    manifest = files["manifest.ocdbt"]
    assert ocdbt.read_root(manifest).height >= 2
    assert dict(ocdbt.decode_nodes(manifest, read_from(files, set()))) == expected


def test_compressed_databases_are_refused_and_not_misread() -> None:
    context = ts.Context()
    base = ts.KvStore.open("memory://", context=context).result()
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "memory"}}, context=context).result()
    store.write(b"key", b"value").result()
    with pytest.raises(Corrupt, match="compression"):
        ocdbt.read_root(stock_files(base)["manifest.ocdbt"])


def write_step(root: Path, arrays: dict[str, np.ndarray[Any, Any]], *, checksum: bool) -> None:
    """A whole step by hand: one pack, the index, the manifest."""
    pack_path = layout.pack_key("0123456789abcdef" * 2)
    pack = bytearray()
    entries: list[tuple[bytes, Value]] = [(layout.STEP_RECORD.encode(), b"{}")]
    for key, array in arrays.items():
        grid = plan(array.shape, array.dtype.itemsize, 4096)
        entries.append(
            (
                f"{key}/zarr.json".encode(),
                array_metadata(grid.shape, array.dtype, grid.cell, CRC32C if checksum else PLAIN),
            )
        )
        leaf = array.tobytes()
        for cell in cells(grid):
            chunk = leaf[cell.start : cell.start + cell.nbytes].ljust(grid.cell_nbytes, b"\0")
            if checksum:
                chunk += crc32c(chunk).to_bytes(4, "little")
            entries.append((f"{key}/".encode() + cell_key(cell.index), Extent(pack_path, len(pack), len(chunk))))
            pack += chunk.ljust(-(-len(chunk) // 4096) * 4096, b"\0")
    index = ocdbt.encode(sorted(entries), BTREE, uuid=UUID, commit_time_ns=1, max_node_bytes=400)
    assert ocdbt.read_root(index.manifest).height >= 1
    files = {pack_path: bytes(pack), BTREE: index.btree, layout.manifest_key(*STEP): index.manifest}
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def zarr_spec(root: Path, key: str) -> dict[str, Any]:
    kvstore = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{root}/"},
        "manifest": {"driver": "file", "path": f"{root}/{layout.step_folder(*STEP)}"},
        "path": f"{key}/",
    }
    return {"driver": "zarr3", "kvstore": kvstore}


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "crc32c"])
def test_stock_tensorstore_opens_the_arrays_of_a_step_in_a_folder(tmp_path: Path, checksum: bool) -> None:
    random = np.random.default_rng(1)
    arrays = {
        "params/kernel": random.standard_normal((37, 130)).astype(np.float32),
        "params/bias": random.standard_normal(5000).astype(">f8"),
        "step": np.array(7, np.int64),
        "empty": np.zeros((3, 0), np.float32),
    }
    write_step(tmp_path, arrays, checksum=checksum)
    for key, array in arrays.items():
        opened = ts.open(zarr_spec(tmp_path, key), open=True).result()
        found = opened.read().result()
        assert found.shape == array.shape
        assert found.tobytes() == array.astype(found.dtype).tobytes()


def test_stock_tensorstore_notices_a_flipped_bit_where_chunks_carry_a_checksum(tmp_path: Path) -> None:
    write_step(tmp_path, {"params/kernel": np.arange(5000.0)}, checksum=True)
    pack = tmp_path / layout.pack_key("0123456789abcdef" * 2)
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    opened = ts.open(zarr_spec(tmp_path, "params/kernel"), open=True).result()
    with pytest.raises(ValueError, match="Digest mismatch"):
        opened.read().result()
