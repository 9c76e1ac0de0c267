"""safetensors' `save_file` and `load_file` for PyTorch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tieredckpt.bench.peers.base import Peer, absent
from tieredckpt.bench.peers.tensor_file import DURABILITY, TensorFile, Tensors

__all__ = ["PEERS"]


def _write(tensors: Tensors, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)


def _read(path: Path) -> Tensors:
    from safetensors.torch import load_file

    # They are mapped at first; a training that goes on needs them in memory.
    return {key: tensor.clone() for key, tensor in load_file(path).items()}


PEERS = (
    Peer(
        "safetensors",
        "safetensors.torch.save_file, load_file",
        DURABILITY,
        "blocking",
        ("new",),
        absent("torch", "safetensors"),
        partial(TensorFile, write=_write, read=_read),
    ),
)
