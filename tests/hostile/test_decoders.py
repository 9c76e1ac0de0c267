"""No bytes make a decoder do anything but decode them or refuse them: no other error, no hang, no great memory.

``pytest -m slow tests/hostile --hypothesis-show-statistics`` fuzzes for minutes and tells how many inputs that were.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from forging import (
    BTREE,
    STORE,
    as_json,
    marker_json,
    record_json,
    sample_step,
    tampered_bytes,
    tampered_json,
    tampered_records,
    tampered_steps,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.blobs import ramnote
from tieredckpt.blobs.chfs import frames, ring
from tieredckpt.config import load, to_toml
from tieredckpt.engine import lease
from tieredckpt.engine.history import history_of
from tieredckpt.engine.known_chunks import KnownChunks
from tieredckpt.engine.state import numbers
from tieredckpt.errors import Conflict, Corrupt, Invalid, TierUnavailable
from tieredckpt.format import layout, ocdbt, pack
from tieredckpt.format.catalog import Catalog, CatalogStep, decode_catalog, encode_catalog
from tieredckpt.format.crc import crc32c
from tieredckpt.format.grid import cells
from tieredckpt.format.manifest import StepIndex, StepRecord, decode_marker, decode_step, encode_step, find_record
from tieredckpt.format.merging import merge
from tieredckpt.format.part import Part, PartArray, decode_part, encode_part
from tieredckpt.format.structure import CONTAINERS, ArrayNode, decode_structure, encode_structure, scalar_value, walk
from tieredckpt.format.zarr import dtype_from_name, dtype_name, parse_array_metadata

FILES, RECORD, ARRAYS = sample_step()
PART = encode_part(
    Part(
        msgspec.structs.replace(RECORD, rank=0),
        {key: PartArray(array.grid, array.dtype, array.chunks) for key, array in ARRAYS.items()},
    )
)
METADATA = (
    b'{"zarr_format":3,"node_type":"array","shape":[3,8192],"data_type":"uint8","chunk_grid":{"name":"regular",'
    b'"configuration":{"chunk_shape":[1,8192]}},"chunk_key_encoding":{"name":"default","configuration":'
    b'{"separator":"/"}},"fill_value":0,"codecs":[{"name":"bytes"},{"name":"crc32c"}],"attributes":{}}'
)
NOTE = {"slab": layout.pack_key("ab" * 16), "capacity": 1 << 20, "boot_id": ramnote.boot_id(), "memfd": None}
HOLDER = msgspec.to_builtins(lease._this_process(1.7e9))
CONFIG = load({"tiers": {"ram": {"kind": "ram"}, "disk": {"kind": "posix", "path": "/checkpoints"}}})
FOOTER = pack.encode_footer([pack.PackEntry(bytes([i]) * 16, 8192 * i, 5000) for i in range(5)], 65536)


CATALOG = encode_catalog(
    Catalog(
        STORE,
        [layout.pack_key("ab" * 16), layout.pack_key("cd" * 16)],
        np.array([8192, 12288], np.uint64),
        np.array([1, 2], np.uint32),
        np.array([(bytes([i]) * 16, 4096 * (i // 2), 100) for i in range(3)], pack.RECORD),
        [
            CatalogStep(
                5, 7, 300, 1.0, "btree", 4000, 1.0, ((1, 3), (5, 7)), 3, 1.0, 99, {"loss": 0.5, "worst": "nan"}, 1
            )
        ],
    )
)


def use_record(record: StepRecord) -> None:
    """What a store does with the record of any step that it finds."""
    numbers(record.metrics)
    history_of(record, []).provenance(1.0, 1.0)
    str(record.id)
    layout.step_folder(record.step, record.serial)
    for _, node in walk(record.structure):
        if not isinstance(node, (*CONTAINERS, ArrayNode)):
            scalar_value(node)
    msgspec.json.encode(record)


def use_step(index: StepIndex) -> None:
    """What a store does with a step: walk its arrays, and commit it to another tier."""
    use_record(index.record)
    for array in index.arrays.values():
        assert sum(cell.nbytes for cell in cells(array.grid)) == array.grid.nbytes
        assert len(array.chunks) == array.grid.size
        dtype_name(array.dtype)
    again = encode_step(index.record, index.arrays, btree_path=BTREE, checksum=False)
    assert decode_step(again.manifest, again.btree, BTREE).record == index.record


def decode_both(files: ocdbt.Index | None) -> None:
    """As opening a store does, and then restoring; either may refuse."""
    if files is None:
        return
    with suppress(Corrupt):
        use_record(find_record(files.manifest, files.btree, BTREE))
    use_step(decode_step(files.manifest, files.btree, BTREE))


def decode_pack(footer: bytes) -> None:
    size = 65536 + len(footer)
    offset, length = pack.footer_range(footer[-4096:].rjust(4096, b"\0"), size)
    assert offset + length == size
    for entry in pack.decode_footer(footer, size):
        assert entry.offset >= 0
        assert entry.offset + entry.length <= offset


def with_right_crc(data: bytes) -> bytes:
    return data[:-4] + crc32c(data[:-4]).to_bytes(4, "little") if len(data) > 4 else data


def tampered_parts() -> st.SearchStrategy[bytes]:
    """Parts of ranks: any byte changed, or an element or the record, under a checksum that fits."""
    elements = msgspec.msgpack.decode(PART[16:-4])
    record = tampered_json(msgspec.json.decode(elements[0])).map(as_json)
    changed = st.integers(1, len(elements) - 1).flatmap(
        lambda i: (
            tampered_json(elements[i]).map(lambda value: [*elements[:i], value, *elements[i + 1 :]])
            if not isinstance(elements[i], bytes)
            else tampered_bytes(elements[i]).map(lambda data: [*elements[:i], data, *elements[i + 1 :]])
        )
    )
    bodies = (changed | record.map(lambda data: [data, *elements[1:]])).map(packed)
    return tampered_bytes(PART) | bodies.map(lambda body: with_right_crc(PART[:16] + body + bytes(4)))


def packed(elements: list[Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(elements)
    except (OverflowError, UnicodeEncodeError, RecursionError, ValueError):  # JSON has more than MessagePack
        return b"\xc1"


def use_part(data: bytes) -> None:
    """What the leader does with a part: use its record, and make a step of it if it is the only one."""
    part = decode_part(data, "the part of rank 0")
    use_record(part.record)
    with suppress(Conflict):
        use_step(merge([part]))


def tampered_catalogs() -> st.SearchStrategy[bytes]:
    """Catalogs: any byte changed, or an element, under a checksum that fits."""
    elements = msgspec.msgpack.decode(CATALOG[16:-4])
    bodies = st.integers(0, len(elements) - 1).flatmap(
        lambda i: (tampered_bytes if isinstance(elements[i], bytes) else tampered_json)(elements[i]).map(
            lambda value: packed([*elements[:i], value, *elements[i + 1 :]])
        )
    )
    return tampered_bytes(CATALOG) | bodies.map(lambda body: with_right_crc(CATALOG[:16] + body + bytes(4)))


def use_catalog(data: bytes) -> None:
    """What opening a store does with a catalog that the listing confirms."""
    catalog = decode_catalog(data, "here")
    chunks = KnownChunks()
    spares = chunks.fill(catalog.packs, catalog.counts, catalog.chunks)
    assert len(chunks) + sum(map(len, spares.values())) <= len(catalog.chunks)
    sizes = dict(zip(catalog.packs, catalog.sizes.tolist(), strict=True))
    if len(sizes) == len(catalog.packs):
        assert all(extent.offset + extent.length <= sizes[extent.path] for extent in chunks.values())
    for step in catalog.steps:
        use_record(step.record(catalog.store))


def decode_note(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "slab.json").write_bytes(data)
        note = ramnote.read_note(Path(folder))
        if note is not None:
            assert layout.parse_pack_key(note.slab)
            assert note.capacity > 0


def decode_holder(data: bytes) -> None:
    holder = lease.decode_holder(data)
    if holder is not None:
        str(holder)
        lease._is_alive(holder, 60.0)
        history_of(RECORD, [holder]).provenance(1.0, 1.0)


def decode_toml(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ckpt.toml")
        path.write_bytes(data)
        to_toml(load(path))


class Ring:
    """A worker that tells of some folders, and of three servers."""

    servers = 3

    def __init__(self, names: list[str]) -> None:
        self._names = names

    async def ask(self, command: frames.Command) -> list[tuple[str, str]]:
        assert isinstance(command, frames.ListFolder)
        return [(name, "folder") for name in self._names]


def decode_ring(names: list[str]) -> None:
    with suppress(TierUnavailable):  # more servers, or fewer
        complete = asyncio.run(ring.check(Ring(names), "/store", "chfs:/store", None))  # type: ignore[arg-type]
        assert not complete or len(set(names)) >= 32


def decode_frame(data: bytes) -> None:
    for kind in (frames.Request, frames.Reply):
        try:
            msgspec.msgpack.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Corrupt(str(error)) from error


DECODERS: dict[str, tuple[Callable[[Any], object], st.SearchStrategy[Any]]] = {
    "the manifest": (ocdbt.read_root, tampered_bytes(FILES.manifest)),
    "a step whose checksums fit": (decode_both, tampered_steps()),
    "a step's record": (decode_both, tampered_records()),
    "a step's files": (
        decode_both,
        st.builds(ocdbt.Index, tampered_bytes(FILES.btree, [FILES.manifest]), tampered_bytes(FILES.manifest)),
    ),
    "the tree's structure": (
        lambda data: encode_structure(decode_structure(data)),
        tampered_json(record_json()["structure"]).map(as_json),
    ),
    "an array's metadata": (
        parse_array_metadata,
        tampered_json(msgspec.json.decode(METADATA)).map(as_json) | tampered_bytes(METADATA),
    ),
    "the name of a dtype": (
        lambda name: dtype_name(dtype_from_name(name)),
        st.sampled_from(["datetime64[ns]", "timedelta64[25s]", "float32:big", "bfloat16"])
        .flatmap(lambda name: tampered_bytes(name.encode()))
        .map(lambda data: data.decode("latin-1")),
    ),
    "a pack's footer": (decode_pack, tampered_bytes(FOOTER) | tampered_bytes(FOOTER).map(with_right_crc)),
    "a catalog": (use_catalog, tampered_catalogs()),
    "a rank's part": (use_part, tampered_parts()),
    "the marker": (
        lambda data: decode_marker(data, "here"),
        tampered_json(marker_json()).map(as_json) | tampered_bytes(as_json(marker_json())),
    ),
    "a lease": (decode_holder, tampered_json(HOLDER).map(as_json) | tampered_bytes(as_json(HOLDER))),
    "the slab's note": (decode_note, tampered_json(NOTE).map(as_json) | tampered_bytes(as_json(NOTE))),
    "a stored configuration": (
        load,
        tampered_json(CONFIG.model_dump(mode="json")).filter(lambda v: isinstance(v, dict)),
    ),
    "a configuration file": (decode_toml, tampered_bytes(to_toml(CONFIG).encode(), [b"[" * 40, b'a = "\\ud800"\n'])),
    "a message of the CHFS worker": (
        decode_frame,
        tampered_bytes(msgspec.msgpack.encode(frames.Request(1, frames.Write(3, 5, [(1, 2, 3)])))),
    ),
    "the record of the CHFS ring": (
        decode_ring,
        st.lists(tampered_bytes(b"3-17").map(lambda data: data.decode("latin-1")), max_size=40),
    ),
    "the name of a step's folder": (
        layout.parse_step_folder,
        tampered_bytes(layout.step_folder(1, 2).encode()).map(lambda data: data.decode("latin-1")),
    ),
}


def refused_or_decoded(name: str, data: Any) -> None:
    """Fail for any error but those that say what is wrong with the input."""
    with suppress(Corrupt, Invalid):
        DECODERS[name][0](data)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=80)
@given(data=st.data())
def test_whatever_a_decoder_is_given_it_decodes_or_refuses(name: str, data: st.DataObject) -> None:
    refused_or_decoded(name, data.draw(DECODERS[name][1]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=3000)
@given(data=st.data())
def test_whatever_a_decoder_is_given_for_a_long_time_it_decodes_or_refuses(name: str, data: st.DataObject) -> None:
    refused_or_decoded(name, data.draw(DECODERS[name][1]))


def test_what_is_tampered_with_would_be_decoded_as_it_was() -> None:
    decode_both(FILES)
    use_part(PART)
    use_catalog(CATALOG)
    decode_pack(FOOTER)
    decode_holder(as_json(HOLDER))
    decode_note(as_json(NOTE))
    decode_toml(to_toml(CONFIG).encode())
    parse_array_metadata(METADATA)
    assert decode_marker(as_json(marker_json()), "here").store == STORE
