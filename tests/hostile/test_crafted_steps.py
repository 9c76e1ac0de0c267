"""Steps, packs and notes whose checksums are right and whose content is not: refused before they cost anything."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from reliability.forging import (
    BTREE,
    PACK,
    as_json,
    entries_of,
    forged_record,
    resealed,
    sample_arrays,
    sample_step,
    tree_of,
)

from tieredckpt.blobs.codecs import CODECS
from tieredckpt.engine.state.failures import failure_history
from tieredckpt.engine.tier import lease
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format import layout, manifest, ocdbt, ocdbt_read, pack
from tieredckpt.format.encoding import CRC32C, PLAIN
from tieredckpt.format.grid import Grid
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepRecord, decode_step, encode_step, find_record
from tieredckpt.format.marker import decode_marker
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.ocdbt_codec import NODE_MAGIC, column, frame, varint
from tieredckpt.format.structure import ArrayNode, DictNode, decode_structure
from tieredckpt.format.zarr import array_metadata, dtype_from_name, parse_array_metadata

MIB = 1 << 20


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Fail if the block allocates more than that at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes


def with_record(**changes: Any) -> ocdbt.Index:
    """The sample step with other things in its record."""
    entries = entries_of(sample_step()[0])
    name = layout.STEP_RECORD.encode()
    value = entries[name]
    assert isinstance(value, bytes)
    entries[name] = as_json({**msgspec.json.decode(value), **changes})
    files = resealed(entries)
    assert files is not None
    return files


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


RECORDS: dict[str, dict[str, Any]] = {
    "no UUID": {"store": "../../etc"},
    "a step beyond 63 bits": {"step": 2**63},
    "a negative size": {"nbytes": -1},
    "a serial of zero": {"serial": 0},
    "a line that ends elsewhere": {"line": [[1, 2]]},
    "a line that descends": {"line": [[3, 3], [1, 3]]},
    "a line that overlaps": {"line": [[1, 3], [3, 3]]},
    "no line": {"line": []},
    "a policy a hundred levels deep": {"policy": {"kind": nested(100)}},
    "a policy thousands of levels deep": {"policy": "@@nested@@"},
    "a structure thousands of levels deep": {"structure": "@@nested@@"},
}


@pytest.mark.parametrize("changes", RECORDS.values(), ids=RECORDS)
def test_a_record_that_no_store_writes_is_corrupt(changes: dict[str, Any]) -> None:
    files = with_record(**changes)
    for decode in (find_record, decode_step):
        with pytest.raises(Corrupt):
            decode(files.manifest, files.btree, BTREE)


def test_a_field_that_nobody_knows_is_passed_over_or_refused_however_deep_it_is() -> None:
    files, plain = with_record(unknown="@@nested@@"), with_record()
    with suppress(Corrupt):  # how deep a decoder goes is up to Python
        found = find_record(files.manifest, files.btree, BTREE)
        assert found == find_record(plain.manifest, plain.btree, BTREE)
    holder = msgspec.to_builtins(lease._this_process(1.7e9))
    found_holder = lease.decode_holder(as_json({**holder, "more": "@@nested@@"}))
    assert found_holder in (None, lease.decode_holder(as_json(holder)))


def test_the_record_of_these_tests_is_readable() -> None:
    record = forged_record(sample_step()[1].structure, nbytes=24616)
    files = with_record(policy={"kind": nested(98)})
    assert find_record(files.manifest, files.btree, BTREE).line == record.line


def test_a_policy_that_nobody_could_read_is_refused_before_it_is_stored() -> None:
    _, record, arrays = sample_step()
    deep = msgspec.structs.replace(record, policy={"kind": nested(100)})
    with pytest.raises(Invalid, match="nested more than 100 deep"):
        encode_step(deep, arrays, btree_path=BTREE, encoding=CRC32C)


def test_a_record_larger_than_any_tree_is_corrupt_before_it_is_parsed() -> None:
    entries = entries_of(sample_step()[0])
    files = resealed({**entries, b"tieredckpt/step.json.1": bytes(MIB)})
    assert files is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "_MAX_RECORD", MIB)
        with pytest.raises(Corrupt, match=r"step\.json has \d+ bytes; 1048576 are the most"):
            find_record(files.manifest, files.btree, BTREE)


def one_array(shape: tuple[int, ...], cell: tuple[int, ...], where: list[Extent]) -> ocdbt.Index:
    """A step of one array of bytes with a grid that no configuration gives."""
    arrays = {"w": ArrayIndex(Grid(shape, cell, 1), np.dtype(np.uint8), [Chunk(bytes(16), at) for at in where])}
    tree = DictNode(["w"], [ArrayNode("w", "uint8", shape, "numpy")])
    return encode_step(forged_record(tree), arrays, btree_path=BTREE, encoding=CRC32C)


@pytest.mark.parametrize("nbytes", [(1 << 30) + 1, 1 << 40, 1 << 61])
def test_a_chunk_larger_than_any_configuration_allows_is_corrupt(nbytes: int) -> None:
    files = one_array((nbytes,), (nbytes,), [Extent(PACK, 0, nbytes + 4)])
    with at_most(16 * MIB), pytest.raises(Corrupt, match="1073741824 are the most"):
        decode_step(files.manifest, files.btree, BTREE)


def test_a_chunk_in_the_index_that_would_expand_a_hundredfold_is_corrupt_before_it_does() -> None:
    zeros = Chunk(bytes(16), bytes(64 * MIB))
    arrays = {"w": ArrayIndex(Grid((64 * MIB,), (64 * MIB,), 1), np.dtype(np.uint8), [zeros])}
    tree = DictNode(["w"], [ArrayNode("w", "uint8", (64 * MIB,), "numpy")])
    files = encode_step(forged_record(tree), arrays, btree_path=BTREE, encoding=CODECS["small"])
    assert len(files.btree) < MIB
    with at_most(16 * MIB), pytest.raises(Corrupt, match="67108864 bytes in the index; 4096 are the most"):
        decode_step(files.manifest, files.btree, BTREE)


def test_an_array_of_countless_chunks_is_corrupt_before_they_are_counted_out() -> None:
    entries = entries_of(sample_step()[0])
    for shape, cell in [((1 << 40, 8192), (1, 8192)), ((1 << 62,), (1,))]:
        entries[b"params/w/zarr.json"] = array_metadata(shape, np.dtype(np.uint8), cell, CRC32C)
        files = resealed(entries)
        assert files is not None
        with at_most(16 * MIB), pytest.raises(Corrupt, match="more than there are digests"):
            decode_step(files.manifest, files.btree, BTREE)


def test_an_array_that_the_tree_does_not_have_is_corrupt() -> None:
    arrays = sample_arrays()
    record = forged_record(tree_of({key: array for key, array in arrays.items() if key != "small"}))
    files = encode_step(record, arrays, btree_path=BTREE, encoding=CRC32C)
    with pytest.raises(Corrupt, match="1 arrays or blocks are not those of the tree"):
        decode_step(files.manifest, files.btree, BTREE)


def encode_and_decode(record: StepRecord, arrays: dict[str, ArrayIndex]) -> None:
    files = encode_step(record, arrays, btree_path=BTREE, encoding=CRC32C)
    decode_step(files.manifest, files.btree, BTREE)


@pytest.mark.parametrize("path", ["packs/../../x", "/etc/passwd", "steps/0000000001-000001/btree", "tieredckpt.json"])
def test_a_chunk_outside_of_the_packs_is_refused(path: str) -> None:
    arrays = sample_arrays()
    chunks: Any = arrays["params/w"].chunks
    chunks[0] = Chunk(bytes(16), Extent(path, 0, 8196))
    record = forged_record(tree_of(arrays))
    with pytest.raises((Corrupt, Invalid), match=r"is no pack|no path below the root|impossible place"):
        encode_and_decode(record, arrays)


# -- numbers and names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["datetime64[s/0]", "timedelta64[s/0]", "datetime64[0s]", "datetime64[99999999999s]", "datetime64[4294967295s]"],
)
def test_a_dtype_that_would_end_the_process_is_no_dtype(name: str) -> None:
    # In a process of its own: NumPy divides by zero for the first of them.
    code = f"""
