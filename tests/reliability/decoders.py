"""Every decoder of this library, with input that somebody made up for it; and the fuzzing of these or of others.

::

    mine = Decoder("my header", parse_my_header, tampered_bytes(a_sound_header))
    fuzz(mine, 1000)

A decoder may decode what it is given, or refuse it with an error that says what is wrong. It may do nothing else: no
other error, no hang, no great memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from reliability import uses
from reliability.forging import (
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
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.codecs import BLOSC, CODECS
from tieredckpt.config import load, to_toml
from tieredckpt.engine.tier import lease
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format import layout, ocdbt, pack
from tieredckpt.format.catalog import Catalog, CatalogStep, encode_catalog
from tieredckpt.format.crc import crc32c
from tieredckpt.format.marker import decode_marker
from tieredckpt.format.part import Part, PartArray, encode_part
from tieredckpt.format.zarr import dtype_from_name, dtype_name, parse_array_metadata

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
_ENCODED = CODECS["small"].encode(uses.CHUNK, uses.CHUNK.size, 4, np.zeros(2 * uses.CHUNK.size, np.uint8))
_FRAME = _ENCODED.parts[0][: _ENCODED.length - BLOSC.checksum_size].tobytes()
_METRICS: dict[str, float | str] = {"loss": 0.5, "worst": "nan"}
_CATALOG = encode_catalog(
    Catalog(
        STORE,
        [layout.pack_key("ab" * 16), layout.pack_key("cd" * 16)],
        np.array([8192, 12288], np.uint64),
        np.array([1, 2], np.uint32),
        np.array([(bytes([i]) * 16, 4096 * (i // 2), 100) for i in range(3)], pack.RECORD),
        [
            CatalogStep(
                5, 7, 300, 1.0, "btree", 4000, 1.0, ((1, 3), (5, 7)), 3, 1.0, 99, _METRICS, 1, STORE, "a run", 4
            ),
        ],
    )
)
_REQUEST = msgspec.msgpack.encode(frames.Request(1, frames.Write(3, 5, [(1, 2, 3)])))
_REPLY = msgspec.msgpack.encode(frames.Reply(1, value=[("packs", "folder"), ("a", "file")]))


def _index(btree: bytes, manifest: bytes) -> ocdbt.Index:
    return ocdbt.Index([btree], manifest)


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


def _tampered_catalogs() -> st.SearchStrategy[bytes]:
    """Catalogs: any byte changed, or an element, under a checksum that fits."""
    elements = msgpack_decoder(list[Any]).decode(_CATALOG[16:-4])
    bodies = st.integers(0, len(elements) - 1).flatmap(
        lambda i: (tampered_bytes if isinstance(elements[i], bytes) else tampered_json)(elements[i]).map(
            lambda value: _packed([*elements[:i], value, *elements[i + 1 :]])
        )
    )
    return tampered_bytes(_CATALOG) | bodies.map(lambda body: _with_crc(_CATALOG[:16] + body + bytes(4)))


_NO_FRAME = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What the two ends of the CHFS worker's pipe take for the end of the other."""


DECODERS: tuple[Decoder, ...] = (
    Decoder("the manifest", ocdbt.read_root, _FILES.manifest, tampered_bytes(_FILES.manifest)),
    Decoder("a step whose checksums fit", uses.decode_both, _FILES, tampered_steps()),
    Decoder("a step of compressed chunks", uses.decode_both, _FILES_2, tampered_steps(BLOSC)),
    Decoder("a step's record", uses.decode_both, _FILES, tampered_records()),
    Decoder("how a step was derived", uses.decode_both, _DERIVED, tampered_derivations()),
    Decoder(
        "a step's files",
        uses.decode_both,
        _FILES,
        st.builds(_index, tampered_bytes(_FILES.btree, [_FILES.manifest]), tampered_bytes(_FILES.manifest)),
    ),
    Decoder(
        "the tree's structure",
        uses.use_encoded_structure,
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
    Decoder(
        "a pack's footer", uses.decode_pack, _FOOTER, tampered_bytes(_FOOTER) | tampered_bytes(_FOOTER).map(_with_crc)
    ),
    Decoder(
        "a pack's footer of version 2",
        uses.decode_pack,
        _FOOTER_2,
        tampered_bytes(_FOOTER_2) | tampered_bytes(_FOOTER_2).map(_with_crc),
    ),
    Decoder(
        "a compressed chunk",
        uses.decode_frame,
        _FRAME,
        tampered_bytes(_FRAME) | tampered_bytes(_FRAME[:64]).map(lambda start: start + _FRAME[64:]),
    ),
    Decoder("a catalog", uses.use_catalog, _CATALOG, _tampered_catalogs()),
    Decoder("a rank's part", uses.use_part, _PART, _tampered_parts()),
    Decoder(
        "the marker",
        lambda data: decode_marker(data, "here"),
        as_json(marker_json()),
        tampered_json(marker_json()).map(as_json) | tampered_bytes(as_json(marker_json())),
    ),
    Decoder(
        "a lease",
        uses.decode_holder,
        as_json(_HOLDER),
        tampered_json(_HOLDER).map(as_json) | tampered_bytes(as_json(_HOLDER)),
    ),
    Decoder(
        "the slab's note",
        uses.decode_note,
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
        uses.decode_toml,
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
        uses.decode_ring,
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
