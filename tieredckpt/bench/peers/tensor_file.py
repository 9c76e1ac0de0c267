"""`torch.save` and safetensors: a state's PyTorch tensors in one file per step, which the peer does not sync."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tieredckpt.bench.peers.base import Peer, Setting, absent, sync_files
from tieredckpt.bench.peers.tensors import arrays_of, tensors_of
from tieredckpt.bench.workloads import State

__all__ = ["PEERS", "TensorFile", "Tensors", "load_tensors"]

_DURABILITY = "none of its own; the bench syncs its file"

Tensors: TypeAlias = dict[str, Any]
"""By key."""


class TensorFile:
    """A session; ``write`` and ``read`` are the peer's own functions."""

    def __init__(
        self, setting: Setting, *, write: Callable[[Tensors, Path], None], read: Callable[[Path], Tensors]
    ) -> None:
        self._folder = setting.own("tensors")
        self._write = write
        self._read = read
        self._tensors: Tensors = {}
        self._last = 0

    def take(self, state: State) -> None:
        self._tensors = tensors_of(state)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.tensors"

    def save(self, step: int) -> None:
        self._last = step
        self._write(self._tensors, self._path(step))

    def wait(self) -> None:
        sync_files(self._folder)

    def restart(self) -> None:
        self._tensors = {}

    def restore(self, into: State | None) -> State:
        return arrays_of(self._read(self._path(self._last)))

    def forget(self, step: int) -> None:
        self._path(step).unlink()

    def close(self) -> None:
        """Nothing runs in the background."""


def load_tensors(path: Path) -> Tensors:
    """Load a file of `torch.save`."""
    import torch

    found: Tensors = torch.load(path, weights_only=True)
    return found


def _torch_save(tensors: Tensors, path: Path) -> None:
    import torch

    torch.save(tensors, path)


def _save_file(tensors: Tensors, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)


def _load_file(path: Path) -> Tensors:
    from safetensors.torch import load_file

    # They are mapped at first; a training that resumes needs them in memory.
    return {key: tensor.clone() for key, tensor in load_file(path).items()}


PEERS = tuple(
    Peer(name, way, _DURABILITY, "blocking", ("new",), missing, partial(TensorFile, write=write, read=read))
    for name, way, missing, write, read in (
        ("torch.save", "torch.save, torch.load(weights_only=True)", absent("torch"), _torch_save, load_tensors),
        (
            "safetensors",
            "safetensors.torch.save_file, load_file",
            absent("torch", "safetensors"),
            _save_file,
            _load_file,
        ),
    )
)
