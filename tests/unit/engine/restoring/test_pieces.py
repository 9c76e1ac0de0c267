"""What lies in the index of a step is put into arrays where it is intact; all else is left to whoever reads chunks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.trees import indexed

from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.devices.memory import HostMemory
from tieredckpt.engine.restoring.inlet import Inlet
from tieredckpt.engine.restoring.pieces import CastTarget, deliver, pieces_of, put_small
from tieredckpt.format.casts import CASTS
from tieredckpt.format.encoding import PLAIN
from tieredckpt.format.layout import block_key
from tieredckpt.format.manifest import Chunk, StepIndex
from tieredckpt.tree import flatten

ARRAYS = {
    "f4": np.arange(6, dtype=np.float32).reshape(2, 3),
    "time": np.arange(3).astype("<M8[ns]"),
    "bf16": np.arange(5).astype(ml_dtypes.bfloat16),
    "big": np.arange(3, dtype=">i4"),
    "bool": np.array([True, False]),
    "scalar": np.array(3.0),
    "empty": np.empty((0, 3)),
    "large": np.arange(1000.0),
}


@given(damaged=st.sets(st.sampled_from(sorted(ARRAYS.keys() - {"empty", "large"}))), boxes=st.booleans())
def test_intact_small_arrays_are_put_and_no_others(damaged: set[str], boxes: bool) -> None:
    arrays: dict[str, Any] = indexed(flatten(ARRAYS), 4096)
    for key in damaged:
        (chunk,) = arrays[key].chunks
        arrays[key] = msgspec.structs.replace(arrays[key], chunks=[Chunk(bytes(16), chunk.where)])
    index = StepIndex(Any, arrays)
    targets = {key: np.empty_like(array) for key, array in ARRAYS.items()}
    if boxes:
        targets["tieredckpt/blocks/f4/0.1"] = np.empty((2, 2), np.float32)
        del targets["f4"]
    left, nbytes = put_small(index, targets)
    put = targets.keys() - left.keys()
    assert put == targets.keys() & (ARRAYS.keys() - damaged - {"empty", "large"})
    assert nbytes == sum(ARRAYS[key].nbytes for key in put)
    for key in put:
        assert targets[key].tobytes() == ARRAYS[key].tobytes()
    for piece in pieces_of(index, left, Inlet(HostMemory(), Slab(None, 0))):
        piece.put(np.frombuffer(piece.chunk.where, np.uint8))
    assert all(targets[key].tobytes() == ARRAYS[key].tobytes() for key in targets.keys() & ARRAYS.keys())


@given(
    shape=st.sampled_from([(2000,), (3, 700), (40, 50), (7, 5, 9), ()]),
    stored=st.sampled_from(["f4", "f8", "f2", ">f4"]),
    name=st.sampled_from(sorted(CASTS)),
    boxes=st.booleans(),
    damaged=st.booleans(),
)
def test_values_are_cast_from_intact_chunks_alone(
    shape: tuple[int, ...], stored: str, name: str, boxes: bool, damaged: bool
) -> None:
    """Of whole arrays and of boxes; a damaged chunk is refused, whatever its bytes would be as numbers."""
    values = np.asarray(np.random.default_rng(0).standard_normal(shape)).astype("f4").astype(stored)
    arrays: dict[str, Any] = indexed(flatten({"w": values}), 4096)
    index, into = StepIndex(Any, arrays), np.zeros(shape, CASTS[name])
    targets = {"w": CastTarget(into, values.dtype)}
    expected = values.astype("=f4").astype(CASTS[name])
    if boxes and shape:
        into = into[..., 3:5].copy()
        key = block_key("w", (0,) * (len(shape) - 1) + (3,))
        targets, expected = {key: CastTarget(into, values.dtype)}, expected[..., 3:5]
    left, nbytes = put_small(index, targets)
    assert (left, nbytes) == (targets, 0)
    for piece in pieces_of(index, left, Inlet(HostMemory(), Slab(None, 0))):
        frame = np.frombuffer(piece.chunk.where, np.uint8).copy()
        if damaged:
            frame[:] = 0x7E
            assert not deliver(piece, frame, PLAIN)
        else:
            assert deliver(piece, frame, PLAIN)
    if not damaged:
        np.testing.assert_array_equal(into, expected)