from tieredckpt.errors import Invalid
from tieredckpt.format.zarr import dtype_from_name
try:
    dtype_from_name({name!r})
except Invalid:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


@pytest.mark.parametrize("unit", ["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "25s"])
def test_every_unit_of_time_is_a_dtype(unit: str) -> None:
    assert dtype_from_name(f"datetime64[{unit}]") == np.dtype(f"<M8[{unit}]")
    assert dtype_from_name(f"timedelta64[{unit}]:big") == np.dtype(f">m8[{unit}]")


def test_metadata_with_numbers_beyond_floats_is_corrupt() -> None:
    metadata = array_metadata((3,), np.dtype(np.uint8), (3,), PLAIN)
    with pytest.raises(Corrupt):
        parse_array_metadata(metadata.replace(b'"shape":[3]', b'"shape":[1.5,1%s]' % (b"0" * 400)))


@pytest.mark.parametrize("number", [2**63, 10**19, 10**40])
def test_no_step_or_serial_is_larger_than_a_store_can_count_on_from(number: int) -> None:
    assert layout.parse_step_folder(f"steps/{number}-000001/") is None
    assert layout.parse_step_folder(f"steps/0000000001-{number}/") is None
    with pytest.raises(Invalid, match=r"2\*\*63 - 1"):
        layout.step_folder(number, 1)
    largest = layout.step_folder(layout.MAX_NUMBER, layout.MAX_NUMBER)
    assert layout.parse_step_folder(largest) == (layout.MAX_NUMBER, layout.MAX_NUMBER)


@pytest.mark.parametrize("failures", ["9" * 4300, "1" + "0" * 400, "-1"])
def test_a_history_that_nobody_lived_through_is_none(failures: str) -> None:
    _, record, _ = sample_step()
    made_up = msgspec.structs.replace(record, provenance={"failures": failures, "trained_seconds": "1e308"})
    history = failure_history(made_up, [])
    assert history.failures == 0
    assert history.provenance(1.0, 0.0)["failures"] == "0"


def test_a_structure_a_thousand_levels_deep_is_corrupt() -> None:
    for depth in (257, 1000, 100_000):
        data = b'{"type":"list","children":[' * depth + b"]}" * depth
        with pytest.raises(Corrupt):
            decode_structure(data)


# -- packs, nodes, markers, leases ------------------------------------------------------------------------


def test_a_trailer_that_asks_for_gigabytes_of_footer_is_corrupt() -> None:
    footer = pack.encode_footer([pack.PackEntry(bytes(16), 0, 4096)], 4096)
    count = 1 << 32
    length = -(-(count * 32 + 40) // 4096) * 4096
    trailer = footer[:-16] + count.to_bytes(8, "little") + footer[-8:]
    with pytest.raises(Corrupt, match="1048576 are the most"):
        pack.footer_range(trailer[-4096:], 4096 + length)


def test_a_pack_of_more_chunks_than_a_reader_takes_is_not_written() -> None:
    entry = pack.PackEntry(bytes(16), 0, 4096)
    with pytest.raises(Invalid, match="1048576 are the most"):
        pack.encode_footer([entry] * (pack.MAX_CHUNKS + 1), 4096)


def test_a_node_whose_keys_would_expand_a_hundredfold_is_corrupt_before_they_do() -> None:
    count, prefix = 40_000, 4000
    body = b"\0\0" + varint(count) + column([prefix] * (count - 1)) + varint(prefix) + column([3] * (count - 1))
    body += b"a" * prefix + b"".join(i.to_bytes(3, "big") for i in range(count - 1)) + bytes(2 * count)
    node = frame(NODE_MAGIC, body)
    reference = ocdbt_read._Reference(BTREE, "", 0, len(node), 0, count, len(node), 0, b"", b"", None)
    with at_most(32 * MIB), pytest.raises(Corrupt, match="impossible lengths"):
        ocdbt_read._leaf(reference, lambda path, offset, length: node, 1 << 30)


MARKERS: dict[str, bytes] = {
    "no UUID": b'{"store": "../../etc/passwd", "format_version": 1, "digest": "xxh3-128"}',
    "an upper-case UUID": b'{"store": "00000000-0000-0000-0000-00000000000A"}',
    "a thousand levels": b'{"store": "x", "more": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    "tens of thousands of levels": b'{"more": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "nothing": b"",
    "zeros": bytes(100),
}


@pytest.mark.parametrize("data", MARKERS.values(), ids=MARKERS)
def test_a_marker_that_no_store_writes_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_marker(data, "/checkpoints")


LEASES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a year beyond all calendars": lambda holder: {**holder, "taken_at": 1e300},
    "a process beyond all numbers": lambda holder: {**holder, "process": 10**30},
    "every process of the user": lambda holder: {**holder, "process": -1},
    "no object": lambda holder: [holder],
}


@pytest.mark.parametrize("forge", LEASES.values(), ids=LEASES)
def test_a_lease_that_no_writer_takes_is_none(forge: Callable[[dict[str, Any]], Any]) -> None:
    holder = msgspec.to_builtins(lease._this_process(1.7e9))
    assert lease.decode_holder(as_json(holder)) is not None
    assert lease.decode_holder(as_json(forge(holder))) is None
