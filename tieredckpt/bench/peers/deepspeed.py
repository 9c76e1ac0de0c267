"""DeepSpeed's `FastFileWriter`: `torch.save` through pinned buffers and direct asynchronous I/O."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from tieredckpt.bench.peers.base import Peer, absent
from tieredckpt.bench.peers.tensor_file import TensorFile, Tensors, load_tensors

__all__ = ["PEERS", "write"]

_BUFFER = 128 << 20
"""Bytes of its two buffers together."""
_BLOCK = 8 << 20
_QUEUE_DEPTH = 8


@cache
def _io() -> tuple[Any, Any]:
    """The handle of DeepSpeed's native I/O, which is compiled at its first use, and its pinned buffer."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = (
        AsyncIOBuilder()
        .load(verbose=False)
        .aio_handle(
            block_size=_BLOCK,
            queue_depth=_QUEUE_DEPTH,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=1,
        )
    )
    return handle, handle.new_cpu_locked_tensor(_BUFFER, torch.empty(0, dtype=torch.uint8))


class _Unused:
    """Replaces DeepSpeed's utilities, which are not built without an accelerator; a file of one rank needs none."""

    cast_to_byte_tensor = None

    def load(self) -> _Unused:
        return self


def write(tensors: Tensors, path: Path) -> None:
    """Write tensors to a new file, which is on its device when this returns."""
    import torch
    from deepspeed.io import FastFileWriterConfig, fast_file_writer

    if not torch.cuda.is_available():
        fast_file_writer.UtilsBuilder = _Unused
    handle, pinned = _io()
    writer = fast_file_writer.FastFileWriter(
        file_path=str(path),
        config=FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=pinned, double_buffer=True),
    )
    try:
        torch.save(tensors, writer, _use_new_zipfile_serialization=False)  # as its documentation does
    finally:
        writer.close()


PEERS = (
    Peer(
        "deepspeed",
        "torch.save to a FastFileWriter (double buffer, one writer), torch.load(weights_only=True)",
        "fsync of its file; the bench syncs the folder",
        "blocking",
        ("new",),
        absent("torch", "deepspeed"),
        partial(TensorFile, write=write, read=load_tensors),
    ),
)
