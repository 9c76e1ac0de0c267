"""`torch.save` and `torch.load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tieredckpt.bench.peers.base import Peer, Setting, absent, sync_files
from tieredckpt.bench.peers.tensors import arrays_of, tensors_of
from tieredckpt.bench.workloads import State

__all__ = ["PEERS"]


class _TorchSave:
    def __init__(self, setting: Setting) -> None:
        self._folder = setting.folder / "torch"
        self._folder.mkdir()
        self._tensors: dict[str, Any] = {}
        self._last = 0

    def take(self, state: State) -> None:
        self._tensors = tensors_of(state)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.pt"

    def save(self, step: int) -> None:
        import torch

        self._last = step
        torch.save(self._tensors, self._path(step))

    def wait(self) -> None:
        sync_files(self._folder)

    def restart(self) -> None:
        self._tensors = {}

    def restore(self, into: State | None) -> State:
        import torch

        return arrays_of(torch.load(self._path(self._last), weights_only=True))

    def forget(self, step: int) -> None:
        self._path(step).unlink()

    def close(self) -> None:
        """Nothing runs in the background."""


PEERS = (
    Peer(
        "torch.save",
        "torch.save, torch.load(weights_only=True)",
        "none of its own; the bench syncs its file",
        "blocking",
        ("new",),
        absent("torch"),
        _TorchSave,
    ),
)
