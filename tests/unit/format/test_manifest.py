"""The commit of a step: what is encoded is what is decoded."""

from __future__ import annotations

import uuid

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.format.digest import digest
from tieredckpt.format.grid import Grid
from tieredckpt.format.keys import child_key
from tieredckpt.format.layout import btree_key
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepRecord, decode_step, encode_step
from tieredckpt.format.structure import ArrayNode, DictNode

NAMES = st.text("a.-!%/0", min_size=1, max_size=4) | st.text(st.characters(codec="utf-8"), max_size=6)
"""Many are the start of another, followed by a character that sorts before the slash."""


@given(names=st.sets(NAMES, max_size=12), checksum=st.booleans())
def test_every_array_gets_its_own_digests_back(names: set[str], checksum: bool) -> None:
    grid = Grid((4,), (2,), 1)
    keys = {name: child_key("", name) for name in names}
    arrays = {
        key: ArrayIndex(grid, np.dtype(np.uint8), [_chunk(i, 0), _chunk(i, 1)]) for i, key in enumerate(keys.values())
    }
    nodes = [ArrayNode(key, "uint8", (4,), "numpy") for key in keys.values()]
    record = StepRecord(
        store=str(uuid.UUID(int=1)),
        step=1,
        serial=1,
        line=((1, 1),),
        restored_from=None,
        saved_at=0.0,
        nbytes=4 * len(arrays),
        metrics={},
        provenance={},
        policy={},
        structure=DictNode(list(keys), nodes),
    )
    path = btree_key(1, 1)
    files = encode_step(record, arrays, btree_path=path, checksum=checksum)
    decoded = decode_step(files.manifest, files.btree, path)
    assert decoded.record == record
    assert decoded.arrays == arrays


def _chunk(array: int, ordinal: int) -> Chunk:
    data = bytes([array, ordinal])
    return Chunk(digest(np.frombuffer(data, np.uint8)), data)
