"""safetensors' `save_file` and `load_file` for PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tieredckpt.bench.peers.base import Peer, Setting, absent, sync_files
from tieredckpt.bench.peers.tensors import arrays_of, tensors_of
from tieredckpt.bench.workloads import State

__all__ = ["PEERS"]


class _Safetensors:
    def __init__(self, setting: Setting) -> None:
        self._folder = setting.folder / "safetensors"
        self._folder.mkdir()
        self._tensors: dict[str, Any] = {}
        self._last = 0

    def take(self, state: State) -> None:
        self._tensors = tensors_of(state)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.safetensors"

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        self._last = step
        save_file(self._tensors, self._path(step))

    def wait(self) -> None:
        sync_files(self._folder)

    def restart(self) -> None:
        self._tensors = {}

    def restore(self, into: State | None) -> State:
        from safetensors.torch import load_file

        # They are mapped at first; a training that goes on needs them in memory.
        return {key: array.copy() for key, array in arrays_of(load_file(self._path(self._last))).items()}

    def forget(self, step: int) -> None:
        self._path(step).unlink()

    def close(self) -> None:
        """Nothing runs in the background."""


PEERS = (
    Peer(
        "safetensors",
        "safetensors.torch.save_file, load_file",
        "none of its own; the bench syncs its file",
        "blocking",
        ("new",),
        absent("torch", "safetensors"),
        _Safetensors,
    ),
)
