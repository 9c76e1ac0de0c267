"""Devices for tests: the fake one, and by the marker ``cuda`` a real one, in one form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from support.scenes import CHUNK, SOON
from tieredckpt.devices.link import Link
from tieredckpt.testing.devices import FakeDevice, FakeDriver

__all__ = ["EVERY_KIND", "Rig", "fail_at", "idle", "refuse_buffers", "rig", "values"]

EVERY_KIND = ["fake", pytest.param("cuda", marks=pytest.mark.cuda)]
"""For `pytest.mark.parametrize`: the fake device, and a real one with ``pytest -m cuda``."""


class Rig(Protocol):
    """What a test does with devices, as a program of their framework does it."""

    count: int
    driver: Any

    def array(self, values: Any, device: int = 0) -> Any:
        """A new array on a device."""

    def change(self, array: Any, values: Any) -> None:
        """Enqueue a change of all of an array, on the program's stream."""

    def read(self, array: Any) -> npt.NDArray[Any]:
        """The values, after what was enqueued."""

    def busy(self, seconds: float, device: int = 0) -> None:
        """Enqueue so much work on the program's stream."""

    def own_stream(self) -> AbstractContextManager[Any]:
        """Let this thread work on a stream of its own, on the first device, for the length of the block."""


class FakeRig:
    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.count = len(driver.devices)

    def array(self, values: Any, device: int = 0) -> Any:
        return self.driver.devices[device].array(values)

    def change(self, array: Any, values: Any) -> None:
        array.change(values)

    def read(self, array: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = array.read()
        return found

    def busy(self, seconds: float, device: int = 0) -> None:
        for _ in range(20):  # other streams go on between them
            self.driver.devices[device].current.enqueue(lambda: time.sleep(seconds / 20))

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        device = self.driver.devices[0]
        before = device.current
        device.current = device.stream()
        try:
            yield
        finally:
            device.current = before


class CudaRig:
    def __init__(self) -> None:
        import torch

        from tieredckpt.devices.cuda import DRIVER

        self.torch, self.driver = torch, DRIVER
        torch.cuda.init()
        self.count = torch.cuda.device_count()

    def array(self, values: Any, device: int = 0) -> Any:
        return self._tensor(values).to(f"cuda:{device}")

    def _tensor(self, values: Any) -> Any:
        array = np.array(values)
        if array.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def change(self, array: Any, values: Any) -> None:
        # From pageable memory, torch would wait for the stream.
        array.copy_(self._tensor(values).to(array.dtype).pin_memory(), non_blocking=True)

    def read(self, array: Any) -> npt.NDArray[Any]:
        here = array.cpu()
        if here.dtype == self.torch.bfloat16:
            bits: npt.NDArray[Any] = here.view(self.torch.int16).numpy()
            return bits.view(ml_dtypes.bfloat16)
        found: npt.NDArray[Any] = here.numpy()
        return found

    def busy(self, seconds: float, device: int = 0) -> None:
        with self.torch.cuda.device(device):
            self.torch.cuda._sleep(int(seconds * 1.5e9))  # cycles

    def own_stream(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = self.torch.cuda.stream(self.torch.cuda.Stream(device=0))
        return stream


def values(seed: int) -> dict[str, Any]:
    """Random arrays of many kinds, in one or several chunks."""
    rng = np.random.default_rng(seed)
    return {
        "large": rng.standard_normal((100, 300)).astype(np.float32),
        "turned": rng.standard_normal((70, 128)).astype(np.float64).T,
        "half": rng.standard_normal((3 * CHUNK,)).astype(ml_dtypes.bfloat16),
        "flags": rng.integers(0, 2, 2 * CHUNK + 77).astype(bool),
        "small": rng.standard_normal(8),
        "scalar": np.array(seed, np.int64),
        "empty": np.empty((0, 4), np.float32),
    }


def need_cuda(devices: int = 1) -> None:
    """Skip the test where there are fewer CUDA devices."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")


@contextmanager
def rig(kind: str, devices: int = 1, **how: Any) -> Iterator[Any]:
    """Devices of a kind; the test is skipped where there are none. ``how`` is for the fake one alone."""
    with ExitStack() as until_end:
        if kind == "fake":
            yield FakeRig(until_end.enter_context(FakeDriver(devices, **how)))
            return
        need_cuda(devices)
        yield CudaRig()


async def idle(device: FakeDevice) -> None:
    """Wait until the device has done all that was enqueued."""
    async with asyncio.timeout(SOON):
        while device.waiting:
            await asyncio.sleep(0)


def fail_at(device: FakeDevice, number: int | None) -> None:
    """One transfer of the device fails; those on other streams go on."""
    transfers = count()

    def transfer_or_fail(nbytes: int) -> None:
        if next(transfers) == number:
            raise RuntimeError("an illegal memory access was encountered")
        FakeDevice.transfer(device, nbytes)

    device.transfer = transfer_or_fail  # type: ignore[method-assign]


def refuse_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of chunks that do not go straight to or from where they lie on the host fail."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("this copy passes through a buffer")

    monkeypatch.setattr(Link, "_buffer", refuse)
