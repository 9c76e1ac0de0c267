"""Every decoder of this library, with input that somebody made up for it; and the fuzzing of these or of others.

::

    mine = Decoder("my header", parse_my_header, tampered_bytes(a_sound_header))
    fuzz(mine, 1000)

A decoder may decode what it is given, or refuse it with an error that says what is wrong. It may do nothing else: no
other error, no hang, no great memory.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from reliability.forging import (
    BTREE,
    STORE,
    as_json,
    derived_step,
    marker_json,
    record_json,
    sample_step,
    tampered_bytes,
    tampered_derivations,
    tampered_json,
    tampered_records,
    tampered_steps,
)
from tieredckpt._decoders import msgpack_decoder
from tieredckpt.blobs.boot import boot_id
from tieredckpt.blobs.chfs import frames, ring
from tieredckpt.blobs.codecs import BLOSC, CODECS
from tieredckpt.blobs.ram import slab_meta
from tieredckpt.config import load, to_toml
from tieredckpt.engine.state.failures import failure_history
from tieredckpt.engine.state.views import numbers
from tieredckpt.engine.tier import lease
from tieredckpt.engine.tier.chunk_index import ChunkIndex
from tieredckpt.errors import Conflict, Corrupt, Invalid, TierUnavailable
from tieredckpt.format import layout, ocdbt, pack
from tieredckpt.format.catalog import Catalog, CatalogStep, decode_catalog, encode_catalog
from tieredckpt.format.crc import crc32c
from tieredckpt.format.derivation import Derivation
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.grid import cells
from tieredckpt.format.manifest import StepIndex, StepRecord, decode_marker, decode_step, encode_step, find_record
from tieredckpt.format.merging import merge
from tieredckpt.format.part import Part, PartArray, decode_part, encode_part
from tieredckpt.format.rounding import round_values
from tieredckpt.format.structure import (
    CONTAINERS,
    ArrayNode,
    Node,
    ObjectNode,
    TypedNode,
    decode_structure,
    encode_structure,
    scalar_value,
    walk,
)
from tieredckpt.format.zarr import dtype_from_name, dtype_name, parse_array_metadata
from tieredckpt.tree.objects import restored_object
from tieredckpt.tree.typed import made_typed

__all__ = ["DECODERS", "Decoder", "fuzz"]


@dataclass(frozen=True)
class Decoder:
    """A decoder, and hostile input for it."""

    name: str
    decode: Callable[[Any], object]
    sound: Any
    """Input that it decodes."""
    inputs: st.SearchStrategy[Any]
    refusals: tuple[type[Exception], ...] = (Corrupt, Invalid)
    """What it raises for input that it does not decode."""

    def meet(self, data: Any) -> None:
        """Decode what may be hostile; raises whatever the decoder should not have raised."""
        with suppress(*self.refusals):
            self.decode(data)


def fuzz(decoder: Decoder, inputs: int, *, seed: int = 0) -> int:
    """Give a decoder so many inputs, and return how many it met; raises as `Decoder.meet`, with the smallest found."""
    met = 0

    @seeded(seed)
    @settings(max_examples=inputs, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=decoder.inputs)
    def each(data: Any) -> None:
        nonlocal met
        met += 1
        decoder.meet(data)

    each()
    return met


_FILES, _RECORD, _ARRAYS = sample_step()
_FILES_2 = sample_step(CODECS["small"])[0]
_DERIVED = derived_step()
_PART = encode_part(
    Part(
        msgspec.structs.replace(_RECORD, rank=0),
        {key: PartArray(array.grid, array.dtype, array.chunks) for key, array in _ARRAYS.items()},
    )
)
_METADATA = (
    b'{"zarr_format":3,"node_type":"array","shape":[3,8192],"data_type":"uint8","chunk_grid":{"name":"regular",'
    b'"configuration":{"chunk_shape":[1,8192]}},"chunk_key_encoding":{"name":"default","configuration":'
    b'{"separator":"/"}},"fill_value":0,"codecs":[{"name":"bytes"},{"name":"crc32c"}],"attributes":{}}'
)
_NOTE = {"slab": layout.pack_key("ab" * 16), "capacity": 1 << 20, "boot_id": boot_id(), "memfd": None}
_HOLDER = msgspec.to_builtins(lease._this_process(1.7e9))
_CONFIG = load({"tiers": {"ram": {"kind": "ram"}, "disk": {"kind": "posix", "path": "/checkpoints"}}})
_FOOTER = pack.encode_footer([pack.PackEntry(bytes([i]) * 16, 8192 * i, 5000) for i in range(5)], 65536)
_FOOTER_2 = pack.encode_footer([pack.PackEntry(bytes(16), 0, 5000)], 65536, compressed=True)
_CHUNK = np.arange(3 * 4096, dtype=np.uint32).view(np.uint8)
_ENCODED = CODECS["small"].encode(_CHUNK, _CHUNK.size, 4, np.zeros(2 * _CHUNK.size, np.uint8))
_FRAME = _ENCODED.parts[0][: _ENCODED.length - BLOSC.checksum_size].tobytes()
_CATALOG = encode_catalog(
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
_REQUEST = msgspec.msgpack.encode(frames.Request(1, frames.Write(3, 5, [(1, 2, 3)])))
_REPLY = msgspec.msgpack.encode(frames.Reply(1, value=[("packs", "folder"), ("a", "file")]))


def _use_record(record: StepRecord) -> None:
    """What a store does with the record of any step that it finds."""
    numbers(record.metrics)
    failure_history(record, []).provenance(1.0, 1.0)
    str(record.id)
    layout.step_folder(record.step, record.serial)
    _use_structure(record.structure)
    if record.derived is not msgspec.UNSET:
        _use_derivation(record.derived)
    msgspec.json.encode(record)


def _use_derivation(how: Derivation) -> None:
    """Derive a chunk of every array again, as where it is damaged; a rule that gives no bound should not be there."""
    for rounded in how.arrays.values():
        rule = how.rules[rounded.rule]
        assert rule.rounds
        assert rule.bound is not None
        for dtype in map(np.dtype, ("<f2", "<f4", "<f8")):
            worst = round_values(_CHUNK.copy(), dtype, rule.bound)
            assert worst is None or worst <= rule.bound.most


def _use_structure(structure: Node) -> None:
    """What a restore makes of a tree's structure, but for the arrays; what makes no object is refused."""
    for path, node in walk(structure):
        with suppress(Corrupt, Invalid):
            if isinstance(node, ObjectNode):
                restored_object(path, node)
            elif isinstance(node, TypedNode):
                made_typed(path, node, [None] * len(node.children))
            elif not isinstance(node, (*CONTAINERS, ArrayNode)):
                scalar_value(node)


