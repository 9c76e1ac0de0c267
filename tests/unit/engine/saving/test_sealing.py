"""A chunk is sealed with its checksum, in the memory where it lies or beside it, and is the same in the pack."""

from __future__ import annotations

import numpy as np
import pytest

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.engine.promoting.pack_writer import Payload, seal
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import digest_array
from tieredckpt.format.encoding import CRC32C

PAGE = ALIGNMENT


@pytest.mark.parametrize(
    "nbytes", [1, PAGE - 4, PAGE - 3, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 4, 2 * PAGE - 2, 3 * PAGE, 3 * PAGE + 9]
)
def test_a_seal_beside_a_chunk_that_must_not_be_written_to_gives_the_same_bytes(nbytes: int) -> None:
    rng = np.random.default_rng(nbytes)
    memory = np.zeros(CRC32C.stored_size(nbytes), dtype=np.uint8)
    memory[:nbytes] = rng.integers(0, 256, nbytes)
    digest = digest_array(memory[:nbytes])
    seen = memory.copy()
    seen.flags.writeable = False
    room = np.zeros(CRC32C.room(nbytes, behind=False), dtype=np.uint8)
    beside = seal(Payload(digest, nbytes, 1, seen, room), CRC32C)
    within = seal(Payload(digest, nbytes, 1, memory), CRC32C)
    assert beside is not None
    assert within is not None
    stored = [np.concatenate(encoded.parts) for encoded in (within, beside)]
    assert all(len(bytes_) == CRC32C.stored_size(nbytes) for bytes_ in stored)
    assert stored[0].tobytes() == stored[1].tobytes()
    checksum = stored[1][nbytes : beside.length].tobytes()
    assert int.from_bytes(checksum, "little") == crc32c(memory[:nbytes], 0)
    assert all(len(part) % PAGE == 0 for part in beside.parts)
