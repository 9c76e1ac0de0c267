"""`torch.save` and `torch.load`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tieredckpt.bench.peers.base import Peer, absent
from tieredckpt.bench.peers.tensor_file import DURABILITY, TensorFile, Tensors, load_tensors

__all__ = ["PEERS"]


def _write(tensors: Tensors, path: Path) -> None:
    import torch

    torch.save(tensors, path)


PEERS = (
    Peer(
        "torch.save",
        "torch.save, torch.load(weights_only=True)",
        DURABILITY,
        "blocking",
        ("new",),
        absent("torch"),
        partial(TensorFile, write=_write, read=load_tensors),
    ),
)