def _use_encoded_structure(data: bytes) -> None:
    structure = decode_structure(data)
    _use_structure(structure)
    assert decode_structure(encode_structure(structure)) == structure


def _use_step(index: StepIndex) -> None:
    """What a store does with a step: walk its arrays, and commit it to another tier."""
    _use_record(index.record)
    for array in index.arrays.values():
        assert sum(cell.nbytes for cell in cells(array.grid)) == array.grid.nbytes
        assert len(array.chunks) == array.grid.size
        dtype_name(array.dtype)
    again = encode_step(index.record, index.arrays, btree_path=BTREE, encoding=CRC32C)
    assert decode_step(again.manifest, again.btree, BTREE).record == index.record


def _index(btree: bytes, manifest: bytes) -> ocdbt.Index:
    return ocdbt.Index([btree], manifest)


def _decode_both(files: ocdbt.Index | None) -> None:
    """As opening a store does, and then restoring; either may refuse."""
    if files is None:
        return
    with suppress(Corrupt):
        _use_record(find_record(files.manifest, files.btree, BTREE))
    _use_step(decode_step(files.manifest, files.btree, BTREE))


def _decode_pack(footer: bytes) -> None:
    size = 65536 + len(footer)
    offset, length = pack.footer_range(footer[-4096:].rjust(4096, b"\0"), size)
    pack.is_compressed(footer)
    assert offset + length == size
    for entry in pack.decode_footer(footer, size):
        assert entry.offset >= 0
        assert entry.offset + entry.length <= offset


def _decode_frame(frame: bytes) -> None:
    into = np.zeros(_CHUNK.size, np.uint8)
    assert BLOSC.decode(np.frombuffer(frame, np.uint8), into.size, into) == digest(into)


