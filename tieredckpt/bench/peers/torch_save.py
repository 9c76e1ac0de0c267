"""`torch.save` and `torch.load`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tieredckpt.bench.peers.base import Peer, absent
from tieredckpt.bench.peers.tensor_file import DURABILITY, TensorFile, Tensors

__all__ = ["PEERS"]


def _write(tensors: Tensors, path: Path) -> None:
    import torch

    torch.save(tensors, path)


def _read(path: Path) -> Tensors:
    import torch

    found: Tensors = torch.load(path, weights_only=True)
    return found


PEERS = (
    Peer(
        "torch.save",
        "torch.save, torch.load(weights_only=True)",
        DURABILITY,
        "blocking",
        ("new",),
        absent("torch"),
        partial(TensorFile, write=_write, read=_read),
    ),
)
