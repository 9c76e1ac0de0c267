"""What this library does with what it has decoded, as far as hostile input can get: to raise there is no refusal."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from reliability.forging import BTREE, sample_step
from tieredckpt.blobs.chfs import frames, record
from tieredckpt.blobs.codecs import BLOSC
from tieredckpt.blobs.ram import slab_meta
from tieredckpt.config import load, to_toml
from tieredckpt.engine.state.failures import failure_history
from tieredckpt.engine.state.views import numbers
from tieredckpt.engine.tier import lease
from tieredckpt.engine.tier.chunk_index import ChunkIndex
from tieredckpt.errors import Conflict, Corrupt, Invalid, TierUnavailable
from tieredckpt.format import layout, ocdbt, pack
from tieredckpt.format.catalog import decode_catalog
from tieredckpt.format.derivation import Derivation
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.grid import cells
from tieredckpt.format.manifest import StepIndex, StepRecord, decode_step, encode_step, find_record
from tieredckpt.format.merging import merge
from tieredckpt.format.part import decode_part
from tieredckpt.format.rounding import round_values
from tieredckpt.format.scalars import scalar_value
from tieredckpt.format.structure import (
    CONTAINERS,
    ArrayNode,
    Node,
    ObjectNode,
    TypedNode,
    decode_structure,
    encode_structure,
    walk,
)
from tieredckpt.format.zarr import dtype_name
from tieredckpt.tree.objects import restored_object
from tieredckpt.tree.typed import made_typed

__all__ = [
    "CHUNK",
    "decode_both",
    "decode_frame",
    "decode_holder",
    "decode_note",
    "decode_pack",
    "decode_ring",
    "decode_toml",
    "use_catalog",
    "use_derivation",
    "use_encoded_structure",
    "use_part",
    "use_record",
    "use_step",
    "use_structure",
]

CHUNK = np.arange(3 * 4096, dtype=np.uint32).view(np.uint8)
"""A chunk of 4-byte items."""


def use_record(record: StepRecord) -> None:
    """What a store does with the record of any step that it finds."""
    numbers(record.metrics)
    failure_history(record, []).provenance(1.0, 1.0)
    str(record.id)
    layout.step_folder(record.step, record.serial)
    use_structure(record.structure)
    if record.derived is not msgspec.UNSET:
        use_derivation(record.derived)
    msgspec.json.encode(record)


def use_derivation(how: Derivation) -> None:
    """Derive a chunk of every array again, as where it is damaged; a rule that gives no bound should not be there."""
    for rounded in how.arrays.values():
        rule = how.rules[rounded.rule]
        assert rule.rounds
        assert rule.bound is not None
        for dtype in map(np.dtype, ("<f2", "<f4", "<f8")):
            worst = round_values(CHUNK.copy(), dtype, rule.bound)
            assert worst is None or worst <= rule.bound.most


def use_structure(structure: Node) -> None:
    """What a restore makes of a tree's structure, but for the arrays; what makes no object is refused."""
    for path, node in walk(structure):
        with suppress(Corrupt, Invalid):
            if isinstance(node, ObjectNode):
                restored_object(path, node)
            elif isinstance(node, TypedNode):
                made_typed(path, node, [None] * len(node.children))
            elif not isinstance(node, (*CONTAINERS, ArrayNode)):
                scalar_value(node)


def use_encoded_structure(data: bytes) -> None:
    structure = decode_structure(data)
    use_structure(structure)
    assert decode_structure(encode_structure(structure)) == structure


def use_step(index: StepIndex) -> None:
    """What a store does with a step: walk its arrays, and commit it to another tier."""
    use_record(index.record)
    for array in index.arrays.values():
        assert sum(cell.nbytes for cell in cells(array.grid)) == array.grid.nbytes
        assert len(array.chunks) == array.grid.size
        dtype_name(array.dtype)
    again = encode_step(index.record, index.arrays, btree_path=BTREE, encoding=CRC32C)
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
    pack.is_compressed(footer)
    assert offset + length == size
    for entry in pack.decode_footer(footer, size):
        assert entry.offset >= 0
        assert entry.offset + entry.length <= offset


def decode_frame(frame: bytes) -> None:
    into = np.zeros(CHUNK.size, np.uint8)
    assert BLOSC.decode(np.frombuffer(frame, np.uint8), into.size, into) == digest(into)


def use_part(data: bytes) -> None:
    """What rank 0 does with a part: use its record, and make a step of it if it is the only one."""
    part = decode_part(data, "the part of rank 0")
    use_record(part.record)
    with suppress(Conflict):
        use_step(merge([part]))


def use_catalog(data: bytes) -> None:
    """What opening a store does with a catalog that the listing confirms."""
    catalog = decode_catalog(data, "here")
    chunks = ChunkIndex()
    duplicates = chunks.fill(catalog.packs, catalog.counts, catalog.chunks)
    assert len(chunks) + sum(map(len, duplicates.values())) <= len(catalog.chunks)
    sizes = dict(zip(catalog.packs, catalog.sizes.tolist(), strict=True))
    if len(sizes) == len(catalog.packs):
        assert all(extent.offset + extent.length <= sizes[extent.path] for extent in chunks.values())
    for step in catalog.steps:
        use_record(step.record)


def decode_note(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "slab.json").write_bytes(data)
        note = slab_meta.read_note(Path(folder))
        if note is not None:
            assert layout.parse_pack_key(note.slab)
            assert note.capacity > 0


def decode_holder(data: bytes) -> None:
    holder = lease.decode_holder(data)
    if holder is not None:
        str(holder)
        lease._process_lives(holder)
        failure_history(sample_step()[1], [holder]).provenance(1.0, 1.0)


def decode_toml(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ckpt.toml")
        path.write_bytes(data)
        to_toml(load(path))


class _Worker:
    """A worker that tells of some folders, and of three servers."""

    servers = 3
    addresses = ("one", "two", "three")

    def __init__(self, names: list[str]) -> None:
        self._names = names

    async def ask(self, command: frames.Command) -> list[tuple[str, str]]:
        assert isinstance(command, frames.ListFolder)
        return [(name, "folder") for name in self._names]


def decode_ring(names: list[str]) -> None:
    with suppress(TierUnavailable):  # more servers, or fewer
        found = asyncio.run(record.place(_Worker(names), "/store", "chfs:/store", None))  # type: ignore[arg-type]
        assert found.record != "complete" or len(set(names)) >= 32
