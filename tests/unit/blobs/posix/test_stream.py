"""A streamed file has the bytes that were appended, copied or lent, in their order; and uses memory again."""

from __future__ import annotations

import errno
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.posix import stream
from tieredckpt.blobs.posix.stream import BLOCK, Blocks, new_file

SIZES = st.one_of(st.integers(0, 3 * ALIGNMENT), st.sampled_from([ALIGNMENT, BLOCK - 1, BLOCK, BLOCK + 1]))


def some(nbytes: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@settings(max_examples=40)
@given(appended=st.lists(st.tuples(st.booleans(), SIZES), max_size=8))
@example(appended=[(True, BLOCK)] * 8)
@example(
    appended=[(False, 8 + 17), (True, BLOCK), (True, 100), (False, BLOCK), (True, 4000), (True, 95), (True, BLOCK)]
)
def test_what_was_appended_is_in_the_file(appended: list[tuple[bool, int]]) -> None:
    """Whatever was copied before what is lent, and after it; memory is free to change as soon as it may be."""
    blocks, expected = Blocks(), b""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        with new_file(path, blocks=blocks) as file:
            for at, (lent, nbytes) in enumerate(appended):
                data = some(min(nbytes, BLOCK) if lent else nbytes, at)
                expected += data.tobytes()
                if lent:
                    block, start = blocks.take(), file.size % ALIGNMENT
                    block[start : start + data.size] = data
                    file.lend(block, start, start + data.size)
                else:
                    assert file.write(data) == data.size
                    data[:] = 0
                assert file.size == len(expected)
        assert path.read_bytes() == expected


def test_memory_that_was_written_is_used_again(tmp_path: Path) -> None:
    """Many blocks are lent, one after the other, and few are made."""
    blocks, seen = Blocks(), set()
    with new_file(tmp_path / "file", blocks=blocks) as file:
        for _ in range(12):
            block = blocks.take()
            seen.add(block.ctypes.data)
            file.lend(block, 0, ALIGNMENT)
    assert len(seen) <= 4


def test_a_block_is_not_free_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads ahead would otherwise change what goes to the device."""
    go_on, write_batch = threading.Event(), stream.write_batch

    def paused(*arguments: Any) -> int:
        assert go_on.wait(60)
        return write_batch(*arguments)

    monkeypatch.setattr(stream, "write_batch", paused)
    blocks = Blocks()
    with new_file(tmp_path / "file", blocks=blocks) as file:
        lent = [blocks.take(), blocks.take()]
        for at, block in enumerate(lent, 1):
            block[:ALIGNMENT] = at
            file.lend(block, 0, ALIGNMENT)
        others = [blocks.take() for _ in range(4)]
        assert not any(np.shares_memory(one, other) for one in lent for other in others)
        go_on.set()
    assert (tmp_path / "file").read_bytes() == b"\1" * ALIGNMENT + b"\2" * ALIGNMENT


def test_a_write_that_fails_leaves_no_file_and_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(stream, "write_batch", fail)

    def write() -> None:
        blocks = Blocks()
        with new_file(tmp_path / "file", blocks=blocks) as file:
            for _ in range(4):
                file.lend(blocks.take(), 0, ALIGNMENT)

    with pytest.raises(OSError, match="no space left"):
        write()
    assert not (tmp_path / "file").exists()