def _with_crc(data: bytes) -> bytes:
    return data[:-4] + crc32c(data[:-4]).to_bytes(4, "little") if len(data) > 4 else data


def _tampered_parts() -> st.SearchStrategy[bytes]:
    """Parts of ranks: any byte changed, or an element or the record, under a checksum that fits."""
    elements = msgpack_decoder(list[Any]).decode(_PART[16:-4])
    record = tampered_json(msgspec.json.decode(elements[0])).map(as_json)
    changed = st.integers(1, len(elements) - 1).flatmap(
        lambda i: (
            tampered_json(elements[i]).map(lambda value: [*elements[:i], value, *elements[i + 1 :]])
            if not isinstance(elements[i], bytes)
            else tampered_bytes(elements[i]).map(lambda data: [*elements[:i], data, *elements[i + 1 :]])
        )
    )
    bodies = (changed | record.map(lambda data: [data, *elements[1:]])).map(_packed)
    return tampered_bytes(_PART) | bodies.map(lambda body: _with_crc(_PART[:16] + body + bytes(4)))


def _packed(elements: list[Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(elements)
    except (OverflowError, UnicodeEncodeError, RecursionError, ValueError):  # JSON has more than MessagePack
        return b"\xc1"


def _use_part(data: bytes) -> None:
    """What rank 0 does with a part: use its record, and make a step of it if it is the only one."""
    part = decode_part(data, "the part of rank 0")
    _use_record(part.record)
    with suppress(Conflict):
        _use_step(merge([part]))


def _tampered_catalogs() -> st.SearchStrategy[bytes]:
    """Catalogs: any byte changed, or an element, under a checksum that fits."""
    elements = msgpack_decoder(list[Any]).decode(_CATALOG[16:-4])
    bodies = st.integers(0, len(elements) - 1).flatmap(
        lambda i: (tampered_bytes if isinstance(elements[i], bytes) else tampered_json)(elements[i]).map(
            lambda value: _packed([*elements[:i], value, *elements[i + 1 :]])
        )
    )
    return tampered_bytes(_CATALOG) | bodies.map(lambda body: _with_crc(_CATALOG[:16] + body + bytes(4)))


def _use_catalog(data: bytes) -> None:
    """What opening a store does with a catalog that the listing confirms."""
    catalog = decode_catalog(data, "here")
    chunks = ChunkIndex()
    duplicates = chunks.fill(catalog.packs, catalog.counts, catalog.chunks)
    assert len(chunks) + sum(map(len, duplicates.values())) <= len(catalog.chunks)
    sizes = dict(zip(catalog.packs, catalog.sizes.tolist(), strict=True))
    if len(sizes) == len(catalog.packs):
        assert all(extent.offset + extent.length <= sizes[extent.path] for extent in chunks.values())
    for step in catalog.steps:
        _use_record(step.record(catalog.store))


def _decode_note(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "slab.json").write_bytes(data)
        note = slab_meta.read_note(Path(folder))
        if note is not None:
            assert layout.parse_pack_key(note.slab)
            assert note.capacity > 0


def _decode_holder(data: bytes) -> None:
    holder = lease.decode_holder(data)
    if holder is not None:
        str(holder)
        lease._process_lives(holder)
        failure_history(_RECORD, [holder]).provenance(1.0, 1.0)


def _decode_toml(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ckpt.toml")
        path.write_bytes(data)
        to_toml(load(path))


class _Ring:
    """A worker that tells of some folders, and of three servers."""

    servers = 3
    addresses = ("one", "two", "three")

    def __init__(self, names: list[str]) -> None:
        self._names = names

    async def ask(self, command: frames.Command) -> list[tuple[str, str]]:
        assert isinstance(command, frames.ListFolder)
        return [(name, "folder") for name in self._names]


def _decode_ring(names: list[str]) -> None:
    with suppress(TierUnavailable):  # more servers, or fewer
        found = asyncio.run(ring.check(_Ring(names), "/store", "chfs:/store", None))  # type: ignore[arg-type]
        assert not found.recorded or len(set(names)) >= 32


_NO_FRAME = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What the two ends of the CHFS worker's pipe take for the end of the other."""


DECODERS: tuple[Decoder, ...] = (
    Decoder("the manifest", ocdbt.read_root, _FILES.manifest, tampered_bytes(_FILES.manifest)),
    Decoder("a step whose checksums fit", _decode_both, _FILES, tampered_steps()),
    Decoder("a step of compressed chunks", _decode_both, _FILES_2, tampered_steps(BLOSC)),
    Decoder("a step's record", _decode_both, _FILES, tampered_records()),
    Decoder("how a step was derived", _decode_both, _DERIVED, tampered_derivations()),
    Decoder(
        "a step's files",
        _decode_both,
        _FILES,
        st.builds(_index, tampered_bytes(_FILES.btree, [_FILES.manifest]), tampered_bytes(_FILES.manifest)),
    ),
    Decoder(
        "the tree's structure",
        _use_encoded_structure,
        as_json(record_json()["structure"]),
        tampered_json(record_json()["structure"]).map(as_json),
    ),
    Decoder(
        "an array's metadata",
        parse_array_metadata,
        _METADATA,
        tampered_json(msgspec.json.decode(_METADATA)).map(as_json) | tampered_bytes(_METADATA),
    ),
    Decoder(
        "the name of a dtype",
        lambda name: dtype_name(dtype_from_name(name)),
        "datetime64[ns]",
        st.sampled_from(["datetime64[ns]", "timedelta64[25s]", "float32:big", "bfloat16"])
        .flatmap(lambda name: tampered_bytes(name.encode()))
        .map(lambda data: data.decode("latin-1")),
    ),
    Decoder("a pack's footer", _decode_pack, _FOOTER, tampered_bytes(_FOOTER) | tampered_bytes(_FOOTER).map(_with_crc)),
    Decoder(
        "a pack's footer of version 2",
        _decode_pack,
        _FOOTER_2,
        tampered_bytes(_FOOTER_2) | tampered_bytes(_FOOTER_2).map(_with_crc),
    ),
    Decoder(
        "a compressed chunk",
        _decode_frame,
        _FRAME,
        tampered_bytes(_FRAME) | tampered_bytes(_FRAME[:64]).map(lambda start: start + _FRAME[64:]),
    ),
    Decoder("a catalog", _use_catalog, _CATALOG, _tampered_catalogs()),
    Decoder("a rank's part", _use_part, _PART, _tampered_parts()),
    Decoder(
        "the marker",
        lambda data: decode_marker(data, "here"),
        as_json(marker_json()),
        tampered_json(marker_json()).map(as_json) | tampered_bytes(as_json(marker_json())),
    ),
    Decoder(
        "a lease",
        _decode_holder,
        as_json(_HOLDER),
        tampered_json(_HOLDER).map(as_json) | tampered_bytes(as_json(_HOLDER)),
    ),
    Decoder(
        "the slab's note",
        _decode_note,
        as_json(_NOTE),
        tampered_json(_NOTE).map(as_json) | tampered_bytes(as_json(_NOTE)),
    ),
    Decoder(
        "a stored configuration",
        load,
        _CONFIG.model_dump(mode="json"),
        tampered_json(_CONFIG.model_dump(mode="json")).filter(lambda value: isinstance(value, dict)),
    ),
    Decoder(
        "a configuration file",
        _decode_toml,
        to_toml(_CONFIG).encode(),
        tampered_bytes(to_toml(_CONFIG).encode(), [b"[" * 40, b'a = "\\ud800"\n']),
    ),
    Decoder(
        "a request to the CHFS worker",
        msgpack_decoder(frames.Request).decode,
        _REQUEST,
        tampered_bytes(_REQUEST),
        refusals=_NO_FRAME,
    ),
    Decoder(
        "a reply of the CHFS worker",
        msgpack_decoder(frames.Reply).decode,
        _REPLY,
        tampered_bytes(_REPLY),
        refusals=_NO_FRAME,
    ),
    Decoder(
        "the record of the CHFS ring",
        _decode_ring,
        ["3-17"],
        st.lists(tampered_bytes(b"3-17").map(lambda data: data.decode("latin-1")), max_size=40),
    ),
    Decoder(
        "the name of a step's folder",
        layout.parse_step_folder,
        layout.step_folder(1, 2),
        tampered_bytes(layout.step_folder(1, 2).encode()).map(lambda data: data.decode("latin-1")),
    ),
)
"""What this library reads of what others may have written."""
