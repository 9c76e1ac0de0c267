"""A training on torch's CUDA device, and the peers that save its state: torch.save, DCP, DeepSpeed and others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tieredckpt.bench.gpu import DevicePeer, no_device
from tieredckpt.bench.peers import deepspeed
from tieredckpt.bench.peers.base import absent

__all__ = ["CudaTraining", "copy_rates", "cuda_peers", "device_memory"]

_WIDTH = 4096
_BATCH = 2048
_SAMPLE = 1 << 30
"""Bytes that `copy_rates` copies at a time."""
_BYTES_OF_PARAMETER = 12
"""In float32 with the two moments of Adam."""


def device_memory() -> int:
    """Bytes that are free on the first device. Raises `DeviceUnavailable` where there is none."""
    if find_spec("torch") is None:
        raise no_device("PyTorch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise no_device(f"PyTorch {torch.__version__} sees none")
    return int(torch.cuda.mem_get_info()[0])


def copy_rates() -> tuple[float, float]:
    """Bytes a second from the first device to page-locked memory, and back."""
    import torch

    host = torch.empty(_SAMPLE, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_SAMPLE, dtype=torch.uint8, device="cuda")
    found = []
    for target, source in ((host, there), (there, host)):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        target.copy_(source, non_blocking=True)
        marks[0].record()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        marks[1].record()
        marks[1].synchronize()
        found.append(4 * _SAMPLE / (marks[0].elapsed_time(marks[1]) / 1e3))
    return found[0], found[1]


class CudaTraining:
    """A multilayer perceptron with AdamW, of about ``nbytes``, on the first device."""

    def __init__(self, nbytes: int) -> None:
        import torch

        self._torch = torch
        layers = max(1, round(nbytes / _BYTES_OF_PARAMETER / _WIDTH**2))
        # Made on the device: on the host, the first values of 20 GB take a quarter of a minute.
        made = (torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device="cuda") for _ in range(layers))
        self._model = torch.nn.Sequential(*made)
        for weight in self._model.parameters():  # else 100 layers shrink their input to nothing
            torch.nn.init.normal_(weight, std=_WIDTH**-0.5)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._batch = torch.randn(_BATCH, _WIDTH, device="cuda")
        self.device = torch.cuda.get_device_name()
        self.passes = 1
        self.forward()
        self.change()
        self.synchronize()
        self.nbytes = sum(tensor.nbytes for tensor in self.state().values())

    def state(self) -> dict[str, Any]:
        found = {f"model/{name}": value for name, value in self._model.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            found.update((f"optimizer/{number}/{name}", value) for name, value in state.items())
        return found

    def forward(self) -> None:
        for _ in range(self.passes):
            with self._torch.autocast("cuda", self._torch.bfloat16):
                loss = self._model(self._batch).float().square().mean()
            loss.backward()

    def change(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def synchronize(self) -> None:
        self._torch.cuda.current_stream().synchronize()

    def copies(self) -> tuple[float, float]:
        out, back = copy_rates()
        return self.nbytes / out, self.nbytes / back


def cuda_peers() -> tuple[list[type[DevicePeer]], dict[str, str]]:
    """The installed peers, and why others are missing."""
    lacking: dict[type[DevicePeer], str | None] = {
        _TorchSave: None,
        _Dcp: None,
        _TorchCheckpointing: absent("torch_checkpointing")(),
        _DeepSpeed: absent("deepspeed")(),
    }
    here = [kind for kind, why in lacking.items() if why is None]
    return here, {kind.name: why for kind, why in lacking.items() if why is not None}


class _Blocking:
    def captured(self) -> None:
        """Does nothing: `save` has done it."""

    def durable(self) -> None:
        """Does nothing: `save` has done it."""

    def close(self) -> None:
        """Does nothing."""


class _TorchSave(_Blocking):
    name = "torch.save"

    def save(self, path: Path, state: Mapping[str, Any]) -> None:
        import torch

        with path.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())


class _DeepSpeed(_Blocking):
    name = "DeepSpeed FastFileWriter"

    def save(self, path: Path, state: Mapping[str, Any]) -> None:
        deepspeed.write(dict(state), path)


class _Dcp:
    name = "torch.distributed.checkpoint, pinned"

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._rendezvous = tempfile.TemporaryDirectory()
        method = f"file://{self._rendezvous.name}/rendezvous"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=method, rank=0, world_size=1)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=True, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=True
            )
        )
        self._response: Any = None

    def save(self, path: Path, state: Mapping[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        self._response = dcp.async_save(dict(state), checkpoint_id=str(path), async_stager=self._stager)

    def captured(self) -> None:
        staging = getattr(self._response, "staging_completion", None)
        if staging is not None:
            staging.result()

    def durable(self) -> None:
        getattr(self._response, "upload_completion", self._response).result()

    def close(self) -> None:
        import torch.distributed as dist

        self._stager.close()
        dist.destroy_process_group()
        self._rendezvous.cleanup()


class _TorchCheckpointing:
    name = "torch_checkpointing"

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Its direct I/O fails on ext4 where a file ends within a block.
        files = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=files))
        self._written: Any = None

    def save(self, path: Path, state: Mapping[str, Any]) -> None:
        self._written = self._manager.save(str(path), {"state": dict(state)})

    def captured(self) -> None:
        with self._manager.lock():  # which is what changes the state between staging and the next save
            pass

    def durable(self) -> None:
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        self._manager.close()
